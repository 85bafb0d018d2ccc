"""What the plug-in knows of each request, and of the requests of one batch as tensors.

A request's state hangs on SGLang's own request object: it survives retraction, when SGLang computes the request anew, and is freed with
the request, however that ends.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...build import build_rule
from ...config import RULES, SpeculativeConfig
from ...errors import UserError
from ...method.acceptance import AcceptanceRule
from ...method.grouped import rows_by_rule
from ...method.guards import ProtectedMasks, RuleParams
from ...method.policy import PolicyState, TreePolicy
from ...method.tree import TreeShape, split_rows, stack_rows
from ...telemetry.stats import Summary
from .sampling import SamplingRows, scores
from .settings import request_config

logger = logging.getLogger(__name__)

ATTRIBUTE = "adaptivespec"
"""Where a request's state hangs on SGLang's request object."""

_RULES_KEPT = 64
_ALL_TOKENS = 1 << 30  # SGLang's top_k for the whole vocabulary
_WIDEST_TOP_K = 1024
_UNLIMITED = torch.iinfo(torch.int64).max
_serial = itertools.count()
_living: weakref.WeakSet[RequestState] = weakref.WeakSet()


@dataclass
class Totals:
    """What a request's steps did, counted from what was drafted, before stop conditions cut the last block."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    promoted: int = 0
    spent: float = 0.0
    accepted_histogram: Counter[int] = field(default_factory=Counter)
    shapes: Counter[TreeShape] = field(default_factory=Counter)

    def add(self, shape: TreeShape, accepted: int, promoted: int, spent: float) -> None:
        """One more step; `spent` is the request's total after it."""
        self.steps += 1
        self.drafted += shape.num_draft_tokens - 1
        self.accepted += accepted
        self.promoted += promoted
        self.spent = spent
        self.accepted_histogram[accepted] += 1
        self.shapes[shape] += 1

    def summary(self) -> Summary:
        """The same as telemetry words it; the server's own metrics time the steps."""
        return Summary(
            steps=self.steps,
            drafted=self.drafted,
            accepted=self.accepted,
            promoted=self.promoted,
            spent=self.spent,
            batch_steps=float(self.steps),
            seconds_draft=0.0,
            seconds_verify=0.0,
            seconds_rest=0.0,
            accepted_histogram=dict(sorted(self.accepted_histogram.items())),
            shapes=dict(sorted(self.shapes.items())),
        )


@dataclass(eq=False)
class RequestState:
    """One request: its settings, what it did, and its rows of the device's state.

    Attributes:
        config, rule: settings in effect.
        temperature: 0 is greedy.
        seed: of the position-keyed noise.
        top_k, top_p, min_p: filters, as SGLang has them.
        protected: token ids that guards protect.
        prompt_tokens: length of the prompt.
        spent: float64 [1], nats spent; policy: its rows of the policy's state; both on the device, None before the first decoding step.
        refund: nats in `spent` of steps whose tokens SGLang dropped; taken off when the request joins a batch again.
        signal, signal_before: the policy's signal after the last finished step and after the one before it; None while there is none.
    """

    config: SpeculativeConfig
    rule: AcceptanceRule
    temperature: float
    seed: int
    top_k: int
    top_p: float
    min_p: float
    protected: frozenset[int]
    prompt_tokens: int
    totals: Totals = field(default_factory=Totals)
    spent: torch.Tensor | None = None
    policy: PolicyState | None = None
    refund: float = 0.0
    signal: float | None = None
    signal_before: float | None = None
    serial: int = field(default_factory=lambda: next(_serial))

    def __post_init__(self) -> None:
        _living.add(self)

    def report(self) -> dict[str, Any]:
        """What meta_info says of a finished request: counts and the settings in effect, plain numbers only."""
        summary = self.totals.summary()
        settings = {name: getattr(self.config, name) for name in RULES[self.config.effective_rule]}
        return {
            "accept_length": summary.accept_length,
            "acceptance_rate": summary.acceptance_rate,
            "verify_steps": summary.steps,
            "drafted": summary.drafted,
            "accepted": summary.accepted,
            "promoted": summary.promoted,
            "spent_budget": summary.spent,
            "accepted_histogram": [summary.accepted_histogram.get(n, 0) for n in range(max(summary.accepted_histogram, default=-1) + 1)],
            "shapes": {str(shape): steps for shape, steps in summary.shapes.items()},
            "rule": self.config.effective_rule,
            **{name: value for name, value in settings.items() if value is not None},
        }


def living() -> int:
    """Requests whose state is held in this process."""
    return len(_living)


class Requests:
    """Makes and finds the state of requests, and keeps the last batch's tensors while its requests stay together.

    Args:
        defaults: the server's settings.
        policy: the server's policy.
    """

    def __init__(self, defaults: SpeculativeConfig, policy: TreePolicy) -> None:
        self._defaults, self._policy = defaults, policy
        self._rules: dict[str, AcceptanceRule] = {}
        self._masks: ProtectedMasks | None = None
        self._last: RequestBatch | None = None
        self._specials: tuple[Any, frozenset[int]] = (None, frozenset())

    def state_of(self, req: Any) -> RequestState:
        """The state of SGLang's request `req`, made at its first sight."""
        state = getattr(req, ATTRIBUTE, None)
        if not isinstance(state, RequestState):
            state = self._new(req)
            setattr(req, ATTRIBUTE, state)
        return state

    def batch(self, reqs: Sequence[Any], device: torch.device) -> RequestBatch:
        """The requests of a batch, in its order."""
        states = [self.state_of(req) for req in reqs]
        serials = [state.serial for state in states]
        refunds = any(state.refund for state in states)
        if self._last is None or self._last.serials != serials or self._last.device != device or refunds:
            if self._last is not None:
                self._last.hand_back()
            self._last = RequestBatch(states, self._policy, device)
        return self._last

    def protected(self, states: Iterable[RequestState], device: torch.device, vocab_size: int) -> torch.Tensor:
        """Bool [1, V], or [B, V] when the requests protect different tokens."""
        if self._masks is None:  # only now are both known
            self._masks = ProtectedMasks(vocab_size, device)
        return self._masks.of(state.protected for state in states)

    def _new(self, req: Any) -> RequestState:
        params = req.sampling_params
        temperature = 0.0 if params.top_k <= 1 else float(params.temperature)  # SGLang's greedy is a top_k of 1
        try:
            config = request_config(self._defaults, params.custom_params, temperature)
        except UserError as error:  # refused where requests come in; what slipped past is served without loss
            logger.warning("adaptivespec: request %s is served strictly: %s", req.rid, error)
            config = self._defaults.for_request({"rule": "strict"})
        # Kappa and guards are tensors of the batch, so requests that differ in nothing else share a rule.
        key = config.effective_rule + config.model_dump_json(include=set(RULES[config.effective_rule]) - set(RULES["margin"]))
        if key not in self._rules:
            if len(self._rules) >= _RULES_KEPT:  # requests may bring settings of their own without end
                self._rules.clear()
            self._rules[key] = build_rule(config)
        return RequestState(
            config=config,
            rule=self._rules[key],
            temperature=temperature,
            seed=_seed(req.rid, params),
            top_k=int(params.top_k),
            top_p=float(params.top_p),
            min_p=float(params.min_p),
            protected=self._protected_ids(req),
            prompt_tokens=len(req.origin_input_ids),
        )

    def _protected_ids(self, req: Any) -> frozenset[int]:
        """End-of-sequence, every special token of the tokenizer, and the request's stop tokens."""
        tokenizer = req.tokenizer
        if tokenizer is not None and tokenizer is not self._specials[0]:  # read once: transformers goes through the vocabulary for it
            self._specials = (tokenizer, _special_ids(tokenizer))
        special = self._specials[1] if tokenizer is not None else frozenset()
        return special.union(req.sampling_params.stop_token_ids or (), req.eos_token_ids or ())


def _seed(rid: str, params: Any) -> int:
    """The request's own seed; else one of its id, so that every rank of tensor parallelism draws the same noise."""
    if params.sampling_seed is not None and params.n == 1:
        return int(params.sampling_seed)
    digest = hashlib.blake2b(f"{params.sampling_seed} {rid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """End-of-sequence and every special token."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    ids = {*getattr(tokenizer, "all_special_ids", ()), *(i for i, token in added.items() if token.special)}
    ids |= set(getattr(tokenizer, "additional_stop_token_ids", None) or ())
    eos = getattr(tokenizer, "eos_token_id", None)
    return frozenset(int(i) for i in (ids if eos is None else {*ids, eos}))


class RequestBatch:
    """The requests of one batch as tensors on the device.

    Settings go there once per composition of the batch, in two copies from pinned memory that the host does not wait for. What steps
    change (`spent`, `policy`) stays there and is handed back to the requests when the composition changes.

    Attributes:
        serials: who is in it.
        spent, spent_before: float64 [B], nats spent by each request, and before the last step.
        policy: the policy's state of each request.
        sampling: sampling settings of each request.
        by_rule: the rows that each rule decides for.
    """

    def __init__(self, states: Sequence[RequestState], policy: TreePolicy, device: torch.device) -> None:
        self.device = device
        self.serials = [state.serial for state in states]
        self._states = [weakref.ref(state) for state in states]
        real = [(s.config.kappa, _limit(s.config.budget), _limit(s.config.budget_per_100), s.temperature, s.top_p, s.min_p) for s in states]
        whole = [
            (
                _UNLIMITED if s.config.max_promotions is None else s.config.max_promotions,
                s.prompt_tokens,
                s.seed,
                s.top_k,
                int(s.config.guards == "protected"),
            )
            for s in states
        ]
        kappa, budget, budget_per_100, temperature, top_p, min_p = to_device(real, torch.float64, device).unbind(1)
        max_promotions, prompt_tokens, seeds, top_k, protect = to_device(whole, torch.int64, device).unbind(1)
        self._settings = (kappa, budget, budget_per_100, max_promotions, protect.bool())
        self._prompt_tokens = prompt_tokens
        sampling = [s for s in states if s.temperature > 0]
        ks = [s.top_k for s in sampling]
        self.sampling = SamplingRows(
            temperature=temperature.float(),
            seeds=seeds,
            top_k=top_k,
            top_p=top_p.float(),
            min_p=min_p.float(),
            samples=bool(sampling),
            filters=any(s.top_k < _ALL_TOKENS or s.top_p < 1 or s.min_p > 0 for s in sampling),
            widest=max(ks) if ks and max(ks) <= _WIDEST_TOP_K else None,
        )
        fresh = policy.initial(1, device)
        nothing = torch.zeros(1, dtype=torch.float64, device=device)
        self.spent = torch.cat([nothing if s.spent is None else (s.spent - s.refund).clamp(min=0) for s in states])
        for s in states:
            s.refund = 0.0
        self.spent_before = self.spent
        self.policy = stack_rows([fresh if s.policy is None else s.policy for s in states])
        self.by_rule = rows_by_rule([s.rule for s in states])

    @property
    def states(self) -> list[RequestState | None]:
        """The requests; None for those that are gone."""
        return [reference() for reference in self._states]

    def params(self, protected: torch.Tensor, seq_lens: torch.Tensor) -> RuleParams:
        """Settings and totals as rules read them.

        Args:
            protected: bool [B or 1, V].
            seq_lens: int64 [B], committed rows of the KV cache: prompt and answer without the last token.
        """
        kappa, budget, budget_per_100, max_promotions, protect = self._settings
        emitted = seq_lens.to(torch.int64) + 1 - self._prompt_tokens
        return RuleParams(kappa, protect, protected, self.spent, budget, budget_per_100, emitted, max_promotions)

    def draw(self, probs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int32 [B]: a token of each row for a position (int64 [B]), with the noise of a decoding step there.

        Args:
            probs: fp32 [B, V] at the requests' temperatures: their logarithms are the tempered logits, but for a constant that changes
                no choice, so that temperature 1 is left to do.
        """
        rows = dataclasses.replace(self.sampling, temperature=(self.sampling.temperature > 0).float())
        return scores(probs.log(), rows, positions)[1].max(-1).indices.to(torch.int32)

    def hand_back(self) -> None:
        """Give each request its rows of what the steps changed."""
        rows = zip(self.states, torch.split(self.spent, 1), split_rows(self.policy, len(self.serials)), strict=True)
        for state, spent, policy in rows:
            if state is not None:
                state.spent, state.policy = spent, policy


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host numbers as a tensor on the device, through pinned memory so that the host waits for nothing."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _limit(value: float | None) -> float:
    return math.inf if value is None else value
