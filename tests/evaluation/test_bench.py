"""The benchmark's bookkeeping: batches, mixed arms, interruptions and writing results."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from adaptivespec import LLM, SamplingParams
from adaptivespec.cli.files import write
from adaptivespec.errors import UserError
from adaptivespec.evaluation.arms import Arm, parse_arms
from adaptivespec.evaluation.bench import ArmResult, describe, describe_groups, run_bench
from tiny_heads import make_tiny_head
from tiny_models import make_tiny_model

PROMPTS = [[5, 9, 33], [77], [12, 100]]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("bench")
    return LLM(str(make_tiny_model("llama", folder / "model")), drafter=make_tiny_head(folder / "head"), dtype="fp32")


@pytest.mark.parametrize(("after", "answers"), [(2, None), (5, 2), (6, 2), (7, 3), (11, 3), (13, 6)])
def test_ctrl_c_keeps_finished_prompts_and_then_whole_repeats(llm: LLM, after: int, answers: int | None) -> None:
    arms, seen = parse_arms("ar; tree"), [0]

    def interrupt(_: Arm) -> None:
        seen[0] += 1
        if seen[0] == after:
            raise KeyboardInterrupt

    params = SamplingParams(max_tokens=4, seed=0)
    if answers is None:
        results = run_bench(llm, arms, PROMPTS, params, 1)
        assert [len(r.outputs) for r in results] == [3, 3]
        seen[0] = 1
        with pytest.raises(KeyboardInterrupt):
            run_bench(llm, arms, PROMPTS, params, 3, on_answer=interrupt)
        return
    results = run_bench(llm, arms, PROMPTS, params, 3, on_answer=interrupt)
    assert [len(r.outputs) for r in results] == [answers, answers]
    for result in results:
        row = describe(result, results[0])
        assert sum(row["finish_reasons"].values()) == answers
        assert row["seconds_rest"] > 0
        groups = describe_groups(result, ["a", "b", "c"])
        assert list(groups) == ["a", "b", "c"][:answers]  # a group without a finished answer is not there
        assert sum(group["answers"] for group in groups.values()) == answers
    assert sorted(llm.scheduler.free) == list(range(8))


def test_a_batch_gives_the_answers_of_one_by_one(llm: LLM) -> None:
    arms, params, prompts = parse_arms("ar; static:3,4,4; ar+tree+static:2,2,4"), SamplingParams(max_tokens=12, seed=0), PROMPTS[:2] * 3
    batched = LLM(llm.model, drafter=llm_head(llm), max_running_requests=4)
    seen: list[str] = []
    alone = run_bench(llm, arms, prompts, params)
    together = run_bench(batched, arms, prompts, params, 3, batch=4, on_answer=lambda arm: seen.append(arm.label))
    assert {label: seen.count(label) for label in seen} == {arm.label: 18 for arm in arms}
    for one, many in zip(alone, together, strict=True):
        assert [len(call.outputs) for call in many.calls] == [6, 6, 6]
        expected = [output.token_ids for output in one.outputs]
        assert [output.token_ids for output in many.outputs] == expected * 3
        row = describe(many, together[0])
        assert row["answer_tokens"] == [len(ids) for ids in expected] * 3
        assert row["call_tokens"] == [sum(map(len, expected))] * 3
        assert row["tokens_per_second"] == sum(row["call_tokens"]) / sum(row["call_seconds"])
        assert 0 < row["seconds_prefill"] < row["seconds"]
        assert row["speedup_vs_ar"]["low"] <= row["speedup_vs_ar"]["ratio"] <= row["speedup_vs_ar"]["high"]
        parts = [row[f"seconds_{part}"] for part in ("prefill", "draft", "verify", "rest")]
        assert sum(parts) == pytest.approx(row["seconds"])
        assert min(parts) >= 0  # a step that requests share counts once
        assert 0 < row["batch_steps"] < row["steps"]
    assert sorted(batched.scheduler.free) == [0, 1, 2, 3]


def llm_head(llm: LLM) -> Path:
    return llm.model.source.path.parent / "head"


def test_prompts_take_turns_with_the_settings_of_a_mixed_arm(llm: LLM) -> None:
    arms, params = parse_arms("ar+static:3,4,4"), SamplingParams(max_tokens=6, seed=0)
    for engine, batch in ((llm, 1), (LLM(llm.model, drafter=llm_head(llm), max_running_requests=3), 3)):
        [result] = run_bench(engine, arms, PROMPTS, params, 2, batch)
        assert [output.speculative.policy for output in result.outputs] == ["off", "static", "off"] * 2
        assert [settings["policy"] for settings in describe(result, None)["settings"]] == ["off", "static"]


@pytest.mark.parametrize(("after", "repeats"), [(5, None), (6, None), (7, 1), (12, 1), (13, 2)])
def test_ctrl_c_keeps_finished_repeats_of_a_batch(llm: LLM, after: int, repeats: int | None) -> None:
    arms, seen = parse_arms("ar; tree"), [0]
    batched = LLM(llm.model, drafter=llm_head(llm), max_running_requests=2)

    def interrupt(_: Arm) -> None:
        seen[0] += 1
        if seen[0] == after:
            raise KeyboardInterrupt

    def bench() -> list[ArmResult]:
        return run_bench(batched, arms, PROMPTS, SamplingParams(max_tokens=4, seed=0), 3, 2, interrupt)

    if repeats is None:
        with pytest.raises(KeyboardInterrupt):
            bench()
    else:
        results = bench()
        assert [len(result.calls) for result in results] == [repeats, repeats]
        assert describe(results[1], results[0])["speedup_vs_ar"]["low"] is None  # fewer than three repeats
    assert sorted(batched.scheduler.free) == [0, 1]


def test_an_engine_for_another_batch_is_refused(llm: LLM) -> None:
    with pytest.raises(UserError, match="decodes 8 requests together, not 2: make it with max_running_requests=2"):
        run_bench(llm, parse_arms("ar"), PROMPTS, SamplingParams(), batch=2)


def test_results_are_written_whole_and_never_replace_a_device(tmp_path: Path) -> None:
    path, link = tmp_path / "out.json", tmp_path / "link.json"
    link.symlink_to(path)
    write(link, "1")
    assert (path.read_text(), link.is_symlink()) == ("1", True)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write(pipe, "2")
    assert os.read(reader, 9) == b"2"
    os.close(reader)
    assert pipe.is_fifo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "out.json", "pipe"]
