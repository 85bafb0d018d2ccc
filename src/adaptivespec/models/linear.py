"""A linear layer whose bf16 weights are reordered once for oneDNN, which halves the time of small batches on a CPU."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F


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
    """y = x W^T + b for x [M, in], W [out, in]. Keeps only the packed weight where packing is possible."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and can_prepack()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1) if self.packed else weight
        self._run = torch.ops.mkldnn._linear_pointwise.default if self.packed else None
        self.num_bytes = weight.numel() * weight.element_size()

    def unpacked(self) -> torch.Tensor:
        """The weight [out, in] as it was given: the tensor itself, or a copy where it was packed."""
        return self.weight.to_dense() if self.packed else self.weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[M, in] -> [M, out]."""
        if self._run is not None:
            return self._run(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]
        return F.linear(x, self.weight, self.bias)
