"""Runs and their folder: every answer is judged and kept, whatever interrupts; a rerun asks what is missing."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from fake_run import FakeLLM, asked, fake_answer, fake_run, question, record, write_run

from adaptivespec import LLM
from adaptivespec.config import SpeculativeConfig
from adaptivespec.engine.request import RequestOutput, TokenLogprob
from adaptivespec.errors import UserError
from adaptivespec.evaluation import folder as folders
from adaptivespec.evaluation.arms import Arm, parse_arms
from adaptivespec.evaluation.folder import ANSWERS, CALLS, AnswerLog, contradiction, key, merged, read_answers, read_run
from adaptivespec.evaluation.runs import Asked, LocalAnswerer, ask_all, check_ids, digest, promotions, share_of_seconds
from adaptivespec.evaluation.scoring import Score
from adaptivespec.evaluation.tasks import Question
from tiny_models import make_tiny_model

ARMS = parse_arms("ar; static:3,4,4")


def decode(token: int) -> str:
    return f"<{token}>"


def answered(llm: Any, folder: Path, count: int, questions: Asked | None = None, arms: list[Arm] = ARMS, **more: Any) -> None:
    with AnswerLog(folder) as log:
        ask_all(LocalAnswerer(llm, arms, decode), [arm.label for arm in arms], {"gsm8k": questions or asked(count)}, log, **more)


def test_every_arm_answers_every_question(tmp_path: Path) -> None:
    told: list[tuple[str, bool]] = []
    answered(FakeLLM({1: "It is 2."}), tmp_path, 3, on_answer=lambda arm, correct: told.append((arm, correct)))
    rows = read_answers(tmp_path)
    assert sorted(map(key, rows)) == sorted((arm.label, "gsm8k", f"gsm8k/{i}") for arm in ARMS for i in range(3))
    assert sorted(told) == sorted((row["arm"], row["correct"]) for row in rows)
    row = next(row for row in rows if row["id"] == "gsm8k/1")
    assert (row["correct"], row["extracted"], row["detail"]) == (False, "2", "last number: 2 != 1")
    assert (row["tokens"], row["steps"], row["seconds"], row["spent"], row["seed"]) == (3, 1, pytest.approx(0.5), 0.5, 8)
    assert row["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == 1
    calls = [json.loads(line) for line in (tmp_path / CALLS).read_text().splitlines()]
    assert [(call["arm"], call["asked"], call["tokens"], call["complete"]) for call in calls] == [(arm.label, 3, 9, True) for arm in ARMS]
    assert sorted(path.name for path in tmp_path.iterdir()) == [ANSWERS, CALLS]


@pytest.mark.parametrize("after", range(7))
def test_ctrl_c_loses_nothing_and_a_rerun_goes_on(tmp_path: Path, after: int) -> None:
    llm = FakeLLM(stop_after=after)
    if after < 6:
        with pytest.raises(KeyboardInterrupt):
            answered(llm, tmp_path, 3)
    else:
        answered(llm, tmp_path, 3)
    assert len(read_answers(tmp_path)) == after
    again = FakeLLM()
    answered(again, tmp_path, 3)
    rows = read_answers(tmp_path)
    assert len((tmp_path / ANSWERS).read_text().splitlines()) == len({key(row) for row in rows}) == 6
    everything = {(policy, i) for policy in ("off", "static") for i in range(3)}
    assert sorted(again.answered) == sorted(everything - set(llm.answered))
    assert not llm.waiting


@pytest.mark.parametrize("after", [3, 12])
def test_ctrl_c_inside_a_step_of_the_real_engine_keeps_no_half_answer(tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine aborts who ran in an interrupted step: those questions are asked again, their beginnings are no answers."""
    llm = LLM(make_tiny_model("llama", tmp_path / "model"), dtype="fp32", drafter="ngram", max_running_requests=2)
    arms, questions = parse_arms("ar"), asked(4, max_tokens=9, ignore_eos=True)
    prompts = Asked(questions.questions, [[5 + i] for i in range(4)], questions.params)
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    answered(llm, tmp_path / "whole", 4, prompts, arms)
    step, count = llm.runner.step, itertools.count(1)

    def interrupted(requests: Any) -> None:
        step(requests)
        if next(count) == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(llm.runner, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answered(llm, tmp_path / "cut", 4, prompts, arms)
    assert len(read_answers(tmp_path / "cut")) == (0 if after < 8 else 2)  # two waves of eight steps
    answered(llm, tmp_path / "cut", 4, prompts, arms)
    rows = [{row["id"]: (row["text"], row["tokens"], row["finish_reason"]) for row in read_answers(tmp_path / n)} for n in ("whole", "cut")]
    assert rows[0] == rows[1]
    assert {reason for _, _, reason in rows[1].values()} == {"length"}


def test_alike_prompts_are_told_apart(tmp_path: Path) -> None:
    same = asked(3)
    answered(FakeLLM(), tmp_path, 3, Asked(same.questions, [[1]] * 3, same.params), ARMS[:1])
    assert sorted((row["id"], row["correct"]) for row in read_answers(tmp_path)) == [
        ("gsm8k/0", False), ("gsm8k/1", True), ("gsm8k/2", False)
    ]  # fmt: skip


@pytest.mark.parametrize("torn", [b'{"arm": "ar", "ta', b"\xff\xfe", b"\0\0\0\n", b'{"arm": "ar"}'[:5] + b"\n"])
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: bytes) -> None:
    answered(FakeLLM(), tmp_path, 2)
    whole = (tmp_path / ANSWERS).read_bytes()
    (tmp_path / ANSWERS).write_bytes(whole + torn)
    assert len(read_answers(tmp_path)) == 4
    answered(FakeLLM(), tmp_path, 3)
    assert (tmp_path / ANSWERS).read_bytes().startswith(whole)
    assert len(read_answers(tmp_path)) == 6


@pytest.mark.parametrize(
    ("line", "message"),
    [("nonsense", "line 2: not JSON"), ("[]", "line 2: not a JSON object"), ('{"arm": "ar"}', "line 2: the field task is missing"),
     (json.dumps(fake_answer("ar", "gsm8k", 1, True, tokens="3")), "line 2: the field tokens is missing or of the wrong type")],
)  # fmt: skip
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    good = json.dumps(fake_answer("ar", "gsm8k", 0, True))
    (tmp_path / ANSWERS).write_text("\n".join([good, line, good]) + "\n")
    with pytest.raises(UserError, match=message):
        read_answers(tmp_path)


def full_disk(monkeypatch: pytest.MonkeyPatch, folder: Path, room: int, reserve: bool = True) -> None:
    """From `room` lines on nothing more fits, half a line is written; with `reserve`, until the reserve is gone."""
    write, lines = os.write, [0]

    def limited(fd: int, data: bytes) -> int:
        if lines[0] >= room and not (reserve and not (folder / folders.RESERVE).exists()):
            if len(data) > 20:
                return write(fd, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        lines[0] += 1
        return write(fd, data)

    monkeypatch.setattr(folders.os, "write", limited)


def test_a_full_disk_ends_the_run_and_loses_no_finished_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM()
    with monkeypatch.context() as patch:
        full_disk(patch, tmp_path, 2)
        with pytest.raises(OSError, match="No space left"):
            answered(llm, tmp_path, 50)
    assert len(read_answers(tmp_path)) == len(llm.answered)
    assert 3 <= len(llm.answered) < 100
    answered(FakeLLM(), tmp_path, 50)
    assert len(read_answers(tmp_path)) == 100


def test_a_disk_that_stays_full_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        full_disk(patch, tmp_path, 2, reserve=False)
        with pytest.raises(OSError, match="No space left"):
            answered(FakeLLM(), tmp_path, 50)
    data = (tmp_path / ANSWERS).read_bytes()
    assert data.endswith(b"\n")
    assert len(data.splitlines()) == len(read_answers(tmp_path)) == 2


def test_judging_does_not_hold_up_decoding(tmp_path: Path) -> None:
    """The first verdict waits until all answers are there."""
    llm = FakeLLM(batch=1)

    def judge(question: Question, text: str) -> Score:
        deadline = time.monotonic() + 20
        while len(llm.answered) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return Score(True, text, "")

    answered(llm, tmp_path, 3, arms=ARMS[:1], judge=judge)
    assert len(read_answers(tmp_path)) == 3


def test_ctrl_c_does_not_reach_what_judges(tmp_path: Path) -> None:
    masks = []

    def judge(question: Question, text: str) -> Score:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        return Score(True, text, "")

    answered(FakeLLM(), tmp_path, 2, judge=judge)
    assert masks
    assert all(signal.SIGINT in mask for mask in masks)


def test_an_error_of_a_judge_is_raised(tmp_path: Path) -> None:
    def judge(question: Question, text: str) -> Score:
        raise UserError("no sandbox here")

    with pytest.raises(UserError, match="no sandbox here"):
        answered(FakeLLM(), tmp_path, 2, judge=judge)


def test_one_process_writes_a_folder(tmp_path: Path) -> None:
    with AnswerLog(tmp_path):
        with pytest.raises(UserError, match="another process is writing"):
            AnswerLog(tmp_path)
        with pytest.raises(UserError, match="another process is writing"):
            folders.check_unused(tmp_path)
    folders.check_unused(tmp_path)
    AnswerLog(tmp_path).close()


def an_output() -> RequestOutput:
    llm = FakeLLM()
    [request] = llm.submit([4], asked(1).params, speculative=SpeculativeConfig())
    return llm.output(request)


def test_promotions_say_what_was_replaced_where_it_is_known() -> None:
    output = an_output()
    assert promotions(output, decode) == [
        {"position": 1, "token_id": 2, "token": "<2>", "log_margin": -0.5, "replaced_id": None, "replaced": None}
    ]
    logprobs = [TokenLogprob(1, -0.1, 1, {1: -0.1}), TokenLogprob(2, -1.0, 2, {8: -0.5}), TokenLogprob(3, -0.1, 1, {3: -0.1})]
    known = dataclasses.replace(output, logprobs=logprobs)
    assert [(row["replaced_id"], row["replaced"]) for row in promotions(known, decode)] == [(8, "<8>")]


def test_seconds_are_shared_by_a_batch() -> None:
    output = dataclasses.replace(an_output(), records=[record(1, batch=4), record(2, batch=2)])
    assert share_of_seconds(output) == pytest.approx(0.3 + 0.4 / 4 + 0.4 / 2)


def settings(**more: Any) -> dict[str, Any]:
    return {**fake_run("ar; margin", {"gsm8k": 2})["settings"], **more}


def test_more_arms_tasks_and_questions_are_no_contradiction() -> None:
    old, new = settings(), fake_run("tree; margin", {"gsm8k": 5, "math500": 1})["settings"]
    new["tasks"]["gsm8k"]["data"] = "elsewhere.jsonl"
    assert contradiction(old, new) is None
    both = merged(old, new)
    assert list(both["arms"]) == ["ar", "margin", "tree"]
    assert {name: len(task["questions"]) for name, task in both["tasks"].items()} == {"gsm8k": 5, "math500": 1}
    assert contradiction(new, both) is contradiction(both, old) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.update(batch=8), "batch 16, not 8"),
        (lambda s: s.update(model="other"), "model 'tiny', not 'other'"),
        (lambda s: s["sampling"].update(temperature=0.7), "temperature 0.0, not 0.7"),
        (lambda s: s["tasks"]["gsm8k"].update(max_tokens=9), "task gsm8k: max_tokens 64, not 9"),
        (lambda s: s["tasks"]["gsm8k"]["questions"].update({"gsm8k/1": "x"}), "task gsm8k: another text of question gsm8k/1"),
        (lambda s: s["arms"]["margin"]["kinds"][0].update(kappa=0.3), "arm margin: kappa 0.5, not 0.3"),
        (lambda s: s["arms"]["margin"]["settings"][0].update(guards="none"), "arm margin: guards 'protected', not 'none'"),
        (lambda s: s.update(fresh_flag=1), "fresh_flag None, not 1"),
    ],
)
def test_contradictions_are_named(change: Any, said: str) -> None:
    new = settings()
    change(new)
    assert contradiction(settings(), new) == said


def test_ids_and_digests_tell_questions_apart() -> None:
    check_ids([question(1), question(2)])
    with pytest.raises(UserError, match="gsm8k: two questions have the id gsm8k/1"):
        check_ids([question(1), question(1)])
    assert digest(question(1)) == digest(question(1)) != digest(question(2))


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "holds no evaluation: cannot read run.json"), ("{", "run.json: not JSON"), ('{"schema": "x"}', "expected the schema"),
     ("[]", "expected the schema adaptivespec-eval-1, not 'list'")],
)  # fmt: skip
def test_what_is_no_run_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_run(tmp_path)


def test_a_run_without_answers_reads_as_empty(tmp_path: Path) -> None:
    write_run(tmp_path, fake_run("ar", {"gsm8k": 1}), [])
    (tmp_path / ANSWERS).unlink()
    assert read_answers(tmp_path) == []
