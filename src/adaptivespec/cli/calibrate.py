"""`adaptivespec calibrate`: what a step costs on this machine, for `policy="goodput"`."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ..config import SpeculativeConfig
from ..errors import UserError
from . import options as o
from .bench import parse_sizes
from .render import CAPTION, aside, progress_bars

if TYPE_CHECKING:
    from ..method.costs import CostTable


def calibrate(
    engine: o.EngineFlags,
    batch: Annotated[str, typer.Option(help="Requests decoded together; each size is measured.")] = "1,2,4,8",
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Times each tree shape has its turn; medians are kept.")] = 7,
    json: Annotated[bool, typer.Option("--json", help="Print the table as JSON, as `bench --cost-table` reads it.")] = False,
) -> None:
    """Measure what draft levels, verifies of many sizes and the rest of a step cost here, and keep it for `--policy goodput`.

    Kept per machine, threads, model, drafter and precision. Nothing else should run meanwhile.

    Examples:

        adaptivespec calibrate

        adaptivespec calibrate -m qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --drafter ./head --batch 1,4

        adaptivespec calibrate --json > here.json && adaptivespec bench --cost-table here.json --arms 'ar; static:3,4,4; goodput'
    """
    sizes = parse_sizes(batch)
    if engine.is_plain or engine.drafter == "none":
        raise UserError("calibrate measures drafting: it needs a drafter")
    from ..cost_files import cache_path, save, to_json
    from ..engine.calibrate import calibrate as measure
    from ..engine.calibrate import identity, num_steps

    llm = engine.build(SpeculativeConfig(policy="static", margin=None), max_running_requests=max(sizes))
    about = identity(llm.model.decoder, llm.drafter)
    with progress_bars() as progress:
        task = progress.add_task("measuring", total=num_steps(sizes, rounds=rounds))
        label = f"{about['processor']}, {about['threads']} threads, {about['dtype']}, measured {datetime.date.today()}"
        table = measure(llm, sizes, rounds=rounds, label=label, on_step=lambda: progress.advance(task))
    if json:
        typer.echo(o.to_json(to_json(table, about)))
    else:
        Console().print(as_table(table))
    path = cache_path(about)
    try:
        save(path, table, about)
    except OSError as error:
        raise UserError(f"measured, but not kept in {path}: {error.strerror}; give it back with --cost-table after --json > FILE") from None
    aside(f"kept in {path}")


def as_table(table: CostTable) -> Group:
    """Milliseconds by rows, a column per batch size; fits 80 columns."""
    sizes = sorted(table.verify)
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("rows", "level", *(f"verify x{size}" for size in sizes)):
        shown.add_column(name, justify="right", no_wrap=True)
    for rows in sorted({row for curve in table.verify.values() for row in curve.rows} | set(table.level.rows)):
        level = f"{1000 * table.level.at(rows):.2f}" if rows in table.level.rows else ""
        cells = [f"{1000 * table.verify[size].at(rows):.2f}" if rows in table.verify[size].rows else "" for size in sizes]
        shown.add_row(str(rows), level, *cells)
    start = ", ".join(f"{1000 * seconds:.2f} x{size}" for size, seconds in zip(table.start.rows, table.start.seconds, strict=True))
    caption = (
        f"ms by rows of the whole batch (xN: N requests together)\nasking the drafter: {start}; rest of a step: {1000 * table.fixed:.2f}"
    )
    return Group(shown, Text(caption, style=CAPTION))
