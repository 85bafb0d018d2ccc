"""What SGLang's constraints cost the adaptive tree policy in accept length: one shape for a whole batch, and confidence that lags a step.

    python benchmarks/shared_shape.py --batch 8

The local engine gives every request the shape of its own signal, as the paper does. Here the policy is wrapped so that it plans as the
SGLang plug-in must: the shape of the batch's mean, smallest or largest signal (the plug-in's own code aggregates), and the signal of the
step before. Accept length only: no times. Prints a table and ends with one line of JSON; not part of the tests.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from adaptivespec import LLM, SamplingParams, SpeculativeConfig
from adaptivespec.engine.request import Request
from adaptivespec.evaluation.prompts import load_prompts
from adaptivespec.evaluation.statistics import paired_bootstrap
from adaptivespec.integrations.sglang.shapes import Shapes
from adaptivespec.method.acceptance import Acceptance
from adaptivespec.method.policy import Adaptive, PolicyDefaults, PolicyState, Root, TreePolicy
from adaptivespec.method.tree import DraftTree, TreeShape
from adaptivespec.telemetry.stats import Summary, summarise

UNSEEN = -2.0
"""`level` of a request that has not taken a step. The plug-in has no signal of the first step, so the second has none to lag behind."""


class SharedShape(PolicyDefaults):
    """The adaptive policy under SGLang's constraints.

    Args:
        policy: the adaptive policy.
        aggregate: `mean`, `min` or `max` of a batch's signals makes its one shape; None leaves every request its own.
        lagged: plan with the signal of the step before, and with the most cautious shape while there is none.
    """

    name = "shared_shape"

    def __init__(self, policy: Adaptive, aggregate: str | None = None, lagged: bool = False) -> None:
        self._policy, self._lagged = policy, lagged
        self._shared = None if aggregate is None else Shapes(policy, aggregate)
        self._now = torch.empty(0)

    def reachable(self) -> list[TreeShape]:
        """The adaptive policy's shapes."""
        return self._policy.reachable()

    def initial(self, batch: int, device: torch.device | str = "cpu") -> PolicyState:
        """The adaptive policy's, with the last signal in `level`, which that policy does not use."""
        state = self._policy.initial(batch, device)
        return dataclasses.replace(state, level=torch.full_like(state.level, UNSEEN))

    def plan(self, state: PolicyState, root: Root) -> torch.Tensor:
        """int64 [B]: the same index for all where the shape is shared."""
        self._now = self._policy.signal(state, root)
        if self._shared is None:
            return self._policy.shape_index(state.level.clamp(min=0) if self._lagged else self._now)
        if not self._lagged:
            return self._shared.plan(self._now).expand(len(self._now))
        known = [signal if signal >= 0 else None for signal in state.level.tolist()]
        return torch.full_like(state.misses, self._shared.plan_on_host(known))

    def update(self, state: PolicyState, tree: DraftTree, acceptance: Acceptance, num_steps: torch.Tensor) -> PolicyState:
        """The adaptive policy's, and this step's signal for the next to lag behind."""
        after = self._policy.update(state, tree, acceptance, num_steps)
        return dataclasses.replace(after, level=torch.where(state.level == UNSEEN, UNSEEN / 2, self._now))


@dataclass(frozen=True)
class Arm:
    """A line of the table: a label, and the policy, None for the static tree 3,4,4."""

    label: str
    policy: TreePolicy | None


def arms() -> list[Arm]:
    """The paper's policy first, which the others are compared with."""
    rows = [
        Arm("per request, current (the paper)", SharedShape(Adaptive())),
        Arm("per request, lagged", SharedShape(Adaptive(), None, True)),
    ]
    for lagged in (False, True):
        word = "lagged" if lagged else "current"
        rows += [Arm(f"shared {how}, {word}", SharedShape(Adaptive(), how, lagged)) for how in ("mean", "min", "max")]
    return [*rows, Arm("static 3,4,4", None)]


def answer(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, margin: float | None, policy: TreePolicy | None
) -> list[Request]:
    """Every prompt's request, finished; all decode in one batch as slots come free."""
    config = SpeculativeConfig(policy="static" if policy is None else "adaptive", margin=margin)
    requests = [request for prompt in prompts for request in llm.submit(prompt, params, speculative=config)]
    for request in requests if policy is not None else ():
        request.policy, request.state = policy, policy.initial(1, llm.model.decoder.device)
    while any(request.finish_reason is None for request in requests):
        llm.step()
    return requests


def compared(requests: Sequence[Request], base: Sequence[Request]) -> tuple[float, float, float]:
    """Accept length over the baseline's on the same prompts, with a 95 % interval from a paired bootstrap over prompts."""
    rows = [
        [s.steps + s.accepted, s.steps, b.steps + b.accepted, b.steps]
        for s, b in ((summarise(r.records), summarise(q.records)) for r, q in zip(requests, base, strict=True))
    ]
    columns = np.array(rows, dtype=float).T

    def ratio(totals: np.ndarray) -> np.ndarray:
        return np.asarray((totals[0] / totals[1]) / (totals[2] / totals[3]))

    low, high = paired_bootstrap(columns, [0] * len(rows), ratio) or (float("nan"), float("nan"))
    return float(ratio(columns.sum(1))), low, high


def described(label: str, margin: float | None, requests: Sequence[Request], base: Sequence[Request]) -> dict[str, Any]:
    """One line of the table."""
    records = [record for request in requests for record in request.records]
    total: Summary = summarise(records)
    ratio, low, high = compared(requests, base)
    levels = Counter(record.shape.num_steps for record in records)
    return {
        "rule": "strict" if margin is None else f"margin {margin:g}",
        "arm": label,
        "accept_length": total.accept_length,
        "ratio": ratio,
        "interval": [low, high],
        "drafted_per_step": total.drafted / total.steps,
        "levels_per_step": sum(n * steps for n, steps in levels.items()) / total.steps,
        "acceptance_rate": total.acceptance_rate,
        "promoted_per_1k": total.promoted_per_1k,
        "steps": total.steps,
        "mean_batch": sum(record.batch for record in records) / len(records),
        "same_text": sum(r.token_ids == q.token_ids for r, q in zip(requests, base, strict=True)),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| rule | shape and confidence | accept length | x per request, current (95 %) | drafted per step | levels | taken |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        low, high = row["interval"]
        lines.append(
            f"| {row['rule']} | {row['arm']} | {row['accept_length']:.2f} | {row['ratio']:.3f} ({low:.3f}-{high:.3f}) "
            f"| {row['drafted_per_step']:.2f} | {row['levels_per_step']:.2f} | {row['acceptance_rate']:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", help="default: the short name's own head")
    parser.add_argument("--dtype", default="fp32", help="fp32 by default, so that strict answers are the same in every arm")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--limit", type=int, help="only the first so many of the packaged prompts")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--margins", default="off,0.2", help="kappas, separated by commas; off is strict")
    args = parser.parse_args()
    llm = LLM(args.model, drafter=args.drafter, dtype=args.dtype, max_running_requests=args.batch)
    prompts = [llm.encode(prompt.messages) for prompt in load_prompts(limit=args.limit)]
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    rows = []
    for word in args.margins.split(","):
        margin = None if word == "off" else float(word)
        base: list[Request] = []
        for arm in arms():
            requests = answer(llm, prompts, params, margin, arm.policy)
            base = base or requests
            rows.append(described(arm.label, margin, requests, base))
    print(table(rows))
    settings = {name: getattr(args, name) for name in ("model", "dtype", "batch", "max_tokens")}
    print(json.dumps({**settings, "prompts": len(prompts), "rows": rows}))


if __name__ == "__main__":
    main()
