"""Logit processors: what one request's settings make of the target's logits. Every node of a draft tree counts its own path."""

from __future__ import annotations

import math

import torch

from .request import Request


def mask_stop_tokens(logits: torch.Tensor, request: Request, depth: list[int]) -> None:
    """Set stop tokens to -inf in place wherever `min_tokens` are not generated yet.

    Args:
        logits: [N, V], one row per node.
        request: its settings and what it has emitted.
        depth: of each node: tokens that would be emitted between the request's last token and the node's choice.
    """
    early = [node for node, d in enumerate(depth) if len(request.token_ids) + d < request.params.min_tokens]
    if early and request.stop_ids:
        banned = torch.tensor(sorted(request.stop_ids), device=logits.device)
        logits[torch.tensor(early, device=logits.device)[:, None], banned[None]] = -math.inf


def penalise(logits: torch.Tensor, request: Request, tokens: list[int], above: torch.Tensor) -> None:
    """Repetition, frequency and presence penalties in place, as vLLM defines them.

    Only columns of tokens that occur are touched: a few thousand instead of the vocabulary.

    Args:
        logits: fp32 [N, V].
        request: its settings, prompt and what it has emitted, the root's token included.
        tokens: of the nodes, the root's first.
        above: bool [N, N], whether node j is node i or one of its ancestors.
    """
    params, device, seen = request.params, logits.device, request.occurrences
    assert seen is not None
    ids, emitted, places = seen.columns(tokens[1:], device)
    drafted = torch.zeros(len(tokens) - 1, len(ids), device=device).scatter_(1, places[:, None], 1.0)
    # The root is committed, so its token is counted already.
    counts = emitted + above[:, 1:].float() @ drafted
    z = logits[:, ids]
    if params.repetition_penalty != 1:
        occurs = counts > 0
        occurs[:, : seen.prompt_columns] = True
        z = torch.where(occurs, torch.where(z > 0, z / params.repetition_penalty, z * params.repetition_penalty), z)
    logits[:, ids] = z - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def keep_probable(logits: torch.Tensor, request: Request) -> None:
    """Top-k, top-p and min-p at the request's temperature: other tokens become -inf in place. Ties at the edge stay.

    Args:
        logits: fp32 [N, V].
        request: its settings; the temperature is above 0.
    """
    params = request.params
    z = logits / params.temperature
    edge = z.new_full((len(z), 1), -math.inf)
    top_k = min(params.top_k, z.shape[1]) if params.top_k > 0 else None
    if params.top_p < 1:
        edge = _nucleus(z, params.top_p, top_k)
    elif top_k is not None:
        edge = z.topk(top_k, -1).values[:, -1:]
    if params.min_p > 0:
        edge = torch.maximum(edge, z.amax(-1, keepdim=True) + math.log(params.min_p))
    logits.masked_fill_(z < edge, -math.inf)


def _nucleus(z: torch.Tensor, top_p: float, top_k: int | None) -> torch.Tensor:
    """[N, 1]: the least score of the smallest set of best tokens that holds `top_p` of the (top-k's) probability.

    A token less probable than (1 - top_p) / V cannot belong to it: all such tokens together hold less than 1 - top_p. So only the
    few others are sorted; sorting whole vocabularies would take longer than a small target's forward.
    """
    if top_k is not None:
        z = z.topk(top_k, -1).values
    total = z.logsumexp(-1, keepdim=True)
    candidates = z >= total + (math.log1p(-top_p) - math.log(z.shape[1]) - 1e-3)  # a little lower: rounding must not matter
    return torch.stack([_edge(row[mask], top_p, rest) for row, mask, rest in zip(z, candidates, total, strict=True)])


def _edge(scores: torch.Tensor, top_p: float, total: torch.Tensor) -> torch.Tensor:
    """[1]: the least score of the best of `scores` [C] that hold `top_p`, `total` [1] being the logarithm of 1."""
    best = scores.sort(descending=True).values
    share = (best - total).exp().double().cumsum(-1)
    # A token belongs to the set when what comes before it does not suffice; the best always does.
    return best[(share[:-1] < top_p).sum()][None]
