"""`adaptivespec report`: the numbers of an evaluation as tables, JSON and one HTML page with figures."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ..errors import UserError
from ..evaluation.folder import contradiction, read_answers, read_run
from .files import check_writable, write
from .options import to_json
from .render import CAPTION, aside

if TYPE_CHECKING:
    from ..evaluation.findings import Analysis, Cell, Interval


def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a run (`adaptivespec eval --out`), finished or not.")],
    out: Annotated[Path | None, typer.Option(help="The HTML page; default: report.html in the folder, beside its figures.")] = None,
    speed: Annotated[
        Path | None, typer.Option(help="Another run of the same arms that measured speed (`eval --batch 1 --interleave`): speeds are its.")
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(help="Also write Markdown, with its figures in a folder beside it; a text around the two marker lines in it stays."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON and write no files.")] = False,
    reference: Annotated[
        str | None, typer.Option(help="The arm to compare with; default: the first strict one that speculates, else plain decoding.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap.")] = 0,
) -> None:
    """Show what an evaluation found, and write it as one HTML page that works offline, with its figures as PNG files.

    Examples:

        adaptivespec report runs/first

        adaptivespec report runs/first --out first.html

        adaptivespec report runs/first --speed runs/speed --markdown results.md

        adaptivespec report runs/first --json | jq '.cells[] | [.task, .arm, .accuracy.value]'
    """
    if json:
        if speed is not None or markdown is not None or out is not None:
            raise UserError("--json prints the numbers of one run and writes nothing: leave out --out, --speed and --markdown")
        typer.echo(to_json(as_json(load(folder, seed, reference)[1])))
        return
    from ..evaluation.figures import DARK, figures, png, require_matplotlib
    from ..evaluation.report import page

    require_matplotlib()
    run, analysis = load(folder, seed, reference)
    timed = None if speed is None else load(speed, seed, reference)
    if timed is not None:
        check_same(run, timed[0], speed)
    target = out if out is not None else folder / "report.html"
    drawn = figures(analysis, timed[1] if timed else None)
    for path in (target, *(folder / f"{name}.png" for name in drawn), *([markdown] if markdown else [])):
        check_writable(path)
    images = {name: (png(draw), png(draw, DARK)) for name, draw in drawn.items()}
    for name, (light, _) in images.items():
        (folder / f"{name}.png").write_bytes(light)
    if markdown is not None:
        write_markdown(markdown, (run, analysis), timed, {name: light for name, (light, _) in images.items()})
    write(target, page(run, analysis, images, timed))
    Console().print(tables(analysis))
    if timed is not None:
        Console().print(speed_table(timed[1]))
    remarks(analysis)
    aside(f"written: {target}{f' and {len(images)} figures in {folder}' if images else ''}")
    if markdown is not None:
        aside(f"written: {markdown}")


def check_same(run: Mapping[str, Any], other: Mapping[str, Any], folder: Path | None) -> None:
    """Refuse speeds of another model, or of arms with the same labels and other settings. Raises UserError."""
    loose = ("batch", "interleave", "replaced", "tasks")
    one, two = ({name: value for name, value in each["settings"].items() if name not in loose} for each in (run, other))
    if said := contradiction(one, two):
        raise UserError(f"--speed {folder} is no run of the same engine and arms: {said}")


def write_markdown(
    path: Path, quality: tuple[dict[str, Any], Analysis], timed: tuple[dict[str, Any], Analysis] | None, images: Mapping[str, bytes]
) -> None:
    """Write the Markdown file and, in a folder of its name beside it, its figures. Raises UserError for a file without markers."""
    from ..evaluation.markdown import markdown, splice

    if not path.suffix:
        raise UserError(f"--markdown {path}: expected a file such as {path}.md; its figures go into a folder {path.name}")
    try:
        old = path.read_text("utf-8") if path.exists() else None
    except (OSError, UnicodeDecodeError):
        raise UserError(f"cannot read {path}") from None
    command = shlex.join(["adaptivespec", *sys.argv[1:]])
    numbers = markdown(quality, timed, {name: f"{path.stem}/{name}.png" for name in images}, command)
    try:
        text = splice(old, numbers)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    beside = path.with_name(path.stem)
    beside.mkdir(exist_ok=True)
    for name, image in images.items():
        (beside / f"{name}.png").write_bytes(image)
    write(path, text)


def load(folder: Path, seed: int, reference: str | None = None) -> tuple[dict[str, Any], Analysis]:
    """run.json and the numbers. Raises UserError for a folder without a run, an unknown reference, and without SciPy."""
    from ..evaluation.analysis import analyse
    from ..evaluation.statistics import require_scipy

    run = read_run(folder)
    require_scipy()
    return run, analyse(run, read_answers(folder), seed, reference)


def show(folder: Path, seed: int) -> None:
    """Print the tables of a run."""
    _, analysis = load(folder, seed)
    Console().print(tables(analysis))
    remarks(analysis)
    aside(f"next: adaptivespec report {folder}")


def as_json(analysis: Analysis) -> dict[str, Any]:
    """Every number, under the names of `evaluation.findings`."""
    return dataclasses.asdict(analysis)


def remarks(analysis: Analysis) -> None:
    """What to know about these numbers, on standard error."""
    from ..evaluation.report import FEW_QUESTIONS

    if analysis.missing:
        aside(f"not finished: {analysis.missing} answers are missing; arms are compared on the questions that both answered", "yellow")
    if any(0 < cell.answers < FEW_QUESTIONS for cell in analysis.cells):
        aside(f"fewer than {FEW_QUESTIONS} questions in some places: too few to tell arms apart", "yellow")


def tables(analysis: Analysis) -> Group:
    """Quality and speed, each task under its name; fits 80 columns."""
    quality = _table("arm", "n", "right % (95 %)", "difference (95 %)", "p", "detects", "recovery")
    for group in analysis.groups:
        if len(analysis.groups) > 1:
            quality.add_row(Text(group, style="bold"))
        for cell in analysis.of(group):
            quality.add_row(*_quality(cell, analysis.reference))
    against = (
        f"difference: percentage points to {analysis.reference}\n" if analysis.reference else "no arm is strict: nothing to compare with\n"
    )
    about_quality = (
        f"{against}on the same questions; p: exact McNemar; detects: the smallest difference\n"
        "found with 80 % power (none: more than the reference gets right);\n"
        "recovery: accuracy in % of the reference's"
    )
    return Group(quality, Text(about_quality, style=CAPTION), Text(""), speed_table(analysis))


def speed_table(analysis: Analysis) -> Group:
    """Lengths, promotions and speed, each task under its name."""
    speed = _table("arm", "tokens", "cut", "promoted", "accept", "-bonus", "taken", "tok/s", "x plain" if analysis.plain else "x ref")
    for group in analysis.groups:
        if len(analysis.groups) > 1:
            speed.add_row(Text(group, style="bold"))
        for cell in analysis.of(group):
            speed.add_row(*_speed(cell, analysis.plain is not None))
    load = f"batch {analysis.batch}, arms one after the other (see bench)"
    if analysis.engine == "openai":
        load = f"{analysis.batch} requests in flight: all tokens / wall time"
    about_speed = (
        "tokens per answer; cut: ended by the token limit; promoted per 1,000\n"
        "tokens; accept: tokens per step, and without the bonus; taken: of the\n"
        f"drafted tokens; tok/s at {load}"
    )
    return Group(speed, Text(about_speed, style=CAPTION))


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(names[0], overflow="fold", min_width=12)  # long labels fold; numbers are never cut
    for name in names[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _quality(cell: Cell, reference: str | None) -> list[str]:
    from ..evaluation.report import detects

    if not cell.answers:
        return [cell.arm, "0"]
    row = [cell.arm, str(cell.answers), _bounds(cell.accuracy, "{:.1f}", "{:.0f}", 100)]
    if cell.versus is None:
        return [*row, "reference" if cell.arm == reference else "-"]
    versus = cell.versus
    return [
        *row,
        _bounds(versus.difference, "{:+.1f}", "{:+.1f}", 100),
        f"{versus.p:.3f}",
        detects(versus),
        f"{100 * versus.recovery.value:.1f}" if versus.recovery else "-",
    ]


def _speed(cell: Cell, plain: bool) -> list[str]:
    if not cell.answers:
        return [cell.arm]
    times = cell.times_plain if plain else cell.times_reference
    return [
        cell.arm,
        f"{cell.mean_tokens:.0f}",
        f"{cell.truncated:.0%}",
        *(
            "-" if value is None else form.format(value)  # a server may not say
            for value, form in ((cell.promoted_per_1k, "{:.1f}"), (cell.accept_length, "{:.2f}"), (cell.drafted_only, "{:.2f}"))
        ),
        f"{cell.acceptance_rate:.0%}" if cell.acceptance_rate is not None and (any(cell.histogram) or cell.acceptance_rate) else "-",
        f"{cell.tokens_per_second:.1f}",
        f"{times.value:.2f}" if times else "-",
    ]


def _bounds(interval: Interval, value: str, bound: str, scale: float) -> str:
    text = value.format(scale * interval.value)
    if interval.low is None or interval.high is None:
        return text
    return f"{text} ({bound.format(scale * interval.low)},{bound.format(scale * interval.high)})"
