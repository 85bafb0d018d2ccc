"""Root mean square normalisation, in as few operations as torch has for it on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .native.ops import rms_norm, runs


class RMSNorm:
    """x / sqrt(mean(x * x) + eps) * weight over the last dimension, [..., H] -> [..., H].

    In bf16 on a CPU without our kernels, where torch composes it of fourteen small operations, it is half of a layer norm over [x, -x]:
    the mean of those is 0 and their variance is the mean square of x. fp32 keeps torch's own: there, even the rounding of a mean is seen.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight, self.eps, self.shape = weight, eps, (len(weight),)
        self.mirrored = weight.repeat(2) if weight.dtype == torch.bfloat16 and weight.device.type == "cpu" else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalised rows; where M > 1 rows were mirrored they are a view with gaps."""
        if x.dim() == 2 and runs(x):
            return rms_norm(x, self.weight, self.eps)
        if self.mirrored is None:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        both = F.layer_norm(torch.cat((x, -x), -1), self.mirrored.shape, self.mirrored, None, self.eps)
        return both[..., : len(self.weight)]
