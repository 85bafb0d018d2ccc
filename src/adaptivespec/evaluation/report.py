"""The report of a run as one HTML page that holds its figures and needs nothing from outside."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

import jinja2

from .figures import caption, concurrency
from .findings import ALL, Analysis, Cell, Comparison, Interval

SHOWN_TOKENS = 25
"""Promoted tokens of an arm in the page's table; the JSON has all."""

FEW_QUESTIONS = 30
"""Below so many questions the page says that intervals are rough."""


def page(
    run: Mapping[str, Any],
    analysis: Analysis,
    images: Mapping[str, tuple[bytes, bytes]],
    timed: tuple[Mapping[str, Any], Analysis] | None = None,
) -> str:
    """One HTML page with everything inside.

    Args:
        run: what run.json says.
        analysis: the numbers.
        images: PNG of each figure, for light and for dark pages.
        timed: the same of another run that measured speed, if any.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": percent, "number": number, "points": points, "signed": signed, "known": known, "detects": detects}

    def uri(data: bytes) -> str:
        return "data:image/png;base64," + base64.b64encode(data).decode()

    tokens = {arm: [t for t in analysis.promoted if t.arm == arm] for arm in analysis.arms}
    sessions = run["sessions"]
    speed_run, speed = timed or (run, analysis)
    return environment.from_string(resources.files(__package__).joinpath("data/report.html").read_text("utf-8")).render(
        run=run,
        analysis=analysis,
        timed=timed is not None,
        speed=speed,
        in_turns=speed_run["settings"].get("interleave", False),
        concurrency=concurrency(speed),
        starts=[*sessions, *(speed_run["sessions"] if timed else [])],
        figures={name: (uri(light), uri(dark), caption(name, analysis, speed)) for name, (light, dark) in images.items()},
        tokens={arm: own[:SHOWN_TOKENS] for arm, own in tokens.items() if own},
        token_counts={arm: (len(own), sum(t.right + t.wrong for t in own)) for arm, own in tokens.items()},
        few=any(0 < cell.answers < FEW_QUESTIONS for cell in analysis.cells),
        mixed_versions=len({json.dumps([s["versions"], s["git_revision"]]) for s in sessions}) > 1,
        pretty=lambda value: json.dumps(value, indent=2, ensure_ascii=False),
        settings={name: value for name, value in run["settings"].items() if name not in ("arms", "tasks")},
        per_answer=lambda cell: per_answer(cell, speed, analysis),
        repr=repr,
    )


def known(value: float | None, form: str, scale: float = 1.0) -> str:
    """A number in a form such as `%.1f`; a dash for what a server does not say."""
    return "-" if value is None else form % (scale * value)


def detects(versus: Comparison) -> str:
    """The smallest difference found, in points; `none` for a comparison that is blind."""
    return "none" if versus.blind else known(versus.detectable, "%.1f", 100)


def per_answer(cell: Cell, speed: Analysis, quality: Analysis) -> float | None:
    """Throughput over the reference's, divided by how much longer whole answers are: what is left of a speed-up for who waits for them.

    Args:
        cell: of `speed`.
        speed: the run that measured speed.
        quality: that of whole answers, perhaps the same. None is the result where the two have no reference or tasks in common.
    """
    own = quality.cell(cell.task, cell.arm)
    alike = quality.reference == speed.reference and (cell.task != ALL or quality.tasks == speed.tasks)
    longer = own.versus.length if own and own.versus else None
    if not alike or not longer or not longer.value or not cell.times_reference:
        return None
    return cell.times_reference.value / longer.value


def percent(interval: Interval) -> str:
    """A share and its interval in percent: `45.0 (36.2 to 54.1)`."""
    return _with_bounds(interval, lambda value: f"{100 * value:.1f}")


def points(interval: Interval) -> str:
    """A difference of shares in percentage points, signed."""
    return _with_bounds(interval, lambda value: f"{100 * value:+.1f}")


def number(interval: Interval) -> str:
    """A ratio and its interval."""
    return _with_bounds(interval, lambda value: f"{value:.2f}")


def signed(interval: Interval) -> str:
    """A logarithm and its interval, signed."""
    return _with_bounds(interval, lambda value: f"{value:+.3f}")


def _with_bounds(interval: Interval, show: Callable[[float], str]) -> str:
    if interval.low is None or interval.high is None:
        return show(interval.value)
    return f"{show(interval.value)} ({show(interval.low)} to {show(interval.high)})"
