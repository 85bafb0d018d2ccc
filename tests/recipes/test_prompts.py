"""Held-out prompts, their siblings and test sets stay out of the training prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from recipes.eagle3_head import topics
from recipes.eagle3_head.config import PromptConfig
from recipes.eagle3_head.prompts import HELDOUT_CODE, HELDOUT_PROMPTS, Exclusion, build, load_texts, normalise, source_files

LEAKED = "A farmer who lives near the old mill has thirteen hens and each of them lays four eggs in a week of rain."


@pytest.fixture(scope="module", autouse=True)
def few_files() -> Iterator[None]:
    """Parsing every installed package takes seconds, and a few modules serve as well."""
    files = source_files()
    kept = files[:: len(files) // 60] + [(module, path) for module, path in files if module == HELDOUT_CODE[0]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipes.eagle3_head.prompts.source_files", lambda: kept)
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    path = tmp_path_factory.mktemp("data") / "gsm8k.jsonl"
    questions = [f"Tom has {i} apples and buys {2 * i} more. How many apples does he have now?" for i in range(200)]
    rows = [{"question": q, "answer": "#### 1"} for q in questions]
    rows += [{"question": LEAKED + " How many eggs are that?", "answer": "#### 52"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return build(PromptConfig(total=600, heldout_each=4), path, [LEAKED])


def test_mixture_and_counts(built: tuple[list[dict[str, str]], list[dict[str, str]]]) -> None:
    train, heldout = built
    kinds = [row["kind"] for row in train]
    assert (kinds.count("general"), kinds.count("maths"), kinds.count("code")) == (240, 180, 180)
    assert [row["kind"] for row in heldout].count("general") == 40
    assert len({row["prompt"] for row in train}) == len(train)


def test_held_out_prompts_are_not_trained_on(built: tuple[list[dict[str, str]], list[dict[str, str]]]) -> None:
    train, heldout = built
    assert not {normalise(row["prompt"]) for row in train} & {normalise(row["prompt"]) for row in heldout}


def test_nothing_shares_a_run_of_words_with_a_test_set(built: tuple[list[dict[str, str]], list[dict[str, str]]]) -> None:
    assert not any("thirteen hens" in row["prompt"] for row in built[0])


def test_templates_and_topics_of_held_out_prompts_are_dropped() -> None:
    exclusion = Exclusion(["Give me a recipe for onion rings!"])
    assert not exclusion.allows_template("Give me a recipe for {t}.")
    assert exclusion.allows_template("How do I make {t}?")
    assert not exclusion.allows_topic("onion rings")
    assert exclusion.allows_topic("apple rings")


def test_held_out_questions_are_no_instances_of_the_templates() -> None:
    exclusion = Exclusion(load_texts(HELDOUT_PROMPTS))
    kept = [t for t in topics.split(topics.EXPLAIN + "\n" + topics.CREATIVE + "\n" + topics.ADVICE) if exclusion.allows_template(t)]
    dropped = [t for t in topics.split(topics.EXPLAIN + "\n" + topics.CREATIVE + "\n" + topics.ADVICE) if t not in kept]
    assert len(dropped) <= 3, dropped  # written to be of other forms; a few may have to go


def test_same_seed_same_prompts(built: tuple[list[dict[str, str]], list[dict[str, str]]], tmp_path: Path) -> None:
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps({"question": f"What is {i} plus {i}?"}) + "\n" for i in range(60)))
    config = PromptConfig(total=50, heldout_each=5)
    assert build(config, path) == build(config, path)
    assert build(config, path) != build(PromptConfig(total=50, heldout_each=5, seed=1), path)


def test_separators_inside_strings_do_not_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text(
        json.dumps({"question": "one\u2028two\x85three"}, ensure_ascii=False) + "\n\n" + json.dumps({"turns": ["four"]}), encoding="utf-8"
    )
    assert load_texts(path) == ["one\u2028two\x85three", "four"]
