"""Where tokens lie in the KV pool: req_to_token is int32 [requests, pool length], the slot of every position of every request."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch


def _ranges(requests: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> Iterator[tuple[int, int, int, int]]:
    """Row, start, end, and how many positions came before, for every request."""
    before = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield row, start, end, before
        before += end - start


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor, req_to_token: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, slots: torch.Tensor, pool_len: int
) -> None:
    """Write the packed slots of all requests to their positions [start, end)."""
    for row, start, end, before in _ranges(requests, starts, ends):
        req_to_token[row, start:end] = slots[before : before + end - start].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    requests: torch.Tensor, req_to_token: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, slots: torch.Tensor, pool_len: int
) -> None:
    """The way back: pack the slots of positions [start, end) of all requests into `slots`."""
    for row, start, end, before in _ranges(requests, starts, ends):
        slots[before : before + end - start] = req_to_token[row, start:end].to(slots.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    requests: torch.Tensor, req_to_token: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor, pool_len: int, topk: int, steps: int
) -> None:
    """Pack the topk * steps slots behind every request's committed tokens into `slots`."""
    assign_extend_cache_locs_cpu(requests, req_to_token, seq_lens, seq_lens + topk * steps, slots, pool_len)


def build_draft_decode_metadata_cpu(
    req_to_token: torch.Tensor, requests: torch.Tensor, seq_lens: torch.Tensor, topk: int, steps: int, pool_len: int
) -> torch.Tensor:
    """A row of slots per branch, int32 [requests * topk, pool length]: the committed ones, then the branch's own `steps` ones."""
    rows = torch.zeros(len(requests) * topk, pool_len, dtype=req_to_token.dtype)
    for i, (row, length) in enumerate(zip(requests.tolist(), seq_lens.tolist(), strict=True)):
        own = req_to_token[row, length : length + topk * steps].view(topk, steps)
        rows[i * topk : (i + 1) * topk, :length] = req_to_token[row, :length]
        rows[i * topk : (i + 1) * topk, length : length + steps] = own
    return rows


def fill_accept_out_cache_loc_cpu(accept_index: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Pack the slots of accepted nodes (flat indices, -1 for none) to the front of `out`."""
    flat = accept_index.flatten()
    kept = flat[flat >= 0].long()
    out[: len(kept)] = slots[kept].to(out.dtype)


def copy_all_layer_kv_cache_cpu(pointers: torch.Tensor, row_bytes: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor) -> None:
    """Copy rows `sources` to rows `targets` in every buffer, all read before any is written.

    Args:
        pointers, row_bytes: of every layer's key and value buffer, the address and the size of a row in bytes.
        targets, sources: rows.
    """
    for pointer, size in zip(pointers.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + source * size, size) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(pointer + target * size, row, size)
