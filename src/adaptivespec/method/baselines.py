"""Acceptance rules to compare the margin rule with, those that only pick a child; `coins.py` has those that sample anew.

In every one of them a child that is the target's choice y stands: rejecting it would emit the same token as the bonus. Of other
children that qualify the one with the highest probability p is taken. p is the target's distribution after penalties, masks and
filters, at the request's temperature, and at temperature 1 for requests at temperature 0. Masked tokens never qualify. The guards of
the margin rule act in `margin_top1` alone.
"""

from __future__ import annotations

import math

import torch

from .acceptance import Margin, RuleDefaults, VerifyInputs, choose_child, exact_children, first_child
from .guards import RuleParams
from .tree import DraftTree


def tempered(inputs: VerifyInputs) -> torch.Tensor:
    """fp32 [R, V]: logits divided by their request's temperature, 1 in place of 0."""
    heat = torch.where(inputs.temperature > 0, inputs.temperature, 1.0)[:, None].expand_as(inputs.rows)
    by_row = torch.ones(len(inputs.logits), device=heat.device).scatter(0, inputs.rows.flatten(), heat.flatten())
    return inputs.logits.float() / by_row[:, None]


def at_parent(tree: DraftTree, inputs: VerifyInputs, row_values: torch.Tensor) -> torch.Tensor:
    """[B, N]: what `row_values` [R] says at the parent of every node."""
    return row_values[inputs.rows.gather(1, tree.parents.clamp(min=0))]


def child_log_probs(tree: DraftTree, inputs: VerifyInputs, logits: torch.Tensor, log_z: torch.Tensor) -> torch.Tensor:
    """fp32 [B, N]: log p of every drafted token at its parent, -inf for root and padding.

    `logits` [R, V] is `tempered`, `log_z` [R] its logsumexp.
    """
    parent_rows = inputs.rows.gather(1, tree.parents.clamp(min=0))
    return torch.where(tree.drafted, logits[parent_rows, tree.tokens] - log_z[parent_rows], -math.inf)


class Typical(RuleDefaults):
    """Typical acceptance (Medusa, arXiv 2401.10774): p(x) > min(epsilon, delta * exp(-H(p))), H the entropy in nats.

    Any engine, shape and temperature. Off (strict): epsilon 1 and delta at least the vocabulary's size.
    """

    name = "typical"

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        self.log_epsilon, self.log_delta = math.log(epsilon), math.log(delta)

    def next_child(self, tree: DraftTree, inputs: VerifyInputs, params: RuleParams) -> torch.Tensor:
        """int64 [B, N]: the exact child, else the most probable typical one, else -1."""
        logits = tempered(inputs)
        log_z = logits.logsumexp(-1)
        entropy = torch.special.entr((logits - log_z[:, None]).exp_()).sum(-1)
        log_p = child_log_probs(tree, inputs, logits, log_z)
        typical = log_p > (self.log_delta - at_parent(tree, inputs, entropy)).clamp(max=self.log_epsilon)
        return choose_child(tree, exact_children(tree, inputs.choice), typical & (log_p > -math.inf), log_p)


class RelaxedTopK(RuleDefaults):
    """Relaxed acceptance (TensorRT-LLM): x is among the target's k best tokens and p(x) >= p(top-1) - delta.

    Any engine and shape, temperature 0 only: above it the source compares with no sample. Ties at the edge count as inside; with k = 1
    only the target's choice is. Off (strict): k 1. Its defaults are what TensorRT-LLM recommends for reasoning models.
    """

    name = "relaxed_topk"
    serves_sampling = False

    def __init__(self, k: int = 10, delta: float = 0.6) -> None:
        self.k, self.delta = k, delta

    def next_child(self, tree: DraftTree, inputs: VerifyInputs, params: RuleParams) -> torch.Tensor:
        """int64 [B, N]: the exact child, else the most probable within reach, else -1."""
        exact = exact_children(tree, inputs.choice)
        if self.k == 1:
            return first_child(tree, exact)
        logits = tempered(inputs)
        log_z = logits.logsumexp(-1)
        best = logits.topk(min(self.k, logits.shape[1])).values
        log_p = child_log_probs(tree, inputs, logits, log_z)
        near = log_p.exp() >= at_parent(tree, inputs, (best[:, 0] - log_z).exp()) - self.delta
        inside = log_p >= at_parent(tree, inputs, best[:, -1] - log_z)
        return choose_child(tree, exact, near & inside & (log_p > -math.inf), log_p)


class LogitRatio(RuleDefaults):
    """MARS (arXiv 2601.15498): x is one of the target's two best tokens and their logits have z2 / z1 > ratio.

    Any engine, shape and temperature; the logits are those before temperature. Not invariant to adding a constant to all logits, and
    meaningless where z1 <= 0: there it is strict. Off (strict): ratio 1.
    """

    name = "logit_ratio"

    def __init__(self, ratio: float = 0.9) -> None:
        self.ratio = ratio

    def next_child(self, tree: DraftTree, inputs: VerifyInputs, params: RuleParams) -> torch.Tensor:
        """int64 [B, N]: the exact child, else the best or second-best token where the two are close, else -1."""
        best = inputs.logits.topk(min(2, inputs.logits.shape[1])).values.float()
        first, second = best[:, 0], best[:, -1]
        close = (first > 0) & (second > self.ratio * first)
        parent_rows = inputs.rows.gather(1, tree.parents.clamp(min=0))
        logit = torch.where(tree.drafted, inputs.logits[parent_rows, tree.tokens].float(), -math.inf)
        qualifies = at_parent(tree, inputs, close) & (logit >= at_parent(tree, inputs, second)) & tree.drafted
        return choose_child(tree, exact_children(tree, inputs.choice), qualifies, logit)


class MarginTop1(Margin):
    """The margin rule read naively above temperature 0: log p(x) - log max p instead of the margin of scores.

    It has the margin rule's kappa and guards, and is that rule at temperature 0. Above, it accepts the target's most probable token
    whenever it is drafted, for every kappa below 1, so that sampling turns greedy on drafted tokens. Any engine, shape and
    temperature. Off (strict): kappa 1.
    """

    name = "margin_top1"

    def margins(self, tree: DraftTree, inputs: VerifyInputs) -> torch.Tensor:
        """float64 [B, N]: log p of every drafted token minus the highest log p at its parent, -inf for root and padding."""
        parent_rows = inputs.rows.gather(1, tree.parents.clamp(min=0))
        top = inputs.logits.amax(-1)
        gap = inputs.logits[parent_rows, tree.tokens].double() - top[parent_rows].double()
        heat = torch.where(inputs.temperature > 0, inputs.temperature, 1.0)[:, None]
        return torch.where(tree.drafted, gap / heat, -math.inf)


class Window(RuleDefaults):
    """FLy (arXiv 2511.22972): a mismatch where the target is unsure stands if the target then agrees for a whole window.

    Unsure: the three largest terms of the entropy of p sum to at least `entropy` nats. Agrees: the next `size` drafted tokens are all
    exact; a window that the draft's end cuts short rejects. Chains only, whose nodes stand in the order of their depth: settings with
    branching shapes are refused. Any engine and temperature. Off (strict): a window as long as the chain.
    """

    name = "window"

    def __init__(self, size: int = 6, entropy: float = 0.3) -> None:
        self.size, self.entropy = size, entropy

    def next_child(self, tree: DraftTree, inputs: VerifyInputs, params: RuleParams) -> torch.Tensor:
        """int64 [B, N]: the next node of the chain where it is exact or its window holds, else -1."""
        exact = exact_children(tree, inputs.choice)
        matches = exact.cumsum(1)
        # Beyond the end the count is 0, which no window's count can be.
        held = torch.nn.functional.pad(matches, (0, self.size))[:, self.size :] - matches == self.size
        logits = tempered(inputs)
        log_z = logits.logsumexp(-1)
        largest = (logits.topk(min(3, logits.shape[1])).values - log_z[:, None]).exp_()
        unsure = torch.special.entr(largest).sum(-1) >= self.entropy
        allowed = at_parent(tree, inputs, unsure) & held & (child_log_probs(tree, inputs, logits, log_z) > -math.inf)
        return first_child(tree, exact | allowed)
