"""An OpenAI-compatible server in a thread of the test: knows sums, speaks the dialects of vLLM and SGLang, and fails when told to."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

VLLM = {
    "mean_acceptance_length": 2.5, "draft_acceptance_rate": 0.5, "acceptance_histogram": [1, 0, 0, 1], "num_spec_steps": 2,
    "num_accepted_draft_tokens": 3, "num_draft_tokens": 6, "num_spec_tokens": 3,
}  # fmt: skip
SGLANG = {
    "spec_accept_rate": 0.5, "spec_accept_length": 2.5, "spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 6, "spec_verify_ct": 2,
    "spec_correct_drafts_histogram": [1, 0, 0, 1], "spec_cap_length": 0.0, "spec_cap_lens_histogram": [],
}  # fmt: skip
DIALECTS: dict[str, dict[str, Any]] = {
    "vllm": {"metrics": {"speculative_decoding": VLLM, "time_to_first_token_ms": 1.0}},
    "ours": {"metrics": {"speculative_decoding": {**VLLM, "num_promoted_tokens": 1, "spent_budget": 0.5}}},
    "sglang": {"sglext": {"spec_tokens_details": SGLANG}},
    "silent": {},
}


class FakeServer:
    """Serves while it is a context.

    Args:
        dialect: of DIALECTS; `sglang` counts only when asked to.
        models: what it serves.
        obeys: whether `speculative` is echoed.
        seconds: each answer takes.
        change: of an answer's JSON.

    Attributes:
        fail: statuses of the next requests, 0 for a closed connection.
        bodies: what was asked; busiest: most requests at the same time.
    """

    def __init__(
        self,
        dialect: str = "silent",
        models: tuple[str, ...] = ("tiny",),
        obeys: bool = False,
        seconds: float = 0.0,
        change: Mapping[str, Any] | None = None,
    ) -> None:
        self.dialect, self.models, self.obeys, self.seconds, self.change = dialect, models, obeys, seconds, change or {}
        self.fail: deque[int] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.running = self.busiest = 0
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                pages = {
                    "/v1/models": {"data": [{"id": name, "owned_by": fake.dialect, "max_model_len": 4096} for name in fake.models]},
                    "/server_info": {"version": "1.2", "speculative_algorithm": "EAGLE3", "host": "secret"},
                }
                self._send(200 if self.path in pages else 404, pages.get(self.path, {}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake._lock:
                    fake.bodies.append(body)
                    fake.keys.add(self.headers["Authorization"])
                    fake.running += 1
                    fake.busiest = max(fake.busiest, fake.running)
                    status = fake.fail.popleft() if fake.fail else 200
                time.sleep(fake.seconds)
                with fake._lock:
                    fake.running -= 1
                if status == 0:
                    self.close_connection = True
                elif status == 200:
                    self._send(200, fake.answer(body))
                else:
                    self._send(status, {"error": {"message": f"fake trouble {status}"}})

            def _send(self, status: int, value: Any) -> None:
                data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """A client that left is no trouble."""

        self._http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def answer(self, body: Mapping[str, Any]) -> Any:
        """A chat completion: the number in the question plus one."""
        [number] = re.findall(r"What is (\d+) \+ 1", body["messages"][0]["content"])
        said: dict[str, Any] = {
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": f"\\boxed{{{int(number) + 1}}}"}, "finish_reason": "stop"}
            ],
            "usage": {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13},
        }
        if self.dialect != "sglang" or body.get("return_spec_tokens_details"):
            said |= DIALECTS[self.dialect]
        if self.obeys and "speculative" in body:
            said["speculative"] = body["speculative"]
        return {**said, **self.change}

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.shutdown()
        self._http.server_close()
