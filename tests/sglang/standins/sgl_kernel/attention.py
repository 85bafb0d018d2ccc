"""Attention over the paged KV pool: buffers are [slots, key heads, width], req_to_token [requests, positions] names the slots."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float, cap: float) -> torch.Tensor:
    """q [n, H, D] over keys and values [m, G, D], where mask [n, m] allows it: [n, H, D]."""
    groups = q.shape[1] // keys.shape[1]
    k, v = (x.float().transpose(0, 1).repeat_interleave(groups, 0) for x in (keys, values))
    scores = q.float().transpose(0, 1) @ k.mT * scale
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    return (F.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ v).transpose(0, 1)


def _refuse(cross_attention: bool, window: int, sinks: torch.Tensor | None) -> None:
    if cross_attention or window > 0 or sinks is not None:
        raise NotImplementedError("the stand-in for sgl_kernel knows neither cross attention nor sliding windows nor sinks")


def decode_attention_cpu(
    q: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    key_scale: float,
    value_scale: float,
    out: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    slots: torch.Tensor,
    scratch: torch.Tensor,
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    logit_cap: float,
    cross_attention: bool,
    window: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """One row per request: store its key and value at its slot, then attend to the request's first seq_lens positions."""
    _refuse(cross_attention, window, sinks)
    if key is not None and value is not None:
        key_buffer[slots] = key.view(-1, *key_buffer.shape[1:]).to(key_buffer.dtype)
        value_buffer[slots] = value.view(-1, *value_buffer.shape[1:]).to(value_buffer.dtype)
    for i, (row, length) in enumerate(zip(requests.tolist(), seq_lens.tolist(), strict=True)):
        at = req_to_token[row, :length].long()
        seen = torch.ones(1, length, dtype=torch.bool)
        out[i : i + 1] = _attend(q[i : i + 1], key_buffer[at], value_buffer[at], seen, scale, logit_cap).to(out.dtype)


def extend_attention_cpu(
    q: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    out: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    key_scale: float,
    value_scale: float,
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    starts: torch.Tensor,
    max_extend_len: int,
    scale: float,
    logit_cap: float,
    cross_attention: bool,
    window: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None = None,
    causal: bool = True,
) -> None:
    """The last extend_lens positions of every request attend to all before them and, among themselves, causally or by tree_mask.

    Keys and values are in the buffers already. Rows of all requests lie flat; tree_mask holds a square of booleans per request.
    """
    _refuse(cross_attention, window, sinks)
    used = 0
    for row, length, new, start in zip(requests.tolist(), seq_lens.tolist(), extend_lens.tolist(), starts.tolist(), strict=True):
        at = req_to_token[row, :length].long()
        seen = torch.ones(new, length, dtype=torch.bool)
        if tree_mask is not None:
            seen[:, length - new :] = tree_mask[used : used + new * new].view(new, new)
            used += new * new
        elif causal:
            seen = seen.tril(length - new)
        rows = slice(start, start + new)
        out[rows] = _attend(q[rows], key_buffer[at], value_buffer[at], seen, scale, logit_cap).to(out.dtype)
