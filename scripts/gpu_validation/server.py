"""A stock SGLang server as a child process, and questions to it."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .plan import Cell

TESTS = Path(__file__).resolve().parents[2] / "tests"
OVERWRITE = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
"""Heads may declare shorter contexts than targets; without this SGLang refuses them."""


class Failed(Exception):
    """A server that did not start, or an answer that did not come."""


@dataclass
class Server:
    """A running SGLang server while it is a context."""

    command: list[str]
    environment: dict[str, str]
    log: Path
    limit: float
    port: int = 0

    def __enter__(self) -> Server:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        began = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self.command, "--port", str(self.port)],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            while not self._ready():
                if self._process.poll() is not None:
                    raise Failed(f"the server ended with exit code {self._process.returncode}: {last_words(self.log)}")
                if time.monotonic() - began > self.limit:
                    raise Failed(f"not ready after {self.limit:.0f} s: {last_words(self.log)}")
                time.sleep(1)
        except BaseException:
            self.close()
            raise
        self.seconds_to_start = time.monotonic() - began
        self._start_of_words = self.log.stat().st_size
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of the server."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        wait_for(lambda: not group_lives(self._process.pid), 60)  # the next one wants the memory

    def _ready(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def words(self) -> str:
        """What it has said since it was ready; SGLang's own start may hold tracebacks that mean nothing."""
        return self.log.read_bytes()[self._start_of_words :].decode(errors="replace")

    def metrics(self) -> str:
        """The text of /metrics. Raises Failed when it does not come."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
                return str(answer.read().decode())
        except OSError as error:
            raise Failed(f"/metrics: {type(error).__name__}: {error}") from None

    def ask(self, ids: list[int], stop_after: float = math.inf, **body: Any) -> dict[str, Any]:
        """One answer of /generate; after `stop_after` streamed chunks the connection is dropped.

        Raises Failed with what the server said.
        """
        payload = {"input_ids": ids, **body, **({"stream": True} if stop_after < math.inf else {})}
        request = urllib.request.Request(f"{self.url}/generate", json.dumps(payload).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.limit) as answer:
                if stop_after < math.inf:
                    for count, _ in enumerate(answer):
                        if count >= stop_after:
                            return {}
                    return {}
                found: dict[str, Any] = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise Failed(f"HTTP {error.code}: {error.read().decode(errors='replace')[:300]}") from None
        except OSError as error:
            raise Failed(f"{type(error).__name__}: {error}") from None
        return found


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def group_lives(group: int) -> bool:
    """Whether a process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(done: Callable[[], bool], seconds: float) -> bool:
    """Whether it becomes true in time."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def last_words(log: Path) -> str:
    """The line of a log that says most of why a server ended."""
    lines = log.read_text(errors="replace").splitlines()
    own = [line for line in lines if line.startswith("adaptivespec:")]
    errors = [line for line in lines if re.match(r"(\S*(Error|Exception)): ", line)]
    return (own or errors or [line for line in lines if line.strip()] or ["nothing in its log"])[-1][:400]


def command_of(cell: Cell, common: dict[str, Any], model: str, head: str) -> list[str]:
    """The stock command line, without the port."""
    flags = {"model-path": model, **common}
    if cell.kind != "plain":
        flags |= {"speculative-algorithm": "EAGLE3", "speculative-draft-model-path": head}
    command = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in (flags | cell.flags).items():
        command += (
            [f"--{name}"]
            if value is True
            else [f"--{name}", *str(value).split()]
            if name == "cuda-graph-bs-decode"
            else [f"--{name}", str(value)]
        )
    return command


def environment_of(cell: Cell, cpu: bool) -> dict[str, str]:
    """Environment variables of a cell's server: whatever of ours is set outside counts for nothing."""
    if cpu:
        sys.path.insert(0, str(TESTS / "sglang"))
        from servers import child_environment

        found: dict[str, str] = child_environment(cell.settings)
    else:
        found = {name: value for name, value in os.environ.items() if not name.startswith("ADAPTIVESPEC")}
        if cell.settings is not None:
            found["ADAPTIVESPEC"] = json.dumps(cell.settings)
    return found | {OVERWRITE: "1"}


def common_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Flags that every server has."""
    flags: dict[str, Any] = {}
    if args.cpu:
        sys.path.insert(0, str(TESTS / "sglang"))
        from servers import FLAGS

        flags |= FLAGS
    flags |= {"dtype": args.dtype, "context-length": args.context_length, "max-running-requests": args.concurrency, "enable-metrics": True}
    for given in args.flag:
        name, separator, value = given.lstrip("-").partition("=")
        flags[name] = value if separator else True
    return flags | {"host": "127.0.0.1"}
