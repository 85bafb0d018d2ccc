"""Intervals for ratios of throughputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def throughput_ratio(
    tokens: Sequence[float],
    seconds: Sequence[float],
    base_tokens: Sequence[float],
    base_seconds: Sequence[float],
    seed: int = 0,
    fewest: int = 2,
) -> tuple[float, float | None, float | None]:
    """Total tokens per total second over the baseline's, with a paired bootstrap over units: prompts, or repeats of a batch.

    Args:
        tokens, seconds: per unit, of the arm.
        base_tokens, base_seconds: of the baseline on the same units.
        seed: of the 2,000 resamples.
        fewest: units that an interval needs; one says nothing about others.

    Returns:
        The ratio and its 95 % percentile interval, None and None with too few units.
    """
    columns = np.array([tokens, seconds, base_tokens, base_seconds], dtype=float)

    def ratio(totals: np.ndarray) -> np.ndarray:
        return np.asarray((totals[0] / totals[1]) / (totals[2] / totals[3]))

    count = columns.shape[1]
    if count < fewest:
        return float(ratio(columns.sum(-1))), None, None
    picks = np.random.default_rng(seed).integers(0, count, size=(2000, count))
    resampled = ratio(columns[:, picks].sum(-1))
    low, high = np.percentile(resampled, [2.5, 97.5])
    return float(ratio(columns.sum(-1))), float(low), float(high)
