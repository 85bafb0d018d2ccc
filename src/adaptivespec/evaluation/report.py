"""The report of a run: figures as PNG, and one HTML page that holds them all and needs nothing from outside."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2

from ..errors import UserError
from .analysis import Analysis, Cell, Interval, Square, pareto

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN_TOKENS = 25
"""Promoted tokens of an arm in the page's table; the JSON has all."""

FEW_QUESTIONS = 30
"""Below so many questions the page says that intervals are rough."""


@dataclass(frozen=True)
class Theme:
    """Colours of a figure: for light pages and files, and for dark pages."""

    text: str
    background: str
    grid: str
    series: tuple[str, ...]


# Okabe and Ito's palette, told apart by all kinds of eyes; the dark theme trades its darkest tones.
LIGHT = Theme("#1f2328", "#ffffff", "#d8dee4", ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666"))
DARK = Theme("#e6edf3", "#0d1117", "#30363d", ("#56B4E9", "#E69F00", "#3fc99b", "#e79bc6", "#F0E442", "#7aa7ff", "#bbbbbb"))

Draw = Callable[[Theme], "Figure"]


def require_matplotlib() -> None:
    """Raise UserError where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("figures need the library matplotlib: pip install 'adaptivespec[eval]'; --json does without")


def figures(analysis: Analysis) -> dict[str, Draw]:
    """The figures that a run has data for, by name: how to draw each in a theme."""
    drawn: dict[str, Draw] = {}
    answered = [cell for cell in analysis.of(analysis.groups[0]) if cell.answers]
    if not answered:
        return drawn
    drawn["accuracy-by-task"] = lambda theme: _bars(analysis, theme)
    if len(answered) > 1 and all(cell.tokens_per_second for cell in answered):
        drawn["accuracy-and-speed"] = lambda theme: _scatter(analysis, answered, theme)
    if any(cell.histogram for cell in answered):
        drawn["accept-length"] = lambda theme: _histograms([cell for cell in answered if cell.histogram], theme)
    for number, square in enumerate(analysis.squares):
        name = "ablation" if number == 0 else f"ablation-{number + 1}"
        drawn[name] = partial(_ablation, analysis, square)
    return drawn


def png(draw: Draw, theme: Theme = LIGHT) -> bytes:
    """A figure as a PNG file's content."""
    buffer = io.BytesIO()
    draw(theme).savefig(buffer, format="png", dpi=120, facecolor=theme.background, metadata={"Software": None})
    return buffer.getvalue()


def _axes(theme: Theme, width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure((width, height), layout="constrained")
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for each in axes:
        each.set_facecolor(theme.background)
        each.tick_params(colors=theme.text)
        each.xaxis.label.set_color(theme.text)
        each.yaxis.label.set_color(theme.text)
        each.title.set_color(theme.text)
        each.grid(color=theme.grid, linewidth=0.8)
        each.set_axisbelow(True)
        for name, spine in each.spines.items():
            spine.set_visible(name in ("left", "bottom"))
            spine.set_color(theme.grid)
    return figure, axes


def _errors(intervals: list[Interval], scale: float = 1.0) -> list[list[float]]:
    """Distances of bounds from values, as matplotlib wants them; 0 without an interval."""
    below = [scale * (i.value - i.low) if i.low is not None else 0.0 for i in intervals]
    above = [scale * (i.high - i.value) if i.high is not None else 0.0 for i in intervals]
    return [[max(0.0, each) for each in below], [max(0.0, each) for each in above]]


def _legend(axes: Axes, theme: Theme) -> None:
    """Beside the data, so that it hides none."""
    axes.legend(frameon=False, fontsize=8, labelcolor=theme.text, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _colour(theme: Theme, analysis: Analysis, arm: str) -> str:
    arms = [cell.arm for cell in analysis.of(analysis.groups[0])]
    return theme.series[arms.index(arm) % len(theme.series)]


def _bars(analysis: Analysis, theme: Theme) -> Figure:
    arms = [cell.arm for cell in analysis.of(analysis.groups[0])]
    figure, [axes] = _axes(theme, max(7.0, 2.8 + 0.32 * len(arms) * len(analysis.groups)), 3.8)
    width = 0.8 / len(arms)
    for index, arm in enumerate(arms):
        cells = {cell.task: cell for cell in analysis.cells if cell.arm == arm and cell.answers}
        places = [place + (index - (len(arms) - 1) / 2) * width for place, task in enumerate(analysis.groups) if task in cells]
        shown = [cells[task].accuracy for task in analysis.groups if task in cells]
        heights = [100 * each.value for each in shown]
        axes.bar(places, heights, width * 0.9, color=_colour(theme, analysis, arm), label=arm)
        axes.errorbar(places, heights, _errors(shown, 100), fmt="none", ecolor=theme.text, elinewidth=1, capsize=2)
    axes.set_xticks(range(len(analysis.groups)), analysis.groups)
    axes.set_ylabel("right answers, % (95 % Wilson)")
    axes.set_ylim(0, 100)
    axes.grid(visible=False, axis="x")
    _legend(axes, theme)
    return figure


def _scatter(analysis: Analysis, cells: list[Cell], theme: Theme) -> Figure:
    """Accuracy over throughput; the line joins arms that no other one beats in both, the legend names kappa."""
    figure, [axes] = _axes(theme, 8.0, 4.0)
    relative = analysis.plain is not None and all(cell.times_plain or cell.arm == analysis.plain for cell in cells)
    points: dict[str, tuple[float, float]] = {}
    for cell in cells:
        speed = Interval(cell.tokens_per_second)
        if relative:
            speed = cell.times_plain or Interval(1.0)
        kappa = analysis.kappas.get(cell.arm, 1.0)
        points[cell.arm] = speed.value, 100 * cell.accuracy.value
        axes.errorbar(
            [speed.value],
            [100 * cell.accuracy.value],
            yerr=_errors([cell.accuracy], 100),
            xerr=_errors([speed]),
            fmt="o",
            color=_colour(theme, analysis, cell.arm),
            elinewidth=1,
            capsize=2,
            label=f"{cell.arm} (kappa {kappa:g})" if kappa < 1 else cell.arm,
        )
    front = pareto(points)
    axes.plot([points[arm][0] for arm in front], [points[arm][1] for arm in front], color=theme.text, linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"{'throughput relative to plain decoding' if relative else 'tokens per second'}, {concurrency(analysis)}")
    axes.set_ylabel("right answers, %")
    axes.margins(x=0.15)
    _legend(axes, theme)
    return figure


def _histograms(cells: list[Cell], theme: Theme) -> Figure:
    figure, panels = _axes(theme, max(5.0, 2.6 * len(cells)), 3.0, len(cells))
    longest = max(len(cell.histogram) for cell in cells)
    for axes, cell in zip(panels, cells, strict=True):
        total = sum(cell.histogram)
        axes.bar(range(len(cell.histogram)), [100 * count / total for count in cell.histogram], color=theme.series[0])
        axes.set_title(cell.arm, fontsize=9)
        axes.set_xlim(-0.7, longest - 0.3)
        axes.set_xlabel("accepted drafted tokens")
        axes.grid(visible=False, axis="x")
    panels[0].set_ylabel("steps that drafted, %")
    return figure


def _ablation(analysis: Analysis, square: Square, theme: Theme) -> Figure:
    """Throughput and accuracy of the four arms: a line per rule, from the static to the adaptive tree."""
    figure, panels = _axes(theme, 8.0, 3.4, 2)
    cells = {cell.arm: cell for cell in analysis.of(analysis.groups[0])}
    lines = (("strict", (square.static, square.tree)), ("margin", (square.margin, square.both)))
    for index, (rule, arms) in enumerate(lines):
        speeds = [cells[arm].tokens_per_second for arm in arms]
        accuracies = [cells[arm].accuracy for arm in arms]
        values = [100 * each.value for each in accuracies]
        panels[0].plot([0, 1], speeds, marker="o", color=theme.series[index], label=rule)
        places = [place + 0.04 * (index - 0.5) for place in (0, 1)]
        panels[1].errorbar(places, values, _errors(accuracies, 100), marker="o", color=theme.series[index], label=rule, capsize=2)
    for axes, label in zip(panels, (f"tokens per second, {concurrency(analysis)}", "right answers, %"), strict=True):
        axes.set_xticks([0, 1], ["static tree", "adaptive tree"])
        axes.set_xlim(-0.3, 1.3)
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.set_ylabel(label)
    _legend(panels[1], theme)
    return figure


CAPTIONS = {
    "accuracy-by-task": "Share of right answers with its 95 % Wilson interval. Arms answered the same questions: their difference is more "
    "certain than the overlap of these intervals suggests; see the comparison above.",
    "accuracy-and-speed": "Up and to the right is better. The dotted line joins arms that no other beats in both. Bars: 95 % intervals.",
    "accept-length": "How many drafted tokens a step accepted, the bonus token not counted; steps without a draft are left out.",
    "ablation": "Static or adaptive tree, strict or margin rule, all else equal. Parallel lines: the parts do not interact.",
}


def page(run: Mapping[str, Any], analysis: Analysis, images: Mapping[str, tuple[bytes, bytes]]) -> str:
    """One HTML page with everything inside.

    Args:
        run: what run.json says.
        analysis: the numbers.
        images: PNG of each figure, for light and for dark pages.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": percent, "number": number, "points": points, "signed": signed, "known": known}

    def uri(data: bytes) -> str:
        return "data:image/png;base64," + base64.b64encode(data).decode()

    tokens = {cell.arm: [t for t in analysis.promoted if t.arm == cell.arm] for cell in analysis.of(analysis.groups[0])}
    sessions = run["sessions"]
    return environment.from_string(resources.files(__package__).joinpath("data/report.html").read_text("utf-8")).render(
        run=run,
        analysis=analysis,
        concurrency=concurrency(analysis),
        figures={name: (uri(light), uri(dark), CAPTIONS[name.rstrip("-0123456789")]) for name, (light, dark) in images.items()},
        tokens={arm: own[:SHOWN_TOKENS] for arm, own in tokens.items() if own},
        token_counts={arm: (len(own), sum(t.right + t.wrong for t in own)) for arm, own in tokens.items()},
        few=any(0 < cell.answers < FEW_QUESTIONS for cell in analysis.cells),
        mixed_versions=len({json.dumps([s["versions"], s["git_revision"]]) for s in sessions}) > 1,
        pretty=lambda value: json.dumps(value, indent=2, ensure_ascii=False),
        settings={name: value for name, value in run["settings"].items() if name not in ("arms", "tasks")},
        repr=repr,
    )


def concurrency(analysis: Analysis) -> str:
    """At what load speed was measured."""
    return f"{analysis.batch} requests in flight" if analysis.engine == "openai" else f"batch {analysis.batch}"


def known(value: float | None, form: str, scale: float = 1.0) -> str:
    """A number in a form such as `%.1f`; a dash for what a server does not say."""
    return "-" if value is None else form % (scale * value)


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
