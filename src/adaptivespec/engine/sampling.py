"""From logits to what the acceptance rule reads: processors, position-keyed noise, rule parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..method.acceptance import VerifyInputs
from ..method.guards import RuleParams
from ..method.noise import gumbel
from ..method.tree import DraftTree
from .request import Request


def mask_stop_tokens(logits: torch.Tensor, requests: Sequence[Request], depth: torch.Tensor) -> torch.Tensor:
    """Logits [B, N, V] with stop tokens at -inf wherever `min_tokens` are not generated yet; each node counts its own path.

    `depth` is int64 [B, N]: tokens that would be emitted between the request's last token and the node's choice.
    """
    if all(r.params.min_tokens <= len(r.token_ids) for r in requests):
        return logits
    logits = logits.clone()
    for b, request in enumerate(requests):
        early = (len(request.token_ids) + depth[b] < request.params.min_tokens).nonzero()[:, 0]
        banned = torch.tensor(sorted(request.stop_ids), dtype=torch.int64, device=logits.device)
        logits[b, early[:, None], banned[None]] = -math.inf
    return logits


def verify_inputs(logits: torch.Tensor, requests: Sequence[Request], tree: DraftTree, cached: Sequence[int]) -> VerifyInputs:
    """Scores and choices of every node.

    Args:
        logits: [B, N, V] as the model gave them.
        requests: the batch.
        tree: its trees.
        cached: committed KV rows of each request: the root's position.
    """
    device = logits.device
    logits = mask_stop_tokens(logits, requests, tree.depth)
    temperature = torch.tensor([r.params.temperature for r in requests], device=device)
    if all(r.params.temperature == 0 for r in requests):
        return VerifyInputs.from_logits(logits, temperature)
    batch, levels, vocab = len(requests), tree.levels + 1, logits.shape[2]
    seeds = torch.tensor([r.seed for r in requests], device=device).repeat_interleave(levels)
    # A node at position p chooses the token of position p + 1; all nodes of one depth share the noise.
    first = torch.tensor(cached, device=device)[:, None] + 1
    positions = (first + torch.arange(levels, device=device)).flatten()
    noise = gumbel(seeds, positions, vocab).view(batch, levels, vocab)
    noise = noise[torch.arange(batch, device=device)[:, None], tree.depth]
    return VerifyInputs.from_logits(logits, temperature, noise)


def rule_params(requests: Sequence[Request], protected: torch.Tensor) -> RuleParams:
    """The batch's settings and totals; `protected` is bool [B or 1, V]."""
    device, double = protected.device, torch.float64

    def limit(value: float | None) -> float:
        return math.inf if value is None else value

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=double, device=device)

    configs = [r.config for r in requests]
    most = [torch.iinfo(torch.int64).max if c.max_promotions is None else c.max_promotions for c in configs]
    return RuleParams(
        kappa=column([c.kappa for c in configs]),
        protect=torch.tensor([c.guards == "protected" for c in configs], device=device),
        protected=protected,
        spent=column([r.spent for r in requests]),
        budget=column([limit(c.budget) for c in configs]),
        budget_per_100=column([limit(c.budget_per_100) for c in configs]),
        emitted=torch.tensor([len(r.token_ids) for r in requests], device=device),
        max_promotions=torch.tensor(most, device=device),
    )
