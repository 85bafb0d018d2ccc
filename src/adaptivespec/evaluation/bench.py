"""The benchmark: every arm answers the same prompts, in turn, in one process, so that ratios survive a machine whose speed drifts."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import SamplingParams
from ..engine.inputs import Prompt
from ..engine.llm import LLM
from ..engine.request import RequestOutput
from ..errors import UserError
from ..telemetry.stats import Summary, summarise
from .arms import Arm
from .peers import PeerOutput, Peers, check_peers, peer_version
from .statistics import throughput_ratio


@dataclass(frozen=True)
class Call:
    """One timed `generate`: its answers, one or a whole batch of them, and the seconds that it took, prompts included.

    All answers are RequestOutputs, or for a peer all PeerOutputs.
    """

    outputs: Sequence[RequestOutput | PeerOutput]
    seconds: float

    @property
    def tokens(self) -> int:
        """Generated ids, never re-tokenised text."""
        return sum(len(output.token_ids) for output in self.outputs)


@dataclass
class ArmResult:
    """What one arm did.

    Attributes:
        arm: its settings.
        batch: requests decoded together.
        calls: with batch 1 one per prompt, in the order of (repeat, prompt); else one per repeat, with all prompts.
        num_units: calls that differ: the prompts with batch 1, else one. The same call comes again in the next repeat.
    """

    arm: Arm
    batch: int
    num_units: int
    calls: list[Call] = field(default_factory=list)

    @property
    def outputs(self) -> list[RequestOutput | PeerOutput]:
        """All answers, in the order of (repeat, prompt)."""
        return [output for call in self.calls for output in call.outputs]

    def samples(self, measure: Callable[[Call], tuple[float, float]] | None = None) -> tuple[list[float], list[float]]:
        """Tokens and seconds of what an interval resamples: prompts, summed over repeats, with batch 1; else repeats.

        `measure` gives both of a call where they are not the measured ones.
        """
        count = min(len(self.calls), self.num_units) if self.batch == 1 else len(self.calls)
        tokens, seconds = [0.0] * count, [0.0] * count
        for i, call in enumerate(self.calls):
            told = (call.tokens, call.seconds) if measure is None else measure(call)
            tokens[i % count] += told[0]
            seconds[i % count] += told[1]
        return tokens, seconds


def run_bench(
    llm: LLM,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    repeats: int = 1,
    batch: int = 1,
    on_answer: Callable[[Arm], None] | None = None,
) -> list[ArmResult]:
    """Run all arms interleaved, in a shuffled order: prompt by prompt with batch 1, else all prompts at once in each repeat.

    Args:
        llm: the models; with a batch over 1 it must decode that many requests together.
        arms: settings to compare, and peers, which run on the same weights.
        prompts: texts, ids or messages.
        params: sampling settings of every answer; the seed makes the arms comparable at temperature > 0, and shuffles.
        repeats: rounds over all prompts.
        batch: requests decoded together: one joins when another leaves.
        on_answer: called after each answer, for a progress bar.

    Returns:
        Results in the order of arms. After Ctrl-C those of the finished prompts, whole repeats only once there is one;
        KeyboardInterrupt is raised only when there are none.

    Raises:
        UserError: prompts that do not fit the model's context, an engine for another batch, or what a peer cannot do: before any work.
    """
    names = [arm.peer for arm in arms if arm.peer is not None]
    check_peers(names, batch, params)
    slots = llm.scheduler.num_slots
    if batch > 1 and slots != batch:
        raise UserError(f"this engine decodes {slots} requests together, not {batch}: make it with max_running_requests={batch}")
    encoded = [llm.encode(prompt) for prompt in prompts]
    for ids in encoded:  # every length is checked before any work
        llm.check_prompt(ids)
    everything = list(range(len(encoded)))
    units = [[number] for number in everything] if batch == 1 else [everything]
    results = [ArmResult(arm, batch, len(units)) for arm in arms]
    order, rng = list(range(len(arms))), random.Random(params.seed)
    peers = Peers(llm, names) if names else None

    def ask(
        arm: Arm, numbers: list[int], settings: SamplingParams, report: Callable[[object], None] | None
    ) -> Sequence[RequestOutput | PeerOutput]:
        if arm.peer is not None and peers is not None:
            answer = peers.answer(arm.peer, encoded[numbers[0]], settings)
            if report is not None:
                report(answer)
            return [answer]
        speculative = [arm.for_prompt(number) for number in numbers]
        return llm.generate([encoded[number] for number in numbers], settings, speculative=speculative, on_finish=report)

    warm_up = params.updated({"max_tokens": min(8, params.max_tokens), "min_tokens": 0})
    engines = list({arm.peer is None: arm for arm in reversed(arms)}.values())  # the first arm of ours and the first peer
    for arm in arms:
        for numbers in [[i] for i in range(min(len(arm.speculative) or 1, len(encoded)))] if batch == 1 else units:
            ask(arm, numbers, warm_up, None)
    for number in range(repeats * len(units)):
        rng.shuffle(order)
        numbers = units[number % len(units)]
        calls: dict[int, Call] = {}
        try:
            if batch == 1:  # what the first forward of a new prompt length costs is not charged to whoever comes first
                for arm in engines:
                    ask(arm, numbers, warm_up.updated({"max_tokens": 1}), None)
            for i in order:
                arm = arms[i]
                report = None if on_answer is None else lambda _, arm=arm: on_answer(arm)
                began = time.perf_counter()
                outputs = ask(arm, numbers, params, report)
                calls[i] = Call(outputs, time.perf_counter() - began)
        except KeyboardInterrupt:
            if number == 0:
                raise
            # A partial repeat would weigh some prompts more than others.
            whole = number if number < len(units) else number - number % len(units)
            for result in results:
                del result.calls[whole:]
            return results
        for i, result in enumerate(results):
            result.calls.append(calls[i])
    return results


def describe(result: ArmResult, baseline: ArmResult | None, seed: int = 0) -> dict[str, Any]:
    """One arm as numbers for a table or JSON.

    `seconds` = prefill + draft + verify + rest; rest is everything else: acceptance, commit, bookkeeping, detokenising. Accept
    length, drafted, accepted and promoted count whole steps, before stop conditions cut the last one. `steps` counts each request's,
    `batch_steps` those of the engine. What a peer does not tell is None; its steps are forwards of the target, the prompt's included, and
    its accept length counts tokens after stop conditions.
    """
    outputs = result.outputs
    tokens, seconds = sum(call.tokens for call in result.calls), sum(call.seconds for call in result.calls)
    row: dict[str, Any] = {
        "settings": [settings.model_dump() for settings in result.arm.speculative],
        "peer": None if result.arm.peer is None else peer_version(result.arm.peer),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "speedup_vs_ar": None,
        **_steps(outputs, seconds),
        "finish_reasons": dict(Counter(output.finish_reason for output in outputs)),
        "answer_tokens": [len(output.token_ids) for output in outputs],
        "call_tokens": [call.tokens for call in result.calls],
        "call_seconds": [call.seconds for call in result.calls],
    }
    if baseline is not None:
        fewest = 2 if result.batch == 1 else 3
        ratio, low, high = throughput_ratio(*result.samples(), *baseline.samples(), seed=seed, fewest=fewest)
        row["speedup_vs_ar"] = {"ratio": ratio, "low": low, "high": high}
    return row


def describe_groups(result: ArmResult, groups: Sequence[str | None]) -> dict[str, dict[str, Any]]:
    """What the steps of each group of prompts came to, by group; only of groups with a finished answer.

    Args:
        result: what an arm did.
        groups: of each prompt, in the order they were given to `run_bench`.
    """
    members: dict[str, list[RequestOutput | PeerOutput]] = {}
    for i, output in enumerate(result.outputs):
        group = groups[i % len(groups)]
        if group is not None:
            members.setdefault(group, []).append(output)
    wanted = ("accept_length", "acceptance_rate", "promoted_per_1k", "steps")
    out = {}
    for group, outputs in members.items():
        steps = _steps(outputs, 0.0)
        out[group] = {"answers": len(outputs), **{name: steps[name] for name in wanted}}
    return out


def _steps(outputs: Sequence[RequestOutput | PeerOutput], seconds: float) -> dict[str, Any]:
    """What is known of the steps behind answers that took so many seconds together."""
    ours = [output for output in outputs if isinstance(output, RequestOutput)]
    summary: Summary = summarise(record for output in ours for record in output.records)
    prefill = sum(output.seconds_prefill for output in ours)
    known = {
        "accept_length": summary.accept_length,
        "acceptance_rate": summary.acceptance_rate,
        "promoted": summary.promoted,
        "promoted_per_1k": summary.promoted_per_1k,
        "spent_nats": summary.spent,
        "steps": summary.steps,
        "drafted": summary.drafted,
        "accepted": summary.accepted,
        "batch_steps": summary.batch_steps,
        "seconds_prefill": prefill,
        "seconds_draft": summary.seconds_draft,
        "seconds_verify": summary.seconds_verify,
        "seconds_rest": seconds - prefill - summary.seconds_draft - summary.seconds_verify,
        "shapes": {str(shape): count for shape, count in summary.shapes.items()},
        "accepted_histogram": {str(n): count for n, count in summary.accepted_histogram.items()},
    }
    if len(ours) == len(outputs):
        return known
    peers = [output for output in outputs if isinstance(output, PeerOutput)]
    steps = sum(output.steps for output in peers)
    return dict.fromkeys(known) | {"steps": steps, "accept_length": sum(len(output.token_ids) for output in peers) / steps}
