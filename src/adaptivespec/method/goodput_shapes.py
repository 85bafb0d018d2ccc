"""`policy="goodput_shapes"`: goodput's choice among a few shapes, made before drafting, for engines that captured a graph per shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from .costs import CostModel
from .goodput import PricedPolicy
from .learned import ENDS
from .policy import PolicyState, Root
from .tree import TreeShape


class GoodputShapes(PricedPolicy):
    """The shape whose predicted tree brings the most tokens - price * seconds; all requests of a batch get the same.

    The tree is predicted from the root's candidates and, below them, the request's running chance (`Learned.brood`).

    Args:
        costs, probe: see `PricedPolicy`.
        shapes: to choose from.
    """

    name = "goodput_shapes"

    def __init__(self, costs: CostModel, shapes: Sequence[TreeShape], probe: int = 16) -> None:
        super().__init__(costs, probe)
        self._shapes = list(dict.fromkeys(shapes))
        if not self._shapes or any(shape.num_steps == 0 for shape in self._shapes):
            raise ValueError("goodput_shapes policy: needs shapes, each of which drafts")
        self._deepest, self._topk, self._nodes = (max(numbers) for numbers in zip(*map(dataclasses.astuple, self._shapes), strict=True))

    def reachable(self) -> list[TreeShape]:
        """The shapes."""
        return list(self._shapes)

    def plan(self, state: PolicyState, root: Root) -> torch.Tensor:
        """int64 [B]: the index of the shape that pays best, the same for all."""
        batch = len(state.rar)
        added = self.added(batch, batch * self._nodes)
        worths = [
            tokens - added(batch * (shape.num_draft_tokens - 1)) - (shape.num_steps - 1) * self.level(batch, batch * shape.topk)
            for shape, tokens in zip(self._shapes, self.expected(state, root).sum(0).tolist(), strict=True)
        ]
        return torch.full_like(state.misses, worths.index(max(worths)))

    def expected(self, state: PolicyState, root: Root) -> torch.Tensor:
        """fp32 [B, S]: the tokens that each shape's predicted tree would have accepted."""
        device = state.rar.device
        steps, topk, nodes = torch.tensor([dataclasses.astuple(shape) for shape in self._shapes], device=device).unbind(1)
        table, ends = torch.tensor(self.learned.table, device=device), torch.tensor(ENDS, device=device)
        edges = table[torch.bucketize(-root.log_probs[:, : self._topk], ends)]
        first = (edges * state.power[:, None]).exp()
        first = torch.nn.functional.pad(first, (0, self._topk - first.shape[1]))
        onward = torch.tensor([self.learned.brood(rar, self._topk) for rar in state.rar.tolist()], device=device)[:, None, None, :]
        allowed = torch.arange(self._topk, device=first.device) < topk[:, None]  # bool [S, K]
        frontier = torch.where(allowed, first[:, None], 0.0)
        found = [frontier]
        for level in range(1, self._deepest):
            children = torch.where(allowed[:, None, :], frontier[..., None] * onward, 0.0).flatten(2)
            children = torch.where((level < steps)[:, None], children, 0.0)
            found.append(children)
            frontier = torch.where(allowed, children.topk(self._topk, -1).values, 0.0)
        best = torch.cat(found, 2).sort(2, descending=True).values.cumsum(2)
        last = (nodes - 2).clamp(max=best.shape[2] - 1).expand(len(first), 1, -1).transpose(1, 2)
        return best.gather(2, last)[..., 0]
