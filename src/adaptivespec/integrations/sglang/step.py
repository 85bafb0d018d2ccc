"""One decoding step of a batch, from the shape to what the host learns of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ...method.policy import PolicyState, Root
from ...method.tree import TreeShape
from .requests import RequestBatch, RequestState
from .verify import Decision, spent_after


@dataclass
class Step:
    """A step under way.

    Attributes:
        batch: its requests.
        shape: the shape drafted for all of them.
        seq_lens: int64 [B], committed rows of the KV cache before the step.
        logits: [B * N, V] of the target while SGLang samples from them.
        decision: what the rules decided.
    """

    batch: RequestBatch
    shape: TreeShape
    seq_lens: torch.Tensor
    logits: torch.Tensor | None = None
    decision: Decision | None = None


@dataclass
class StepResult:
    """What a step did, on its way to the host.

    Attributes:
        states: the requests.
        shape: the shape drafted.
        values: float64 [B, 5] on the host: accepted, promoted, nats spent by the step, nats spent in all, the policy's signal.
        ready: when the copy is done; None when it is.
    """

    states: list[RequestState]
    shape: TreeShape
    values: torch.Tensor
    ready: Any = field(default=None, repr=False)

    def rows(self) -> list[tuple[int, int, float, float, float]]:
        """Per request the five values; waits for the copy."""
        if self.ready is not None:
            self.ready.synchronize()
        return [(int(a), int(p), nats, spent, signal) for a, p, nats, spent, signal in self.values.tolist()]


def root_of(topk_p: torch.Tensor, topk_index: torch.Tensor) -> Root:
    """The drafter's root as policies read it, from SGLang's probabilities and draft-vocabulary indices [B, K]."""
    return Root(topk_index, topk_p.float().log())


def book(step: Step, policy: Any) -> None:
    """Fold what was decided into the batch's totals and the policy's state; on the device."""
    decision = step.decision
    assert decision is not None
    batch = step.batch
    batch.spent_before = batch.spent
    batch.spent = spent_after(batch.spent, decision.acceptance)
    planned = torch.full_like(decision.acceptance.num_accepted, step.shape.num_steps)
    batch.policy = policy.update(batch.policy, decision.tree, decision.acceptance, planned)


def result_of(step: Step, states: list[RequestState], signal: torch.Tensor) -> StepResult:
    """Start the copy of a finished step's outcome to the host; `signal` is fp32 [B]."""
    assert step.decision is not None
    acceptance, spent = step.decision.acceptance, step.batch.spent
    columns = (acceptance.num_accepted, acceptance.promoted.sum(1), spent - step.batch.spent_before, spent, signal)
    values = torch.stack([column.double() for column in columns], 1)
    if values.device.type != "cuda":
        return StepResult(states, step.shape, values)
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record()
    return StepResult(states, step.shape, host, ready)


def no_signal(state: PolicyState) -> torch.Tensor:
    """The signal of policies that have one shape."""
    return torch.zeros_like(state.rar)
