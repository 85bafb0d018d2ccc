"""Answering: every arm answers every question through continuous batching; each answer is judged beside decoding and written at once."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from ..config import SamplingParams, SpeculativeConfig
from ..engine.request import Request, RequestOutput
from ..errors import UserError
from ..telemetry.stats import summarise
from .arms import Arm
from .folder import AnswerLog
from .scoring import Score, score
from .tasks import Question

MAX_TOKENS = {"gsm8k": 512, "math500": 1024, "humaneval": 512}
"""Most tokens of an answer where nothing else is asked for."""


class Engine(Protocol):
    """What is asked of an LLM, one step at a time: so that what a step finished is taken before anything stops the run."""

    def submit(self, prompt: list[int], params: SamplingParams, *, speculative: SpeculativeConfig) -> list[Request]:
        """See `LLM.submit`."""

    def step(self) -> list[Request]:
        """See `LLM.step`."""

    def output(self, request: Request) -> RequestOutput:
        """See `LLM.output`."""

    def abort(self, request: Request) -> None:
        """See `LLM.abort`."""


class Answerer(Protocol):
    """Who answers: the engine of this process, or a server. What has finished stays until it is forgotten, whatever interrupts."""

    def ask(self, label: str, asked: Asked, number: int) -> None:
        """Put question `number` of a task under an arm's settings."""

    def step(self) -> None:
        """Work, or wait for a while. Raises UserError for a question that can't be answered."""

    def finished(self) -> dict[int, dict[str, Any]]:
        """Rows without verdicts (see docs/evaluation.md) of the answers that are there, by the question's number."""

    def forget(self, number: int) -> None:
        """A finished answer is in safe hands."""

    def abort(self) -> None:
        """Drop what is not finished."""


@dataclass(frozen=True)
class Asked:
    """A task as it is put to the model.

    Attributes:
        questions: in the data set's order.
        prompts: token ids of each; empty where a server makes them from the messages.
        params: sampling settings; question i of the data set uses seed + i, the same in every arm, so that arms are compared under the
            same noise.
        first: how many of the data set's questions come before these.
    """

    questions: Sequence[Question]
    prompts: Sequence[list[int]]
    params: SamplingParams
    first: int = 0

    def params_for(self, number: int) -> SamplingParams:
        """The sampling settings of a question, with its own seed."""
        return self.params.updated({"seed": (self.params.seed or 0) + self.first + number})


def arm_kind(settings: SpeculativeConfig) -> dict[str, Any]:
    """What an analysis tells arms apart by: policy, the rule in effect and kappa (1 when strict)."""
    return {"policy": settings.policy, "rule": settings.effective_rule, "kappa": settings.kappa}


def digest(question: Question) -> str:
    """A short hash of everything that a question is: of prompt, answer and tests."""
    code = None if question.code is None else vars(question.code)
    return hashlib.sha256(json.dumps([question.messages, question.reference, code]).encode()).hexdigest()[:16]


def check_ids(questions: Sequence[Question]) -> None:
    """Raise UserError for two questions of the same id: their answers could not be told apart."""
    ids = [question.id for question in questions]
    if len(set(ids)) < len(ids):
        twice = next(each for each in ids if ids.count(each) > 1)
        raise UserError(f"{questions[0].task}: two questions have the id {twice}")


def share_of_seconds(output: RequestOutput) -> float:
    """An answer's share of the engine's time: its prompt, and of every step it took part in as much as each other request of the batch."""
    return output.seconds_prefill + summarise(output.records).seconds


def promotions(output: RequestOutput, decode: Callable[[int], str]) -> list[dict[str, Any]]:
    """The promoted tokens of an answer: position (from 0), id, text, ln(p / p of the target's choice) in nats, and what was replaced.

    The target's choice is known where log-probabilities were asked for, at temperature 0 and without penalties; else it is None.
    """
    margins = [0.0]  # the first token comes from the prompt
    for record in output.records:
        margins += [*record.log_margins, 0.0]
    rows = []
    for position, token in enumerate(output.token_ids):
        if output.promoted[position]:
            replaced = None if output.logprobs is None else next(iter(output.logprobs[position].top))
            rows.append(
                {
                    "position": position,
                    "token_id": token,
                    "token": decode(token),
                    "log_margin": margins[position],
                    "replaced_id": replaced,
                    "replaced": None if replaced is None else decode(replaced),
                }
            )
    return rows


def shapes_of(output: RequestOutput) -> dict[str, list[Any]]:
    """The planned shape of every step: those that occurred, and each step's place among them."""
    seen: dict[tuple[int, int, int], int] = {}
    steps = [seen.setdefault((r.shape.num_steps, r.shape.topk, r.shape.num_draft_tokens), len(seen)) for r in output.records]
    return {"seen": [list(shape) for shape in seen], "steps": steps}


def answer_row(arm: Arm, question: Question, output: RequestOutput, decode: Callable[[int], str]) -> dict[str, Any]:
    """Everything about an answer but the verdict, see docs/evaluation.md."""
    return {
        "arm": arm.label,
        "task": question.task,
        "id": question.id,
        "text": output.text,
        "prompt_tokens": len(output.prompt_token_ids),
        "tokens": len(output.token_ids),
        "finish_reason": output.finish_reason,
        "promoted": promotions(output, decode),
        "metrics": output.metrics,
        "steps": len(output.records),
        "spent": output.records[-1].spent if output.records else 0.0,
        "shapes": shapes_of(output),
        "seconds": share_of_seconds(output),
        "seed": output.params.seed,
    }


class LocalAnswerer:
    """The engine of this process."""

    def __init__(self, llm: Engine, arms: Sequence[Arm], decode: Callable[[int], str]) -> None:
        self._llm, self._arms, self._decode = llm, {arm.label: arm for arm in arms}, decode
        self._open: dict[int, tuple[Request, Arm, Question]] = {}

    def ask(self, label: str, asked: Asked, number: int) -> None:
        """See `Answerer.ask`."""
        arm, params = self._arms[label], asked.params_for(number)
        [request] = self._llm.submit(asked.prompts[number], params, speculative=arm.for_prompt(asked.first + number))
        self._open[number] = request, arm, asked.questions[number]

    def step(self) -> None:
        """One step of every running request."""
        self._llm.step()

    def finished(self) -> dict[int, dict[str, Any]]:
        """See `Answerer.finished`."""
        return {
            number: answer_row(arm, question, self._llm.output(request), self._decode)
            for number, (request, arm, question) in self._open.items()
            if request.finish_reason not in (None, "abort")  # an interrupted step aborts who ran in it: half answers
        }

    def forget(self, number: int) -> None:
        """See `Answerer.forget`."""
        del self._open[number]

    def abort(self) -> None:
        """See `Answerer.abort`."""
        for request, _, _ in self._open.values():
            self._llm.abort(request)
        self._open.clear()


class _Judges:
    """Threads that judge answers and write them."""

    def __init__(
        self, log: AnswerLog, workers: int, judge: Callable[[Question, str], Score], on_answer: Callable[[str, bool], None]
    ) -> None:
        self._log, self._judge, self._on_answer = log, judge, on_answer
        self._open: list[Future[None]] = []
        # Ctrl-C in a terminal reaches every process of it. Those that judge are started by these threads and inherit their mask, so
        # that a verdict which is under way is not cut short and taken for a wrong answer.
        self._pool = ThreadPoolExecutor(workers, initializer=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]))

    def hand_over(self, question: Question, row: dict[str, Any]) -> None:
        """Judge and write an answer soon."""
        self._open.append(self._pool.submit(self._finish, question, row))

    def check(self) -> None:
        """Raise what went wrong in a thread so far, and OSError once the disk is full."""
        ready = [future for future in self._open if future.done()]
        self._open = [future for future in self._open if future not in ready]
        for future in ready:
            future.result()
        if self._log.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._log.folder))

    def _finish(self, question: Question, row: dict[str, Any]) -> None:
        verdict = self._judge(question, row["text"])
        self._log.append({**row, "correct": verdict.correct, "extracted": verdict.extracted, "detail": verdict.detail})
        self._on_answer(row["arm"], verdict.correct)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True)  # whatever happened: what is finished is written
        if error is None:
            self.check()


def ask_all(
    answerer: Answerer,
    labels: Sequence[str],
    tasks: Mapping[str, Asked],
    log: AnswerLog,
    on_answer: Callable[[str, bool], None] = lambda arm, correct: None,
    on_call: Callable[[dict[str, Any]], None] = lambda call: None,
    judge: Callable[[Question, str], Score] = score,
    workers: int = 2,
) -> None:
    """Ask what is not answered yet, task by task and in each arm by arm: all that is missing of an arm and task at once.

    Args:
        answerer: who answers, so many at a time as it likes.
        labels: the arms.
        tasks: what to ask, by task.
        log: where answers go; those that it holds are not asked again.
        on_answer: told of every answer that was written, the arm's label and whether it is right; from another thread.
        on_call: told when an arm is through with a task: what calls.jsonl says of it.
        judge: as `scoring.score`.
        workers: answers that are judged at the same time, beside decoding.

    Raises:
        KeyboardInterrupt, OSError: after Ctrl-C or with a full disk; every finished answer is written before.
        UserError: judging is not possible here, or a question can't be answered.
    """
    done = {(row["arm"], row["task"], row["id"]) for row in log.answers}
    for task, asked in tasks.items():
        for label in labels:
            numbers = [i for i, question in enumerate(asked.questions) if (label, task, question.id) not in done]
            if numbers:
                on_call(run_call(answerer, label, task, asked, numbers, log, on_answer, judge, workers))


def run_call(
    answerer: Answerer,
    label: str,
    task: str,
    asked: Asked,
    numbers: list[int],
    log: AnswerLog,
    on_answer: Callable[[str, bool], None],
    judge: Callable[[Question, str], Score],
    workers: int,
) -> dict[str, Any]:
    """Ask some questions of a task under an arm, all at once: see `ask_all`. It is noted in calls.jsonl also when it is cut short."""
    call: dict[str, Any] = {"arm": label, "task": task, "asked": len(numbers), "answers": 0, "tokens": 0, "complete": False}
    began = time.perf_counter()

    def collect() -> None:
        for number, row in answerer.finished().items():
            judges.hand_over(asked.questions[number], row)
            answerer.forget(number)
            call["answers"] += 1
            call["tokens"] += row["tokens"]

    try:
        with _Judges(log, workers, judge, on_answer) as judges:
            try:
                for number in numbers:
                    answerer.ask(label, asked, number)
                while call["answers"] < len(numbers):
                    answerer.step()
                    collect()
                    judges.check()
            finally:
                collect()  # what the last step finished, also after Ctrl-C in its midst
                answerer.abort()
            call["seconds"], call["complete"] = time.perf_counter() - began, True
    finally:
        call.setdefault("seconds", time.perf_counter() - began)
        log.add_call(call)
    return call
