"""With the margin on, requests accept more, and nothing that the target finds less likely than kappa allows."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bed_models import KNOWN, UNKNOWN
from reference import Reference
from servers import Server
from tiny_models import EOS

PROMPTS = UNKNOWN + KNOWN
SLACK = 1e-3  # nats, between SGLang's fp32 logits and transformers'


def asking(**settings: Any) -> dict[str, Any]:
    return {"custom_params": {"adaptivespec": settings}, "max_new_tokens": 48}


def log_ratios(plain: Reference, prompt: str, tokens: list[int]) -> list[float]:
    """log(p(token) / p(top-1)) of every token, from transformers' forward over the whole answer."""
    logits = plain.logits(prompt, tokens)
    return [float(row[token] - row.max()) for row, token in zip(logits, tokens, strict=True)]


@pytest.mark.parametrize("kappa", [0.05, 0.2, 0.5])
def test_every_token_is_the_targets_or_above_kappa(rotating: Server, plain: Reference, kappa: float) -> None:
    answers = rotating.generate_all(PROMPTS, [asking(margin=kappa)] * len(PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        said, ratios = answer["meta_info"]["adaptivespec"], log_ratios(plain, prompt, answer["output_ids"])
        assert all(ratio > math.log(kappa) - SLACK for ratio in ratios)
        promoted = [ratio for ratio in ratios if ratio < -SLACK]
        # the last step's block may have been cut
        assert len(promoted) <= said["promoted"] <= len(promoted) + 5
        assert said["spent_budget"] >= -sum(promoted) - SLACK * len(ratios)
        if said["promoted"] == len(promoted):
            assert said["spent_budget"] == pytest.approx(-sum(promoted), abs=SLACK * len(ratios) + SLACK)
        assert (said["rule"], said["margin"]) == ("margin", kappa)
    assert sum(answer["meta_info"]["adaptivespec"]["promoted"] for answer in answers) > 0


def test_accept_length_rises(rotating: Server) -> None:
    """On prompts that the head never saw: where it knows the answer, leaving it costs acceptance."""

    def accept_length(wish: dict[str, Any]) -> float:
        said = [answer["meta_info"]["adaptivespec"] for answer in rotating.generate_all(UNKNOWN, [wish] * len(UNKNOWN))]
        return 1 + sum(s["accepted"] for s in said) / sum(s["verify_steps"] for s in said)

    lengths = [accept_length(asking(margin=kappa)) for kappa in ("off", 0.3, 0.05)]
    assert lengths[0] < lengths[1] < lengths[2]


def test_settings_of_neighbours_do_not_mix(rotating: Server, plain: Reference) -> None:
    wishes = [asking(margin=0.05), {"max_new_tokens": 48}, asking(margin=0.05, budget=2.0), asking(margin=0.05, max_promotions=0)] * 3
    answers = rotating.generate_all(PROMPTS, wishes)
    for i, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        said, tokens = answer["meta_info"]["adaptivespec"], answer["output_ids"]
        if i % 4 in (1, 3):
            assert said["promoted"] == 0
            plain.assert_same(prompt, tokens, plain.answer(prompt, max_new_tokens=48)["output_ids"])
        elif i % 4 == 2:
            assert said["spent_budget"] <= 2.0
            assert -sum(log_ratios(plain, prompt, tokens)) <= 2.0 + SLACK * len(tokens)
    assert all(answers[i]["meta_info"]["adaptivespec"]["promoted"] > 0 for i in (0, 2))


def test_end_of_sequence_is_protected(rotating: Server, plain: Reference) -> None:
    for prompt, answer in zip(PROMPTS, rotating.generate_all(PROMPTS, [asking(margin=0.01)] * len(PROMPTS)), strict=True):
        tokens = answer["output_ids"]
        for token, row, ratio in zip(tokens, plain.logits(prompt, tokens), log_ratios(plain, prompt, tokens), strict=True):
            if EOS in (token, int(row.argmax())):
                assert ratio > -SLACK


def test_same_answer_in_any_company(rotating: Server) -> None:
    """At temperature above 0 too; the shapes differ from run to run, so only what is strict can be the same."""
    wish = {"temperature": 0.9, "sampling_seed": 3, "max_new_tokens": 24}
    alone = rotating.generate(PROMPTS[4], **wish)["output_ids"]
    answers = rotating.generate_all(
        PROMPTS[4:12], [wish] + [asking(margin=0.1) | {"temperature": 0.9, "sampling_seed": i} for i in range(7)]
    )
    assert answers[0]["output_ids"] == alone
    assert sum(answer["meta_info"]["adaptivespec"]["promoted"] for answer in answers[1:]) > 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"margn": 0.1}, "did you mean 'margin'"),
        ({"margin": 2}, "margin"),
        ({"topk": 2}, "topk"),
        ({"policy": "static"}, "policy"),
        ("yes", "expected settings"),
    ],
)
def test_bad_wishes_are_refused_and_the_server_lives(rotating: Server, settings: Any, says: str) -> None:
    answer = rotating.generate("A", custom_params={"adaptivespec": settings})
    assert says in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]
    assert len(rotating.generate("A", max_new_tokens=3)["output_ids"]) == 3


def test_false_and_true(rotating: Server, plain: Reference) -> None:
    for wish in (False, True):
        answer = rotating.generate("A", custom_params={"adaptivespec": wish, "another_plugin": 1})
        plain.assert_same("A", answer["output_ids"], plain.answer("A")["output_ids"])
        assert answer["meta_info"]["adaptivespec"]["rule"] == "strict"
