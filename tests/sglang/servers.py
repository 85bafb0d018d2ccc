"""The stock SGLang server as a child process on a loopback port, on a CPU, with the stand-in kernels on its path and on nobody else's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

STANDINS = Path(__file__).with_name("standins")
START_LIMIT = 600.0  # seconds; a start takes 20 on an idle machine
ANSWER_LIMIT = 600.0
FLAGS = {
    "device": "cpu",
    "dtype": "float32",
    "attention-backend": "intel_amx",
    "cuda-graph-backend-decode": "disabled",
    "cuda-graph-backend-prefill": "disabled",
    "sleep-on-idle": True,
    "max-running-requests": 8,
    "max-total-tokens": 4096,
    "skip-server-warmup": True,
    "random-seed": 1,
    "host": "127.0.0.1",
}

ROTATION = "1,1,2;3,3,8;2,2,4;4,1,5;1,4,5;5,3,12"
"""Six shapes for CPU_BED_SHAPES: chains between trees, wide after narrow, the deepest next to the shallowest."""


def child_environment(settings: object = None, **more: str) -> dict[str, str]:
    """Environment variables of a process that imports SGLang on a CPU.

    Args:
        settings: value of ADAPTIVESPEC: text as it is, anything else as JSON; None leaves it out.
        more: further variables.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG", "ADAPTIVESPEC", "PYTEST", "CPU_BED"))}
    environment = kept | {
        "PYTHONPATH": str(STANDINS),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    if settings is not None:
        environment["ADAPTIVESPEC"] = settings if isinstance(settings, str) else json.dumps(settings)
    return environment | more


def server_command(port: int, **flags: Any) -> list[str]:
    """The stock command line; True is a switch, None takes a flag away."""
    command = [sys.executable, "-m", "sglang.launch_server", "--port", str(port)]
    for name, value in {**FLAGS, **{name.replace("_", "-"): value for name, value in flags.items()}}.items():
        if value is True:
            command.append(f"--{name}")
        elif value is not None:
            command += [f"--{name}", str(value)]
    return command


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerFailed(AssertionError):
    """The server ended or didn't answer; the message holds the end of its log."""


class Server:
    """A running server while it is a context.

    Args:
        log: file that gets what all its processes say.
        settings: value of ADAPTIVESPEC, see `child_environment`.
        variables: further environment variables.
        flags: of the stock command line.
    """

    def __init__(self, log: Path, settings: object = None, variables: dict[str, str] | None = None, **flags: Any) -> None:
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = server_command(self.port, **flags)
        self._environment = child_environment(settings, **variables or {})

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, cwd=self.log.parent, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + START_LIMIT
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise ServerFailed(f"the server did not start\n{self.tail()}")
            time.sleep(0.5)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of the server."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # asked politely, SGLang waits seconds for its crash report
        self._process.wait()

    def tail(self, lines: int = 60) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def get(self, path: str) -> str:
        """The body of a GET request."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=ANSWER_LIMIT) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: object) -> Any:
        """The JSON answer to a POST request, also of a refusal."""
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_LIMIT) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            text = error.read().decode()
        except OSError as error:
            raise ServerFailed(f"POST {path}: {error}\n{self.tail()}") from error
        return json.loads(text) if text else None

    def generate(self, prompt: str | list[int], rid: str | None = None, **params: Any) -> dict[str, Any]:
        """One answer of SGLang's own interface: `text`, `output_ids`, `meta_info`. Greedy, 32 tokens and no end unless params differ."""
        body: dict[str, Any] = {"sampling_params": {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True, **params}}
        body["text" if isinstance(prompt, str) else "input_ids"] = prompt
        if rid is not None:
            body["rid"] = rid
        answer: dict[str, Any] = self.post("/generate", body)
        return answer

    def generate_all(
        self, prompts: list[str], wishes: list[dict[str, Any]] | None = None, at_once: int = 8, **params: Any
    ) -> list[dict[str, Any]]:
        """Answers to many prompts, so many at once, each with its own further params (`wishes`)."""
        wishes = wishes or [{} for _ in prompts]
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda pair: self.generate(pair[0], **{**params, **pair[1]}), zip(prompts, wishes, strict=True)))

    def stream(self, prompt: str, rid: str, **params: Any) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer, each with everything so far."""
        body = {
            "rid": rid,
            "text": prompt,
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True, **params},
        }
        request = urllib.request.Request(f"{self.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_LIMIT) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
