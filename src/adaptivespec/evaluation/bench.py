"""The benchmark: every arm answers every prompt, in turn, in one process, so that ratios survive a machine whose speed drifts."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import SamplingParams
from ..engine.llm import LLM, Prompt
from ..engine.request import RequestOutput
from ..telemetry.stats import Summary, summarise
from .arms import Arm
from .statistics import throughput_ratio


@dataclass(frozen=True)
class Answer:
    """One answer and the seconds that it took, its prompt included."""

    output: RequestOutput
    seconds: float


@dataclass
class ArmResult:
    """What one arm answered, in the order of (repeat, prompt)."""

    arm: Arm
    num_prompts: int
    answers: list[Answer] = field(default_factory=list)

    def per_prompt(self) -> tuple[list[float], list[float]]:
        """Generated tokens and seconds of each prompt, summed over repeats. Tokens are generated ids, never re-tokenised text."""
        tokens, seconds = [0.0] * self.num_prompts, [0.0] * self.num_prompts
        for i, answer in enumerate(self.answers):
            tokens[i % self.num_prompts] += len(answer.output.token_ids)
            seconds[i % self.num_prompts] += answer.seconds
        answered = min(len(self.answers), self.num_prompts)
        return tokens[:answered], seconds[:answered]


def run_bench(
    llm: LLM,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    repeats: int = 1,
    on_answer: Callable[[Arm], None] | None = None,
) -> list[ArmResult]:
    """Run all arms interleaved prompt by prompt, in a shuffled order; one request at a time.

    Args:
        llm: the models.
        arms: settings to compare.
        prompts: texts, ids or messages.
        params: sampling settings of every answer; the seed makes the arms comparable at temperature > 0, and shuffles.
        repeats: rounds over all prompts.
        on_answer: called after each answer, for a progress bar.

    Returns:
        Results in the order of arms. After Ctrl-C those of the finished prompts, whole repeats only once there is one;
        KeyboardInterrupt is raised only when there are none.
    """
    encoded = [llm.encode(prompt) for prompt in prompts]
    for ids in encoded:  # every length is checked before any work
        llm.check_prompt(ids)
    results = [ArmResult(arm, len(encoded)) for arm in arms]
    order, rng = list(range(len(arms))), random.Random(params.seed)
    warm_up = params.updated({"max_tokens": min(8, params.max_tokens), "min_tokens": 0})
    for arm in arms:
        llm.generate([encoded[0]], warm_up, speculative=arm.speculative)
    for number in range(repeats * len(encoded)):
        rng.shuffle(order)
        ids = encoded[number % len(encoded)]
        round_answers: dict[int, Answer] = {}
        try:
            # What the first forward of a new prompt length costs is not charged to whoever comes first.
            llm.generate([ids], warm_up.updated({"max_tokens": 1}), speculative=arms[0].speculative)
            for i in order:
                began = time.perf_counter()
                [output] = llm.generate([ids], params, speculative=arms[i].speculative)
                round_answers[i] = Answer(output, time.perf_counter() - began)
                if on_answer is not None:
                    on_answer(arms[i])
        except KeyboardInterrupt:
            if number == 0:
                raise
            # A partial repeat would weigh some prompts more than others.
            whole = number if number < len(encoded) else number - number % len(encoded)
            for result in results:
                del result.answers[whole:]
            return results
        for i, result in enumerate(results):
            result.answers.append(round_answers[i])
    return results


def describe(result: ArmResult, baseline: ArmResult | None, seed: int = 0) -> dict[str, Any]:
    """One arm as numbers for a table or JSON.

    `seconds` = prefill + draft + verify + rest; rest is everything else: acceptance, commit, bookkeeping, detokenising. Accept
    length, drafted, accepted and promoted count whole steps, before stop conditions cut the last one.
    """
    outputs = [answer.output for answer in result.answers]
    summary: Summary = summarise(record for output in outputs for record in output.records)
    answer_tokens = [len(output.token_ids) for output in outputs]
    answer_seconds = [answer.seconds for answer in result.answers]
    tokens, seconds = sum(answer_tokens), sum(answer_seconds)
    prefill = sum(output.seconds_prefill for output in outputs)
    row: dict[str, Any] = {
        "settings": result.arm.speculative.model_dump(),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "speedup_vs_ar": None,
        "accept_length": summary.accept_length,
        "acceptance_rate": summary.acceptance_rate,
        "promoted": summary.promoted,
        "promoted_per_1k": summary.promoted_per_1k,
        "spent_nats": summary.spent,
        "steps": summary.steps,
        "drafted": summary.drafted,
        "accepted": summary.accepted,
        "seconds_prefill": prefill,
        "seconds_draft": summary.seconds_draft,
        "seconds_verify": summary.seconds_verify,
        "seconds_rest": seconds - prefill - summary.seconds_draft - summary.seconds_verify,
        "shapes": {str(shape): count for shape, count in summary.shapes.items()},
        "accepted_histogram": {str(n): count for n, count in summary.accepted_histogram.items()},
        "finish_reasons": dict(Counter(output.finish_reason for output in outputs)),
        "answer_tokens": answer_tokens,
        "answer_seconds": answer_seconds,
    }
    if baseline is not None:
        ratio, low, high = throughput_ratio(*result.per_prompt(), *baseline.per_prompt(), seed=seed)
        row["speedup_vs_ar"] = {"ratio": ratio, "low": low, "high": high}
    return row
