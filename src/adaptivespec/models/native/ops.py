"""The compiled kernels on tensors. They read memory as they are told, so whatever they are given is checked here."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from . import pages
from .build import library

if TYPE_CHECKING:
    from ..kv_cache import Block, KVCache
    from ..norm import RMSNorm

PANEL = 64  # outputs side by side, as in linear.c
MOST_HEADS = 64  # that share a key head, as in attention.c


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] -> [ceil(out / 64), in / 2, 64, 2], the order in which the kernel reads."""
    out, inner = weight.shape
    if out % PANEL:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, -out % PANEL))
    panels = weight.reshape(-1, PANEL, inner // 2, 2).transpose(1, 2)
    return pages.weights.empty(tuple(panels.shape), weight.dtype).copy_(panels)


def unpack(packed: torch.Tensor, out: int) -> torch.Tensor:
    """The inverse of `pack`: a copy [out, in]."""
    return packed.transpose(1, 2).flatten(2).flatten(0, 1)[:out]


def runs(tensor: torch.Tensor) -> bool:
    """Whether the kernels are there for tensors of this type and device."""
    return tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and library() is not None


def fits(weight: torch.Tensor) -> bool:
    """Whether `linear` can take this weight: pairs along the inner dimension."""
    return runs(weight) and weight.shape[1] % 2 == 0


def attends(cache: torch.Tensor, heads_per_key: int) -> bool:
    """Whether `rotate` and `attend` can work on this cache [..., head_dim]."""
    return runs(cache) and cache.shape[-1] % 32 == 0 and heads_per_key <= MOST_HEADS


def _rows(x: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """x with neighbouring columns; rows may have gaps. Raises ValueError: not bf16 [rows, width]."""
    if x.dtype != torch.bfloat16 or x.shape != (rows, width):
        raise ValueError(f"expected bf16 [{rows}, {width}], not {x.dtype} {list(x.shape)}")
    return x if x.stride(1) == 1 else x.contiguous()


def _kernels() -> ctypes.CDLL:
    kernels = library()
    assert kernels is not None
    return kernels


def linear(x: torch.Tensor, packed: torch.Tensor, out: int, bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
    """x [M, in] (rows may have gaps), packed weight, bias [out], residual [M, out] -> [M, out]; one rounding, at the end.

    Raises:
        ValueError: x or residual of another type or shape.
    """
    rows, inner = len(x), 2 * packed.shape[1]
    x = _rows(x, rows, inner)
    residual = None if residual is None else _rows(residual, rows, out)
    y = x.new_empty(rows, out)
    _kernels().linear(
        x.data_ptr(),
        x.stride(0),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        y.data_ptr(),
        rows,
        out,
        inner,
        torch.get_num_threads(),
    )
    return y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [M, H] (rows may have gaps), weight [H] -> [M, H]; one rounding. Raises ValueError: x of another type or shape."""
    rows, width = len(x), len(weight)
    x = _rows(x, rows, width)
    y = x.new_empty(rows, width)
    _kernels().rms_norm(x.data_ptr(), x.stride(0), weight.data_ptr(), eps, y.data_ptr(), rows, width, torch.get_num_threads())
    return y


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """gate and up side by side [M, 2 I] -> silu(gate) * up [M, I]; one rounding. Raises ValueError: of another type."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    gate_up = _rows(gate_up, rows, 2 * width).contiguous()
    y = gate_up.new_empty(rows, width)
    _kernels().silu_multiply(gate_up.data_ptr(), y.data_ptr(), rows, width, torch.get_num_threads())
    return y


class NativeView:
    """A block's part of a cache, for the kernels: as `CacheView`, made once for all layers of a forward.

    Raises:
        ValueError: a block that does not fit the cache, or whose mask does not fit the block.
    """

    def __init__(self, cache: KVCache, block: Block) -> None:
        data = cache.data
        _, slots, _, length, self.dim = data.shape
        self.layers, self.kv_heads, self.rows = data, cache.num_kv_heads, sum(block.counts)
        self.slot_stride, self.head_stride = data.stride(1), data.stride(2)
        flat: list[int] = []
        for slot, base, start, count in zip(block.slots, block.bases, block.starts, block.counts, strict=True):
            if not (0 <= slot < slots and 0 <= base <= start and count >= 0 and start + count <= length):
                raise ValueError(f"{count} rows from {start} behind {base} in slot {slot} leave a cache of {slots} slots of {length} rows")
            flat += (slot, base, start, count)
        self.batch, self.requests = len(block.slots), (ctypes.c_long * len(flat))(*flat)
        self.visible, self.width, strides = None, 0, (0, 0)
        if block.visible is not None:
            visible = block.visible if block.visible.stride(2) == 1 else block.visible.contiguous()
            # Columns beyond what the longest request has written are nobody's.
            width = min(visible.shape[2], max(s + n - b for b, s, n in zip(block.bases, block.starts, block.counts, strict=True)))
            if visible.dtype != torch.bool or visible.shape[0] != self.batch or visible.shape[1] < max(block.counts):
                raise ValueError(f"a mask of {visible.dtype} {list(visible.shape)} for requests of {block.counts} rows")
            self.visible, self.width, strides = visible, width, (visible.stride(0), visible.stride(1))
        self.strides, self.end = strides, block.end
        self.threads = torch.get_num_threads()
        kernels = _kernels()
        self._rotate, self._attend = kernels.rotate, kernels.attend
        self.scratch = torch.empty(kernels.attention_scratch(self.end, self.width, self.dim, self.threads), dtype=torch.float32)

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[RMSNorm, RMSNorm] | None,
    ) -> torch.Tensor:
        """Normalise and rotate, write the layer's new rows, then attend.

        Args:
            layer: which layer's cache.
            qkv: [M, (heads + 2 * kv_heads) * head_dim]; its queries are overwritten.
            angles: cosine and signed sine, [M, 1, head_dim] each.
            norms: of queries and keys, for Qwen3.

        Returns:
            [M, heads * head_dim].

        Raises:
            ValueError: rows or angles of another number or type.
        """
        cosine, sine = angles
        dim, kv_heads, total = self.dim, self.kv_heads, qkv.shape[1]
        heads = total // dim - 2 * kv_heads
        if qkv.dtype != torch.bfloat16 or len(qkv) != self.rows or not qkv.is_contiguous() or total % dim or heads % kv_heads:
            raise ValueError(f"expected bf16 [{self.rows}, heads of {dim}], not {qkv.dtype} {list(qkv.shape)}")
        if cosine.dtype != torch.bfloat16 or len(cosine) != self.rows or cosine.shape[-1] != dim or cosine.stride() != sine.stride():
            raise ValueError(f"expected angles of bf16 [{self.rows}, 1, {dim}], not {cosine.dtype} {list(cosine.shape)}")
        cache = self.layers[layer].data_ptr()
        self._rotate(
            qkv.data_ptr(),
            cosine.data_ptr(),
            sine.data_ptr(),
            cosine.stride(0),
            None if norms is None else norms[0].weight.data_ptr(),
            None if norms is None else norms[1].weight.data_ptr(),
            0.0 if norms is None else norms[0].eps,
            cache,
            self.slot_stride,
            self.head_stride,
            self.requests,
            self.batch,
            heads,
            kv_heads,
            dim,
        )
        out = qkv.new_empty(self.rows, heads * dim)
        self._attend(
            qkv.data_ptr(),
            total,
            cache,
            self.slot_stride,
            self.head_stride,
            kv_heads * self.head_stride,
            self.requests,
            self.batch,
            None if self.visible is None else self.visible.data_ptr(),
            *self.strides,
            self.width,
            dim**-0.5,
            self.scratch.data_ptr(),
            self.end,
            out.data_ptr(),
            heads,
            kv_heads,
            dim,
            self.threads,
        )
        return out
