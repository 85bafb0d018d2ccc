"""Questions, answers, and how far two servers' answers agree."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .server import Failed, Server

REQUEST_KEY = "adaptivespec"


@dataclass(frozen=True)
class Question:
    """Ids of a prompt."""

    ids: list[int]


def settings_of(tokens: int, wish: Any = None, **more: Any) -> dict[str, Any]:
    """Greedy sampling parameters of a request, `tokens` long whatever comes."""
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **more}
    return params if wish is None else params | {"custom_params": {REQUEST_KEY: wish}}


def ask_all(
    server: Server, questions: Sequence[Question], params: Sequence[dict[str, Any]], at_once: int
) -> tuple[list[dict[str, Any]], float, list[float], list[str]]:
    """Answers ({} where there is none), wall seconds, seconds of each answer, and errors."""
    errors: list[str] = []

    def one(pair: tuple[Question, dict[str, Any]]) -> tuple[dict[str, Any], float]:
        began = time.monotonic()
        try:
            return server.ask(pair[0].ids, sampling_params=pair[1]), time.monotonic() - began
        except Failed as error:
            errors.append(str(error))
            return {}, time.monotonic() - began

    began = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        results = list(pool.map(one, zip(questions, params, strict=True)))
    return [answer for answer, _ in results], time.monotonic() - began, [seconds for _, seconds in results], errors


@dataclass(frozen=True)
class Agreement:
    """Two cells' answers to the same questions.

    Attributes:
        identical: questions with the same tokens.
        ties: those that part where both tokens are nearly the target's best.
        parted: those that part elsewhere, each in words.
    """

    identical: int
    ties: int
    parted: list[str]


def first_difference(answer: Sequence[int], expected: Sequence[int]) -> int | None:
    """Where two answers part; None when they are the same."""
    for place, (ours, theirs) in enumerate(zip(answer, expected, strict=False)):
        if ours != theirs:
            return place
    return None if len(answer) == len(expected) else min(len(answer), len(expected))


def agreement(
    questions: Sequence[Question],
    answers: Sequence[list[int]],
    expected: Sequence[list[int]],
    gaps: Callable[[list[int], list[int]], list[float]],
    tie: float,
) -> Agreement:
    """Compare token by token.

    Args:
        questions, answers, expected: in the same order.
        gaps: of a text and some tokens, how many nats each is below the target's best continuation of the text.
        tie: nats; what is less below the best than this may be chosen for the best, because rounding depends on the number of rows.
    """
    identical, ties, parted = 0, 0, []
    for number, (question, ours, theirs) in enumerate(zip(questions, answers, expected, strict=True)):
        place = first_difference(ours, theirs)
        if place is None:
            identical += 1
            continue
        if place >= min(len(ours), len(theirs)):
            parted.append(f"question {number}: {len(ours)} tokens, not {len(theirs)}")
            continue
        below = gaps([*question.ids, *theirs[:place]], [ours[place], theirs[place]])
        if max(below) < tie:
            ties += 1
        else:
            parted.append(f"question {number}, token {place}: {below[0]:.3f} and {below[1]:.3f} nats below the best")
    return Agreement(identical, ties, parted)


def gaps_of(server: Server, wish: Any) -> Callable[[list[int], list[int]], list[float]]:
    """The target's opinion, from a prefill, in which nothing is drafted."""

    def gaps(text: list[int], tokens: list[int]) -> list[float]:
        answer = server.ask(text, sampling_params=settings_of(1, wish), return_logprob=True, top_logprobs_num=20)
        top = {entry[1]: entry[0] for entry in answer["meta_info"]["output_top_logprobs"][0]}
        best = max(top.values())
        return [best - top.get(token, -math.inf) for token in tokens]

    return gaps


def least_likely(server: Server, question: Question, answer: list[int], wish: Any) -> float:
    """log(p(token) / p(top-1)) of the token of an answer that the target finds least likely, from a prefill of the whole."""
    said = server.ask(
        [*question.ids, *answer],
        sampling_params=settings_of(1, wish),
        return_logprob=True,
        logprob_start_len=max(len(question.ids) - 1, 0),
        top_logprobs_num=1,
    )["meta_info"]
    own, top = said["input_token_logprobs"][-len(answer) :], said["input_top_logprobs"][-len(answer) :]
    if [entry[1] for entry in own] != answer:
        raise Failed("the server scored other tokens than the answer's")
    return min(float(entry[0] - best[0][0]) for entry, best in zip(own, top, strict=True))


def counts_of(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What answers' meta_info says of speculation, added up; the plug-in's, else SGLang's own."""
    infos = [answer["meta_info"] for answer in answers if answer]
    own = [info[REQUEST_KEY] for info in infos if REQUEST_KEY in info]
    if own:
        total = {name: sum(report[name] for report in own) for name in ("verify_steps", "drafted", "accepted", "promoted", "spent_budget")}
        shapes: Counter[str] = Counter()
        for report in own:
            shapes.update(report["shapes"])
        total["shapes"] = dict(shapes.most_common())
    else:
        names = {"verify_steps": "spec_verify_ct", "accepted": "spec_num_correct_drafts", "drafted": "spec_num_proposed_drafts"}
        total = {ours: sum(info.get(theirs, 0) for info in infos) for ours, theirs in names.items()}
    steps = total["verify_steps"]
    total["accept_length"] = 1 + total["accepted"] / steps if steps else None
    total["reports"] = len(own)
    return total


def series(text: str, name: str) -> float:
    """The sum of a Prometheus series over its labels; 0 where it is not."""
    return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))
