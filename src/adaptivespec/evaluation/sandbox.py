"""Run Python that nobody has read: an answer of a model, in a process of its own that can do little and leaves nothing behind.

`run_python` starts this very file as a script in a fresh, isolated interpreter: the supervisor. It enters namespaces where it may, forks
the process that runs the source with limits and without privileges, waits for it, and ends whatever it left. The script part therefore
imports the standard library alone. What each layer is for, strongest first; `protections` says which ones this machine has:

- process namespace: signals reach nothing outside, and all processes inside die with the first one, also after `setsid`;
- network namespace: no interface at all;
- read-only files: every mount is read-only and the working folder is a small one in memory, which vanishes with the namespace;
- unprivileged user: started by root, the source runs as a user that nobody else is, without capabilities;
- resource limits: CPU time, address space, size of a file, processes, open files, no core dump;
- guard: an audit hook refuses Python's ways to start or signal processes, to connect, and to write or remove files outside the folder.

Without the first three (a container that forbids them, macOS) the guard alone stands between the source and the files and processes of the
user who runs it: enough for mistakes, which is what models make, but not for malice; ctypes gets around it. Run it in a container then.
The namespaces do not hide files: what the user may read, the source may read (never write or send).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

LAYERS = ("namespaces", "user", "guard")
"""What is tried beyond the limits. Tests take some away."""

GRACE = 30.0
"""Seconds that starting and cleaning up may take on a busy machine, on top of the source's own."""

MAX_PROCESSES = 64
MAX_FILE_BYTES = 64 << 20
FOLDER_BYTES = 128 << 20
TAIL_BYTES = 4096


@dataclass(frozen=True)
class Outcome:
    """What became of a source.

    Attributes:
        passed: it ran to its last line: neither an exception nor an early exit, a kill or the time limit.
        reason: `passed`, or why not, in a line.
        stderr_tail: the last 4 KB that it wrote to standard error, its traceback above all.
        protections: the layers that were active.
    """

    passed: bool
    reason: str
    stderr_tail: str
    protections: tuple[str, ...]


def run_python(source: str, seconds: float = 10.0, memory_mb: int = 1024) -> Outcome:
    """Run a source as `__main__` in a fresh interpreter, without input, network or environment, in an empty folder that is removed.

    Safe to call from several threads. Standard output is thrown away. Threads and processes that the source leaves are killed.

    Args:
        source: Python code. Whatever is installed beside this package can be imported.
        seconds: wall-clock limit; CPU time of one process is limited to little more.
        memory_mb: address space of one process in MiB. PyTorch wants some 4,000, built for CUDA 20,000.

    Raises:
        UserError: on Windows, which has none of this.
    """
    if sys.platform == "win32":
        from ..errors import UserError  # not at the top: as a script this file belongs to no package

        raise UserError("running generated code needs Linux or macOS")
    token = secrets.token_hex(16)
    with (
        tempfile.TemporaryDirectory(prefix="adaptivespec-", ignore_cleanup_errors=True) as folder,
        # Files and not pipes: their size is limited, and a process that outlives the source can't keep a reader waiting.
        tempfile.TemporaryFile() as stderr,
        tempfile.TemporaryFile() as report,
    ):
        folder = os.path.realpath(folder)
        job = {
            "source": source,
            "token": token,
            "report": report.fileno(),
            "folder": folder,
            "seconds": seconds,
            "memory_mb": memory_mb,
            "layers": LAYERS,
        }
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            pass_fds=(report.fileno(),),
            cwd="/",
            env={
                "PATH": os.defpath,
                "HOME": folder,
                "TMPDIR": folder,
                "LANG": "C.UTF-8",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(json.dumps(job).encode(), timeout=seconds + GRACE)
        except subprocess.TimeoutExpired:
            output = b""
        finally:  # also after Ctrl-C: the supervisor ends the source's processes when it is asked to end
            _stop(process)
        said = _objects(output)
        stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - TAIL_BYTES))
        tail = stderr.read().decode(errors="replace")
        report.seek(0)
        results = [entry for entry in _objects(report.read(TAIL_BYTES)) if entry.get("token") == token]
    protections = tuple(said[0].get("protections", ())) if said else ()
    ended = said[-1].get("ended", "lost") if said else "lost"
    if results:
        error = results[0].get("error")
        return Outcome(error is None, "passed" if error is None else str(error), tail, protections)
    if ended == "timeout":
        reason = f"timed out after {seconds:g} s"
    elif isinstance(ended, int):
        how = f"killed by {signal.Signals(-ended).name}" if -ended in set(signal.Signals) else f"exit status {ended}"
        reason = f"ended before its last line ({how})"
    else:
        reason = "the sandbox itself did not answer"
    return Outcome(False, reason, tail, protections)


@functools.cache
def protections() -> tuple[str, ...]:
    """The layers that are active on this machine, found by running an empty source once."""
    return run_python("").protections


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _objects(data: bytes) -> list[dict[str, Any]]:
    """The JSON objects among the lines; what the source itself may have written between them is left out."""
    found = []
    for line in data.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found


# The rest runs in the supervisor and below.

_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 8, 36, 38
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = (
    1 << 17,
    1 << 26,
    1 << 27,
    1 << 28,
    1 << 29,
    1 << 30,
)
_NAMESPACES = _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 1 << 14, 1 << 18
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 1, 2, 442, -100, 0x8000
_CAP_DAC_READ_SEARCH, _CAPABILITY_VERSION_3 = 2, 0x20080522


class _Stopped(BaseException):
    """The time is up, or the caller wants no more."""


def _supervise() -> NoReturn:
    job = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    root, layers = os.geteuid() == 0, job["layers"]
    user = _unused_user() if root and "user" in layers else None
    active = ["resource limits"]
    if "guard" in layers:
        active.append("guard")
    if user is not None:
        active.append("unprivileged user")
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, _raise_stopped)
    if _LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what the source's processes orphan becomes a child of this one
    namespaces = _LINUX and "namespaces" in layers and _works(functools.partial(_enter_namespaces, root))
    if namespaces:
        _enter_namespaces(root)
        active += ["process namespace", "network namespace"]
    ended: int | str = "timeout"
    child = os.fork()
    if child == 0:
        _as_child(lambda: _first_process(job, user, namespaces, active))
    try:
        signal.setitimer(signal.ITIMER_REAL, job["seconds"])
        # Not reaped yet: as long as it isn't, no other process group can have its number.
        info = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        if info is not None:
            ended = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
    except _Stopped:
        pass
    finally:
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        _end_all(child, None if namespaces else user)
    if namespaces and isinstance(ended, int) and ended > 128:
        ended = 128 - ended  # the namespace's first process says so of its own child
    shutil.rmtree(job["folder"], ignore_errors=True)  # the caller does so too, unless it was killed
    _say({"ended": ended})
    os._exit(0)


def _raise_stopped(_number: int, _frame: types.FrameType | None) -> NoReturn:
    raise _Stopped


def _say(entry: dict[str, Any]) -> None:
    os.write(1, json.dumps(entry).encode() + b"\n")


def _as_child(work: Callable[[], None]) -> NoReturn:
    """Do the work of a forked process, which never returns into its parent's code."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _works(attempt: Callable[[], None]) -> bool:
    """Whether something that can't be taken back works, by trying it in a process that ends at once."""
    pid = os.fork()
    if pid == 0:
        try:
            attempt()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _first_process(job: dict[str, Any], user: int | None, namespaces: bool, active: list[str]) -> None:
    os.setsid()
    if _LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not namespaces:
        if user is not None:
            os.chown(job["folder"], user, user)
        _say({"protections": active})
        _run(job, user)
        return
    _say({"protections": active + _isolate_files(job["folder"], os.getuid() if user is None else user)})
    child = os.fork()  # the first process of a namespace ignores signals that it does not handle: not what a source expects of itself
    if child == 0:
        _as_child(lambda: _run(job, user))
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _unused_user() -> int | None:
    """A user id of its own for every run, so that it can neither touch nor count against any other process; None without that right.

    The second try is for containers that know 65,536 ids only.
    """
    for user in (0x60000000 + os.getpid(), 20_000 + os.getpid() % 40_000):
        if _works(functools.partial(os.setresuid, user, user, user)):
            return user
    return None


def _enter_namespaces(root: bool) -> None:
    uid, gid = os.getuid(), os.getgid()
    _call("unshare", _NAMESPACES if root else _NAMESPACES | _CLONE_NEWUSER)
    if not root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _isolate_files(folder: str, owner: int) -> list[str]:
    """Make all files read-only but those of a new folder in memory. Returns the layers gained."""
    gained: list[str] = []
    try:
        _call("unshare", _CLONE_NEWNS)  # here and not above: the supervisor must still be able to remove the folder
        _mount(None, "/", None, _MS_REC | _MS_PRIVATE, None)
        options = f"size={FOLDER_BYTES},nr_inodes=4096,mode=700,uid={owner}"
        _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
        _mount_setattr("/", set_flags=_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, recursive=True)
        _mount_setattr(folder, clear_flags=_MOUNT_ATTR_RDONLY)
        gained.append("read-only files")
        _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None)  # hides the processes outside
    except OSError:
        pass  # containers may forbid any of these, old kernels lack the third
    return gained


def _run(job: dict[str, Any], user: int | None) -> None:
    """Give up all rights, run the source, report how it ended, and end without clean-up: its threads may never."""
    source, folder, report = job["source"], job["folder"], job["report"]
    if _LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # What it prints is nobody's business, and the supervisor's pipe none of its own.
    os.dup2(0, 1)
    os.set_inheritable(report, False)
    os.chdir(folder)
    _limit(math.ceil(job["seconds"]) + 1, job["memory_mb"] << 20, user)
    _drop_rights(user, folder)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]
    result: dict[str, Any] = {"token": job.pop("token"), "error": None}
    write, leave, dumps = os.write, os._exit, json.dumps
    if "guard" in job["layers"]:
        _guard(folder)
    try:
        exec(compile(source, "<source>", "exec"), module.__dict__)
    except SystemExit:
        result["error"] = "called exit before its last line"
    except BaseException as error:
        result["error"] = type(error).__name__
        try:
            result["error"] = " ".join(traceback.format_exception_only(error)[-1].split())[:300]
            traceback.print_exc()
            sys.stderr.flush()
        except BaseException:  # out of memory, standard error closed
            pass
    write(report, dumps(result).encode() + b"\n")
    leave(0)


def _limit(cpu_seconds: int, memory: int, user: int | None) -> None:
    import resource  # not on Windows

    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
    }
    if _LINUX:  # counts all processes and threads of the user, who has none yet when the user is new
        limits[resource.RLIMIT_NPROC] = MAX_PROCESSES + (0 if user is not None else _count_tasks(os.getuid()))
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _count_tasks(uid: int) -> int:
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            pass  # ended meanwhile
    return count


def _drop_rights(user: int | None, folder: str) -> None:
    keep = 0
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        # An interpreter under /root is out of reach for anyone else. The right to read all files keeps imports working there.
        os.seteuid(user)
        places = {os.path.dirname(os.__file__), sys.prefix, sys.base_prefix, folder}
        if not all(os.access(place, os.R_OK | os.X_OK, effective_ids=True) for place in places):
            keep = 1 << _CAP_DAC_READ_SEARCH
        os.seteuid(0)
        if _LINUX:
            _prctl(_PR_SET_KEEPCAPS, 1 if keep else 0)
        os.setresuid(user, user, user)
    if _LINUX:
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        low, high = (keep, keep, 0), (0, 0, 0)  # effective, permitted, inheritable; the lower and upper 32
        _call("capset", header, (ctypes.c_uint32 * 6)(*low, *high))


_FORBIDDEN = {
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.kill",
    "os.killpg",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pty.spawn",
    "signal.pthread_kill",
    "socket.bind",
    "socket.connect",
    "socket.getaddrinfo",
    "socket.gethostbyaddr",
    "socket.gethostbyname",
    "socket.sendmsg",
    "socket.sendto",
    "subprocess.Popen",
}

# Where an event's arguments hold a path that is written to or removed, and the folder (a descriptor, or -1) that it is relative to.
_WRITES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.link": ((1, 3),),
    "os.mkdir": ((0, 2),),
    "os.remove": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.rmdir": ((0, 1),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "shutil.rmtree": ((0, 1),),
}


def _guard(folder: str) -> None:
    """Refuse, from here to the end of the process, what a function that computes something never needs."""
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    fsdecode, join, readlink, realpath = os.fsdecode, os.path.join, os.readlink, os.path.realpath
    inside = (folder + os.sep, "/dev/")

    def check(event: str, path: Any, where: Any) -> None:
        if isinstance(path, int):
            return  # was opened before, and refused then if need be
        text = fsdecode(path)
        if isinstance(where, int) and where >= 0:
            text = join(readlink(f"/proc/self/fd/{where}"), text)
        if not (realpath(text) + os.sep).startswith(inside):
            raise PermissionError(f"{event} outside the working folder is not allowed here")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in _FORBIDDEN:
            raise PermissionError(f"{event} is not allowed here")
        if event == "open":
            if isinstance(args[2], int) and args[2] & writing:
                check(event, args[0], -1)
        elif event in _WRITES:
            for path, where in _WRITES[event]:
                check(event, args[path], -1 if where is None or where >= len(args) else args[where])

    sys.addaudithook(hook)


def _end_all(child: int, user: int | None) -> None:
    """Kill a child, its process group, all its descendants, and all processes of a user that was made for it; wait for their end."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    if user is not None:
        pid = os.fork()
        if pid == 0:
            try:  # at once for all of them, so that no chain of forks runs ahead; after the change of user it can hit no one else
                os.setresuid(user, user, user)
                if os.getresuid() == (user, user, user):
                    os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
    deadline = time.monotonic() + GRACE / 2
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for pid in _children() if _LINUX else [child]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def _children() -> list[int]:
    me, found = str(os.getpid()), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if parent.decode() == me and state != b"Z":
            found.append(int(name))
    return found


def _call(name: str, *args: Any) -> None:
    """A function of the C library that returns 0. Raises OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)


def _prctl(option: int, value: int) -> None:
    _call("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _call("mount", *texts[:3], ctypes.c_ulong(flags), texts[3])


def _mount_setattr(path: str, set_flags: int = 0, clear_flags: int = 0, recursive: bool = False) -> None:
    attributes = (ctypes.c_uint64 * 4)(set_flags, clear_flags, 0, 0)  # struct mount_attr; the C library may not have the function
    arguments = (ctypes.c_int(_AT_FDCWD), os.fsencode(path), ctypes.c_uint(_AT_RECURSIVE if recursive else 0))
    _call("syscall", ctypes.c_long(_SYS_MOUNT_SETATTR), *arguments, attributes, ctypes.c_size_t(ctypes.sizeof(attributes)))


if __name__ == "__main__":
    _supervise()
