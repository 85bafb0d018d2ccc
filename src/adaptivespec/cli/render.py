"""What people see: comparison tables, a drawn draft tree, coloured answers, remarks beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.style import Style
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

if TYPE_CHECKING:
    from ..method.records import StepRecord

PROMOTED = "bold yellow"
ACCEPTED = "green"
CAPTION = "dim italic"


def show(console: Console, piece: str, promoted: bool) -> None:
    """Write a piece of the answer as it is: rich would expand tabs and replace emoji names. On a terminal, without its control codes."""
    if console.is_terminal:
        piece = piece.replace("\x1b", "")
        if promoted and console.color_system is not None:
            piece = Style.parse(PROMOTED).render(piece)
    console.file.write(piece)
    console.file.flush()


def progress_bars() -> Progress:
    """Bars on standard error with a count and the time that remains; silent where that is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def aside(message: str, style: str = "dim") -> None:
    """One line on standard error, beside the answers."""
    Console(stderr=True).print(" ".join(message.split()), style=style, markup=False, highlight=False, soft_wrap=True)


def comparison_table(rows: dict[str, dict[str, Any]]) -> Group:
    """Arms side by side, from `evaluation.bench.describe`; fits 80 columns."""
    caption = (
        "tok/s of whole answers; x plain with its 95 % interval; accept: tokens\n"
        "per step, bonus included; taken: of the drafted tokens; promoted: per\n"
        "1,000 tokens; draft, verify and rest: ms per step of the batch"
    )
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("arm", overflow="fold", min_width=12)  # long labels fold; numbers are never cut
    for name in ("tok/s", "x plain", "accept", "taken", "promoted", "draft", "verify", "rest"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, row in rows.items():
        speedup, steps, promoted = row["speedup_vs_ar"], row["batch_steps"] or 1, row["promoted_per_1k"]
        times = [row[f"seconds_{part}"] for part in ("draft", "verify", "rest")]
        ratio = f"{speedup['ratio']:.2f}" if speedup else "-"
        if speedup and speedup["low"] is not None:
            ratio += f" ({speedup['low']:.2f}-{speedup['high']:.2f})"
        table.add_row(
            label,
            f"{row['tokens_per_second']:.1f}",
            ratio,
            f"{row['accept_length']:.2f}",
            f"{row['acceptance_rate']:.0%}" if row["drafted"] else "-",
            "-" if promoted is None else f"{promoted:.1f}",  # another engine does not tell
            *("-" if seconds is None else f"{1000 * seconds / steps:.1f}" for seconds in times),
        )
    return Group(table, Text(caption, style=CAPTION))  # not the table's own caption, which folds to a narrow table's width


def batch_table(runs: dict[int, dict[str, dict[str, Any]]]) -> Group:
    """A row per batch size and a column per arm, from the rows of `evaluation.bench.describe` by label."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("batch", justify="right")
    for label in next(iter(runs.values())):
        table.add_column(label, justify="right", overflow="fold", min_width=len("1000.0 10.00x"))
    for batch, rows in runs.items():
        cells = []
        for row in rows.values():
            speedup = row["speedup_vs_ar"]
            cells.append(f"{row['tokens_per_second']:.1f} {speedup['ratio']:5.2f}x" if speedup else f"{row['tokens_per_second']:.1f}")
        table.add_row(str(batch), *cells)
    return Group(table, Text("tok/s of whole answers, and x plain at the same batch", style=CAPTION))


def group_table(rows: dict[str, dict[str, Any]]) -> Group:
    """Accept length of each arm by group of prompts, and the mean of the groups, from `evaluation.bench.describe_groups`."""
    groups = {group: own["answers"] for row in rows.values() for group, own in row["groups"].items()}
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("accept length", overflow="fold", min_width=12)
    for group, answers in groups.items():
        table.add_column(f"{group} ({answers})", justify="right", overflow="fold", min_width=5)
    table.add_column("mean", justify="right", no_wrap=True)
    for label, row in rows.items():
        lengths = [own["accept_length"] for own in row["groups"].values()]
        table.add_row(label, *(f"{length:.2f}" for length in lengths), f"{sum(lengths) / len(lengths):.2f}")
    return Group(Text(), table)


def modelled_table(runs: dict[int, dict[str, dict[str, Any]]], label: str) -> Group:
    """The modelled numbers of every batch size, from rows with `evaluation.modelled`; never to be mistaken for measured ones."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("modelled", overflow="fold", min_width=12)
    for name in ("batch", "tok/s", "x plain", "draft", "verify", "rest"):
        table.add_column(name, justify="right", no_wrap=True)
    for batch, rows in runs.items():
        for name, row in rows.items():
            if (told := row["modelled"]) is None or told["tokens_per_second"] is None:
                table.add_row(name, str(batch), *["-"] * 5)
                continue
            steps, speedup = row["batch_steps"] or 1, told["speedup_vs_ar"]
            ratio = f"{speedup['ratio']:.2f}" if speedup else "-"
            if speedup and speedup["low"] is not None:
                ratio += f" ({speedup['low']:.2f}-{speedup['high']:.2f})"
            times = [f"{1000 * told[f'seconds_{part}'] / steps:.1f}" for part in ("draft", "verify", "rest")]
            table.add_row(name, str(batch), f"{told['tokens_per_second']:.1f}", ratio, *times)
    caption = f"MODELLED, not measured: decoding steps alone, real acceptance, seconds by the\ncost table: {label or 'without a label'}"
    return Group(Text(""), table, Text(caption, style=CAPTION))


def draw_tree(record: StepRecord, decode: Callable[[int], str]) -> Tree:
    """One step's draft tree: accepted nodes green, promoted yellow, rejected dim; the target's bonus token at its place."""
    promoted = {node for node, flag in zip(record.path, record.promoted, strict=True) if flag}
    margins = dict(zip(record.path, record.log_margins, strict=True))

    def label(node: int) -> Text:
        text = repr(decode(record.tokens[node]))
        if node == 0:
            return Text(f"{text} (last token)", style="bold")
        if node in promoted:
            return Text(f"{text} promoted, p / p_top1 = {math.exp(margins[node]):.2f}", style=PROMOTED)
        return Text(text, style=ACCEPTED) if node in margins else Text(text, style="dim")

    root = Tree(label(0))
    branches = {0: root}
    for node in range(1, len(record.tokens)):
        branches[node] = branches[record.parents[node]].add(label(node))
    branches[record.path[-1] if record.path else 0].add(Text(f"{decode(record.bonus)!r} (target)", style="bold cyan"))
    return root
