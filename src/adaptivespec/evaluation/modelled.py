"""Modelled seconds beside measured ones: what the steps of a run would have cost by a cost table, their acceptance being real.

Only decoding steps are modelled. The tokens counted against them leave out each answer's first, which the prompt gave.
"""

from __future__ import annotations

from typing import Any

from ..engine.request import RequestOutput
from ..method.costs import CostTable
from .bench import ArmResult, Call
from .statistics import throughput_ratio


def modelled(result: ArmResult, baseline: ArmResult | None, table: CostTable, seed: int = 0) -> dict[str, Any] | None:
    """One arm's modelled numbers, named as `bench.describe` names the measured ones; None for a peer, whose steps are not known."""
    if result.arm.peer is not None:
        return None
    parts = [_parts(call, table) for call in result.calls]
    draft, verify, rest = (sum(part[i] for part in parts) for i in range(3))
    tokens, seconds = sum(map(_decoded, result.calls)), draft + verify + rest
    row: dict[str, Any] = {
        "label": table.label,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "speedup_vs_ar": None,
        "seconds_draft": draft,
        "seconds_verify": verify,
        "seconds_rest": rest,
    }
    if baseline is not None and seconds and any(map(_decoded, baseline.calls)):
        fewest = 2 if result.batch == 1 else 3
        samples = [one.samples(lambda call: (_decoded(call), sum(_parts(call, table)))) for one in (result, baseline)]
        ratio, low, high = throughput_ratio(*samples[0], *samples[1], seed=seed, fewest=fewest)
        row["speedup_vs_ar"] = {"ratio": ratio, "low": low, "high": high}
    return row


def _decoded(call: Call) -> float:
    """Tokens that steps brought."""
    return sum(max(0, len(output.token_ids) - 1) for output in call.outputs)


def _parts(call: Call, table: CostTable) -> tuple[float, float, float]:
    """Modelled seconds of draft, verify and rest; a step that requests share counts once."""
    draft = verify = rest = 0.0
    for output in call.outputs:
        for record in output.records if isinstance(output, RequestOutput) else ():
            step = table.step(record.draft_rows, record.rows, record.batch)
            draft, verify, rest = (total + part / record.batch for total, part in zip((draft, verify, rest), step, strict=True))
    return draft, verify, rest
