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
    params, device = request.params, logits.device
    prompt = request.prompt_ids if params.repetition_penalty != 1 else frozenset()
    ids = sorted({*tokens[1:], *request.counts, *prompt})
    if not ids:
        return
    columns = torch.tensor(ids, device=device)
    emitted = torch.tensor([request.counts.get(i, 0) for i in ids], dtype=torch.float32, device=device)
    drafted = torch.tensor(tokens[1:], device=device)
    # The root is committed, so its token is counted already.
    counts = emitted + above[:, 1:].float() @ (drafted[:, None] == columns).float()
    z = logits[:, columns]
    if params.repetition_penalty != 1:
        occurs = (counts > 0) | torch.tensor([i in prompt for i in ids], device=device)
        z = torch.where(occurs, torch.where(z > 0, z / params.repetition_penalty, z * params.repetition_penalty), z)
    logits[:, columns] = z - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


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

    Sorting a whole vocabulary takes longer than a small target's forward, so ever more of the best are looked at until they suffice.
    """
    vocab = z.shape[1]
    count = top_k or min(256, vocab)
    total = None if top_k else z.logsumexp(-1, keepdim=True)
    while True:
        best = z.topk(count, -1).values
        share = (best - (best.logsumexp(-1, keepdim=True) if total is None else total)).exp().double().cumsum(-1)
        if count in (top_k, vocab) or bool((share[:, -1] >= top_p).all()):
            break
        count = min(8 * count, vocab)
    # A token belongs to the set when what comes before it does not suffice; the best always does.
    members = 1 + (share[:, :-1] < top_p).sum(-1, keepdim=True)
    return best.gather(1, members - 1)
