"""Which servers to start, and what each must do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

STATIC = (3, 4, 4)
"""The static tree of the paper: num_steps, topk, num_draft_tokens."""
LARGER = (6, 8, 16)
"""A static tree that is a stronger baseline."""
NO_GRAPHS = {"cuda-graph-backend-decode": "disabled", "cuda-graph-backend-prefill": "disabled"}


@dataclass(frozen=True)
class Cell:
    """A server to start.

    Attributes:
        name: kind and variant, such as `strict/no-overlap`.
        kind: `plain` (no speculation), `stock`, `strict`, `margin`, or `refused`: it must not start.
        flags: of the server, beside those that all have; True is a switch.
        settings: value of ADAPTIVESPEC; None leaves the plug-in off.
        reference: the cell whose answers this one's must equal.
        shapes: the tree shapes it may draft; empty for whatever the policy reaches.
        says: what the refusal must hold.
    """

    name: str
    kind: str
    flags: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] | None = None
    reference: str = ""
    shapes: tuple[str, ...] = ()
    says: str = ""


def static_flags(shape: tuple[int, int, int]) -> dict[str, Any]:
    """SGLang's flags of a static tree."""
    return dict(zip(("speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens"), shape, strict=True))


def make_plan(gpus: int, cpu: bool, kappa: float) -> list[Cell]:
    """Every server, references first."""
    variants: dict[str, dict[str, Any]] = {"base": {}}
    if not cpu:
        variants |= {"no-overlap": {"disable-overlap-schedule": True}, "no-graphs": NO_GRAPHS, "page-64": {"page-size": 64}}
        if gpus >= 2:
            variants["tp-2"] = {"tp-size": 2}
    off: dict[str, Any] = {"margin": None}
    small = ",".join(map(str, STATIC))
    static = {"policy": "static", **dict(zip(("num_steps", "topk", "num_draft_tokens"), STATIC, strict=True)), **off}
    cells = [Cell("plain", "plain")]
    for name, flags in variants.items():
        stock = f"stock/{name}"
        cells += [
            Cell(stock, "stock", {**flags, **static_flags(STATIC)}),
            Cell(f"strict/{name}", "strict", flags, off, stock),
            Cell(f"margin/{name}", "margin", flags, {"margin": kappa}),
        ]
        if name in ("base", "no-overlap", "tp-2"):
            lagged = {"confidence": "lagged"}
            cells += [
                Cell(f"strict-lagged/{name}", "strict", flags, off | lagged, stock),
                Cell(f"margin-lagged/{name}", "margin", flags, {"margin": kappa, **lagged}),
            ]
    cells.append(Cell("strict-static/base", "strict", {}, static, "stock/base", (small,)))
    says = "--tokenizer-worker-num 2 does not go with ADAPTIVESPEC"
    cells.append(Cell("refused/tokenizer-workers", "refused", {"tokenizer-worker-num": 2}, off, says=says))
    if not cpu:
        cells += [
            Cell("strict-one-shape/base", "strict", {}, {**off, "graph_memory": 0}, "stock/base", (small,)),
            Cell("stock-larger/base", "stock", static_flags(LARGER)),
        ]
    return cells


def wanted(plan: Sequence[Cell], pattern: str) -> list[Cell]:
    """The cells that match, and those that they refer to."""
    names = {cell.name for cell in plan if re.search(pattern, cell.name)}
    names |= {cell.reference for cell in plan if cell.name in names}
    return [cell for cell in plan if cell.name in names]
