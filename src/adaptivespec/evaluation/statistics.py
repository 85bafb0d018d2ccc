"""Intervals and tests for paired comparisons: throughputs, and answers that are right or wrong. SciPy is read when first needed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np

from ..errors import UserError

RESAMPLES = 2000


def throughput_ratio(
    tokens: Sequence[float],
    seconds: Sequence[float],
    base_tokens: Sequence[float],
    base_seconds: Sequence[float],
    seed: int = 0,
    fewest: int = 2,
    strata: Sequence[int] | None = None,
) -> tuple[float, float | None, float | None]:
    """Total tokens per total second over the baseline's, with a paired bootstrap over units: prompts, questions, repeats of a batch.

    Args:
        tokens, seconds: per unit, of the arm.
        base_tokens, base_seconds: of the baseline on the same units.
        seed: of the 2,000 resamples.
        fewest: units that an interval needs; one says nothing about others.
        strata: the group of each unit, which keep their sizes; None for one group.

    Returns:
        The ratio and its 95 % percentile interval, None and None with too few units.
    """
    columns = np.array([tokens, seconds, base_tokens, base_seconds], dtype=float)

    def ratio(totals: np.ndarray) -> np.ndarray:
        return np.asarray((totals[0] / totals[1]) / (totals[2] / totals[3]))

    count = columns.shape[1]
    interval = paired_bootstrap(columns, strata or [0] * count, ratio, seed) if count >= fewest else None
    return float(ratio(columns.sum(-1))), *(interval or (None, None))


def require_scipy() -> None:
    """Raise UserError where SciPy is not installed."""
    if importlib.util.find_spec("scipy") is None:
        raise UserError("intervals and tests need the library scipy: pip install 'adaptivespec[eval]'")


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a share, `right` of `count`; (0, 1) when nothing was counted."""
    if count == 0:
        return 0.0, 1.0
    from scipy.stats import binomtest

    interval = binomtest(right, count).proportion_ci(0.95, method="wilson")
    return float(interval.low), float(interval.high)


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p of McNemar's test: were the questions that just one of two arms got right split by a fair coin?

    Args:
        only_first, only_second: questions that the one arm got right and the other wrong.
    """
    if only_first + only_second == 0:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(only_first, only_first + only_second, 0.5).pvalue)


def tango(only_first: int, only_second: int, count: int) -> tuple[float, float]:
    """The 95 % score interval of the difference of two paired shares (Tango, Statistics in Medicine 17, 1998).

    Unlike a bootstrap it keeps its width where the two hardly ever differ: no discordant question among 200 leaves room for 1.9 points.

    Args:
        only_first, only_second: questions that the one arm got right and the other wrong.
        count: all questions, 1 at least.
    """
    from scipy.optimize import brentq

    estimate, limit = (only_first - only_second) / count, NormalDist().inv_cdf(0.975)

    def score(difference: float) -> float:
        """How many standard errors the estimate lies above a true difference, the discordance being the likeliest one then."""
        linear = (2 * count - only_first + only_second) * difference - only_first - only_second
        constant = -only_second * difference * (1 - difference)
        fewer = (math.sqrt(max(0.0, linear**2 - 8 * count * constant)) - linear) / (4 * count)
        variance = 2 * fewer + difference * (1 - difference)
        return float(count * (estimate - difference) / math.sqrt(count * variance)) if variance > 0 else 0.0

    edge = 1 - 1e-9
    low = brentq(lambda at: score(at) - limit, -edge, estimate) if estimate > -edge and score(-edge) > limit else -1.0
    high = brentq(lambda at: score(at) + limit, estimate, edge) if estimate < edge and score(edge) < -limit else 1.0
    return float(low), float(high)


def detectable_difference(count: int, discordant: int) -> float | None:
    """The smallest difference of two accuracies that McNemar's test at 5 % finds in 80 % of samples like this one.

    Solves sqrt(n) d = z_0.975 sqrt(q) + z_0.8 sqrt(q - d^2) for d (Connor, Biometrics 43, 1987), q being the discordant share that was
    seen. A difference can't be larger than the discordance that carries it, so where the seen one is too small, q = d is assumed: all
    discordant questions on one side. The exact test, being conservative, then finds it in 75 to 80 of 100 samples.

    Args:
        count: questions that both arms answered.
        discordant: those of which just one was right.

    Returns:
        A difference in (0, 1], None with fewer than six questions: even six to none is only just below 5 %.
    """
    normal = NormalDist()
    size, power, seen = normal.inv_cdf(0.975), normal.inv_cdf(0.8), discordant / count if count else 0.0

    def excess(difference: float) -> float:
        share = max(seen, difference)
        spread = math.sqrt(max(0.0, share - difference**2))
        return math.sqrt(count) * difference - size * math.sqrt(share) - power * spread

    if count < 6:
        return None
    from scipy.optimize import brentq

    return float(brentq(excess, 1e-9, 1.0))


def paired_bootstrap(
    columns: np.ndarray, strata: Sequence[int], statistic: Callable[[np.ndarray], np.ndarray], seed: int = 0
) -> tuple[float, float] | None:
    """A 95 % percentile interval of a function of totals, by resampling questions with all that the arms did on them.

    Args:
        columns: [k, n], k numbers of each of n questions.
        strata: [n], the group of each question; groups keep their sizes.
        statistic: of totals [k, ...] the values [...]; nan where it is undefined, inf where it has no bound.
        seed: of the 2,000 resamples.

    Returns:
        Lower and upper bound; None with fewer than two questions, where more than one resample in twenty is undefined, and without a bound.
    """
    groups, rng = np.asarray(strata), np.random.default_rng(seed)
    if len(groups) < 2:
        return None
    totals = np.zeros((len(columns), RESAMPLES))
    for group in np.unique(groups):
        own = columns[:, groups == group]
        count = own.shape[1]
        totals += own @ rng.multinomial(count, np.full(count, 1 / count), RESAMPLES).T  # how often each question is drawn
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(totals)
    values = values[~np.isnan(values)]
    if len(values) < 0.95 * RESAMPLES:
        return None
    low, high = np.percentile(values, [2.5, 97.5], method="nearest")  # between two values there may be inf on one side
    return (float(low), float(high)) if np.isfinite([low, high]).all() else None
