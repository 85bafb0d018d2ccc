"""From draft probabilities to acceptance probabilities, learned from what the rule really accepted.

An edge is a node given its parent. One table, shared by all requests, turns the drafter's probability of an edge into the chance that it is
accepted once its parent is: with exact matches a good head is right about itself, a rule that accepts mismatches accepts more. A node's
chance is the product along its path, to the power of its request: more than 1 for a text that is harder than the others. So a child is
never likelier than its parent.

Under a rule that accepts mismatches an exact match among the lesser siblings takes the place of their best, which would often have been
promoted and gone on. What a lesser sibling adds is what the best one would have missed, so its hit is booked as the best one's in the share
of mismatches that were promoted lately. Strict rules promote nothing, and so nothing is moved.

What deeper levels will bring is foretold from means alone, since the confidence of the path so far told nothing more where we looked: the
best child of a node is accepted as often as those that were reached lately and, where it misses, its siblings as often as learned for
their rank.

A power is the maximum-likelihood step away from 1. With the sums over the edges tried of
score = log q (hit - q) / (1 - q) and information = (log q)^2 q / (1 - q), power = 1 + score / (information + prior).

Everything is decided node by node in plain numbers: trees are small, each level waits for the decision anyway, and right after a forward,
which has driven everything else out of the caches, a tensor operation on five nodes takes as long as a loop over them; 100 were needed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from .tree import DraftTree

BINS = 24
RANKS = 8  # siblings behind the best that are told apart; later ones hardly ever hit
DEEPEST = 7.0  # nats: 1 in 1,100, less than any row is worth
_WORD = 8.0  # edges tried per bin that the prior counts as
_PRIOR, _OWN_PRIOR = 8.0, 24.0  # information that a power of 1 counts as, of all requests and of one
_MEMORY, _OWN_MEMORY = 0.998, 0.97  # kept of the shared counts and of a request's per step

# Bins are narrow where drafts are sure: bin k ends at DEEPEST * (k / (BINS - 1))^2 nats, but the last is open.
_EDGES = [DEEPEST * (k / (BINS - 1)) ** 2 for k in range(BINS)]
ENDS = [*_EDGES[1:], 3e38]
_SAID = [math.exp(-nats) for nats in (*((a + b) / 2 for a, b in pairwise(_EDGES)), DEEPEST + 1)]


@dataclass(frozen=True)
class HostTree:
    """One request's tree: `parents`, `depth` and `log_probs` of its nodes as in `DraftTree`, padding included."""

    parents: list[int]
    depth: list[int]
    log_probs: list[float]

    @classmethod
    def of(cls, tree: DraftTree) -> list[HostTree]:
        """Those of a batch; waits for the device."""
        return [cls(*own) for own in zip(tree.parents.tolist(), tree.depth.tolist(), tree.log_probs.tolist(), strict=True)]


@dataclass(frozen=True)
class Outcome:
    """What became of one request's tree.

    Attributes:
        tree: as verified.
        path, promoted: as in `Acceptance`.
        power: the request's.
        evidence: its score and information so far.
    """

    tree: HostTree
    path: list[int]
    promoted: list[bool]
    power: float
    evidence: tuple[float, float]


class Learned:
    """The shared table and the counts behind it.

    Attributes:
        tried, hits: [BINS + 1], edges by bin and those accepted; the last bin is that of candidates that do not exist.
        table: [BINS + 1], log of an edge's chance by bin, falling; -inf in the last.
        mismatches: nodes with children of which none was exact, and those where one was promoted.
        spare_tried, spare_hits: [RANKS + 1], by rank behind the best sibling: tried where all better missed, and accepted; others last.
        spare: [RANKS], the chance of those siblings where the best missed.
    """

    def __init__(self) -> None:
        self.tried, self.hits = [0.0] * (BINS + 1), [0.0] * (BINS + 1)
        self.mismatches = (_PRIOR, 0.0)
        self.spare_tried, self.spare_hits = [0.0] * (RANKS + 1), [0.0] * (RANKS + 1)
        self.refit()

    def chances(self, tree: HostTree, power: float) -> list[float]:
        """[N]: every node's chance, 1 of the root, 0 of padding and of candidates that do not exist."""
        table, parents, log_probs = self.table, tree.parents, tree.log_probs
        logs, chances = [0.0] * len(parents), [1.0] + [0.0] * (len(parents) - 1)
        for node in range(1, len(parents)):
            parent, log_prob = parents[node], log_probs[node]
            if parent >= 0 and log_prob > -math.inf:
                logs[node] = log = logs[parent] + power * table[bisect_left(ENDS, log_probs[parent] - log_prob)]
                chances[node] = math.exp(log)
        return chances

    def brood(self, best: float, width: int) -> list[float]:
        """[width]: the chances of a node's children, best first, when the best has the chance `best`."""
        lesser = [(1 - best) * share for share in self.spare[: width - 1]]
        return [best, *lesser, *[0.0] * (width - 1 - len(lesser))]

    def learn(self, outcomes: Sequence[Outcome]) -> list[tuple[tuple[float, float], float | None]]:
        """Count a step.

        Returns:
            for each request its new evidence, and the mean chance of the best children of the nodes that were reached; None of a tree of
            its root alone, whose evidence is the old.
        """
        if not any(parent >= 0 for outcome in outcomes for parent in outcome.tree.parents):
            return [(outcome.evidence, None) for outcome in outcomes]
        for counts in (self.tried, self.hits, self.spare_tried, self.spare_hits):
            counts[:] = [_MEMORY * count for count in counts]
        wrong, promotions = self.mismatches
        found = [self._learn(outcome, promotions / wrong) for outcome in outcomes]
        self.mismatches = (
            _MEMORY * wrong + sum(own_wrong for _, _, own_wrong, _ in found),
            _MEMORY * promotions + sum(own_promotions for _, _, _, own_promotions in found),
        )
        return [(evidence, mean) for evidence, mean, _, _ in found]

    def _learn(self, outcome: Outcome, share: float) -> tuple[tuple[float, float], float | None, int, int]:
        """Count one request: evidence and mean as in `learn`, mismatches and promotions.

        `share` of the exact hits of lesser siblings are booked as their best one's.
        """
        parents, log_probs = outcome.tree.parents, outcome.tree.log_probs
        accepted = {node: promoted for node, promoted in zip(outcome.path, outcome.promoted, strict=True) if node >= 0}
        rank, eldest, hit = [0] * len(parents), {}, [0.0] * len(parents)
        children: dict[int, int] = {}
        for node in range(1, len(parents)):
            parent = parents[node]
            if parent < 0:
                continue
            rank[node] = children.get(parent, 0)
            children[parent] = rank[node] + 1
            if not rank[node]:
                eldest[parent] = node
            if node in accepted:
                moved = share if rank[node] and not accepted[node] else 0.0
                hit[node] += 1 - moved
                hit[eldest[parent]] += moved
        score, information = outcome.evidence
        if children:
            score, information = _OWN_MEMORY * score, _OWN_MEMORY * information
        best, tried_best, taken = 0.0, 0, dict.fromkeys(children, 0.0)
        for node in range(1, len(parents)):
            parent = parents[node]
            if parent < 0 or (parent and parent not in accepted):
                continue  # only edges under the root and under accepted nodes were tried
            place = bisect_left(ENDS, log_probs[parent] - log_probs[node])
            self.tried[place] += 1
            self.hits[place] += hit[node]
            if rank[node]:
                spare = min(rank[node] - 1, RANKS)
                self.spare_tried[spare] += 1 - taken[parent]
                self.spare_hits[spare] += hit[node]
            else:
                best += math.exp(outcome.power * self.table[place])
                tried_best += 1
            taken[parent] += hit[node]
            chance, log, odds = self._terms[place]
            score += log * (hit[node] - chance) * odds
            information += log * log * chance * odds
        promotions = sum(accepted.values())
        wrong = tried_best - (len(accepted) - promotions)
        return (score, information), best / tried_best if tried_best else None, wrong, promotions

    def refit(self) -> None:
        """Make the table from the counts, over a prior: the drafter's word to the power that all edges together suggest."""
        tried, hits, said = (torch.tensor(values[:BINS], dtype=torch.float64) for values in (self.tried, self.hits, _SAID))
        log, power = said.log(), torch.tensor(1.0, dtype=torch.float64)
        for _ in range(3):  # Newton's steps
            prior = said**power
            score = (log * (hits - tried * prior) / (1 - prior)).sum() - _PRIOR * (power - 1)
            power = (power + score / ((log * log * tried * prior / (1 - prior)).sum() + _PRIOR)).clamp(0.2, 4)
        table = falling((hits + _WORD * said**power) / (tried + _WORD), tried + _WORD)
        self.table = [*table.log().tolist(), -math.inf]
        chances = [*table.clamp(1e-3, 1 - 1e-3).tolist(), 1e-3]
        self._terms = [(chance, math.log(chance), 1 / (1 - chance)) for chance in chances]  # of the likelihood
        self.spare, left = [], 1.0
        for count, hit in zip(self.spare_tried[:RANKS], self.spare_hits[:RANKS], strict=True):
            hazard = (hit + _WORD / 2) / (count + _WORD)
            self.spare.append(left * hazard)
            left *= 1 - hazard


def power_of(evidence: tuple[float, float]) -> float:
    """From score and information."""
    score, information = evidence
    return min(max(1 + score / (information + _OWN_PRIOR), 0.2), 4.0)


def falling(mean: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Isotonic regression: of all [K] that never rise the one nearest to chances `mean` [K], by the min-max formula over blocks."""
    weights, sums = (torch.nn.functional.pad(x.double().cumsum(0), (1, 0)) for x in (weight, weight * mean))
    block = (sums[None, 1:] - sums[:-1, None]) / (weights[None, 1:] - weights[:-1, None])  # [j, k]: the mean of j to k
    index = torch.arange(len(mean), device=mean.device)
    inside = index[:, None] <= index
    highest = torch.where(inside, block, -math.inf).flip(1).cummax(1).values.flip(1)
    return torch.where(inside, highest, math.inf).amin(0).clamp(1e-4, 1 - 1e-4).to(mean.dtype)
