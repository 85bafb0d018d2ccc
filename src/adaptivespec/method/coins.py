"""Acceptance rules that toss coins and sample a fallback token: SGLang's thresholds and rejection sampling.

Their coins are uniforms of seed and position (`noise.uniform`), independent of the Gumbel noise, so results do not depend on the
batch. The fallback is drawn with that noise: an argmax over what is left. Not y but the coin decides, hence nothing counts as promoted.
They change the bonus, so they override `accept`, and an engine that lets a stock kernel walk `next_child` cannot serve them.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from .acceptance import Acceptance, RuleDefaults, VerifyInputs, first_child, walk
from .baselines import child_log_probs, tempered
from .guards import RuleParams
from .tree import DraftTree


def _coins(tree: DraftTree, inputs: VerifyInputs) -> torch.Tensor:
    """fp32 [B, N]: the coin of every node's parent."""
    if inputs.coins is None:
        raise ValueError("this rule needs coins in VerifyInputs")
    return inputs.coins.gather(1, tree.parents.clamp(min=0))


def _walk(tree: DraftTree, inputs: VerifyInputs, next_child: torch.Tensor) -> tuple[Acceptance, torch.Tensor, torch.Tensor]:
    """The walk without promotions, the row [B] of the node where it ends, and that node's children, bool [B, N]: all rejected."""
    acceptance = walk(tree, inputs, next_child)
    # The root joins the path in front, so that a path of no nodes ends there.
    whole = torch.nn.functional.pad(acceptance.path, (1, 0))
    last = whole.gather(1, acceptance.num_accepted[:, None])
    nothing = torch.zeros_like(acceptance.log_margin)
    acceptance = dataclasses.replace(acceptance, promoted=nothing.bool(), log_margin=nothing)
    return acceptance, inputs.rows.gather(1, last)[:, 0], tree.drafted & (tree.parents == last)


def _with_bonus(acceptance: Acceptance, scores: torch.Tensor, rejected: torch.Tensor) -> Acceptance:
    """The bonus drawn from `scores` [B, V] where a child was rejected. Where nothing is left (rounding), y stands."""
    best, token = scores.max(-1)
    drawn = rejected.any(1) & (best > -math.inf)
    return dataclasses.replace(acceptance, bonus=torch.where(drawn, token, acceptance.bonus))


class Threshold(RuleDefaults):
    """SGLang's tree_speculative_sampling_target_only: one coin per parent, its children tried in index order. A child stands when the
    coin is at most (p of the siblings tried so far, its own included) / acc, or its own p is at least `single`; when none does, the
    token is drawn from p without the rejected siblings.

    Temperature above 0 only (SGLang's greedy kernel has no thresholds); any shape whose siblings are distinct tokens. Lossless with both
    thresholds at 1, though not token for token what plain sampling draws.
    """

    name = "threshold"
    serves_greedy = False
    tosses_coins = True

    def __init__(self, single: float = 1.0, acc: float = 1.0) -> None:
        self.single, self.acc = single, acc

    def next_child(self, tree: DraftTree, inputs: VerifyInputs, params: RuleParams) -> torch.Tensor:
        """int64 [B, N]: the first child that its coin or its own probability accepts, or -1."""
        logits = tempered(inputs)
        p = child_log_probs(tree, inputs, logits, logits.logsumexp(-1)).exp()
        siblings = (tree.parents[:, :, None] == tree.parents[:, None, :]).tril()
        # In double: the order of the sum, which depends on the padding, must not show.
        tried_so_far = torch.where(siblings, p.double()[:, None, :], 0.0).sum(-1)
        accepted = (_coins(tree, inputs) <= tried_so_far / self.acc) | (p >= self.single)
        return first_child(tree, accepted & (p > 0))

    def accept(self, tree: DraftTree, inputs: VerifyInputs, params: RuleParams) -> Acceptance:
        """Walk from the root; the bonus is drawn from p without the rejected children of the last node."""
        acceptance, row, rejected = _walk(tree, inputs, self.next_child(tree, inputs, params))
        scores = inputs.scores[row].float()
        tried = torch.zeros_like(scores).scatter_add(1, tree.tokens, rejected.float()) > 0
        return _with_bonus(acceptance, scores.masked_fill(tried, -math.inf), rejected)


class Rejection(RuleDefaults):
    """Speculative sampling (Leviathan et al. 2023, Chen et al. 2023): a drafted x drawn from q stands when the coin is at most
    p(x) / q(x); otherwise the token is drawn from norm(max(0, p - q)). Lossless.

    Chains from a sampling drafter that hands over its q rows, drawn independently of the target's noise; temperature above 0 only.
    """

    name = "rejection"
    serves_greedy = False
    tosses_coins = True
    needs_q = True

    def next_child(self, tree: DraftTree, inputs: VerifyInputs, params: RuleParams) -> torch.Tensor:
        """int64 [B, N]: the next node of the chain where its coin accepts it, else -1."""
        logits, q = tempered(inputs), self._q(inputs)
        p = child_log_probs(tree, inputs, logits, logits.logsumexp(-1)).exp()
        drawn_from = q[inputs.rows.gather(1, tree.parents.clamp(min=0)), tree.tokens]
        return first_child(tree, _coins(tree, inputs) * drawn_from <= p)

    def accept(self, tree: DraftTree, inputs: VerifyInputs, params: RuleParams) -> Acceptance:
        """Walk from the root; after a rejection the bonus is drawn from what p has more than q."""
        acceptance, row, rejected = _walk(tree, inputs, self.next_child(tree, inputs, params))
        heat = inputs.temperature[:, None]
        p = (inputs.logits[row].float() / heat).softmax(-1)
        more = (p - self._q(inputs)[row]).clamp(min=0)
        # log(more) + Gumbel noise, times the temperature; masked tokens have no noise left to read, and no probability either
        scores = heat * more.log() + inputs.scores[row].float() - inputs.logits[row].float()
        return _with_bonus(acceptance, torch.where(more > 0, scores, -math.inf), rejected)

    @staticmethod
    def _q(inputs: VerifyInputs) -> torch.Tensor:
        if inputs.q is None:
            raise ValueError("rejection needs the drafter's q rows in VerifyInputs")
        return inputs.q
