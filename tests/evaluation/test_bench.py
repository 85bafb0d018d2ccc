"""The benchmark's bookkeeping: interruptions and writing results."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from adaptivespec import LLM, SamplingParams
from adaptivespec.cli.bench import write
from adaptivespec.evaluation.arms import Arm, parse_arms
from adaptivespec.evaluation.bench import describe, run_bench
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
        assert [len(r.answers) for r in results] == [3, 3]
        seen[0] = 1
        with pytest.raises(KeyboardInterrupt):
            run_bench(llm, arms, PROMPTS, params, 3, interrupt)
        return
    results = run_bench(llm, arms, PROMPTS, params, 3, interrupt)
    assert [len(r.answers) for r in results] == [answers, answers]
    for result in results:
        row = describe(result, results[0])
        assert sum(row["finish_reasons"].values()) == answers
        assert row["seconds_rest"] > 0
    assert sorted(llm.scheduler.free) == list(range(8))


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
