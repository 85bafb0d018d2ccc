"""Prompts: the packaged mixed set, or a JSON-lines file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import UserError

Messages = list[dict[str, str]]

GROUP_FIELDS = ("task", "category", "kind")


@dataclass(frozen=True)
class BenchPrompt:
    """Chat messages, and the group that results are also shown for: a task, or what the file says."""

    messages: Messages
    group: str | None = None


def load_prompts(path: Path | None = None, limit: int | None = None) -> list[BenchPrompt]:
    """Prompts of a file whose lines have a field `prompt`, `question`, `turns` (the first is asked) or `messages`.

    A field `task`, `category` or `kind` names a prompt's group.

    Args:
        path: None for the packaged prompts (questions, mathematics, code).
        limit: only the first so many.

    Raises:
        UserError: an unreadable file, or a line that is not such an object; the message names the line.
    """
    if path is None:
        text, name = resources.files(__package__).joinpath("data/prompts.jsonl").read_text("utf-8"), "packaged prompts"
    else:
        name = str(path)
        try:
            text = path.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read prompts from {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    lines = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    prompts = [_prompt(line, f"{name}, line {i}") for i, line in lines[:limit]]
    if not prompts:
        raise UserError(f"{name}: no prompts")
    return prompts


def _prompt(line: str, where: str) -> BenchPrompt:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"{where}: not JSON") from None
    if isinstance(row, dict):
        messages = _messages(row)
        if messages:
            return BenchPrompt(messages, next((str(row[name]) for name in GROUP_FIELDS if isinstance(row.get(name), str)), None))
    raise UserError(f"{where}: needs a field prompt or question (text), turns (texts) or messages (role and content)")


def _messages(row: dict[str, Any]) -> Messages:
    """The chat that a row asks for; empty when it has none that can be asked."""
    turns = row.get("turns")
    for text in (row.get("prompt"), row.get("question"), turns[0] if isinstance(turns, list) and turns else None):
        if isinstance(text, str) and text.strip():
            return [{"role": "user", "content": text}]
    messages = row.get("messages")
    if isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    ):
        return [{"role": m["role"], "content": m["content"]} for m in messages]
    return []
