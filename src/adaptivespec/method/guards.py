"""Guards of the margin rule: tokens it must not touch, and how much of the quality budget it may spend.

Spent = the sum of -log_margin over promoted tokens on the emitted path. A budget bounds that sum by construction; it does
not bound the distance to the strict answer, nor accuracy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .tree import DraftTree

_MASKS_KEPT = 256


@dataclass(frozen=True)
class RuleParams:
    """Settings and running totals of each request in a batch; one batch mixes settings.

    Attributes:
        kappa: float64 [B] in (0, 1]; 1 is strict.
        protect: bool [B], whether protected tokens are guarded.
        protected: bool [B or 1, V], end-of-sequence, other special tokens and stop tokens.
        spent: float64 [B], nats spent so far by the request.
        budget: float64 [B], the most the request may spend in all; inf for none.
        budget_per_100: float64 [B], the most per 100 emitted tokens; inf for none.
        emitted: int64 [B], tokens emitted so far.
        max_promotions: int64 [B], the most promotions in one step.
    """

    kappa: torch.Tensor
    protect: torch.Tensor
    protected: torch.Tensor
    spent: torch.Tensor
    budget: torch.Tensor
    budget_per_100: torch.Tensor
    emitted: torch.Tensor
    max_promotions: torch.Tensor


def protected_mask(vocab_size: int, token_ids: Iterable[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Bool [1, V] that marks `token_ids`; ids outside the vocabulary are ignored."""
    mask = torch.zeros(1, vocab_size, dtype=torch.bool, device=device)
    mask[0, [i for i in token_ids if 0 <= i < vocab_size]] = True
    return mask


class ProtectedMasks:
    """Masks of the token sets that requests protect, each made once.

    Args:
        vocab_size, device: of the masks.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._masks: dict[frozenset[int], torch.Tensor] = {}

    def of(self, requests: Iterable[frozenset[int]]) -> torch.Tensor:
        """Bool [B, V], or [1, V] when all B requests protect the same tokens."""
        masks = []
        for ids in requests:
            if ids not in self._masks:
                if len(self._masks) >= _MASKS_KEPT:  # requests may bring stop tokens of their own without end
                    self._masks.clear()
                self._masks[ids] = protected_mask(self._vocab_size, ids, self._device)
            masks.append(self._masks[ids])
        return masks[0] if all(mask is masks[0] for mask in masks) else torch.cat(masks)


def unprotected(tree: DraftTree, choice: torch.Tensor, params: RuleParams) -> torch.Tensor:
    """Bool [B, N]: promoting this node would replace no protected token and emit none. `choice` int64 [B, N]."""
    protected = params.protected.expand(len(tree.tokens), -1)
    replaced = choice.gather(1, tree.parents.clamp(min=0))
    touches = protected.gather(1, tree.tokens) | protected.gather(1, replaced)
    return ~(params.protect[:, None] & touches)


def affordable(tree: DraftTree, log_margin: torch.Tensor, exact: torch.Tensor, params: RuleParams) -> torch.Tensor:
    """Bool [B, N]: reaching this node by promotion stays within the budgets, given what its own path already spent.

    Args:
        tree: the draft trees.
        log_margin: float64 [B, N] of every drafted node.
        exact: bool [B, N], nodes that are the target's choice and cost nothing.
        params: settings and totals.
    """
    parent = tree.parents.clamp(min=0)
    promoted = tree.drafted & ~exact
    edge_cost = torch.where(promoted, -log_margin, 0.0)
    spent = params.spent[:, None].expand_as(edge_cost)
    promotions = torch.zeros_like(tree.depth)
    start_spent, start_promotions = spent, promotions
    for _ in range(tree.levels):
        spent = torch.where(tree.drafted, spent.gather(1, parent) + edge_cost, start_spent)
        promotions = torch.where(tree.drafted, promotions.gather(1, parent) + promoted, start_promotions)
    # Tokens emitted before this one: those of earlier steps and the path down to the parent.
    emitted = params.emitted[:, None] + tree.depth - 1
    allowance = params.budget_per_100[:, None] * (emitted + 100) / 100
    return (spent <= params.budget[:, None]) & (spent <= allowance) & (promotions <= params.max_promotions[:, None])
