"""Attention, MLP and whole layers as single calls of the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .ops import as_rows, kernels

if TYPE_CHECKING:
    from ..decoder import MLP, Attention, Layer
    from ..kv_cache import Block, KVCache

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long
MOST_HEADS = 64  # that share a key head, as in attention.c


class _Request(ctypes.Structure):
    _fields_ = [(name, _LONG) for name in ("slot", "base", "start", "count")]


class _View(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("cache", "requests", "visible", "cosine", "sine", "scratch", "buffer")),
        *((name, _LONG) for name in ("layer_stride", "slot_stride", "head_stride", "kv_heads", "dim", "batch", "rows")),
        *((name, _LONG) for name in ("visible_request", "visible_row", "width", "end", "angle_stride")),
        ("threads", ctypes.c_int),
    ]


class _Attention(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("qkv", "bias", "out", "q_norm", "k_norm")),
        *((name, _LONG) for name in ("inner", "hidden", "heads", "kv_heads", "dim")),
        ("eps", ctypes.c_float),
    ]


class _MLP(ctypes.Structure):
    _fields_ = [("gate_up", _POINTER), ("down", _POINTER), ("hidden", _LONG), ("inner", _LONG)]


class _Layer(ctypes.Structure):
    _fields_ = [("attention", _Attention), ("mlp", _MLP), ("input_norm", _POINTER), ("post_norm", _POINTER)]


def native_attention(module: Attention) -> _Attention | None:
    """Where an attention's weights are, or None if the kernels cannot take it. The module keeps the weights alive."""
    qkv, out = module.qkv, module.out
    if qkv.kernel != "native" or out.kernel != "native" or module.dim % 32 or module.heads > MOST_HEADS * module.kv_heads:
        return None
    q_norm, k_norm = module.q_norm, module.k_norm
    return _Attention(
        qkv.weight.data_ptr(),
        None if qkv.bias is None else qkv.bias.data_ptr(),
        out.weight.data_ptr(),
        None if q_norm is None else q_norm.weight.data_ptr(),
        None if k_norm is None else k_norm.weight.data_ptr(),
        qkv.in_features,
        out.out_features,
        module.heads,
        module.kv_heads,
        module.dim,
        module.eps,
    )


def native_mlp(module: MLP) -> _MLP | None:
    """Where an MLP's weights are, or None if the kernels cannot take it. The module keeps the weights alive."""
    gate_up, down = module.gate_up, module.down
    if gate_up.kernel != "native" or down.kernel != "native":
        return None
    return _MLP(gate_up.weight.data_ptr(), down.weight.data_ptr(), gate_up.in_features, down.in_features)


def native_layers(layers: Sequence[Layer]) -> ctypes.Array[_Layer] | None:
    """Where the weights of a decoder's layers are, or None if the kernels cannot take one of them."""
    parts = [(layer.attention.native, layer.mlp.native, layer) for layer in layers]
    if any(attention is None or mlp is None for attention, mlp, _ in parts):
        return None
    return (_Layer * len(parts))(*(_Layer(a, m, x.input_norm.weight.data_ptr(), x.post_norm.weight.data_ptr()) for a, m, x in parts))


def run_mlp(mlp: _MLP, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """x, residual [M, H] -> residual + MLP [M, H]. Raises ValueError: of another type or shape."""
    rows = len(x)
    x, residual = as_rows(x, rows, mlp.hidden).contiguous(), as_rows(residual, rows, mlp.hidden).contiguous()
    y, buffer = torch.empty_like(x), x.new_empty(3 * rows * mlp.inner)
    kernels().run_mlp(ctypes.byref(mlp), rows, x.data_ptr(), residual.data_ptr(), y.data_ptr(), buffer.data_ptr(), torch.get_num_threads())
    return y


class NativeView:
    """A block's part of a cache, for the kernels: as `CacheView`, made once for all layers of a forward.

    Args:
        cache: whose rows are written and read.
        block: the new rows.
        angles: cosine and signed sine of each, [M, 1, head_dim] both.

    Raises:
        ValueError: a block that does not fit the cache, or a mask or angles that do not fit the block.
    """

    def __init__(self, cache: KVCache, block: Block, angles: tuple[torch.Tensor, torch.Tensor]) -> None:
        data, (cosine, sine) = cache.data, angles
        layers, slots, _, length, dim = data.shape
        rows, batch = sum(block.counts), len(block.slots)
        if data.dtype != torch.bfloat16 or not data.is_contiguous() or dim % 32 or not 0 < cache.native_group <= MOST_HEADS:
            raise ValueError(f"a cache of {data.dtype} {list(data.shape)} is not one that the kernels can work on")
        requests = (_Request * batch)()
        for i, (slot, base, start, count) in enumerate(zip(block.slots, block.bases, block.starts, block.counts, strict=True)):
            if not (0 <= slot < slots and 0 <= base <= start and count >= 0 and start + count <= length):
                raise ValueError(f"{count} rows from {start} behind {base} in slot {slot} leave a cache of {slots} slots of {length} rows")
            requests[i] = _Request(slot, base, start, count)
        visible, width = block.visible, 0
        if visible is not None:
            if visible.dtype != torch.bool or visible.shape[0] != batch or visible.shape[1] < max(block.counts):
                raise ValueError(f"a mask of {visible.dtype} {list(visible.shape)} for requests of {block.counts} rows")
            visible = visible if visible.stride(2) == 1 else visible.contiguous()
            # Columns beyond what the longest request has written are nobody's.
            width = min(visible.shape[2], max(s + n - b for b, s, n in zip(block.bases, block.starts, block.counts, strict=True)))
        for table in (cosine, sine):
            if table.dtype != torch.bfloat16 or table.shape != (rows, 1, dim) or table.stride() != cosine.stride() or table.stride(2) != 1:
                raise ValueError(f"expected angles of bf16 [{rows}, 1, {dim}], not {table.dtype} {list(table.shape)}")
        self.kernels, self.group, threads = kernels(), cache.native_group, torch.get_num_threads()
        room = self.kernels.attention_scratch(block.end, width, dim, self.group, threads)
        scratch = torch.empty(room, dtype=torch.float32, device="cpu")
        self.alive = (data, requests, visible, cosine, sine, scratch)  # whatever the view points to
        self.rows, self.layers, self.buffer = rows, layers, data.new_empty(0)
        self.view = _View(
            data.data_ptr(),
            ctypes.addressof(requests),
            None if visible is None else visible.data_ptr(),
            cosine.data_ptr(),
            sine.data_ptr(),
            scratch.data_ptr(),
            None,
            data.stride(0),
            data.stride(1),
            data.stride(2),
            cache.num_kv_heads,
            dim,
            batch,
            rows,
            0 if visible is None else visible.stride(0),
            0 if visible is None else visible.stride(1),
            width,
            block.end,
            cosine.stride(0),
            threads,
        )

    def _reserve(self, attention: _Attention, mlp: _MLP | None) -> None:
        """Make room for what lies between the linears of a layer. Raises ValueError: layers of another model than the cache's."""
        if (attention.heads, attention.kv_heads, attention.dim) != (self.view.kv_heads * self.group, self.view.kv_heads, self.view.dim):
            raise ValueError(f"a cache of {self.view.kv_heads} key heads of {self.view.dim} is not this model's")
        wide = 2 * (attention.heads + self.view.kv_heads) * self.view.dim
        needed = self.rows * max(wide, 3 * mlp.inner if mlp is not None else 0)
        if len(self.buffer) < needed:
            self.buffer = self.buffer.new_empty(needed)
            self.view.buffer = self.buffer.data_ptr()

    def attention(self, layer: int, weights: _Attention, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x [M, H or 2H], residual [M, H] -> residual + attention [M, H]; writes a layer's new keys and values into the cache.

        Raises:
            ValueError: rows of another number, width or type, or no such layer.
        """
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer {layer} of {self.layers}")
        x, residual = as_rows(x, self.rows, weights.inner), as_rows(residual, self.rows, weights.hidden)
        y = residual.new_empty(self.rows, weights.hidden)
        self._reserve(weights, None)
        self.kernels.run_attention(
            ctypes.byref(weights),
            ctypes.byref(self.view),
            layer,
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            residual.stride(0),
            y.data_ptr(),
        )
        return y

    def run(self, layers: ctypes.Array[_Layer], x: torch.Tensor, taken: Sequence[int]) -> torch.Tensor | None:
        """All layers, in place on x [M, H].

        Args:
            layers: from `native_layers`.
            x: contiguous.
            taken: layers whose inputs are wanted.

        Returns:
            Those inputs side by side, [M, len(taken) * H]; None without.

        Raises:
            ValueError: x of another shape or type, not contiguous, or no such layer.
        """
        hidden = layers[0].mlp.hidden
        as_rows(x, self.rows, hidden)
        if not x.is_contiguous() or len(layers) != self.layers:
            raise ValueError(f"expected contiguous rows of {hidden} and {self.layers} layers")
        if any(not 0 <= layer < self.layers for layer in taken):
            raise ValueError(f"features of layers {list(taken)}, of {self.layers}")
        features = x.new_empty(self.rows, len(taken) * hidden) if taken else None
        normed = torch.empty_like(x)
        self._reserve(layers[0].attention, layers[0].mlp)
        self.kernels.run_layers(
            layers,
            len(layers),
            ctypes.byref(self.view),
            x.data_ptr(),
            normed.data_ptr(),
            (_LONG * len(taken))(*taken),
            len(taken),
            None if features is None else features.data_ptr(),
        )
        return features
