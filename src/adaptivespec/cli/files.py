"""Files that commands read and write: checked before any work, and written whole or not at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError


def check_writable(path: Path) -> None:
    """Refuse a file that could not be written, before any work."""
    shown, path = path, path.resolve()
    if path.is_dir():
        raise UserError(f"cannot write {shown}: it is a folder")
    if not path.exists() and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise UserError(f"cannot write {shown}: its folder is missing or read-only")
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"cannot write {shown}: it is read-only")


def write(path: Path, text: str) -> None:
    """Write beside the target, then rename, so that a full disk never leaves half a file; devices and pipes are written to directly."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def input_lines() -> Iterator[str]:
    """Standard input line by line. Raises UserError for what is not text."""
    try:
        yield from sys.stdin
    except UnicodeDecodeError:
        raise UserError("standard input is not UTF-8 text") from None
