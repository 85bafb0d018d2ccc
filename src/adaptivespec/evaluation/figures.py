"""The figures of a run, drawn for light and for dark pages."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .analysis import pareto
from .findings import ALL, Analysis, Cell, Interval, ShapesOverTime, Square

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
MARKERS = "sD^vPX<>*"

Draw = Callable[[Theme], "Figure"]

CAPTIONS = {
    "accuracy-by-task": "Share of right answers with its 95 % Wilson interval; dashed: {reference}. Arms answered the same questions, so "
    "their difference is more certain than the overlap of these intervals suggests; see the tables.",
    "accuracy-and-speed": "Up and to the right is better. A line goes through arms that differ in kappa alone, each marked with its kappa; "
    "the dotted line joins arms that no other beats in both. Bars: 95 % intervals. Speed at {concurrency}.",
    "accept-length": "How many drafted tokens a step accepted on {common}, without the bonus token; steps without a draft are left out.",
    "ablation": "Static or adaptive tree, strict or margin rule, all else equal. Bars: 95 % intervals. Speed at {concurrency}.",
    "shape-over-time": "Shapes (num_steps,topk,num_draft_tokens) planned as answers to {common} grew, of those still running.",
}


def require_matplotlib() -> None:
    """Raise UserError where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("figures need the library matplotlib: pip install 'adaptivespec[eval]'; --json does without")


def concurrency(analysis: Analysis) -> str:
    """At what load speed was measured."""
    return f"{analysis.batch} requests in flight" if analysis.engine == "openai" else f"batch {analysis.batch}"


def caption(name: str, analysis: Analysis, speed: Analysis | None = None) -> str:
    """What a figure shows."""
    text = CAPTIONS[name.rstrip("-0123456789")]
    reference = analysis.reference or "nothing, as no arm is strict"
    common = "all tasks" if analysis.common == ALL else analysis.common
    uprights = (
        " Uprights: strict arms of which only speed was measured."
        if speed and name == "accuracy-and-speed" and _untried(analysis, speed)
        else ""
    )
    return text.format(reference=reference, common=common, concurrency=concurrency(speed or analysis)) + uprights


def _untried(analysis: Analysis, speed: Analysis) -> list[str]:
    """Strict arms of the run for speed alone. Their answers would be the reference's, so a pace is all that there is to know of them."""
    return [arm for arm in speed.arms if arm not in analysis.arms and speed.kappas.get(arm) == 1 and arm != speed.plain]


def figures(analysis: Analysis, speed: Analysis | None = None) -> dict[str, Draw]:
    """The figures that a run has data for, by name: how to draw each in a theme.

    Args:
        analysis: of the run.
        speed: of another run of the same arms that measured speed; None for this one's own.
    """
    speed = speed or analysis
    drawn: dict[str, Draw] = {}
    answered = [cell for cell in analysis.cells if cell.answers]
    if not answered:
        return drawn
    drawn["accuracy-by-task"] = partial(_bars, analysis)
    groups = [group for group in analysis.groups if sum(_point(analysis, speed, group, arm) is not None for arm in analysis.arms) > 1]
    if groups:
        drawn["accuracy-and-speed"] = partial(_scatter, analysis, speed, groups)
    steps = {cell.arm: cell.histogram for cell in analysis.of(analysis.common) if any(cell.histogram)}
    if steps:
        drawn["accept-length"] = partial(_histograms, steps)
    for number, arms in enumerate(dict.fromkeys(square.arms for square in analysis.squares)):
        squares = [square for square in analysis.squares if square.arms == arms]
        drawn["ablation" if number == 0 else f"ablation-{number + 1}"] = partial(_ablation, analysis, speed, squares)
    if analysis.shapes:
        drawn["shape-over-time"] = partial(_shapes, analysis.shapes)
    return drawn


def png(draw: Draw, theme: Theme = LIGHT) -> bytes:
    """A figure as a PNG file's content."""
    buffer = io.BytesIO()
    draw(theme).savefig(buffer, format="png", dpi=100, facecolor=theme.background, metadata={"Software": None})
    return buffer.getvalue()


def _axes(theme: Theme, width: float, height: float, rows: int = 1, columns: int = 1, **shared: Any) -> tuple[Figure, list[Axes]]:
    """A figure of panels, each `width` x `height` inches."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure((width * columns, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for each in axes:
        each.set_facecolor(theme.background)
        each.tick_params(colors=theme.text, labelsize=8)
        for text in (each.xaxis.label, each.yaxis.label):
            text.set_color(theme.text)
            text.set_fontsize(9)
        each.grid(color=theme.grid, linewidth=0.8)
        each.set_axisbelow(True)
        for name, spine in each.spines.items():
            spine.set_visible(name in ("left", "bottom"))
            spine.set_color(theme.grid)
    return figure, axes


def _wrapped(theme: Theme, count: int, most: int, width: float, height: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    """So many panels, at most `most` in a row."""
    columns = min(count, most)
    figure, axes = _axes(theme, width, height, math.ceil(count / columns), columns, **shared)
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def _errors(intervals: Sequence[Interval], scale: float = 1.0) -> list[list[float]]:
    """Distances of bounds from values, as matplotlib wants them; 0 without an interval."""
    below = [scale * (i.value - i.low) if i.low is not None else 0.0 for i in intervals]
    above = [scale * (i.high - i.value) if i.high is not None else 0.0 for i in intervals]
    return [[max(0.0, each) for each in below], [max(0.0, each) for each in above]]


def _legend(figure: Figure, theme: Theme, entries: Mapping[str, Any]) -> None:
    """Under the panels, so that it hides no data, in as many rows as it needs; a colour stands for a patch of it."""
    from matplotlib.patches import Patch

    widest = 0.55 + 0.065 * max(map(len, entries), default=0)  # inches of an entry: its patch, the gaps, and its letters
    columns = max(1, int(figure.get_figwidth() / widest))
    figure.set_figheight(figure.get_figheight() + 0.16 * (math.ceil(len(entries) / columns) - 1))
    handles = [Patch(color=entry) if isinstance(entry, str) else entry for entry in entries.values()]
    look: dict[str, Any] = {"frameon": False, "fontsize": 8, "labelcolor": theme.text, "ncols": columns}
    figure.legend(handles, list(entries), loc="outside lower center", **look)


def _title(axes: Axes, text: str, theme: Theme) -> None:
    if len(text) > 30:  # wider than a small panel
        text = text.replace(",", ",\n", 1)
    axes.set_title(text, fontsize=9, color=theme.text)


def _kind(analysis: Analysis, arm: str) -> int:
    """0 for plain decoding, 1 strict, 2 lossy, 3 where a label does not say."""
    if arm == analysis.plain:
        return 0
    kappa = analysis.kappas.get(arm)
    return 3 if kappa is None else 2 if kappa < 1 else 1


def _bars(analysis: Analysis, theme: Theme) -> Figure:
    """A panel per task and a row per arm."""
    arms, groups = analysis.arms, analysis.groups
    figure, panels = _axes(theme, max(2.4, 7.0 / len(groups)), 1.0 + 0.26 * len(arms), 1, len(groups), sharey=True)
    colours = (theme.series[6], theme.series[0], theme.series[1], theme.series[2])
    names = ("plain decoding", "strict", "lossy", "as labelled")
    for axes, group in zip(panels, groups, strict=True):
        for kind in range(4):
            own = [(place, cell) for place, arm in enumerate(arms) if (cell := analysis.cell(group, arm)) and _kind(analysis, arm) == kind]
            if own:
                accuracies = [cell.accuracy for _, cell in own]
                values = [100 * each.value for each in accuracies]
                axes.barh([place for place, _ in own], values, 0.7, color=colours[kind])
                errors = _errors(accuracies, 100)
                axes.errorbar(values, [p for p, _ in own], xerr=errors, fmt="none", ecolor=theme.text, elinewidth=1, capsize=2)
        if analysis.reference and (reference := analysis.cell(group, analysis.reference)):
            axes.axvline(100 * reference.accuracy.value, color=theme.text, linewidth=0.8, linestyle="--")
        _title(axes, group, theme)
        axes.set_xlabel("right answers, %")
        highest = max((100 * (cell.accuracy.high or 1.0) for cell in analysis.of(group) if cell.answers), default=100.0)
        axes.set_xlim(0, min(100.0, 1.1 * highest))
        axes.grid(visible=False, axis="y")
    panels[0].set_yticks(range(len(arms)), arms)
    panels[0].invert_yaxis()
    _legend(figure, theme, {names[kind]: colours[kind] for kind in sorted({_kind(analysis, arm) for arm in arms})})
    return figure


def _speed(speed: Analysis, task: str, arm: str) -> Interval | None:
    """Throughput on a task, relative to plain decoding where that is there; None where the run of speed did not have the task."""
    cell = speed.cell(task, arm)
    if cell is None or not cell.tokens_per_second:
        return None
    if speed.plain is None:
        return Interval(cell.tokens_per_second)
    return Interval(1.0) if arm == speed.plain else cell.times_plain


def _point(analysis: Analysis, speed: Analysis, task: str, arm: str) -> tuple[Interval, Cell] | None:
    cell, at = analysis.cell(task, arm), _speed(speed, task, arm)
    return None if cell is None or at is None else (at, cell)


def _axis_of_speed(speed: Analysis) -> str:
    return "x plain decoding" if speed.plain is not None else "tokens per second"


def _scatter(analysis: Analysis, speed: Analysis, groups: Sequence[str], theme: Theme) -> Figure:
    """Accuracy over throughput, a panel per task."""
    figure, panels = _wrapped(theme, len(groups), 2, 4.6 if len(groups) > 1 else 7.0, 3.4)
    swept = {arm: number for number, sweep in reversed(list(enumerate(analysis.sweeps))) for arm in sweep}
    single = [arm for arm in analysis.arms if arm not in swept]
    labels: dict[str, Any] = {}
    for axes, group in zip(panels, groups, strict=True):
        points = {arm: point for arm in analysis.arms if (point := _point(analysis, speed, group, arm)) is not None}
        for arm, (at, cell) in points.items():
            lone = arm not in swept
            colour = theme.series[(2 + single.index(arm)) % len(theme.series)] if lone else theme.series[swept[arm] % 2]
            labels[arm if lone else _name(analysis.sweeps[swept[arm]])] = axes.errorbar(
                [at.value],
                [100 * cell.accuracy.value],
                yerr=_errors([cell.accuracy], 100),
                xerr=_errors([at]),
                fmt=MARKERS[single.index(arm) % len(MARKERS)] if lone else "o",
                markersize=5,
                color=colour,
                elinewidth=0.7,
                capsize=2,
            )
            if not lone:
                kappa = analysis.kappas.get(arm, 1.0)
                said = f"{kappa:g}" if kappa < 1 else "off"
                where = at.value, 100 * cell.accuracy.value
                axes.annotate(said, where, xytext=(4, 4), textcoords="offset points", fontsize=8, color=theme.text)
        for number, arm in enumerate(_untried(analysis, speed)):
            if (pace := _speed(speed, group, arm)) is not None:
                look: dict[str, Any] = {
                    "color": theme.series[6],
                    "linewidth": 0.9,
                    "linestyle": ("--", "-.", ":", (0, (5, 4)), (0, (1, 4)))[number % 5],
                }
                labels[f"{arm}, speed alone"] = axes.axvline(pace.value, **look)
        for number, sweep in enumerate(analysis.sweeps):
            line = [points[arm] for arm in sweep if arm in points]
            places = [at.value for at, _ in line], [100 * cell.accuracy.value for _, cell in line]
            axes.plot(*places, color=theme.series[number % 2], linewidth=1.2)
        places_of = {arm: (at.value, 100 * cell.accuracy.value) for arm, (at, cell) in points.items()}
        front = [places_of[arm] for arm in pareto(places_of)]
        axes.plot([x for x, _ in front], [y for _, y in front], color=theme.text, linewidth=0.8, linestyle=":")
        _title(axes, group, theme)
        axes.set_xlabel(_axis_of_speed(speed))
        axes.set_ylabel("right answers, %")
        axes.margins(x=0.12)
    _legend(figure, theme, labels)
    return figure


def _name(sweep: Sequence[str]) -> str:
    """What to call a sweep: its loosest arm's name without settings."""
    return f"{sweep[-1].partition(':')[0]}, by kappa"


def _histograms(steps: Mapping[str, Sequence[int]], theme: Theme) -> Figure:
    figure, panels = _wrapped(theme, len(steps), 4, 2.3, 1.9, sharex=True, sharey=True)
    longest = max(map(len, steps.values()))
    highest = max(100 * max(counts) / sum(counts) for counts in steps.values())
    for number, (axes, (arm, counts)) in enumerate(zip(panels, steps.items(), strict=True)):
        axes.bar(range(len(counts)), [100 * count / sum(counts) for count in counts], color=theme.series[0])
        mean = sum(i * count for i, count in enumerate(counts)) / sum(counts)
        axes.axvline(mean, color=theme.series[1], linewidth=1)
        axes.annotate(f"mean {mean:.2f}", (0.98, 0.9), xycoords="axes fraction", ha="right", fontsize=8, color=theme.text)
        axes.set_ylim(0, 1.2 * highest)  # room for the words
        _title(axes, arm, theme)
        axes.set_xlim(-0.7, longest - 0.3)
        axes.set_xticks(range(longest))
        axes.tick_params(labelbottom=True)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("accepted drafted tokens" if number + 4 >= len(panels) else "")
        if number % 4 == 0:
            axes.set_ylabel("% of steps")
    return figure


def _ablation(analysis: Analysis, speed: Analysis, squares: Sequence[Square], theme: Theme) -> Figure:
    """Throughput above accuracy, a column per task; a line per rule, from the static to the adaptive tree."""
    figure, panels = _axes(theme, max(2.3, 5.0 / len(squares)), 2.3, 2, len(squares), sharex=True, sharey="row")
    for column, square in enumerate(squares):
        top, bottom = panels[column], panels[len(squares) + column]
        for index, arms in enumerate(((square.static, square.tree), (square.margin, square.both))):
            places = [place + 0.04 * (2 * index - 1) for place in (0, 1)]
            speeds = [_speed(speed, square.task, arm) or Interval(math.nan) for arm in arms]
            accuracies = [cell.accuracy if (cell := analysis.cell(square.task, arm)) else Interval(math.nan) for arm in arms]
            for axes, values, scale in ((top, speeds, 1), (bottom, accuracies, 100)):
                heights = [scale * each.value for each in values]
                errors = _errors(values, scale)
                axes.errorbar(places, heights, errors, marker="o", markersize=5, color=theme.series[index], capsize=2)
        _title(top, square.task, theme)
        bottom.set_xticks([0, 1], ["static tree", "adaptive tree"])
        bottom.set_xlim(-0.4, 1.4)
    for axes, label in ((panels[0], _axis_of_speed(speed)), (panels[len(squares)], "right answers, %")):
        axes.set_ylabel(label)
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    _legend(figure, theme, {"strict": theme.series[0], "margin": theme.series[1]})
    return figure


def _shapes(shown: Sequence[ShapesOverTime], theme: Theme) -> Figure:
    """Stacked shares, a panel per arm; the same colour is the same shape everywhere, from shallow to deep."""
    import matplotlib
    from matplotlib.colors import to_hex

    figure, panels = _wrapped(theme, len(shown), 4, 2.3, 1.9, sharey=True)
    deep = sorted({shape for one in shown for shape in one.shapes}, key=lambda text: (int(text.split(",")[0]), -int(text.split(",")[1])))
    scale = matplotlib.colormaps["viridis"].resampled(len(deep))
    for number, (axes, one) in enumerate(zip(panels, shown, strict=True)):
        layers = [[100 * share[i] for share in one.shares] for i in range(len(one.shapes))]
        axes.stackplot(one.steps, layers, colors=[scale(deep.index(shape)) for shape in one.shapes], step="post")
        _title(axes, one.arm, theme)
        axes.set_ylim(0, 100)
        axes.margins(x=0)
        axes.set_xlabel("step" if number + 4 >= len(shown) else "")
        if number % 4 == 0:
            axes.set_ylabel("% of steps")
    _legend(figure, theme, {shape: to_hex(scale(index)) for index, shape in enumerate(deep)})
    return figure
