"""Position-keyed noise: sampling becomes an argmax that depends on (seed, position) alone, and so do the coins of rules.

The same noise at the same position, whatever the batch, tree or step, makes strict speculative sampling equal plain seeded
sampling token for token: argmax(z + T * g) is a sample of softmax(z / T) (the Gumbel-max trick).
"""

from __future__ import annotations

import functools

import torch


def _signed(value: int, bits: int) -> int:
    """An unsigned constant as torch's signed integers of `bits` bits hold it."""
    return value - (1 << bits) if value >= 1 << (bits - 1) else value


def _xor_shift(x: torch.Tensor, shift: int, bits: int) -> torch.Tensor:
    """x ^= x >> shift in place; torch shifts arithmetically, so the sign's copies are masked away."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (bits - shift)) - 1))


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function on int64 (wrapping arithmetic); Steele, Lea and Flood 2014."""
    x = x + _signed(0x9E3779B97F4A7C15, 64)
    x = _xor_shift(x, 30, 64) * _signed(0xBF58476D1CE4E5B9, 64)
    x = _xor_shift(x, 27, 64) * _signed(0x94D049BB133111EB, 64)
    return _xor_shift(x, 31, 64)


def derive(seeds: torch.Tensor, positions: torch.Tensor | int) -> torch.Tensor:
    """Int64 of the seeds' shape: a new 64-bit seed from each int64 seed and position."""
    return _splitmix64(_splitmix64(seeds) ^ positions)


def _keys(seeds: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two int32 keys per row from its 64-bit seed and its position."""
    mixed = derive(seeds, positions)
    return (mixed >> 32).to(torch.int32), (mixed << 32 >> 32).to(torch.int32)


@functools.lru_cache(maxsize=8)
def _token_codes(vocab_size: int, device: torch.device) -> torch.Tensor:
    """Int32 [V]: every token id times an odd constant, so that neighbours differ in many bits."""
    return torch.arange(vocab_size, dtype=torch.int32, device=device).mul_(_signed(0x9E3779B1, 32))


def _hash(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Int32 [R, V] in 0..2^31 - 1: Murmur3's finaliser over the token codes, keyed at two places; in place, as the rows are wide."""
    high, low = _keys(seeds, positions)
    x = _token_codes(vocab_size, seeds.device) ^ high[:, None]
    x = _xor_shift(x, 16, 32).mul_(_signed(0x85EBCA6B, 32))
    x = _xor_shift(x, 13, 32).add_(low[:, None]).mul_(_signed(0xC2B2AE35, 32))
    return _xor_shift(x, 16, 32).bitwise_and_(0x7FFFFFFF)


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise for rows of logits.

    Args:
        seeds: int64 [R], the request's seed.
        positions: int64 [R], the absolute position of the token that will be chosen.
        vocab_size: V.

    Returns:
        fp32 [R, V], finite, between about -2.9 and 22.
    """
    x = _hash(seeds, positions, vocab_size)
    # u in (0, 1); -log1p(-u) is exponential and keeps full precision at small u, the side where large noise comes from.
    minus_u = x.float().add_(0.5).mul_(-(2.0**-31)).clamp_(min=-(1 - 2.0**-24))
    return minus_u.log1p_().neg_().log_().neg_()


_COINS = 0x636F696E  # a stream of its own: the seeds that `gumbel` splits into keys are hashed once more with it


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One uniform per (seed, position), independent of the Gumbel noise there.

    Args:
        seeds: int64, the request's seed; any shape that broadcasts with positions.
        positions: int64, the absolute position of the token that will be chosen.

    Returns:
        fp32 in the open interval (0, 1), multiples of 2^-24.
    """
    bits = derive(derive(seeds, positions), _COINS) >> 41 & ((1 << 23) - 1)
    return bits.float().add_(0.5).mul_(2.0**-23)  # 23 bits and a half: exact in fp32, so neither 0 nor 1
