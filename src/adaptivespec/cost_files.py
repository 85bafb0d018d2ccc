"""Cost tables as files: read and checked, written whole or not at all, and the calibrated ones of this machine in the cache."""

from __future__ import annotations

import hashlib
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

from .errors import UserError, nearest
from .method.costs import CostTable, Curve
from .user_cache import user_cache

SCHEMA = "adaptivespec-costs-1"
"""Changes whenever an older file would be misread: those in the cache are then measured anew."""

PACKAGED = ("h100-8b",)
"""Tables that are shipped, by name."""


def to_json(table: CostTable, about: dict[str, Any] | None = None) -> dict[str, Any]:
    """A table as the file holds it; `about` says how it was made."""
    curves = {
        name: {"rows": list(curve.rows), "seconds": list(curve.seconds)} for name, curve in (("start", table.start), ("level", table.level))
    }
    verify = [{"batch": batch, "rows": list(c.rows), "seconds": list(c.seconds)} for batch, c in sorted(table.verify.items())]
    return {"schema": SCHEMA, "label": table.label, **curves, "verify": verify, "fixed": table.fixed, "about": about or {}}


def from_json(value: Any) -> CostTable:
    """The inverse of `to_json`. Raises ValueError with what is wrong."""
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    if value.get("schema") != SCHEMA:
        raise ValueError(f"schema {value.get('schema')!r} is not {SCHEMA!r}")
    if unknown := value.keys() - {"schema", "label", "start", "level", "verify", "fixed", "about"}:
        raise ValueError(f"unknown entry {sorted(unknown)[0]!r}")
    rows = value.get("verify")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and _is_count(row.get("batch")) for row in rows):
        raise ValueError("verify: expected a list of objects with batch, rows and seconds")
    if len({row["batch"] for row in rows}) < len(rows):
        raise ValueError("verify: a batch is there twice")
    if not isinstance(label := value.get("label", ""), str):
        raise ValueError("label: expected text")
    verify = {row["batch"]: _curve(row, f"verify of batch {row['batch']}") for row in rows}
    if not _is_number(fixed := value.get("fixed", "")):
        raise ValueError("fixed: expected seconds")
    return CostTable(_curve(value.get("start"), "start"), _curve(value.get("level"), "level"), verify, float(fixed), label)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31


def _curve(value: Any, where: str) -> Curve:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object with rows and seconds")
    rows, seconds = value.get("rows"), value.get("seconds")
    if not isinstance(rows, list) or not all(map(_is_count, rows)):
        raise ValueError(f"{where}: rows are whole numbers, none of them huge")
    if not isinstance(seconds, list) or not all(map(_is_number, seconds)):
        raise ValueError(f"{where}: seconds are numbers")
    try:
        return Curve(tuple(rows), tuple(map(float, seconds)))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def load(name: str | Path) -> CostTable:
    """A table from a file, or a shipped one by name. Raises UserError, in one line."""
    if str(name) in PACKAGED:
        text = resources.files("adaptivespec").joinpath(f"data/{name}.json").read_text("utf-8")
    else:
        try:
            text = Path(name).read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            known = nearest(str(name), PACKAGED)
            raise UserError(f"cannot read a cost table from {name}: {getattr(error, 'strerror', None) or 'not text'}{known}") from None
    try:
        return from_json(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise UserError(f"cost table {name}: {error}") from None


def save(path: Path, table: CostTable, about: dict[str, Any]) -> None:
    """Write beside the file, then rename: whoever reads meanwhile sees the old one or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(to_json(table, about), indent=1) + "\n", "utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def cache_path(about: dict[str, Any]) -> Path:
    """Where a calibration is kept: costs / KEY.json in the user's cache, the key of schema and identity."""
    key = hashlib.sha256(json.dumps([SCHEMA, about], sort_keys=True).encode()).hexdigest()[:20]
    return user_cache() / "costs" / f"{key}.json"


def load_cached(about: dict[str, Any]) -> CostTable | None:
    """The calibration of an identity; None without one, and for a damaged file, which the next calibration replaces."""
    try:
        return from_json(json.loads(cache_path(about).read_text("utf-8")))
    except (OSError, ValueError, RecursionError):
        return None
