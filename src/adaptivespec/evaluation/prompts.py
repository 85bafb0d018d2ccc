"""Prompts: the packaged mixed set, or a JSON-lines file."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import UserError

Messages = list[dict[str, str]]


def load_prompts(path: Path | None = None, limit: int | None = None) -> list[Messages]:
    """Chat messages per prompt, from a file whose lines have a field `prompt`, `question` or `messages`.

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
    prompts = [_messages(line, f"{name}, line {i}") for i, line in lines[:limit]]
    if not prompts:
        raise UserError(f"{name}: no prompts")
    return prompts


def _messages(line: str, where: str) -> Messages:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"{where}: not JSON") from None
    if isinstance(row, dict):
        for name in ("prompt", "question"):
            if isinstance(row.get(name), str) and row[name].strip():
                return [{"role": "user", "content": row[name]}]
        messages = row.get("messages")
        if (
            isinstance(messages, list)
            and messages
            and all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages)
        ):
            return [{"role": m["role"], "content": m["content"]} for m in messages]
    raise UserError(f"{where}: needs a field prompt or question (text) or messages (role and content)")
