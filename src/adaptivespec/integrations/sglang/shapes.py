"""Which tree shape a batch drafts: the policy's shapes, what of them is prepared, and how requests agree on one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...method.policy import Adaptive, PolicyState, Root, TreePolicy
from ...method.tree import TreeShape


class Shapes:
    """A policy's shapes in their order, from the most cautious to the boldest.

    Attributes:
        all: every shape the policy can plan.
        room: one shape that is at least as deep, wide and large as each of them: what memory is reserved for.
    """

    def __init__(self, policy: TreePolicy, aggregate: str = "mean") -> None:
        self.policy = policy
        self.all = policy.reachable()
        self.room = TreeShape(
            max(shape.num_steps for shape in self.all),
            max(shape.topk for shape in self.all),
            max(shape.num_draft_tokens for shape in self.all),
        )
        self._aggregate = aggregate
        self._stand_in = list(range(len(self.all)))

    @property
    def root_width(self) -> int:
        """Continuations of the last token that the drafter must hand over: with one alone SGLang sets its probability to 1."""
        return max(self.room.topk, 2) if isinstance(self.policy, Adaptive) else self.room.topk

    @property
    def prepared(self) -> list[TreeShape]:
        """The shapes that are really drafted."""
        return [self.all[index] for index in sorted(set(self._stand_in))]

    def prepare_only(self, count: int) -> list[TreeShape]:
        """Keep `count` shapes, spread evenly over the order; every other is drafted as its nearest neighbour, the smaller one at a tie."""
        last = len(self.all) - 1
        kept = sorted({round(i * last / max(count - 1, 1)) for i in range(max(count, 1))})
        self._stand_in = [min(kept, key=lambda other, index=index: (abs(other - index), other)) for index in range(last + 1)]  # type: ignore[misc]
        return self.prepared

    def signal(self, state: PolicyState, root: Root) -> torch.Tensor:
        """fp32 [B] in 0..1: how bold the policy would be for each request alone."""
        if isinstance(self.policy, Adaptive):
            return self.policy.signal(state, root)
        return self.policy.plan(state, root).float() / max(len(self.all) - 1, 1)

    def plan(self, signals: torch.Tensor) -> torch.Tensor:
        """fp32 [B] signals -> int64 [1], an index into `all`; on the signals' device, without a host read."""
        match self._aggregate:
            case "min":
                one = signals.amin(0, keepdim=True)
            case "max":
                one = signals.amax(0, keepdim=True)
            case _:
                one = signals.mean(0, keepdim=True)
        if isinstance(self.policy, Adaptive):
            return self.policy.shape_index(one)
        return (one * (len(self.all) - 1) + 0.5).floor().long()

    def plan_on_host(self, signals: Sequence[float | None]) -> int:
        """The same from host numbers; requests without one (None) have no say, and nobody's say is the most cautious shape."""
        known = [signal for signal in signals if signal is not None and not math.isnan(signal)]
        return int(self.plan(torch.tensor(known, dtype=torch.float32))) if known else 0

    def stand_in(self, index: int) -> TreeShape:
        """The prepared shape that is drafted for the shape at `index`."""
        return self.all[self._stand_in[index]]
