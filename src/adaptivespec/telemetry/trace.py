"""The trace file: every step of every request as a line of JSON, written as it happens. Its schema is in docs/trace.md."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config import SamplingParams, SpeculativeConfig
from ..errors import UserError
from ..method.records import StepRecord

SCHEMA = "adaptivespec-trace-1"


class TraceWriter:
    """Writes lines to a file, from `begin` on. A disk that fills up ends the trace with a warning, never the answers.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            # line buffered: a reader sees whole steps, and an interrupted run keeps all of them
            self._file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115  lives as long as the engine
        except (OSError, ValueError) as error:
            raise UserError(f"cannot write the trace {path!r}: {getattr(error, 'strerror', None) or error}") from None

    def begin(self) -> None:
        """Empty the file, which an engine that was refused leaves as it was, and write the first line."""
        if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):  # not a pipe, a terminal or another device
            self._file.truncate(0)
        self._write({"type": "trace", "schema": SCHEMA})

    def request(self, request: int, index: int, prompt_tokens: int, params: SamplingParams, speculative: SpeculativeConfig) -> None:
        """A request was accepted, with the settings in effect."""
        settings = {"params": params.model_dump(), "speculative": speculative.model_dump()}
        self._write({"type": "request", "request": request, "index": index, "prompt_tokens": prompt_tokens, **settings})

    def step(self, request: int, step: int, record: StepRecord) -> None:
        """One step of one request."""
        values = asdict(record)
        shape = list(values.pop("shape").values())
        self._write({"type": "step", "request": request, "step": step, "shape": shape, **values})

    def finish(self, request: int, reason: str, token_ids: list[int]) -> None:
        """A request ended; its tokens after stop conditions cut the last block."""
        self._write({"type": "finish", "request": request, "finish_reason": reason, "token_ids": token_ids})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            warnings.warn(f"the trace ends here: {error.strerror or error}", stacklevel=2)
            with contextlib.suppress(OSError):  # what is still in the buffer does not fit either
                self._file.close()
