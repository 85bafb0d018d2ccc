"""A static key/value cache of slots, one per running request, and the attention over it for a ragged block of new rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F

from .native.layers import NativeView


@dataclass(frozen=True)
class Block:
    """Where the new rows of one forward go, and what they see. Rows of all requests are flattened: M = sum(counts).

    Attributes:
        slots: cache slot of each request, [B] host ints.
        bases: cache rows before bases[b] are visible to every new row of request b.
        starts: cache row where each request's first new row is written, [B] host ints.
        counts: new rows of each request, [B] host ints.
        visible: bool [B, >= max(counts), W]: which of the W cache rows from bases[b] on row i of request b sees;
            None for one new row per request that sees all rows up to and including itself.
    """

    slots: list[int]
    bases: list[int]
    starts: list[int]
    counts: list[int]
    visible: torch.Tensor | None

    @cached_property
    def end(self) -> int:
        """Longest live length after the write; attention reads no further."""
        return max(start + count for start, count in zip(self.starts, self.counts, strict=True))


@dataclass(frozen=True)
class Padded:
    """A block as torch's attention takes it: every request has max(counts) rows, those it lacks repeat its row 0.

    Attributes:
        slots: as in `Block`; idle slots with no rows may stand between them.
        mask: additive [B, 1, 1, max(counts), end] in the model's dtype, or None when every row sees everything up to end.
        slot_rows, cache_rows: [M] write addresses; pad_index [B, max(counts)] rows of the flattened input; unpad_index [M]
            positions in the padded [B * max(counts)] layout. None for one request.
    """

    slots: list[int]
    mask: torch.Tensor | None
    slot_rows: torch.Tensor | None = None
    cache_rows: torch.Tensor | None = None
    pad_index: torch.Tensor | None = None
    unpad_index: torch.Tensor | None = None
    _folded: dict[int, torch.Tensor] = field(default_factory=dict)

    def folded_mask(self, group: int) -> torch.Tensor | None:
        """The mask repeated for `group` query heads folded into rows, [B, 1, group * max(counts), end]; made once per forward."""
        if self.mask is None:
            return None
        if group not in self._folded:
            batch, _, _, width, end = self.mask.shape
            self._folded[group] = self.mask.expand(batch, 1, group, width, end).reshape(batch, 1, group * width, end)
        return self._folded[group]


def pad(block: Block, dtype: torch.dtype, device: torch.device) -> Padded:
    """Address the rows of a block and build its mask in `dtype` on `device`."""
    slots, bases, starts, counts, visible, end = block.slots, block.bases, block.starts, block.counts, block.visible, block.end
    batch, width = len(slots), max(counts)
    if batch == 1:
        if visible is None:
            return Padded(slots, None)
        mask = torch.zeros(1, 1, 1, width, end, dtype=dtype, device=device)
        mask[0, 0, 0, :, bases[0] :].masked_fill_(~visible[0, :width, : end - bases[0]], float("-inf"))
        return Padded(slots, mask)
    span = slots[-1] - slots[0] + 1
    if batch < span <= 2 * batch and slots == sorted(slots):
        # Idle slots between busy ones join as rows that nobody reads: a view of neighbours instead of a copy of every layer's cache.
        lane_of = {slot: i for i, slot in enumerate(slots)}
        lanes = [lane_of.get(slot) for slot in range(slots[0], slots[-1] + 1)]
        slots = list(range(slots[0], slots[-1] + 1))
        bases, starts, counts = ([0 if lane is None else values[lane] for lane in lanes] for values in (bases, starts, counts))
        if visible is not None:
            visible = visible[[lane or 0 for lane in lanes]]
        batch = span
    columns = torch.arange(end, device=device)
    count = torch.tensor(counts, device=device)[:, None]
    row = torch.arange(width, device=device)[None]
    real = row < count
    # What is behind the block's first row is seen by every new row; only the block itself differs from row to row.
    if visible is None:
        mask = _hidden(columns > torch.tensor(starts, device=device)[:, None, None], dtype).expand(batch, width, end).contiguous()
    else:
        base = torch.tensor(bases, device=device)[:, None, None]
        inside = visible.shape[2]
        mask = torch.zeros(batch, width, end + inside, dtype=dtype, device=device)  # room for the block of the longest request
        mask[:, :, :end].masked_fill_(columns >= base, float("-inf"))
        place = (base + torch.arange(inside, device=device)).expand(batch, width, inside)
        mask.scatter_(2, place, _hidden(~visible[:, :width], dtype))
        mask = mask[:, :, :end]
    # A padded row must see something, or its softmax is NaN and poisons nothing but time spent looking for it.
    mask[:, :, 0].masked_fill_(~real, 0.0)
    mask = mask[:, None, None]
    first = count.cumsum(0) - count
    pad_index = torch.where(real, first + row, first)
    return Padded(
        slots,
        mask,
        slot_rows=torch.tensor(slots, device=device)[:, None].expand(batch, width)[real],
        cache_rows=(torch.tensor(starts, device=device)[:, None] + row)[real],
        pad_index=pad_index,
        unpad_index=real.flatten().nonzero()[:, 0],
    )


def _hidden(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """-inf where `hidden` (bool), else 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that cost no memory until written: numpy asks the system for untouched pages where torch.zeros writes them all.

    They must be zeros: a masked row of not-a-numbers would still poison attention.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


class KVCache:
    """Keys and values of every layer: data [layers, slots, 2 * kv_heads, length, head_dim], keys first.

    Args:
        num_layers, num_slots, num_kv_heads, length, head_dim: of `data`.
        dtype, device: of `data`.
        native_group: query heads of each key head where the attention over it is the compiled one; 0 where it is torch's.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        native_group: int = 0,
    ) -> None:
        self.data = _lazy_zeros((num_layers, num_slots, 2 * num_kv_heads, length, head_dim), dtype, device)
        self.num_kv_heads, self.length, self.native_group = num_kv_heads, length, native_group

    def view(self, block: Block, angles: tuple[torch.Tensor, torch.Tensor]) -> CacheView | NativeView:
        """What one forward writes and reads, made once for all layers; `angles` rotate the new rows."""
        return NativeView(self, block, angles) if self.native_group else CacheView(self, block, angles)

    def compact(self, slot: int, start: int, offsets: list[int]) -> None:
        """Move rows start + offsets[i] to start + i, for increasing offsets; rows already in place are not touched."""
        kept = next((i for i, offset in enumerate(offsets) if offset != i), len(offsets))
        if kept == len(offsets):
            return
        moved = self.data[:, slot, :, [start + offset for offset in offsets[kept:]]]
        self.data[:, slot, :, start + kept : start + len(offsets)] = moved


class CacheView:
    """A block's part of a cache: where each layer's new rows go, and the keys and values that they see.

    Indexing a tensor costs microseconds, so the views of all layers are cut at once.
    """

    def __init__(self, cache: KVCache, block: Block, angles: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.angles = angles
        self.padded, self.end, self.kv_heads = pad(block, cache.data.dtype, cache.data.device), block.end, cache.num_kv_heads
        slots = self.padded.slots
        first, last = slots[0], slots[-1]
        if self.padded.pad_index is None:
            start = block.starts[0]
            self.written = cache.data[:, first, :, start : start + block.counts[0]].unbind()
        else:
            self.written = cache.data.unbind()
        self.neighbours = slots == list(range(first, last + 1))  # in order: views instead of copies
        if self.neighbours:
            live = cache.data[:, first : last + 1, :, : self.end]
            self.keys, self.values = live[:, :, : self.kv_heads].unbind(), live[:, :, self.kv_heads :].unbind()

    def attend(self, layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        """Write a layer's new rows, then attend.

        Args:
            layer: which layer's cache.
            queries: [M, heads, head_dim], rotated.
            keys_values: [M, 2 * kv_heads, head_dim], keys rotated.

        Returns:
            [M, heads * head_dim].
        """
        padded, kv_heads, written = self.padded, self.kv_heads, self.written[layer]
        rows, heads, dim = queries.shape
        batch, group = len(padded.slots), heads // kv_heads
        if padded.pad_index is None:
            width = rows
            written.copy_(keys_values.transpose(0, 1))
        else:
            width = padded.pad_index.shape[1]
            written[padded.slot_rows, :, padded.cache_rows] = keys_values
        full = rows == batch * width  # no request has fewer rows than another: nothing to pad
        rows_of_all = queries if full else queries[padded.pad_index]
        if self.neighbours:
            keys, values = self.keys[layer], self.values[layer]
        else:
            live = written[padded.slots, :, : self.end]
            keys, values = live[:, :kv_heads], live[:, kv_heads:]
        # The heads that share a key head are folded into the rows, so keys are read once and never repeated.
        if width == 1:
            q = rows_of_all.view(batch, kv_heads, group, dim)
        else:
            q = rows_of_all.view(batch, width, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * width, dim)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=padded.folded_mask(group))
        if width > 1:
            out = out.view(batch, kv_heads, group, width, dim).permute(0, 3, 1, 2, 4)
        out = out.reshape(batch * width, heads * dim)
        return out if full else out[padded.unpad_index]
