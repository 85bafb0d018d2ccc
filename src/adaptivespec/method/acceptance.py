"""Acceptance rules: which drafted child of every node, if any, the target lets stand.

A rule answers for all nodes at once (`next_child`); `accept` only walks that answer from the root. SGLang's kernel can do the
walk instead, from a target prediction rewritten with `next_child`.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from .guards import RuleParams, affordable, unprotected
from .tree import DraftTree


@dataclass(frozen=True)
class VerifyInputs:
    """What one target forward says about every node. Rows of all requests lie flat, without padding, as engines produce them.

    Attributes:
        logits: [R, V] after penalties, masks, top-k, top-p and min-p, before temperature; -inf where masked.
        scores: [R, V], logits + temperature * Gumbel noise; the same tensor when every temperature is 0.
        rows: int64 [B, N], the row of each node; padding repeats any row of its own request.
        choice: int64 [B, N], the argmax of scores: the token that plain decoding would emit after this node.
        top: [B, N], the maximum of scores.
        temperature: fp32 [B].
        coins: fp32 [B, N] uniforms in (0, 1), one per parent node, for rules that toss one (`noise.uniform`); None otherwise.
        q: fp32 [R, V], the distribution that the drafter drew each node's child from, for rejection sampling; None otherwise.
    """

    logits: torch.Tensor
    scores: torch.Tensor
    rows: torch.Tensor
    choice: torch.Tensor
    top: torch.Tensor
    temperature: torch.Tensor
    coins: torch.Tensor | None = None
    q: torch.Tensor | None = None

    @classmethod
    def from_rows(cls, logits: torch.Tensor, scores: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor) -> VerifyInputs:
        """Choices from flat logits and scores [R, V], the nodes' rows [B, N] and temperature [B]."""
        top, choice = scores.max(-1)  # much faster than argmax on wide rows
        return cls(logits, scores, rows, choice[rows], top[rows], temperature)

    @classmethod
    def from_logits(cls, logits: torch.Tensor, temperature: torch.Tensor, noise: torch.Tensor | None = None) -> VerifyInputs:
        """From padded logits [B, N, V], temperature [B] and Gumbel noise [B, N, V] (None when all are at 0)."""
        batch, nodes, vocab = logits.shape
        scores = logits if noise is None else torch.addcmul(logits.float(), noise, temperature[:, None, None])
        rows = torch.arange(batch * nodes, device=logits.device).view(batch, nodes)
        return cls.from_rows(logits.reshape(-1, vocab), scores.reshape(-1, vocab), rows, temperature)

    def of_requests(self, requests: list[int]) -> VerifyInputs:
        """Only some requests of the batch (host ints). The flat rows stay whole: nothing as wide as the vocabulary is copied."""
        own = (self.rows, self.choice, self.top, self.temperature)
        rows, choice, top, temperature = (values[requests] for values in own)
        coins = None if self.coins is None else self.coins[requests]
        return dataclasses.replace(self, rows=rows, choice=choice, top=top, temperature=temperature, coins=coins)


@dataclass(frozen=True)
class Acceptance:
    """What a rule accepted, before stop conditions.

    Attributes:
        path: int64 [B, D], accepted node indices in order, the root excluded, padded with -1 (D = the tree's levels).
        num_accepted: int64 [B].
        bonus: int64 [B], the target's own token after the last accepted node.
        promoted: bool [B, D], accepted although it was not the target's choice.
        log_margin: float64 [B, D], log-margin of promoted tokens, 0 elsewhere.
    """

    path: torch.Tensor
    num_accepted: torch.Tensor
    bonus: torch.Tensor
    promoted: torch.Tensor
    log_margin: torch.Tensor


class AcceptanceRule(Protocol):
    """An acceptance rule; stateless, so one object serves every request with the same settings.

    Attributes:
        name: as settings spell it.
        serves_greedy, serves_sampling: whether it is defined at temperature 0, and above; engines refuse it elsewhere.
        tosses_coins: it reads `VerifyInputs.coins`.
        needs_q: it reads `VerifyInputs.q`, so only a sampling drafter can serve it.
    """

    name: str
    serves_greedy: bool
    serves_sampling: bool
    tosses_coins: bool
    needs_q: bool

    def next_child(self, tree: DraftTree, inputs: VerifyInputs, params: RuleParams) -> torch.Tensor:
        """int64 [B, N]: the chosen child of every node, or -1."""
        ...

    def accept(self, tree: DraftTree, inputs: VerifyInputs, params: RuleParams) -> Acceptance:
        """Walk from the root."""
        ...


def child_margins(tree: DraftTree, inputs: VerifyInputs) -> torch.Tensor:
    """float64 [B, N]: score of each drafted token at its parent, minus the best score there; -inf for root and padding.

    At temperature 0 this is log(p(token) / p(top-1)).
    """
    parent = tree.parents.clamp(min=0)
    score = inputs.scores[inputs.rows.gather(1, parent), tree.tokens]
    margin = score.double() - inputs.top.double().gather(1, parent)
    return torch.where(tree.drafted, margin, -math.inf)


def exact_children(tree: DraftTree, choice: torch.Tensor) -> torch.Tensor:
    """Bool [B, N]: the drafted token is the target's choice (int64 [B, N]) at its parent."""
    return tree.drafted & (tree.tokens == choice.gather(1, tree.parents.clamp(min=0)))


def first_child(tree: DraftTree, wanted: torch.Tensor) -> torch.Tensor:
    """int64 [B, N]: for every node the lowest-index child that is `wanted` (bool [B, N]), or -1."""
    batch, nodes = tree.tokens.shape
    index = torch.arange(nodes, device=tree.tokens.device).expand(batch, nodes)
    none = torch.full_like(index, nodes)
    first = none.scatter_reduce(1, tree.parents.clamp(min=0), torch.where(wanted & tree.drafted, index, nodes), "amin")
    return torch.where(first < nodes, first, -1)


def choose_child(tree: DraftTree, exact: torch.Tensor, qualifies: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """int64 [B, N]: the exact child of every node, else of its qualifying children the one with the highest rank, else -1.

    Args:
        tree: the draft trees.
        exact, qualifies: bool [B, N], of drafted nodes.
        rank: [B, N] floats; ties go to the lowest index.
    """
    parent = tree.parents.clamp(min=0)
    ranked = torch.where(qualifies, rank, -math.inf)
    best = torch.full_like(ranked, -math.inf).scatter_reduce(1, parent, ranked, "amax")
    exact_child = first_child(tree, exact)
    return torch.where(exact_child >= 0, exact_child, first_child(tree, qualifies & (rank == best.gather(1, parent))))


def walk(tree: DraftTree, inputs: VerifyInputs, next_child: torch.Tensor, margin: torch.Tensor | None = None) -> Acceptance:
    """Follow `next_child` (int64 [B, N]) from the root.

    `margin` (float64 [B, N]) is what promotions are booked with; None takes `child_margins`.
    """
    node = torch.zeros_like(tree.size)[:, None]
    path, previous = [], []
    for _ in range(tree.levels):
        child = next_child.gather(1, node)
        path.append(child)
        previous.append(node)
        node = torch.where(child >= 0, child, node)
    bonus = inputs.choice.gather(1, node)[:, 0]
    if not path:
        empty = torch.empty(len(bonus), 0, dtype=torch.int64, device=bonus.device)
        return Acceptance(empty, torch.zeros_like(bonus), bonus, empty.bool(), empty.double())
    steps = torch.cat(path, 1)
    taken = steps >= 0
    child = steps.clamp(min=0)
    promoted = taken & (tree.tokens.gather(1, child) != inputs.choice.gather(1, torch.cat(previous, 1)))
    if margin is None:
        margin = child_margins(tree, inputs)
    log_margin = torch.where(promoted, margin.gather(1, child), 0.0)
    return Acceptance(steps, taken.sum(1), bonus, promoted, log_margin)


class RuleDefaults(ABC):
    """What most rules share: they serve every temperature, need nothing but the scores, and acceptance walks `next_child`."""

    serves_greedy = True
    serves_sampling = True
    tosses_coins = False
    needs_q = False

    @abstractmethod
    def next_child(self, tree: DraftTree, inputs: VerifyInputs, params: RuleParams) -> torch.Tensor:
        """int64 [B, N]: the chosen child of every node, or -1."""

    def accept(self, tree: DraftTree, inputs: VerifyInputs, params: RuleParams) -> Acceptance:
        """Walk from the root."""
        return walk(tree, inputs, self.next_child(tree, inputs, params))


class Strict(RuleDefaults):
    """Accept a drafted token exactly where it is the target's choice: lossless at every temperature (sample and match)."""

    name = "strict"

    def next_child(self, tree: DraftTree, inputs: VerifyInputs, params: RuleParams) -> torch.Tensor:
        """int64 [B, N]: the exact child of every node, or -1."""
        return first_child(tree, exact_children(tree, inputs.choice))


class Margin(RuleDefaults):
    """AdaptiveSpec's per-step margin rule (arXiv 2609.02897): an exact match always wins; otherwise the child with the
    highest log-margin is promoted when that margin exceeds log(kappa) and the guards allow it.

    Needs one gathered score per node and one maximum per row. kappa = 1 is exactly `Strict`.
    """

    name = "margin"

    def margins(self, tree: DraftTree, inputs: VerifyInputs) -> torch.Tensor:
        """float64 [B, N]: the log-margin of every drafted node, -inf for root and padding."""
        return child_margins(tree, inputs)

    def next_child(self, tree: DraftTree, inputs: VerifyInputs, params: RuleParams) -> torch.Tensor:
        """int64 [B, N]: the exact child, else the promoted child, else -1."""
        return self._choose(tree, inputs, params, self.margins(tree, inputs))

    def accept(self, tree: DraftTree, inputs: VerifyInputs, params: RuleParams) -> Acceptance:
        """Walk from the root; promotions are booked with the margins they were chosen by."""
        margin = self.margins(tree, inputs)
        return walk(tree, inputs, self._choose(tree, inputs, params, margin), margin)

    @staticmethod
    def _choose(tree: DraftTree, inputs: VerifyInputs, params: RuleParams, margin: torch.Tensor) -> torch.Tensor:
        exact = exact_children(tree, inputs.choice)
        # Masked tokens have a margin of -inf and fail the comparison for every kappa.
        promotable = tree.drafted & ~exact & (margin > params.kappa.log()[:, None]) & unprotected(tree, inputs.choice, params)
        # The best child spends least: when it is too dear for the budget its siblings are too, so none takes its place.
        return choose_child(tree, exact, promotable & affordable(tree, margin, exact, params), margin)
