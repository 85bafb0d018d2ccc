"""The sandbox: what passes, what must fail, and what must not leave the process, with all layers and with some taken away.

Sources that would do harm outside are run only where the layers that must hold them are known to be active.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adaptivespec.evaluation import sandbox
from adaptivespec.evaluation.sandbox import protections, run_python

LINUX = sys.platform == "linux"

LIBC = "import ctypes; libc = ctypes.PyDLL(None, use_errno=True)\n"
"""Past the guard, to see that the layers below hold. PyDLL keeps the interpreter's lock, so that a forked child can go on."""

NAME = f"sandbox{os.getpid()}"
BRAND = LIBC + f"libc.prctl(15, b'{NAME}', 0, 0, 0)\n"
"""Names the process, and with it all its children, so that survivors can be found from outside."""


def survivors() -> list[str]:
    found = []
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            if comm.read_text().strip() == NAME:
                found.append(comm.parent.name)
        except OSError:
            pass
    return found


@pytest.fixture(params=["all", "no namespaces", "guard alone"])
def layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The sandbox with fewer and fewer layers. Returns those tried."""
    kept = {"all": ("namespaces", "user", "guard"), "no namespaces": ("user", "guard"), "guard alone": ("guard",)}[request.param]
    monkeypatch.setattr(sandbox, "LAYERS", kept)
    return set(kept)


def test_a_source_that_ends_passes_and_says_what_protected_others(layers: set[str]) -> None:
    outcome = run_python("import sys, math\nprint('a lot', file=sys.stderr)\nassert math.gcd(6, 4) == 2")
    assert (outcome.passed, outcome.reason, outcome.stderr_tail) == (True, "passed", "a lot\n")
    assert {"resource limits", "guard"} <= set(outcome.protections)
    assert "namespaces" in layers or "process namespace" not in outcome.protections
    assert "user" in layers or "unprivileged user" not in outcome.protections


def test_this_machine_protects(record_property: pytest.RecordProperty) -> None:
    record_property("protections", ", ".join(protections()))
    assert protections() == run_python("").protections
    if LINUX and os.geteuid() == 0:
        assert "unprivileged user" in protections()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("assert 1 == 2, 'no\\nway'", "AssertionError: no way"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("x = '\0'", "SyntaxError"),
        ("'\ud800'", "UnicodeEncodeError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import sys; sys.exit(0)\nassert False", "called exit"),
        ("exit()\nassert False", "called exit"),
        ("import os; os._exit(0)\nassert False", "ended before its last line (exit status 0)"),
        ("import os; os._exit(124)", "ended before its last line (exit status 124)"),
        ("import os; os.abort()", "ended before its last line (killed by SIGABRT)"),
        ("input()", "EOFError"),
        ("import sys\nassert sys.stdin.read()", "AssertionError"),
        ("import sys; sys.stdout.close(); print('x')", "ValueError: I/O operation on closed file"),
        ("import os, sys; [os.close(n) for n in range(3)]; assert False", "AssertionError"),
        ("import os; os.closerange(0, 1000)", "ended before its last line"),
        ("class E(Exception):\n    def __str__(self): 1/0\nraise E", "E: <exception str() failed>"),
        ("import sys; sys.setrecursionlimit(10**5)\nf = lambda: f()\nf()", "RecursionError"),
        ("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "ValueError"),
        ("import multiprocessing as m; m.Process(target=print).start()", "PermissionError: os.fork"),
        ("import subprocess; subprocess.run(['true'])", "PermissionError: subprocess.Popen"),
        ("import os; os.system('true')", "PermissionError: os.system"),
        ("import os; os.execv('/bin/true', ['true'])", "PermissionError: os.exec"),
        ("import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')", "not allowed here"),
    ],
)
def test_what_fails_says_why(source: str, reason: str) -> None:
    outcome = run_python(source, seconds=5)
    assert not outcome.passed
    assert reason in outcome.reason
    assert "\n" not in outcome.reason


def test_the_traceback_is_kept() -> None:
    outcome = run_python("def f():\n    return {}['key']\nf()")
    assert outcome.reason == "KeyError: 'key'"
    assert 'File "<source>", line 2, in f' in outcome.stderr_tail


@pytest.mark.parametrize(
    "source", ["while True: pass", "import time; time.sleep(60)", "try:\n  while True: pass\nexcept BaseException: pass"]
)
def test_the_time_limit_holds(layers: set[str], source: str) -> None:
    began = time.monotonic()
    outcome = run_python(source, seconds=0.5)
    assert (outcome.passed, outcome.reason) == (False, "timed out after 0.5 s")
    assert 0.5 <= time.monotonic() - began < 15


def test_signals_do_not_avert_the_time_limit() -> None:
    source = "import signal, time\nfor n in (1, 2, 14, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: time.sleep(1)"
    assert run_python(source, seconds=0.5).reason == "timed out after 0.5 s"


def test_memory_is_limited(layers: set[str]) -> None:
    assert run_python("x = [0] * (10 * 2**30 // 8)").reason.startswith("MemoryError")
    assert run_python("x = bytearray(200 << 20)", memory_mb=128).reason.startswith("MemoryError")
    assert run_python("x = bytearray(200 << 20)", memory_mb=512).passed
    assert run_python("x = []\nwhile True: x.append(bytes(1 << 20))", memory_mb=256).reason.startswith("MemoryError")


def test_a_file_is_limited(layers: set[str]) -> None:
    source = "with open('big', 'wb') as f:\n    for _ in range(10 * 1024): f.write(bytes(1 << 20))"
    assert "OSError: [Errno 27]" in run_python(source).reason


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_fills_nothing(stream: str) -> None:
    outcome = run_python(f"import sys\nwhile True: sys.{stream}.write('spam ' * 1000)", seconds=1)
    assert not outcome.passed
    assert len(outcome.stderr_tail) <= 4096


def test_a_forged_report_is_ignored() -> None:
    source = """
import os
for n in range(64):
    try: os.write(n, b'{"token": "0", "error": null}\\n[1]\\n{"ended": 0}\\n')
    except OSError: pass
assert False
"""
    outcome = run_python(source)
    assert (outcome.passed, outcome.reason) == (False, "AssertionError")


def test_threads_neither_keep_it_alive_nor_run_away() -> None:
    began = time.monotonic()
    assert run_python("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()", seconds=50).passed
    assert time.monotonic() - began < 20
    many = "threading.stack_size(1 << 16)\nfor _ in range(5000): threading.Thread(target=time.sleep, args=(9,)).start()"
    source = f"import threading, time\n{many}"
    assert "can't start new thread" in run_python(source, seconds=5).reason


def test_it_starts_with_an_empty_world(layers: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("A_SECRET", "1")
    source = f"""
import os, sys, __main__
assert 'A_SECRET' not in os.environ and os.environ['HOME'] == os.getcwd() == os.environ['TMPDIR']
assert os.listdir() == [] and os.getcwd() != {os.getcwd()!r} and os.getpid() != {os.getpid()}
assert __name__ == '__main__' and __main__.__dict__ is globals() and sys.flags.isolated
import tempfile
with tempfile.TemporaryDirectory() as folder:
    open(folder + '/x', 'w').write('y')
    os.mkdir(folder + '/sub')
    os.rename(folder + '/x', folder + '/sub/x')
os.mkdir('deep'); open('deep/file', 'w').write('z'); os.chmod('deep', 0)
"""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o755)
    outcome = run_python(source)
    assert outcome.passed, outcome.stderr_tail
    assert list(tmp_path.iterdir()) == []


def test_heavy_imports_work(layers: set[str]) -> None:
    outcome = run_python("import numpy, dataclasses, asyncio, typing\nassert numpy.eye(2).sum() == 2", seconds=60)
    assert outcome.passed, outcome.stderr_tail


def test_pytorch_can_be_imported() -> None:
    outcome = run_python("import torch\nassert torch.ones(2).sum() == 2", seconds=120, memory_mb=32 << 10)
    assert outcome.passed, outcome.stderr_tail


@pytest.mark.parametrize(
    "action",
    [
        "os.remove(path)",
        "os.rename(path, 'mine')",
        "os.rmdir(os.path.dirname(path) + '/empty')",
        "shutil.rmtree(os.path.dirname(path))",
        "open(path, 'w')",
        "open(path, 'r+')",
        "os.open(path, os.O_WRONLY | os.O_TRUNC)",
        "os.truncate(path, 0)",
        "os.chmod(path, 0)",
        "os.symlink('x', path + '2')",
        "os.mkdir(path + '2')",
        "os.symlink(os.path.dirname(path), 'link'); open('link/kept', 'w')",
        "os.unlink('kept', dir_fd=os.open(os.path.dirname(path), os.O_RDONLY))",
        "open(os.path.expanduser('~/../kept'), 'w')",
    ],
)
def test_files_outside_stay_as_they_are(layers: set[str], tmp_path: Path, action: str) -> None:
    tmp_path.chmod(0o777)  # so that it isn't the other user alone that protects them
    path = tmp_path / "kept"
    path.write_text("text")
    path.chmod(0o666)
    (tmp_path / "empty").mkdir()
    outcome = run_python(f"import os, shutil\npath = {str(path)!r}\n{action}")
    assert not outcome.passed
    assert "PermissionError" in outcome.reason
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty", "kept"]
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("text", 0o666)


def test_a_file_outside_outlives_the_system_call(tmp_path: Path) -> None:
    if "read-only files" not in protections():
        pytest.skip("no read-only files here")
    tmp_path.chmod(0o777)
    path = tmp_path / "kept"
    path.write_text("text")
    path.chmod(0o666)
    outcome = run_python(LIBC + f"assert libc.unlink({str(path)!r}.encode()) == 0, ctypes.get_errno()")
    assert outcome.reason == "AssertionError: 30"  # EROFS
    assert path.read_text() == "text"


@pytest.mark.parametrize("guarded", [True, False])
def test_no_network(monkeypatch: pytest.MonkeyPatch, guarded: bool) -> None:
    if not guarded:
        if "network namespace" not in protections():
            pytest.skip("no network namespace here")
        monkeypatch.setattr(sandbox, "LAYERS", ("namespaces", "user"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        outcome = run_python(f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=2)")
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    assert not outcome.passed
    assert ("PermissionError" if guarded else "OSError: [Errno 101]") in outcome.reason


@pytest.mark.parametrize(
    "call", ["os.kill(-1, 9)", "os.kill(os.getppid(), 9)", "os.killpg(0, 9)", "os.fork()", "signal.pthread_kill(1, 9)"]
)
def test_the_guard_refuses_signals_and_forks(call: str) -> None:
    if not {"process namespace", "unprivileged user"} & set(protections()):
        pytest.skip("nothing below the guard would hold this")
    outcome = run_python(f"import os, signal\n{call}")
    assert outcome.reason.startswith("PermissionError: ")


@pytest.mark.parametrize("kept", [("namespaces", "user"), ("user",)])
def test_a_signal_to_everyone_reaches_no_one(monkeypatch: pytest.MonkeyPatch, kept: tuple[str, ...]) -> None:
    monkeypatch.setattr(sandbox, "LAYERS", kept)
    if not {"process namespace", "unprivileged user"} & set(run_python("").protections):
        pytest.skip("nothing below the guard would hold this")
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    for source in (LIBC + "libc.kill(-1, 9)\nassert False", LIBC + f"assert libc.kill({bystander.pid}, 9) == 0", LIBC + "libc.kill(0, 9)"):
        assert not run_python(source, seconds=5).passed
    assert bystander.poll() is None
    bystander.communicate(b"\n")
    assert bystander.returncode == 0


@pytest.mark.skipif(not LINUX, reason="counts processes in /proc")
@pytest.mark.parametrize("kept", [("namespaces", "user"), ("user",)])
@pytest.mark.parametrize(
    "source",
    [
        # a bomb, limited by the number of processes
        "import time\nwhile libc.fork() >= 0: pass\ntime.sleep(60)",
        # a daemon: twice forked, in a session of its own
        "import os, time\nif libc.fork() == 0:\n  os.setsid()\n  if libc.fork() == 0: time.sleep(60)\n  os._exit(0)\nos.wait()\n1 / 0",
        # a chain, in which each process ends as soon as it has a child
        "import os\nwhile True:\n  if libc.fork() > 0: os._exit(0)\n  os.setsid()",
    ],
    ids=["bomb", "daemon", "chain"],
)
def test_no_process_survives(monkeypatch: pytest.MonkeyPatch, kept: tuple[str, ...], source: str) -> None:
    monkeypatch.setattr(sandbox, "LAYERS", kept)
    monkeypatch.setattr(sandbox, "MAX_PROCESSES", 16)
    if not {"process namespace", "unprivileged user"} & set(run_python("").protections):
        pytest.skip("nothing but the guard would hold this")
    outcome = run_python(BRAND + source, seconds=1)
    assert not outcome.passed
    assert survivors() == []


@pytest.mark.skipif(not LINUX, reason="looks into /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_with_its_caller(layers: set[str], tmp_path: Path, how: signal.Signals) -> None:
    run = f"sandbox.LAYERS = {tuple(sorted(layers))!r}\nsandbox.run_python({BRAND + 'while True: pass'!r}, 60)"
    # As at a terminal: whoever starts the tests in the background may have them ignore Ctrl-C, and children inherit that.
    heed = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heed}\nfrom adaptivespec.evaluation import sandbox\n{run}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    caller = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not survivors() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert survivors()
    caller.send_signal(how)
    assert caller.wait(60) != 0
    while (survivors() or list(tmp_path.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (survivors(), list(tmp_path.iterdir())) == ([], [])


def test_threads_may_share_it() -> None:
    def ask(number: int) -> bool:
        text = "pass" if number % 2 else "assert False"
        outcome = run_python(f"open('own', 'x').write('{number}')\nassert open('own').read() == '{number}'\n{text}")
        return outcome.passed

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(12))) == [False, True] * 6
    assert threading.active_count() < 20
