"""A linear layer whose bf16 weights are reordered once: for the kernel of native/linear.c where it runs, else for oneDNN."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from .native import ops

DOUBLED_BYTES = 4 << 20
"""Two rows meet a weight of more bytes twice, as four: oneDNN's kernel for two rows reads slower, by a fifth to a third on a Zen 4."""


@functools.cache
def can_prepack() -> bool:
    """Whether this torch build and CPU offer oneDNN's prepacked bf16 linear; probed by running one."""
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(32, 32, dtype=torch.bfloat16), 1)
        torch.ops.mkldnn._linear_pointwise(torch.zeros(1, 32, dtype=torch.bfloat16), weight, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Linear:
    """y = x W^T + b for x [M, in], W [out, in]. Keeps only the packed weight where packing is possible.

    Raises:
        ValueError: a bias of another type or shape.

    Attributes:
        kernel: "native" (ours), "onednn" or "torch".
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype or not bias.is_contiguous()):
            raise ValueError(f"a bias of {bias.dtype} {list(bias.shape)} for a weight of {weight.dtype} {list(weight.shape)}")
        self.bias = bias
        self.num_bytes = weight.numel() * weight.element_size()
        self.kernel, self.weight = "torch", weight
        if ops.fits(weight):
            self.kernel, self.weight = "native", ops.pack(weight)
        elif weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and can_prepack():
            self.kernel, self.weight = "onednn", torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
        self.doubles = self.kernel == "onednn" and self.num_bytes > DOUBLED_BYTES

    @property
    def packed(self) -> bool:
        """Whether the weight is a copy in another order."""
        return self.kernel != "torch"

    def unpacked(self) -> torch.Tensor:
        """The weight [out, in] as it was given: the tensor itself, or a copy where it was packed."""
        if self.kernel == "native":
            return ops.unpack(self.weight, self.out_features)
        return self.weight.to_dense() if self.packed else self.weight

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, in] -> [M, out], added to `residual` [M, out] where there is one."""
        if self.kernel == "native":
            return ops.linear(x, self.weight, self.out_features, self.bias, residual)
        if self.kernel == "torch":
            y = F.linear(x, self.weight, self.bias)
            return y if residual is None else residual + y
        if self.doubles and len(x) == 2:
            return self._run(x.repeat(2, 1), None if residual is None else residual.repeat(2, 1))[:2]
        return self._run(x, residual)

    def _run(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        run = torch.ops.mkldnn._linear_pointwise
        if residual is None:
            return run.default(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]
        return run.binary(x, residual, self.weight, self.bias, "add")  # type: ignore[no-any-return]
