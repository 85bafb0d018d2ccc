"""An evaluation without models: a fake engine that answers from a dict, and a folder full of invented answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adaptivespec.config import SamplingParams, SpeculativeConfig
from adaptivespec.engine.request import RequestOutput
from adaptivespec.evaluation.arms import parse_arms
from adaptivespec.evaluation.folder import ANSWERS, RUN, SCHEMA
from adaptivespec.evaluation.runs import Asked, arm_kind
from adaptivespec.evaluation.tasks import Question
from adaptivespec.method.records import StepRecord
from adaptivespec.method.tree import TreeShape
from adaptivespec.telemetry.stats import speculative_metrics

FOUR = "ar; static:3,4,4; margin; tree; adaptivespec"


def question(number: int, task: str = "gsm8k") -> Question:
    return Question(task, f"{task}/{number}", [{"role": "user", "content": f"How much is {number}?"}], str(number))


def asked(count: int, **params: Any) -> Asked:
    """Questions whose prompts are their numbers, and whose right answers too."""
    return Asked([question(i) for i in range(count)], [[i] for i in range(count)], SamplingParams(seed=7, **params))


def record(path: int = 0, promoted: Sequence[int] = (), batch: int = 1, drafted: int = 3) -> StepRecord:
    """A step on a chain, that accepted `path` tokens; those at the places `promoted` were."""
    flags = [i in promoted for i in range(path)]
    return StepRecord(
        shape=TreeShape(3, 1, 4) if drafted else TreeShape.off(),
        tokens=list(range(drafted + 1)),
        parents=list(range(-1, drafted)),
        path=list(range(1, path + 1)),
        promoted=flags,
        log_margins=[-0.5 if flag else 0.0 for flag in flags],
        bonus=9,
        confidence=0.5,
        rar=0.0,
        spent=0.5 * sum(flags),
        batch=batch,
        seconds_draft=0.1,
        seconds_verify=0.2,
        seconds_rest=0.1,
    )


class FakeRequest:
    """A request that knows its answer."""

    def __init__(self, prompt: list[int], params: SamplingParams, config: SpeculativeConfig) -> None:
        self.prompt, self.params, self.config = prompt, params, config
        self.finish_reason: str | None = None


class FakeLLM:
    """Answers `prompt[0]` with `texts`, the number itself where it has none, `batch` requests a step, the last ones first.

    After `stop_after` answers in all it raises KeyboardInterrupt, in the middle of a step.
    """

    def __init__(self, texts: Mapping[int, str] | None = None, stop_after: int | None = None, batch: int = 2) -> None:
        self.texts, self.stop_after, self.batch = texts or {}, stop_after, batch
        self.answered: list[tuple[str, int]] = []
        self.waiting: list[Any] = []

    def submit(self, prompt: list[int], params: SamplingParams, *, speculative: SpeculativeConfig) -> list[Any]:
        self.waiting.append(FakeRequest(prompt, params, speculative))
        return self.waiting[-1:]

    def step(self) -> list[Any]:
        done = []
        for _ in range(min(self.batch, len(self.waiting))):
            if len(self.answered) == self.stop_after:
                raise KeyboardInterrupt
            request = self.waiting.pop()
            request.finish_reason = "stop"
            self.answered.append((request.config.policy, request.prompt[0]))
            done.append(request)
        return done

    def output(self, request: Any) -> RequestOutput:
        return RequestOutput(
            prompt_token_ids=request.prompt,
            index=0,
            token_ids=[1, 2, 3],
            text=self.texts.get(request.prompt[0], f"\\boxed{{{request.prompt[0]}}}"),
            finish_reason="stop",
            stop_reason=None,
            promoted=[False, True, False],
            logprobs=None,
            records=[record(1, [0], batch=2)],
            params=request.params,
            speculative=request.config,
            seed=request.params.seed,
            seconds_prefill=0.3,
        )

    def abort(self, request: Any) -> None:
        self.waiting.remove(request)


def fake_run(arms: str, tasks: Mapping[str, int], batch: int = 16) -> dict[str, Any]:
    """A run.json."""
    return {
        "schema": SCHEMA,
        "settings": {
            "model": "tiny",
            "batch": batch,
            "sampling": {"temperature": 0.0},
            "arms": {
                arm.label: {
                    "kinds": [arm_kind(one) for one in arm.speculative],
                    "settings": [one.model_dump(mode="json") for one in arm.speculative],
                }
                for arm in parse_arms(arms)
            },
            "tasks": {
                name: {"max_tokens": 64, "data": None, "questions": {f"{name}/{i}": "0" for i in range(count)}}
                for name, count in tasks.items()
            },
        },
        "prompts": {"chat_template": "{{ messages }}", "examples": {name: [{"role": "user", "content": "<b>?"}] for name in tasks}},
        "sessions": [
            {
                "began": "2030-01-01T00:00:00+00:00",
                "command": "adaptivespec eval --arms 'a; b'",
                "git_revision": None,
                "versions": {"adaptivespec": "0"},
                "machine": {"cores": 2},
                "model": "tiny",
                "dtype": "float32",
                "context_length": 512,
                "seed": 0,
                "sandbox": None,
            }
        ],
    }


def fake_answer(arm: str, task: str, number: int, correct: bool, **more: Any) -> dict[str, Any]:
    records = [record(0, drafted=0)] * 10 if arm == "ar" else [record(1), record(2), record(0)]
    return {
        "arm": arm,
        "task": task,
        "id": f"{task}/{number}",
        "correct": correct,
        "text": "",
        "tokens": 10,
        "finish_reason": "stop",
        "promoted": [],
        "metrics": {"speculative_decoding": speculative_metrics(records)},
        "steps": len(records),
        "spent": 0.0,
        "seconds": 1.0,
        **more,
    }


def fake_answers(run: Mapping[str, Any], seed: int = 0) -> list[dict[str, Any]]:
    """Invented answers to all questions: questions are easy or hard, arms agree mostly, some promote."""
    rng = np.random.default_rng(seed)
    rows = []
    speeds = {"ar": 1.0, "static:3,4,4": 1.4, "margin": 1.6, "tree": 1.5, "adaptivespec": 2.0}
    for task, entry in run["settings"]["tasks"].items():
        ease = rng.uniform(0, 1, len(entry["questions"])) < 0.5
        for arm, kind in run["settings"]["arms"].items():
            lossy = kind["kinds"][0]["kappa"] < 1
            for i, easy in enumerate(ease):
                correct = bool(easy) != bool(rng.uniform() < (0.1 if lossy else 0.02))
                tokens = int(rng.integers(20, 60))
                promoted = [
                    {"position": 1, "token_id": 5, "token": "<b>", "log_margin": -0.5, "replaced_id": 6, "replaced": " so"},
                    {"position": 2, "token_id": 7, "token": " the", "log_margin": -0.1, "replaced_id": None, "replaced": None},
                ]
                rows.append(
                    fake_answer(
                        arm,
                        task,
                        i,
                        correct,
                        tokens=tokens,
                        seconds=float(tokens * rng.uniform(0.9, 1.1) / speeds.get(arm, 1.0)),
                        promoted=promoted[: int(rng.integers(0, 3))] if lossy else [],
                        spent=0.5 if lossy else 0.0,
                        finish_reason="length" if rng.uniform() < 0.1 else "stop",
                    )
                )
    return rows


def write_run(folder: Path, run: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / RUN).write_text(json.dumps(run))
    (folder / ANSWERS).write_text("".join(json.dumps(row) + "\n" for row in answers))
    return folder
