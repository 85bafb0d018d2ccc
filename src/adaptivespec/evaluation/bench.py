"""The benchmark: every arm answers every prompt, in turn, in one process, so that ratios survive a machine whose speed drifts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import SamplingParams
from ..engine.llm import LLM, Prompt
from ..method.records import StepRecord
from ..telemetry.stats import Summary, summarise
from .arms import Arm
from .statistics import throughput_ratio


@dataclass
class ArmResult:
    """What one arm did. Seconds are whole answers, prompts included; tokens are generated ids, never re-tokenised text."""

    arm: Arm
    tokens: list[int] = field(default_factory=list)  # per answer, in the order of (repeat, prompt)
    seconds: list[float] = field(default_factory=list)
    seconds_prefill: float = 0.0
    records: list[StepRecord] = field(default_factory=list)
    finish_reasons: dict[str, int] = field(default_factory=dict)

    def per_prompt(self, values: Sequence[float], prompts: int) -> list[float]:
        """Sums over repeats, per prompt."""
        return [sum(values[i::prompts]) for i in range(prompts)]


def run_bench(
    llm: LLM,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    repeats: int = 1,
    on_answer: Callable[[Arm], None] | None = None,
) -> list[ArmResult]:
    """Run all arms interleaved prompt by prompt, each prompt starting with another arm; one request at a time.

    Args:
        llm: the models.
        arms: settings to compare.
        prompts: texts, ids or messages.
        params: sampling settings of every answer; the seed makes the arms comparable at temperature > 0.
        repeats: rounds over all prompts.
        on_answer: called after each answer, for a progress bar.

    Returns:
        Results in the order of arms. After Ctrl-C, those of the finished prompts; KeyboardInterrupt is raised only when there
        are none.
    """
    results = [ArmResult(arm) for arm in arms]
    encoded = [llm.encode(prompt) for prompt in prompts]
    for ids in encoded:  # every length is checked before any work
        llm.check_prompt(ids)
    warm_up = params.updated({"max_tokens": min(8, params.max_tokens), "min_tokens": 0})
    for arm in arms:
        llm.generate([encoded[0]], warm_up, speculative=arm.speculative)
    for number in range(repeats * len(encoded)):
        answers: list[tuple[ArmResult, Any, float]] = []
        try:
            for shift in range(len(arms)):
                result = results[(number + shift) % len(arms)]
                began = time.perf_counter()
                output = llm.generate([encoded[number % len(encoded)]], params, speculative=result.arm.speculative)[0]
                answers.append((result, output, time.perf_counter() - began))
                if on_answer is not None:
                    on_answer(result.arm)
        except KeyboardInterrupt:
            if number < len(encoded):
                if number == 0:
                    raise
                return results
            # A partial repeat would weigh some prompts more than others.
            for result in results:
                whole = number - number % len(encoded)
                del result.tokens[whole:], result.seconds[whole:]
            return results
        for result, output, seconds in answers:
            result.tokens.append(len(output.token_ids))
            result.seconds.append(seconds)
            result.seconds_prefill += output.seconds_prefill
            result.records += output.records
            result.finish_reasons[output.finish_reason] = result.finish_reasons.get(output.finish_reason, 0) + 1
    return results


def describe(result: ArmResult, baseline: ArmResult | None, num_prompts: int, seed: int = 0) -> dict[str, Any]:
    """One arm as numbers for a table or JSON.

    `seconds` = prefill + draft + verify + rest; rest is everything else: acceptance, commit, bookkeeping, detokenising.
    """
    summary: Summary = summarise(result.records)
    tokens, seconds = sum(result.tokens), sum(result.seconds)
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
        "seconds_prefill": result.seconds_prefill,
        "seconds_draft": summary.seconds_draft,
        "seconds_verify": summary.seconds_verify,
        "seconds_rest": seconds - result.seconds_prefill - summary.seconds_draft - summary.seconds_verify,
        "shapes": {str(shape): count for shape, count in summary.shapes.items()},
        "accepted_histogram": {str(n): count for n, count in summary.accepted_histogram.items()},
        "finish_reasons": result.finish_reasons,
        "answer_tokens": result.tokens,
        "answer_seconds": result.seconds,
    }
    if baseline is not None:
        count = min(num_prompts, len(result.tokens))
        mine, base = ((r.per_prompt(r.tokens, count), r.per_prompt(r.seconds, count)) for r in (result, baseline))
        ratio, low, high = throughput_ratio(*mine, *base, seed=seed)
        row["speedup_vs_ar"] = {"ratio": ratio, "low": low, "high": high}
    return row
