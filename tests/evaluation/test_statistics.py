"""The bootstrap of throughput ratios."""

from __future__ import annotations

import numpy as np
import pytest

from adaptivespec.config import SpeculativeConfig
from adaptivespec.evaluation.arms import parse_arm, parse_arms
from adaptivespec.evaluation.statistics import throughput_ratio


def test_a_constant_ratio_has_no_spread() -> None:
    seconds = [1.0, 2.0, 5.0]
    assert throughput_ratio([10, 20, 50], seconds, [5, 10, 25], seconds) == pytest.approx((2.0, 2.0, 2.0))


def test_one_prompt_has_no_interval() -> None:
    assert throughput_ratio([10], [1.0], [5], [1.0]) == (2.0, None, None)


def test_too_few_units_have_no_interval() -> None:
    assert throughput_ratio([10, 10], [1.0, 1.0], [5, 5], [1.0, 1.0], fewest=3) == (2.0, None, None)


def test_total_over_total_is_not_a_mean_of_ratios() -> None:
    ratio, _, _ = throughput_ratio([100, 10], [1, 10], [100, 10], [1, 1])
    assert ratio == pytest.approx((110 / 11) / (110 / 2))


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        base = rng.uniform(1, 2, 30)
        seconds = base / 1.3 * rng.lognormal(0, 0.2, 30)
        _, low, high = throughput_ratio([100] * 30, seconds.tolist(), [100] * 30, base.tolist(), seed=trial)
        assert low is not None
        assert high is not None
        true = 1.3 / np.exp(0.02)  # the mean of a lognormal factor
        covered += low <= true <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_arms() -> None:
    arms = parse_arms("ar; static:5,4,8; margin:margin=0.5; tree; adaptivespec:low=3/4/8,high=7/4/16,budget=2")
    assert [a.label for a in arms] == ["ar", "static:5,4,8", "margin:margin=0.5", "tree", "adaptivespec:low=3/4/8,high=7/4/16,budget=2"]
    settings = [a.for_prompt(0) for a in arms]
    assert [len(a.speculative) for a in arms] == [1] * 5
    assert [a.is_plain for a in arms] == [True, False, False, False, False]
    assert settings[0].policy == "off"
    assert (settings[1].policy, settings[1].shape, settings[1].margin) == ("static", (5, 4, 8), None)
    assert (settings[2].policy, settings[2].margin) == ("static", 0.5)
    assert (settings[3].policy, settings[3].margin) == ("adaptive", None)
    assert (settings[4].low, settings[4].high, settings[4].budget, settings[4].margin) == ((3, 4, 8), (7, 4, 16), 2.0, 0.5)


def test_a_mixed_arm_takes_turns() -> None:
    arm = parse_arm("ar + static:5,4,8 + adaptivespec:margin=0.5")
    assert arm.label == "ar+static:5,4,8+adaptivespec:margin=0.5"
    assert [settings.policy for settings in arm.speculative] == ["off", "static", "adaptive"]
    assert [arm.for_prompt(i) for i in (0, 3, 4, 5)] == [arm.speculative[i] for i in (0, 0, 1, 2)]
    assert not arm.is_plain


def test_margin_arms_use_the_shipped_default_and_the_papers_rule_is_guards_none() -> None:
    default = SpeculativeConfig()
    assert (default.margin, default.guards) == (0.5, "protected")
    assert parse_arm("adaptivespec").for_prompt(0).margin == default.margin
    assert parse_arm("margin:guards=none").for_prompt(0).guards == "none"
