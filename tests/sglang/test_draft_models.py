"""A draft model instead of a head (STANDALONE), the adaptive policy as it ships, and requests that are retracted again and again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from adaptivespec.method.policy import Adaptive
from bed_models import KNOWN, UNKNOWN, BedModels
from reference import Reference
from servers import Server

PROMPTS = KNOWN + UNKNOWN


@pytest.fixture(scope="module")
def standalone(bed: BedModels, logs: Path) -> Iterator[Server]:
    with Server(
        logs / "standalone.log",
        {"margin": "off", "aggregate": "max"},
        {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"},
        model_path=bed.target,
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=bed.standalone,
    ) as server:
        yield server


def test_retracted_requests(standalone: Server, plain: Reference) -> None:
    answers = standalone.generate_all(PROMPTS * 2, [{"max_new_tokens": 20 + 9 * i % 50} for i in range(24)])
    for i, answer in enumerate(answers):
        prompt, limit = PROMPTS[i % 12], 20 + 9 * i % 50
        plain.assert_same(prompt, answer["output_ids"], plain.answer(prompt, max_new_tokens=limit)["output_ids"])
        assert len(answer["output_ids"]) == limit
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0


def test_the_policy_moves(standalone: Server) -> None:
    """Only among the shapes of the ladder, and over several of them."""
    said = [answer["meta_info"]["adaptivespec"] for answer in standalone.generate_all(PROMPTS, max_new_tokens=60, at_once=2)]
    reachable = {str(shape) for shape in Adaptive().reachable()}
    used = {shape for s in said for shape in s["shapes"]}
    assert used <= reachable
    assert len(used) > 3
    assert sum(s["accepted"] for s in said) > 0.3 * sum(s["verify_steps"] for s in said)  # otherwise there was nothing to move for


def test_the_margin_rule(standalone: Server) -> None:
    wish = {"custom_params": {"adaptivespec": {"margin": 0.05}}, "max_new_tokens": 40}
    said = [answer["meta_info"]["adaptivespec"] for answer in standalone.generate_all(PROMPTS, [wish] * len(PROMPTS))]
    assert sum(s["promoted"] for s in said) > 0
