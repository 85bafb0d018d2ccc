"""The compiled kernels on tensors. They read memory as they are told, so rows are checked here; weights are where they are packed."""

from __future__ import annotations

import ctypes

import torch

from . import pages
from .build import library

PANEL = 48  # outputs side by side, as in linear.c


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] -> [ceil(out / 48), in / 2, 48, 2], the order in which the kernel reads."""
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


def as_rows(x: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """x [rows, width] with neighbouring columns; rows may have gaps. Raises ValueError: not bf16 [rows, width]."""
    if x.dtype != torch.bfloat16 or x.shape != (rows, width):
        raise ValueError(f"expected bf16 [{rows}, {width}], not {x.dtype} {list(x.shape)}")
    return x if x.stride(1) == 1 else x.contiguous()


def kernels() -> ctypes.CDLL:
    """The library, where `runs` said that it is there."""
    loaded = library()
    assert loaded is not None
    return loaded


def linear(x: torch.Tensor, packed: torch.Tensor, out: int, bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
    """x [M, in] (rows may have gaps), packed weight, bias [out], residual [M, out] -> [M, out]; one rounding, at the end.

    Raises:
        ValueError: x or residual of another type or shape.
    """
    rows, inner = len(x), 2 * packed.shape[1]
    x = as_rows(x, rows, inner)
    residual = None if residual is None else as_rows(residual, rows, out)
    y = x.new_empty(rows, out)
    kernels().linear(
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
    x = as_rows(x, rows, width)
    if weight.dtype != torch.bfloat16 or not weight.is_contiguous():
        raise ValueError(f"expected a bf16 weight, not {weight.dtype}")
    y = x.new_empty(rows, width)
    kernels().rms_norm(x.data_ptr(), x.stride(0), weight.data_ptr(), eps, y.data_ptr(), rows, width, torch.get_num_threads())
    return y
