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
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from .acceptance import Acceptance, first_child
from .tree import DraftTree

BINS = 24
RANKS = 8  # siblings behind the best that are told apart; later ones hardly ever hit
DEEPEST = 7.0  # nats: 1 in 1,100, less than any row is worth
_WORD = 8.0  # edges tried per bin that the prior counts as
_PRIOR, _OWN_PRIOR = 8.0, 24.0  # information that a power of 1 counts as, of all requests and of one
_MEMORY, _OWN_MEMORY = 0.998, 0.97  # kept of the shared counts and of a request's per step


class Learned:
    """The shared table and the counts behind it, on one device.

    Attributes:
        counts: fp32 [2, BINS + 1], edges tried and accepted; the last bin is that of candidates that do not exist.
        table: fp32 [BINS + 1], log of an edge's chance by bin, falling; -inf in the last.
        mismatches: fp32 [2], nodes with children of which none was exact, and those where one was promoted.
        spare_counts: fp32 [2, RANKS + 1], by rank behind the best sibling: tried where all better ones missed, and accepted; others last.
        spare: fp32 [RANKS], the chance of those siblings where the best missed.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        # Bins are narrow where drafts are sure: bin k ends at DEEPEST * (k / (BINS - 1))^2 nats, but the last is open.
        ends = [DEEPEST * (k / (BINS - 1)) ** 2 for k in range(BINS)]
        middles = [*((a + b) / 2 for a, b in pairwise(ends)), DEEPEST + 1]
        self._ends = torch.tensor([*ends[1:], 3e38], device=device)
        self._said = torch.tensor([math.exp(-nats) for nats in middles], device=device)
        self.counts = torch.zeros(2, BINS + 1, device=device)
        self.mismatches = torch.tensor([_PRIOR, 0.0], device=device)
        self.spare_counts = torch.zeros(2, RANKS + 1, device=device)
        self.refit()

    def place(self, nats: torch.Tensor) -> torch.Tensor:
        """int64, the bins of edges of these improbabilities (-log p); infinity and what is not a number fall into the last."""
        return torch.bucketize(nats, self._ends)

    def bins(self, tree: DraftTree) -> torch.Tensor:
        """int64 [B, N]: the bin of every edge; the root has one too, to be ignored."""
        return self.place(tree.log_probs.gather(1, tree.parents.clamp(min=0)) - tree.log_probs)

    def paths(self, bins: torch.Tensor, tree: DraftTree, power: torch.Tensor) -> torch.Tensor:
        """fp32 [B, N]: log of every node's chance, 0 of the root; `power` [B] is its request's."""
        edge, parents = self.table[bins] * power[:, None], tree.parents.clamp(min=0)
        edge[:, 0].zero_()
        total = edge
        for _ in range(tree.levels - 1):
            total = edge + total.gather(1, parents)
        return total

    def brood(self, best: torch.Tensor, width: int) -> torch.Tensor:
        """fp32 [B, width]: the chances of a node's children, best first, when the best has the chance `best` [B]."""
        shares = torch.nn.functional.pad(self.spare, (0, max(0, width - 1 - RANKS)))[: width - 1]
        return torch.cat([best[:, None], (1 - best)[:, None] * shares], 1)

    def learn(
        self, bins: torch.Tensor, tree: DraftTree, acceptance: Acceptance, evidence: torch.Tensor, power: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Count a step.

        Args:
            bins: of the tree.
            tree: as verified.
            acceptance: what came of it.
            evidence: of the requests so far.
            power: theirs.

        Returns:
            their new evidence fp32 [B, 2] (score and information), and fp32 [B], the mean chance of the best children of the nodes that
            were reached (not a number in a tree of its root alone).
        """
        nodes, path = tree.tokens.shape[1], acceptance.path
        parent = tree.parents.clamp(min=0)
        column = torch.where(path >= 0, path, nodes)
        hit = evidence.new_zeros(len(path), nodes + 1)
        hit.scatter_(1, column, 1.0)[:, 0].fill_(1.0)
        tried = hit.gather(1, parent) * tree.drafted  # under the root and under accepted nodes
        promoted = torch.zeros_like(hit).scatter_(1, column, acceptance.promoted.float())[:, :nodes]
        hit = hit[:, :nodes] * tried
        eldest = first_child(tree, tree.drafted).gather(1, parent)  # a node's best sibling, or the node itself
        better = (parent[:, None] == parent[:, :, None]).tril(-1) & tree.drafted[:, None]  # [B, N, N]: of a node's siblings
        rank = better.sum(2) * tree.drafted
        lesser = rank > 0
        exact = hit - promoted
        moved = exact * lesser * (self.mismatches[1] / self.mismatches[0])
        hit = (hit - moved).scatter_add(1, eldest.clamp(min=0), moved)
        decided = (tried * ~lesser).sum()
        self.mismatches.mul_(_MEMORY).add_(torch.stack([decided - exact.sum(), promoted.sum()]))
        self.counts.mul_(_MEMORY).index_add_(1, bins.flatten(), torch.stack([tried, hit]).flatten(1))
        missed = tried * lesser * (1 - (better * hit[:, None]).sum(2))
        place = torch.where(lesser, (rank - 1).clamp(max=RANKS), RANKS)
        self.spare_counts.mul_(_MEMORY).index_add_(1, place.flatten(), torch.stack([missed, hit * lesser]).flatten(1))
        best = tried * ~lesser
        mean = ((self.table[bins] * power[:, None]).exp() * best).sum(1) / best.sum(1)
        chance = self.table[bins].exp().clamp(1e-3, 1 - 1e-3)
        log, odds = chance.log() * tried, 1 / (1 - chance)
        new = torch.stack([(log * (hit - chance) * odds).sum(1), (log * log * chance * odds).sum(1)], 1)
        return torch.where(tree.drafted.any(1, keepdim=True), _OWN_MEMORY * evidence + new, evidence), mean

    def refit(self) -> None:
        """Make the table from the counts, over a prior: the drafter's word to the power that all edges together suggest."""
        (tried, hits), log = self.counts[:, :BINS], self._said.log()
        power = torch.ones_like(log[0])
        for _ in range(3):  # Newton's steps
            said = self._said**power
            score = (log * (hits - tried * said) / (1 - said)).sum() - _PRIOR * (power - 1)
            power = (power + score / ((log * log * tried * said / (1 - said)).sum() + _PRIOR)).clamp(0.2, 4)
        prior = self._said**power
        table = falling((hits + _WORD * prior) / (tried + _WORD), tried + _WORD).log()
        self.table = torch.cat([table, torch.full_like(table[:1], -math.inf)])
        tried, hits = self.spare_counts[:, :RANKS]
        hazard = (hits + _WORD / 2) / (tried + _WORD)
        self.spare = hazard * torch.cat([torch.ones_like(hazard[:1]), (1 - hazard).cumprod(0)[:-1]])


def power_of(evidence: torch.Tensor) -> torch.Tensor:
    """[...] from score and information [..., 2]."""
    return (1 + evidence[..., 0] / (evidence[..., 1] + _OWN_PRIOR)).clamp(0.2, 4)


def falling(mean: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Isotonic regression: of all [K] that never rise the one nearest to chances `mean` [K], by the min-max formula over blocks."""
    weights, sums = (torch.nn.functional.pad(x.double().cumsum(0), (1, 0)) for x in (weight, weight * mean))
    block = (sums[None, 1:] - sums[:-1, None]) / (weights[None, 1:] - weights[:-1, None])  # [j, k]: the mean of j to k
    index = torch.arange(len(mean), device=mean.device)
    inside = index[:, None] <= index
    highest = torch.where(inside, block, -math.inf).flip(1).cummax(1).values.flip(1)
    return torch.where(inside, highest, math.inf).amin(0).clamp(1e-4, 1 - 1e-4).to(mean.dtype)
