"""Arms of the rules and policies to compare with."""

from __future__ import annotations

import pytest

from adaptivespec.config import POLICIES, RULES
from adaptivespec.errors import UserError
from adaptivespec.evaluation.arms import BASES, parse_arm, parse_arms


def test_every_rule_and_policy_has_an_arm() -> None:
    settings = [parse_arm(name).for_prompt(0) for name in BASES]
    assert {s.policy for s in settings} == set(POLICIES)
    # strict is static; rejection is refused by the engine
    assert {s.effective_rule for s in settings} == set(RULES) - {"rejection"}


def test_arms_take_their_own_parameters() -> None:
    arms = parse_arms(
        "threshold:5,4,8,threshold_acc=0.5; talon:num_draft_tokens=32; accept_ema:candidate_steps=1/2/4; window; margin_top1:margin=0.5"
    )
    threshold, talon, ema, window, top1 = (arm.for_prompt(0) for arm in arms)
    assert (threshold.rule, threshold.shape, threshold.threshold_acc) == ("threshold", (5, 4, 8), 0.5)
    assert (talon.policy, talon.shape, talon.effective_rule) == ("talon", (15, 10, 32), "strict")
    assert ema.candidate_steps == (1, 2, 4)
    assert (window.rule, window.shape) == ("window", (15, 1, 16))
    assert (top1.rule, top1.kappa) == ("margin_top1", 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("typcal", "unknown arm 'typcal'; did you mean 'typical'?"),
        ("window:5,4,8", "rule window needs chains"),
        ("talon:3,4,4", "expected num_steps,topk,num_draft_tokens"),
        ("talon:low=3/4/8", "low has no effect with policy talon"),
        ("typical:margin=0.4", "margin has no effect with rule typical"),
    ],
)
def test_what_does_not_fit_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_arm(text)
