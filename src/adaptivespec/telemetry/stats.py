"""Totals over StepRecords, in the field's words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..method.records import StepRecord
from ..method.tree import TreeShape


@dataclass(frozen=True)
class Summary:
    """What a set of steps did. Counts come from what was really drafted, never from a configured maximum.

    Attributes:
        steps: verify steps.
        drafted, accepted, promoted: drafted tokens, accepted ones (promoted included), promoted ones.
        spent: nats spent on promotions.
        batch_steps: steps of the engine: one that several requests shared counts once.
        seconds_draft, seconds_verify, seconds_rest: wall time of those.
        accepted_histogram: steps by number of accepted drafted tokens.
        shapes: steps by the shape that was planned.
    """

    steps: int
    drafted: int
    accepted: int
    promoted: int
    spent: float
    batch_steps: float
    seconds_draft: float
    seconds_verify: float
    seconds_rest: float
    accepted_histogram: dict[int, int]
    shapes: dict[TreeShape, int]

    @property
    def seconds(self) -> float:
        """Wall time of all steps."""
        return self.seconds_draft + self.seconds_verify + self.seconds_rest

    @property
    def accept_length(self) -> float:
        """Tokens per verify step before stop conditions cut the last one, the bonus included."""
        return (self.accepted + self.steps) / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafted tokens / drafted tokens, the bonus excluded."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def promoted_per_1k(self) -> float:
        """Promoted tokens per 1,000 decoded ones."""
        tokens = self.accepted + self.steps
        return 1000 * self.promoted / tokens if tokens else 0.0


def summarise(records: Iterable[StepRecord]) -> Summary:
    """Add up steps of any number of requests; all those of a batch, or a step that they shared counts in part only."""
    rows = list(records)
    return Summary(
        steps=len(rows),
        drafted=sum(r.num_drafted for r in rows),
        accepted=sum(r.num_accepted for r in rows),
        promoted=sum(r.num_promoted for r in rows),
        spent=sum((-m for r in rows for m in r.log_margins), 0.0),
        batch_steps=sum(1 / r.batch for r in rows),
        seconds_draft=sum(r.seconds_draft / r.batch for r in rows),
        seconds_verify=sum(r.seconds_verify / r.batch for r in rows),
        seconds_rest=sum(r.seconds_rest / r.batch for r in rows),
        accepted_histogram=dict(sorted(Counter(r.num_accepted for r in rows).items())),
        shapes=dict(sorted(Counter(r.shape for r in rows).items())),
    )


def speculative_metrics(records: Iterable[StepRecord]) -> dict[str, Any]:
    """One request's steps under the names of vLLM's `metrics.speculative_decoding`, which load generators read.

    As there, only steps that drafted count, `acceptance_histogram[j]` is the number of steps that accepted j tokens, and
    num_spec_tokens is the largest draft; ours adds promoted tokens and the spent quality budget in nats.
    """
    rows = [r for r in records if r.num_drafted]
    summary = summarise(rows)
    deepest = max(summary.accepted_histogram, default=-1)
    return {
        "mean_acceptance_length": summary.accept_length or 1.0,
        "draft_acceptance_rate": summary.acceptance_rate,
        "acceptance_histogram": [summary.accepted_histogram.get(j, 0) for j in range(deepest + 1)],
        "num_spec_steps": summary.steps,
        "num_accepted_draft_tokens": summary.accepted,
        "num_draft_tokens": summary.drafted,
        "num_spec_tokens": max((r.num_drafted for r in rows), default=0),
        "num_promoted_tokens": summary.promoted,
        "spent_budget": summary.spent,
    }
