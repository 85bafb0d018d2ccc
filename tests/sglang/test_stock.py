"""Without settings the plug-in isn't there; with the same static shape and rule strict it decodes as stock SGLang does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bed_models import KNOWN, UNKNOWN, BedModels
from reference import Reference
from servers import Server

PROMPTS = KNOWN + UNKNOWN
SHAPE = (3, 2, 5)
COUNTS = ("spec_verify_ct", "spec_num_correct_drafts", "spec_correct_drafts_histogram", "spec_accept_length", "spec_accept_rate")


def spec_flags(bed: BedModels) -> dict[str, Any]:
    return {"model_path": bed.target, "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": bed.eagle3}


@pytest.fixture(scope="module")
def stock_answers(bed: BedModels, logs: Path) -> list[dict[str, Any]]:
    """Stock SGLang with a static EAGLE-3 tree; the plug-in is installed and has no settings."""
    shape = dict(zip(("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"), SHAPE, strict=True))
    with Server(logs / "stock.log", **spec_flags(bed), **shape) as server:
        return [server.generate(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def static(bed: BedModels, logs: Path) -> Iterator[Server]:
    """The same shape through the plug-in, with the margin rule as its default."""
    steps, topk, nodes = SHAPE
    settings = {"policy": "static", "num_steps": steps, "topk": topk, "num_draft_tokens": nodes, "margin": 0.1}
    with Server(logs / "static.log", settings, **spec_flags(bed)) as server:
        yield server


def test_without_settings_it_is_stock(stock_answers: list[dict[str, Any]], plain: Reference) -> None:
    for prompt, answer in zip(PROMPTS, stock_answers, strict=True):
        plain.assert_same(prompt, answer["output_ids"], plain.answer(prompt)["output_ids"])
        assert "adaptivespec" not in answer["meta_info"]


def test_static_and_strict_is_stock(static: Server, stock_answers: list[dict[str, Any]]) -> None:
    """A request may switch the margin rule off; then every step accepts what stock SGLang accepts."""
    for prompt, stock in zip(PROMPTS, stock_answers, strict=True):
        answer = static.generate(prompt, custom_params={"adaptivespec": False})
        assert answer["output_ids"] == stock["output_ids"]
        for name in COUNTS:
            assert answer["meta_info"][name] == pytest.approx(stock["meta_info"][name]), name
        said = answer["meta_info"]["adaptivespec"]
        assert said["shapes"] == {",".join(map(str, SHAPE)): said["verify_steps"]}
        assert said["accept_length"] == pytest.approx(1 + said["accepted"] / said["verify_steps"])


def test_the_servers_margin_is_the_default(static: Server, stock_answers: list[dict[str, Any]]) -> None:
    said = [static.generate(prompt)["meta_info"]["adaptivespec"] for prompt in UNKNOWN]
    assert {(s["rule"], s["margin"]) for s in said} == {("margin", 0.1)}
    stock = [answer["meta_info"] for prompt, answer in zip(PROMPTS, stock_answers, strict=True) if prompt in UNKNOWN]
    ours = sum(s["accepted"] for s in said) / sum(s["verify_steps"] for s in said)
    theirs = sum(s["spec_num_correct_drafts"] for s in stock) / sum(s["spec_verify_ct"] for s in stock)
    assert ours > theirs
