"""Arms that take turns: every question is put to all of them before the next, warmed up, resumed, in the same order every time."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_run import FakeLLM, asked

from adaptivespec.evaluation.arms import parse_arms
from adaptivespec.evaluation.folder import AnswerLog, key, read_answers
from adaptivespec.evaluation.interleaved import WARM_UP, ask_in_turns
from adaptivespec.evaluation.runs import LocalAnswerer

ARMS = parse_arms("ar; static:3,4,4; tree")
LABELS = [arm.label for arm in ARMS]


def ask(llm: FakeLLM, folder: Path, count: int = 4) -> None:
    with AnswerLog(folder) as log:
        ask_in_turns(LocalAnswerer(llm, ARMS, str), LABELS, {"gsm8k": asked(count)}, log)


def test_questions_come_one_after_the_other_and_arms_in_turns(tmp_path: Path) -> None:
    ask(FakeLLM(batch=1), tmp_path)
    rows = [key(row) for row in read_answers(tmp_path)]
    assert [row[2] for row in rows] == [f"gsm8k/{i}" for i in range(4) for _ in LABELS]
    orders = [[row[0] for row in rows[3 * i : 3 * i + 3]] for i in range(4)]
    assert all(sorted(order) == sorted(LABELS) for order in orders)
    assert len({tuple(order) for order in orders}) > 1  # nobody is always first


def test_every_arm_and_every_prompt_is_warmed_up_and_that_is_not_kept(tmp_path: Path) -> None:
    lengths = []

    class Watched(FakeLLM):
        def submit(self, prompt, params, *, speculative):  # type: ignore[no-untyped-def]
            lengths.append((prompt[0], params.max_tokens, params.min_tokens))
            return super().submit(prompt, params, speculative=speculative)

    with AnswerLog(tmp_path) as log:
        ask_in_turns(LocalAnswerer(Watched(batch=1), ARMS, str), LABELS, {"gsm8k": asked(2, max_tokens=50, min_tokens=9)}, log)
    first = [(0, 1, 0)] + [(0, WARM_UP, 0)] * 3 + [(0, 50, 9)] * 3
    assert lengths == first + [(1, 1, 0)] + [(1, 50, 9)] * 3
    assert len(read_answers(tmp_path)) == 6


@pytest.mark.parametrize("after", [0, 1, 5, 9, 14])
def test_ctrl_c_loses_nothing_and_a_rerun_goes_on(tmp_path: Path, after: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        ask(FakeLLM(batch=1, stop_after=after), tmp_path)
    before = [key(row) for row in read_answers(tmp_path)]
    ask(FakeLLM(batch=1), tmp_path)
    rows = [key(row) for row in read_answers(tmp_path)]
    assert rows[: len(before)] == before
    whole = tmp_path / "whole"
    whole.mkdir()
    ask(FakeLLM(batch=1), whole)
    assert rows == [key(row) for row in read_answers(whole)]
