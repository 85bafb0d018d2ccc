"""Answering for time: arms take turns at every question, one request at a time, so that ratios survive a machine that drifts."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .folder import AnswerLog
from .runs import Answerer, Asked, run_call
from .scoring import Score, score
from .tasks import Question

WARM_UP = 8
"""Tokens that an arm generates before its first answer of a start, and that nobody counts."""


def ask_in_turns(
    answerer: Answerer,
    labels: Sequence[str],
    tasks: Mapping[str, Asked],
    log: AnswerLog,
    on_answer: Callable[[str, bool], None] = lambda arm, correct: None,
    on_call: Callable[[dict[str, Any]], None] = lambda call: None,
    judge: Callable[[Question, str], Score] = score,
) -> None:
    """Ask what is not answered yet, question by question; at each the arms take turns in a shuffled order, the same in every start.

    Nothing else runs meanwhile: an answer is judged and written before the next is asked. What the first forwards of a start and of a new
    prompt length cost is not charged to whoever comes first.

    Args, Raises:
        see `runs.ask_all`.
    """
    done = {(row["arm"], row["task"], row["id"]) for row in log.answers}
    cold = set(labels)
    for task, asked in tasks.items():
        for number, question in enumerate(asked.questions):
            missing = [label for label in labels if (label, task, question.id) not in done]
            random.Random(f"{task} {number}").shuffle(missing)
            for label in missing[:1]:
                _warm_up(answerer, label, asked, number, 1)
            for label in missing:
                if label in cold:
                    _warm_up(answerer, label, asked, number, WARM_UP)
                    cold.remove(label)
            for label in missing:
                on_call(run_call(answerer, label, task, asked, [number], log, on_answer, judge, 1))


def _warm_up(answerer: Answerer, label: str, asked: Asked, number: int, tokens: int) -> None:
    few = replace(asked, params=asked.params.updated({"max_tokens": min(tokens, asked.params.max_tokens), "min_tokens": 0}))
    try:
        answerer.ask(label, few, number)
        while not answerer.finished():
            answerer.step()
        answerer.forget(number)
    finally:
        answerer.abort()
