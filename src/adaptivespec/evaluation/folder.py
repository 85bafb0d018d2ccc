"""The folder of an evaluation: `run.json` (settings, provenance), `answers.jsonl` (one line per answer), `calls.jsonl` (one per call).

docs/evaluation.md has the fields. Reading needs neither a model nor torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any, Self

from ..errors import UserError

SCHEMA = "adaptivespec-eval-1"
RUN, ANSWERS, CALLS, RESERVE = "run.json", "answers.jsonl", "calls.jsonl", "answers.reserve"
OWN_FILES = (RUN, ANSWERS, CALLS, RESERVE)
"""What a run writes. The reserve is given up when the disk is full, so that answers which are finished by then still fit."""

LATER = {"interleave": False}
"""Settings that the first versions did not record, and what they were."""

RESERVE_BYTES = 4 << 20

Key = tuple[str, str, str]
"""arm, task and id: what makes an answer."""

FIELDS = {
    "arm": str, "task": str, "id": str, "correct": bool, "text": str, "tokens": int, "finish_reason": str,
    "promoted": (list, NoneType), "metrics": dict, "steps": (int, NoneType), "seconds": (int, float),
}  # fmt: skip
"""Fields of an answer without which it can't be analysed; None stands for what a server does not say."""


def key(row: Mapping[str, Any]) -> Key:
    """What identifies an answer."""
    return row["arm"], row["task"], row["id"]


def read_run(folder: Path) -> dict[str, Any]:
    """What run.json says.

    Raises:
        UserError: no such file, not JSON, or another schema.
    """
    path = folder / RUN
    try:
        run = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{folder} holds no evaluation: cannot read {RUN} ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not JSON") from None
    if not isinstance(run, dict) or run.get("schema") != SCHEMA:
        raise UserError(f"{path}: expected the schema {SCHEMA}, not {run.get('schema') if isinstance(run, dict) else type(run).__name__!r}")
    return run


def read_answers(folder: Path) -> list[dict[str, Any]]:
    """All answers, in the order they finished; a torn last line, which an interrupted write leaves, is passed over.

    Raises:
        UserError: a file that can't be read, or a line that is no answer.
    """
    try:
        data = (folder / ANSWERS).read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {folder / ANSWERS}: {error.strerror}") from None
    rows: dict[Key, dict[str, Any]] = {}
    for number, line in enumerate(data[: _whole(data)].splitlines(), start=1):
        row = _answer(line, f"{folder / ANSWERS}, line {number}")
        rows.setdefault(key(row), row)
    return list(rows.values())


def _whole(data: bytes) -> int:
    """The length of the whole lines. A last line that ends but is no JSON is torn too: blocks of a crashed machine may be zeros."""
    end = data.rfind(b"\n") + 1
    begin = data.rfind(b"\n", 0, max(0, end - 1)) + 1
    try:
        json.loads(data[begin:end] or b"0")
    except ValueError:
        return begin
    return end


def _answer(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"{where}: not JSON") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object")
    if wrong := [name for name, kind in FIELDS.items() if not isinstance(row.get(name), kind)]:  # type: ignore[arg-type]
        raise UserError(f"{where}: the field {wrong[0]} is missing or of the wrong type")
    return row


def contradiction(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """What the settings of a run and new ones disagree on, as `name old, not new`. More arms, tasks and questions are no contradiction."""
    old, new = {**LATER, **old}, {**LATER, **new}
    for name in {**old, **new}:
        before, now = old.get(name), new.get(name)
        if name in ("arms", "tasks"):
            for label in (label for label in before or () if label in (now or ())):
                if said := _difference(f"{name[:-1]} {label}: ", before[label], now[label]):  # type: ignore[index]
                    return said
        elif said := _difference("", {name: before}, {name: now}):
            return said
    return None


def _difference(where: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if name in ("data", "arms"):  # where questions come from, when what they are is compared; which arms were asked them
            continue
        if name == "questions" and isinstance(old, dict) and isinstance(new, dict):
            if changed := [each for each in old if each in new and old[each] != new[each]]:
                return f"{where}another text of question {changed[0]}"
        elif isinstance(old, dict) and isinstance(new, dict):
            if said := _difference(where, old, new):
                return said
        elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            for one, other in zip(old, new, strict=True):
                if one != other:
                    if isinstance(one, dict) and isinstance(other, dict):
                        return _difference(where, one, other)
                    return f"{where}{name} {old!r}, not {new!r}"
        elif old != new:
            return f"{where}{name} {old!r}, not {new!r}"
    return None


def asked_arms(settings: Mapping[str, Any], task: str) -> list[str]:
    """The arms that a task was put to, all of the run where run.json does not say (of an earlier version); none without the task."""
    if task not in settings["tasks"]:
        return []
    return list(settings["tasks"][task].get("arms", settings["arms"]))


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run that is taken up again: those of both, which do not contradict each other."""
    tasks = {
        name: {
            **task,
            "arms": list(dict.fromkeys([*asked_arms(old, name), *asked_arms(new, name)])),
            "questions": {**old["tasks"].get(name, {}).get("questions", {}), **task["questions"]},
        }
        for name, task in new["tasks"].items()
    }
    return {**new, "arms": {**old["arms"], **new["arms"]}, "tasks": {**old["tasks"], **tasks}}


def check_unused(folder: Path) -> None:
    """Raise UserError while another process writes a run's answers."""
    try:
        with (folder / ANSWERS).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return
    except BlockingIOError:
        raise UserError(f"another process is writing to {folder}") from None
    except OSError as error:
        raise UserError(f"cannot read {folder / ANSWERS}: {error.strerror}") from None


class AnswerLog:
    """Appends answers, each as one whole line; nobody else may write beside it. Thread-safe.

    Attributes:
        answers: those that were there.
        full: the disk is, and the reserve was given up: time to stop.

    Raises:
        UserError: another process writes this folder, or a file in it is not an evaluation's.
        OSError: the folder can't be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.full = folder, False
        self._lock = threading.Lock()
        self._fd = os.open(folder / ANSWERS, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.answers = read_answers(folder)
            os.ftruncate(self._fd, _whole((folder / ANSWERS).read_bytes()))
            (folder / RESERVE).write_bytes(b"\0" * RESERVE_BYTES)
        except BlockingIOError:
            os.close(self._fd)
            raise UserError(f"another process is writing to {folder}") from None
        except BaseException:
            os.close(self._fd)
            (folder / RESERVE).unlink(missing_ok=True)
            raise

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one answer. Raises OSError, and leaves whole lines behind, when not even the reserve gives it room."""
        line = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n").encode(errors="replace")
        with self._lock:
            try:
                self._write(line)
            except OSError as error:
                if self.full or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self.full = True
                (self.folder / RESERVE).unlink(missing_ok=True)
                self._write(line)

    def _write(self, line: bytes) -> None:
        begin = os.fstat(self._fd).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._fd, line[written:])
        except BaseException:
            os.ftruncate(self._fd, begin)
            raise

    def add_call(self, row: Mapping[str, Any]) -> None:
        """Note one call in calls.jsonl. On a full disk it is not noted: answers come first."""
        with contextlib.suppress(OSError), (self.folder / CALLS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """Close the files and give the reserve back."""
        with contextlib.suppress(OSError):
            (self.folder / RESERVE).unlink(missing_ok=True)
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
