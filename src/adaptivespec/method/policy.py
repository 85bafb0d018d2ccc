"""Tree policies: how deep, wide and large the next draft tree is, decided per request and step."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import torch

from .acceptance import Acceptance
from .records import StepTotals
from .tree import DraftTree, TreeShape, keep_best


@dataclass(frozen=True)
class Root:
    """What the drafter knows before drafting: its best continuations of the last committed token.

    Attributes:
        tokens: int64 [B, K] target token ids, best first.
        log_probs: fp32 [B, K] natural log-probabilities at temperature 1 over the draft vocabulary.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor

    @property
    def confidence(self) -> torch.Tensor:
        """fp32 [B]: the drafter's top-1 probability."""
        return self.log_probs[:, 0].exp()


@dataclass(frozen=True)
class PolicyState:
    """A policy's memory of each request.

    Attributes:
        rar: fp32 [B], rolling acceptance ratio.
        misses: int64 [B], consecutive drafted steps with nothing accepted.
        tripped: bool [B], the circuit breaker holds the next drafted step at the smallest shape.
        level: fp32 [B], the depth that a policy which moves it step by step is at.
        ema: fp32 [B], moving average of the accepted tokens per step, where a policy keeps one.
        evidence, power: fp32 [B, 2] and [B], how far the request departs from what was learned of all, and what follows (`learned`).
    """

    rar: torch.Tensor
    misses: torch.Tensor
    tripped: torch.Tensor
    level: torch.Tensor
    ema: torch.Tensor
    evidence: torch.Tensor
    power: torch.Tensor


class TreePolicy(Protocol):
    """Chooses a `TreeShape` per request. What it knows of a request is passed in and returned, never kept; one that reads costs keeps
    what it learns of the machine and of all its requests together.
    """

    name: str
    per_level: bool
    """Whether the policy also decides while drafting (`keep_going`, `prune`); engines with captured graphs refuse those."""
    reads_costs: bool
    """Whether it must know what a step costs."""

    def asks(self, requests: int) -> int:
        """For how many of the policy's `requests` of this step, the first of them, the drafter is to be asked. 0 lets it rest."""
        ...

    def observe(self, step: StepTotals) -> None:
        """What a finished step brought, in host numbers."""
        ...

    def reachable(self) -> list[TreeShape]:
        """Every shape `plan` can return, so that an engine can prepare each."""
        ...

    def initial(self, batch: int, device: torch.device | str = "cpu") -> PolicyState:
        """The state of `batch` new requests."""
        ...

    def plan(self, state: PolicyState, root: Root) -> torch.Tensor:
        """int64 [B]: an index into `reachable()` for each request."""
        ...

    def keep_going(self, state: PolicyState, tree: DraftTree, num_steps: torch.Tensor) -> torch.Tensor:
        """Bool [B]: draft another level, given every candidate so far (`tree`, those at -inf do not exist) and planned depths [B]."""
        ...

    def prune(self, state: PolicyState, tree: DraftTree, num_draft_tokens: torch.Tensor) -> torch.Tensor:
        """Bool [B, N - 1]: which drafted nodes to send to the target; `num_draft_tokens` int64 [B] counts the root."""
        ...

    def update(self, state: PolicyState, tree: DraftTree, acceptance: Acceptance, num_steps: torch.Tensor) -> PolicyState:
        """The state after a step that was planned `num_steps` [B] deep."""
        ...


class PolicyDefaults:
    """The defaults every shipped policy shares."""

    per_level = False
    reads_costs = False

    def asks(self, requests: int) -> int:
        """All."""
        return requests

    def observe(self, step: StepTotals) -> None:
        """Nothing to learn from it."""

    def initial(self, batch: int, device: torch.device | str = "cpu") -> PolicyState:
        """The state of `batch` new requests: acceptance ratio 0.5, no misses."""
        misses = torch.zeros(batch, dtype=torch.int64, device=device)
        nothing = torch.zeros(batch, device=device)
        return PolicyState(nothing + 0.5, misses, misses > 0, nothing, nothing, torch.zeros(batch, 2, device=device), nothing + 1)

    def keep_going(self, state: PolicyState, tree: DraftTree, num_steps: torch.Tensor) -> torch.Tensor:
        """Bool [B]: the planned depth is not reached yet."""
        return tree.levels < num_steps

    def prune(self, state: PolicyState, tree: DraftTree, num_draft_tokens: torch.Tensor) -> torch.Tensor:
        """Bool [B, N - 1]: the best drafted nodes by cumulative log-probability."""
        return keep_best(tree.log_probs[:, 1:], num_draft_tokens - 1)

    def update(self, state: PolicyState, tree: DraftTree, acceptance: Acceptance, num_steps: torch.Tensor) -> PolicyState:
        """Nothing to learn."""
        return state


class Static(PolicyDefaults):
    """The same shape at every step: EAGLE-3 as engines ship it."""

    name = "static"

    def __init__(self, shape: TreeShape) -> None:
        self.shape = shape

    def reachable(self) -> list[TreeShape]:
        """The one shape."""
        return [self.shape]

    def plan(self, state: PolicyState, root: Root) -> torch.Tensor:
        """Index 0 for every request."""
        return torch.zeros_like(state.misses)


class Adaptive(PolicyDefaults):
    """AdaptiveSpec's tree policy (arXiv 2609.02897): confident and lately accepted drafts grow deep and narrow, doubtful ones stay
    shallow and wide.

    s = clip(c * RAR / saturation, 0, 1) interpolates from `low` to `high`, rounded half up; c is the drafter's top-1
    probability and RAR an exponential moving average of accepted / deepest drafted level. After `patience` drafted steps
    in a row with nothing accepted, RAR returns to 0.5 and the next step drafts `low`, however confident the drafter is.

    Raises:
        ValueError: a shape on the way from `low` to `high` is invalid.
    """

    name = "adaptive"

    def __init__(
        self,
        low: TreeShape = TreeShape(3, 4, 4),
        high: TreeShape = TreeShape(7, 1, 8),
        saturation: float = 0.5,
        alpha: float = 0.3,
        patience: int = 5,
        normalise: str = "depth",
    ) -> None:
        if not 0 < saturation <= 1 or not 0 < alpha <= 1 or patience < 1 or normalise not in ("depth", "num_steps"):
            raise ValueError("adaptive policy: saturation and alpha lie in (0, 1], patience is at least 1, normalise is depth or num_steps")
        self.low, self.high = low, high
        self.saturation, self.alpha, self.patience, self.normalise = saturation, alpha, patience, normalise
        self._shapes, self._starts = self._ladder()
        self._starts_on: dict[torch.device, torch.Tensor] = {}

    def _ladder(self) -> tuple[list[TreeShape], list[float]]:
        """The shapes in order of s, and the smallest fp32 s of each: floor(x + 1/2) of the exact interpolation.

        In floating point the sum would round across a change a few ulps early, and not for all three numbers at once.
        """
        corners = list(zip(dataclasses.astuple(self.low), dataclasses.astuple(self.high), strict=True))
        points = {Fraction(0), Fraction(1)}
        for low, high in corners:
            points |= {Fraction(2 * k + 1, 2 * abs(high - low)) for k in range(abs(high - low))}
        nearest = torch.tensor([float(point) for point in points], dtype=torch.float32)
        candidates = torch.cat([nearest, *(torch.nextafter(nearest, torch.full_like(nearest, end)) for end in (0.0, 1.0))])
        starts: dict[tuple[int, ...], float] = {}
        for s in sorted(candidates.tolist()):
            shape = tuple(math.floor(low + Fraction(s) * (high - low) + Fraction(1, 2)) for low, high in corners)
            starts.setdefault(shape, s)
        try:
            return [TreeShape(*shape) for shape in starts], list(starts.values())
        except ValueError as error:
            raise ValueError(f"adaptive policy from {self.low} to {self.high}: {error}") from None

    def reachable(self) -> list[TreeShape]:
        """The shapes from `low` to `high`; with the default corners exactly eight."""
        return list(self._shapes)

    def signal(self, state: PolicyState, root: Root) -> torch.Tensor:
        """fp32 [B] in 0..1: s, 0 where the circuit breaker is open."""
        s = (root.confidence * state.rar / self.saturation).clamp(0, 1)
        return torch.where(state.tripped, 0.0, s)

    def plan(self, state: PolicyState, root: Root) -> torch.Tensor:
        """int64 [B]: the index of the interpolated shape."""
        return self.shape_index(self.signal(state, root))

    def shape_index(self, s: torch.Tensor) -> torch.Tensor:
        """fp32 [B] in 0..1 -> int64 [B], index into `reachable()`: for engines that aggregate s over a batch."""
        starts = self._starts_on.get(s.device)
        if starts is None:  # once per device: a copy from the host cannot be captured in a CUDA graph
            starts = self._starts_on[s.device] = torch.tensor(self._starts[1:], dtype=torch.float32, device=s.device)
        return (s[:, None] >= starts).sum(1)

    def update(self, state: PolicyState, tree: DraftTree, acceptance: Acceptance, num_steps: torch.Tensor) -> PolicyState:
        """Fold the step's acceptance ratio in; requests that drafted nothing keep their state."""
        deepest = tree.depth.amax(1)
        drafted = deepest > 0
        planned = deepest if self.normalise == "depth" else num_steps
        ratio = acceptance.num_accepted / planned.clamp(min=1)
        rar = (1 - self.alpha) * state.rar + self.alpha * ratio
        misses = torch.where(acceptance.num_accepted == 0, state.misses + 1, 0)
        tripped = misses >= self.patience
        rar = torch.where(tripped, 0.5, rar)
        misses = torch.where(tripped, 0, misses)
        return PolicyState(
            torch.where(drafted, rar, state.rar),
            torch.where(drafted, misses, state.misses),
            torch.where(drafted, tripped, state.tripped),
            state.level,
            state.ema,
            state.evidence,
            state.power,
        )
