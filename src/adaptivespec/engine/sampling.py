"""From logits to what the acceptance rule reads: processors, position-keyed noise, rule parameters; and log-probabilities."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import accumulate

import torch

from ..config import SpeculativeConfig
from ..method.acceptance import VerifyInputs
from ..method.guards import RuleParams
from ..method.noise import gumbel, uniform
from ..method.tree import DraftTree
from .processors import keep_probable, mask_stop_tokens, penalise
from .request import Request, TokenLogprob


def verify_inputs(
    logits: torch.Tensor, rows: torch.Tensor, requests: Sequence[Request], tree: DraftTree, cached: Sequence[int], sizes: Sequence[int]
) -> VerifyInputs:
    """Scores and choices of every node.

    Args:
        logits: [R, V] as the model gave them, one row per real node, request after request; left as they are.
        rows: int64 [B, N], the row of each node.
        requests: the batch.
        tree: its trees.
        cached: committed KV rows of each request: the root's position.
        sizes: real nodes of each request, host ints.
    """
    device = logits.device
    temperature = torch.tensor([r.params.temperature for r in requests], device=device)
    if not any(_processed(r) for r in requests):
        return VerifyInputs.from_rows(logits, logits, rows, temperature)
    logits = logits.to(torch.float32, copy=True)
    depth, tokens = tree.depth.tolist(), tree.tokens.tolist()
    above = tree.ancestor_mask() if any(r.params.penalises for r in requests) else None
    firsts = [0, *accumulate(sizes)]
    for b, request in enumerate(requests):
        own = logits[firsts[b] : firsts[b + 1]]
        if request.params.min_tokens > len(request.token_ids):
            mask_stop_tokens(own, request, depth[b][: sizes[b]])
        if above is not None and request.params.penalises:
            penalise(own, request, tokens[b][: sizes[b]], above[b, : sizes[b], : sizes[b]])
        if request.params.filters:
            keep_probable(own, request)
    sampled = [b for b, r in enumerate(requests) if r.params.temperature > 0]
    if not sampled:
        return VerifyInputs.from_rows(logits, logits, rows, temperature)
    # A node at position p chooses the token of position p + 1; all nodes of one depth share the noise.
    seeds: list[int] = []
    positions: list[int] = []
    noise_rows: list[int] = []
    for b in sampled:
        deepest, first = max(depth[b][: sizes[b]]), len(seeds)
        seeds += [requests[b].seed] * (deepest + 1)
        positions += range(cached[b] + 1, cached[b] + deepest + 2)
        noise_rows += [first + d for d in depth[b][: sizes[b]]]
    noise = gumbel(torch.tensor(seeds, device=device), torch.tensor(positions, device=device), logits.shape[1])[noise_rows]
    heat = torch.tensor([requests[b].params.temperature for b in sampled for _ in range(sizes[b])], device=device)[:, None]
    if len(sampled) == len(requests):
        scores = torch.addcmul(logits, noise, heat)
    else:
        mine = [row for b in sampled for row in range(firsts[b], firsts[b + 1])]
        scores = logits.clone()
        scores[mine] = torch.addcmul(logits[mine], noise, heat)
    return VerifyInputs.from_rows(logits, scores, rows, temperature)


def with_coins(inputs: VerifyInputs, requests: Sequence[Request], tree: DraftTree, cached: Sequence[int]) -> VerifyInputs:
    """The same with the coins of every node, each keyed by the request's seed and the position of the token it decides on."""
    seeds = torch.tensor([r.seed for r in requests], device=tree.depth.device)[:, None]
    positions = tree.depth + 1 + torch.tensor(cached, device=tree.depth.device)[:, None]
    return dataclasses.replace(inputs, coins=uniform(seeds, positions))


def _processed(request: Request) -> bool:
    params = request.params
    return params.temperature > 0 or params.penalises or params.min_tokens > len(request.token_ids)


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """What the target thought of the tokens that were emitted, before penalties, masks and temperature.

    Args:
        logits: [n, V] as the model gave them: row i chose token i.
        tokens: n emitted tokens.
        top: how many of the most probable tokens to give beside each.
    """
    log_probs = logits.float().log_softmax(-1)
    chosen = log_probs.gather(1, torch.tensor(list(tokens), device=logits.device)[:, None])
    ranks = (log_probs > chosen).sum(-1) + 1
    best = log_probs.topk(min(top, log_probs.shape[1]), -1) if top else None
    values, ids = (best.values.tolist(), best.indices.tolist()) if best is not None else ([[]] * len(tokens), [[]] * len(tokens))
    return [
        TokenLogprob(token, value, rank, dict(zip(ids[i], values[i], strict=True)))
        for i, (token, value, rank) in enumerate(zip(tokens, chosen[:, 0].tolist(), ranks.tolist(), strict=True))
    ]


def rule_params(
    configs: Sequence[SpeculativeConfig], spent: Sequence[float], emitted: Sequence[int], protected: torch.Tensor
) -> RuleParams:
    """The batch's settings and totals: per request its configuration, nats spent and tokens emitted; `protected` is bool [B or 1, V]."""
    device, double = protected.device, torch.float64

    def limit(value: float | None) -> float:
        return math.inf if value is None else value

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=double, device=device)

    most = [torch.iinfo(torch.int64).max if c.max_promotions is None else c.max_promotions for c in configs]
    return RuleParams(
        kappa=column([c.kappa for c in configs]),
        protect=torch.tensor([c.guards == "protected" for c in configs], device=device),
        protected=protected,
        spent=column(spent),
        budget=column([limit(c.budget) for c in configs]),
        budget_per_100=column([limit(c.budget_per_100) for c in configs]),
        emitted=torch.tensor(emitted, device=device),
        max_promotions=torch.tensor(most, device=device),
    )
