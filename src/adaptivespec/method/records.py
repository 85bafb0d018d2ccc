"""What one decoding step did for one request. Everything people see (statistics, traces, trees) is made from these."""

from __future__ import annotations

from dataclasses import dataclass, field

from .tree import TreeShape


@dataclass(frozen=True)
class StepRecord:
    """One request's step. Counts are of what was really drafted, before stop conditions cut the block.

    Attributes:
        shape: the shape the policy asked for; off when nothing was drafted, as by a head beyond its context.
        tokens: the tree's tokens, the root first; parents: the parent index of each (-1 for the root).
        path: accepted node indices in order; promoted and log_margins: one entry per accepted node.
        bonus: the target's own token after the path.
        confidence: the drafter's top-1 probability at the root, None when nothing was drafted.
        rar: rolling acceptance ratio before the step.
        spent: nats of the quality budget spent by the request after the step, promotions that a stop condition cut off included.
        batch: requests that shared the step.
        seconds_draft, seconds_verify, seconds_rest: wall time of the batch's step.
        rows: rows of the target's forward, those of all requests of the step.
        draft_rows: requests for which the drafter was asked, then the rows of each further draft forward; empty when it was not asked.
    """

    shape: TreeShape
    tokens: list[int]
    parents: list[int]
    path: list[int]
    promoted: list[bool]
    log_margins: list[float]
    bonus: int
    confidence: float | None
    rar: float
    spent: float
    batch: int
    seconds_draft: float
    seconds_verify: float
    seconds_rest: float
    rows: int = 1
    draft_rows: list[int] = field(default_factory=list)

    @property
    def num_drafted(self) -> int:
        """Drafted nodes in the tree, the root excluded."""
        return len(self.tokens) - 1

    @property
    def num_accepted(self) -> int:
        """Accepted drafted tokens, promoted ones included, the bonus excluded."""
        return len(self.path)

    @property
    def num_promoted(self) -> int:
        """Accepted tokens that were not the target's choice."""
        return sum(self.promoted)


@dataclass(frozen=True)
class StepTotals:
    """One decoding step as policies that read costs see it: of the whole batch, and of their own requests.

    Attributes:
        requests, rows: of the batch; rows are those of the target's forward.
        emitted: tokens of the batch, bonus tokens included, before stop conditions.
        draft_rows: see `StepRecord`.
        own_requests, own_rows, accepted: of the policy's own requests; accepted drafted tokens.
        asked: for how many of them the drafter was asked.
    """

    requests: int
    rows: int
    emitted: int
    draft_rows: tuple[int, ...]
    own_requests: int
    own_rows: int
    accepted: int
    asked: int
