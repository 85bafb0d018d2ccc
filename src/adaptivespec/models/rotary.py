"""Rotary position embedding with Llama 3.1's frequency scaling (the half-rotation layout of Hugging Face checkpoints)."""

from __future__ import annotations

import math

import torch

from .architecture import ModelConfig


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """[head_dim / 2] fp32 rotary frequencies after scaling."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    freq = 1.0 / (config.rope_theta**exponent)
    if config.rope_factors is not None:
        return freq / torch.tensor(config.rope_factors, dtype=torch.float32)
    if (scaling := config.rope_scaling) is None:
        return freq
    # Long wavelengths are stretched by `factor`, short ones kept, those between blended (Llama 3.1's reference code).
    wavelength = 2 * math.pi / freq
    smooth = scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor
    smooth = (smooth / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return (1 - smooth) * freq / scaling.factor + smooth * freq


class Rotary:
    """A table of cosine and signed sine, grown to the longest context asked for."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.freq = inverse_frequencies(config)
        self.table = torch.empty(0)  # [positions, 2, 1, head_dim]

    def grow(self, length: int) -> None:
        """Make positions 0 .. length - 1 available."""
        if length <= len(self.table):
            return
        angle = torch.outer(torch.arange(length, dtype=torch.float32), self.freq)
        cos, sin = angle.cos(), angle.sin()
        # The first half of the rotated vector is minus the second half: the sign lives in the table, so rotating is one roll.
        both = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
        self.table = both[:, :, None].to(self.device, self.dtype)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [M] -> cosine and signed sine, both [M, 1, head_dim]."""
        cos, sin = self.table[positions].unbind(1)
        return cos, sin


def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, heads, head_dim] rotated by its positions' angles: a new tensor, or `out`, which may be x itself."""
    cos, sin = angles
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, out=out)
