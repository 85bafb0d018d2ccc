"""Tree policies to compare the adaptive one with. All but `Talon` draft chains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from .acceptance import Acceptance
from .policy import PolicyDefaults, PolicyState, Root
from .tree import DraftTree, TreeShape, keep_best


class Talon(PolicyDefaults):
    """TALON's token budget: the first layer holds the root's best topk tokens; of a deeper layer those nodes stay whose path is at least
    `mu` times as probable as the layer's most probable path; layers follow until the budget is spent, so that sure drafts grow deep
    and doubtful ones wide.

    A layer that does not fit the rest of the budget keeps its most probable nodes. Decides per level: not for captured graphs.
    Next to the source, the next layer's candidates hang from the best topk nodes of the layer before, as the drafters grow trees.

    Args:
        shape: the deepest level, the first layer's width, and the budget in nodes, the root included.
        mu: share of the layer's highest path probability, in (0, 1].
    """

    name = "talon"
    per_level = True

    def __init__(self, shape: TreeShape = TreeShape(15, 10, 60), mu: float = 0.03) -> None:
        if not 0 < mu <= 1:
            raise ValueError("talon policy: mu lies in (0, 1]")
        self.shape, self.log_mu = shape, math.log(mu)

    def reachable(self) -> list[TreeShape]:
        """The largest tree; how deep and large a tree really is shows while drafting."""
        return [self.shape]

    def plan(self, state: PolicyState, root: Root) -> torch.Tensor:
        """Index 0 for every request."""
        return torch.zeros_like(state.misses)

    def keep_going(self, state: PolicyState, tree: DraftTree, num_steps: torch.Tensor) -> torch.Tensor:
        """Bool [B]: the nodes that stay do not fill the budget yet."""
        return (tree.levels < num_steps) & (self._stays(tree).sum(1) < self.shape.num_draft_tokens - 1)

    def prune(self, state: PolicyState, tree: DraftTree, num_draft_tokens: torch.Tensor) -> torch.Tensor:
        """Bool [B, N - 1]: layer after layer the nodes that stay, the most probable first in the layer that exceeds the budget."""
        # A step between layers that no log-probability bridges, in double so that it costs none of their digits: shallower come first.
        rank = torch.where(self._stays(tree), tree.log_probs.double() - 1e6 * tree.depth, -math.inf)
        return keep_best(rank[:, 1:], num_draft_tokens - 1)

    def _stays(self, tree: DraftTree) -> torch.Tensor:
        """Bool [B, N]: drafted nodes above their layer's threshold whose parents are."""
        parent = tree.parents.clamp(min=0)
        real = tree.drafted & (tree.log_probs > -math.inf)
        root = ~tree.drafted & (tree.depth == 0)
        stays = root
        for level in range(1, tree.levels + 1):
            layer = real & (tree.depth == level) & stays.gather(1, parent)
            highest = torch.where(layer, tree.log_probs, -math.inf).amax(1, keepdim=True)
            stays = stays | (layer & (tree.log_probs >= highest + self.log_mu if level > 1 else layer))
        return stays & ~root


class _Chains(PolicyDefaults):
    """Chains of prescribed depths, ascending."""

    name = "chains"

    def __init__(self, depths: Sequence[int]) -> None:
        if not depths or depths[0] < 1 or any(a >= b for a, b in pairwise(depths)):
            raise ValueError(f"{self.name} policy: depths are positive and ascending, not {list(depths)}")
        self.depths = list(depths)
        self._depths_on: dict[torch.device, torch.Tensor] = {}

    def reachable(self) -> list[TreeShape]:
        """One chain per depth."""
        return [TreeShape(depth, 1, depth + 1) for depth in self.depths]

    def _on(self, device: torch.device) -> torch.Tensor:
        """fp32 [D]: the depths on a device, made once: a copy from the host cannot be captured in a CUDA graph."""
        if device not in self._depths_on:
            self._depths_on[device] = torch.tensor(self.depths, dtype=torch.float32, device=device)
        return self._depths_on[device]

    def plan(self, state: PolicyState, root: Root) -> torch.Tensor:
        """int64 [B]: the index of the depth in `state.level`."""
        return self._index(state.level)

    def _index(self, level: torch.Tensor) -> torch.Tensor:
        """fp32 [B] depths -> int64 [B], index into `reachable()`."""
        return (level[:, None] > self._on(level.device)).sum(1)


class AcceptEMA(_Chains):
    """SGLang's speculative-adaptive: a moving average of the accepted tokens per step (bonus excluded) moves the depth among candidates.

    One deeper while the average exceeds the depth - 1/2, one shallower while it is at most the next shallower depth - 3/4 (dropping
    takes a quarter more than rising did). Starts at the middle candidate with an average of its depth - 1. Decides after every
    step: SGLang's ten warm-up batches, and its interval of five, spare it the change of CUDA graphs.
    """

    name = "accept_ema"

    def __init__(self, candidates: Sequence[int] = (1, 3, 5, 7), alpha: float = 0.2) -> None:
        super().__init__(candidates)
        if not 0 < alpha <= 1:
            raise ValueError("accept_ema policy: alpha lies in (0, 1]")
        self.alpha = alpha

    def initial(self, batch: int, device: torch.device | str = "cpu") -> PolicyState:
        """The state of `batch` new requests: the middle candidate."""
        state = super().initial(batch, device)
        level = torch.full_like(state.level, self.depths[len(self.depths) // 2])
        return dataclasses.replace(state, level=level, ema=level - 1)

    def update(self, state: PolicyState, tree: DraftTree, acceptance: Acceptance, num_steps: torch.Tensor) -> PolicyState:
        """Fold the step's accepted tokens in and move; requests that drafted nothing keep their state."""
        drafted = tree.depth.amax(1) > 0
        ema = torch.where(drafted, state.ema + self.alpha * (acceptance.num_accepted - state.ema), state.ema)
        depths = self._on(ema.device)
        # From each candidate the average carries one up, or one down, as far as it goes: the ends of two ladders.
        most = (ema[:, None] > depths[:-1] - 0.5).sum(1)
        least = (ema[:, None] > depths[:-1] - 0.75).sum(1)
        index = self._index(state.level).minimum(least).maximum(most)
        return dataclasses.replace(state, ema=ema, level=torch.where(drafted, depths[index], state.level))


class Heuristic(_Chains):
    """transformers' schedule: two tokens deeper after a step that accepted all it drafted, else one shallower.

    Args:
        deepest: transformers has no bound; an engine needs one.
        start: the first depth.
    """

    name = "heuristic"

    def __init__(self, deepest: int = 15, start: int = 5) -> None:
        super().__init__(range(1, deepest + 1))
        self.start = min(start, deepest)

    def initial(self, batch: int, device: torch.device | str = "cpu") -> PolicyState:
        """The state of `batch` new requests: the start depth."""
        state = super().initial(batch, device)
        return dataclasses.replace(state, level=torch.full_like(state.level, self.start))

    def update(self, state: PolicyState, tree: DraftTree, acceptance: Acceptance, num_steps: torch.Tensor) -> PolicyState:
        """Move the depth; requests that drafted nothing keep it."""
        deepest = tree.depth.amax(1)
        moved = torch.where(acceptance.num_accepted == deepest, state.level + 2, state.level - 1).clamp(1, self.depths[-1])
        return dataclasses.replace(state, level=torch.where(deepest > 0, moved, state.level))


class Confidence(PolicyDefaults):
    """transformers' assistant_confidence_threshold: a chain ends with the first drafted token whose probability is below `threshold`.

    That token is still sent to the target, as there. Decides per level: not for captured graphs. SVIP's variant, which reads the entropy
    of the draft's softmax, needs all of its probabilities where drafters hand over the best few, and is left out.
    """

    name = "confidence"
    per_level = True

    def __init__(self, deepest: int = 15, threshold: float = 0.4) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError("confidence policy: threshold lies in [0, 1]")
        self.shape, self.threshold = TreeShape(deepest, 1, deepest + 1), threshold

    def reachable(self) -> list[TreeShape]:
        """The longest chain."""
        return [self.shape]

    def plan(self, state: PolicyState, root: Root) -> torch.Tensor:
        """Index 0 for every request."""
        return torch.zeros_like(state.misses)

    def keep_going(self, state: PolicyState, tree: DraftTree, num_steps: torch.Tensor) -> torch.Tensor:
        """Bool [B]: the last drafted token's own probability, its path's over its parent's, is no less than the threshold."""
        last, before = (
            torch.where(tree.depth == level, tree.log_probs, -math.inf).amax(1) for level in (tree.levels, tree.levels - 1)
        )  # a chain: one real node per level, the other columns are at -inf
        return (tree.levels < num_steps) & ((last - before).exp() >= self.threshold)
