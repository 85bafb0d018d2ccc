"""What people see: the comparison table, a drawn draft tree, coloured answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ..method.records import StepRecord

PROMOTED = "bold yellow"
ACCEPTED = "green"


def comparison_table(rows: dict[str, dict[str, Any]]) -> Table:
    """Arms side by side, from `evaluation.bench.describe`; fits 80 columns."""
    caption = (
        "tok/s of whole answers; x plain with its 95 % interval; accept: tokens\n"
        "per step, bonus included; taken: of the drafted tokens; promoted: per\n"
        "1,000 tokens; draft, verify and rest: ms per step"
    )
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, caption=caption, caption_justify="left")
    for name in ("arm", "tok/s", "x plain", "accept", "taken", "promoted", "draft", "verify", "rest"):
        if name == "arm":
            table.add_column(name, overflow="fold", min_width=12)  # long labels fold; numbers are never cut
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for label, row in rows.items():
        speedup, steps = row["speedup_vs_ar"], max(row["steps"], 1)
        ratio = f"{speedup['ratio']:.2f}" if speedup else "-"
        if speedup and speedup["low"] is not None:
            ratio += f" ({speedup['low']:.2f}-{speedup['high']:.2f})"
        table.add_row(
            label,
            f"{row['tokens_per_second']:.1f}",
            ratio,
            f"{row['accept_length']:.2f}",
            f"{row['acceptance_rate']:.0%}" if row["drafted"] else "-",
            f"{row['promoted_per_1k']:.1f}",
            *(f"{1000 * row[f'seconds_{part}'] / steps:.1f}" for part in ("draft", "verify", "rest")),
        )
    return table


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
