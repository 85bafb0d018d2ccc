"""Settings, defined once for every engine: frozen, validated, from Python, JSON or flags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .errors import UserError, nearest

Shape = tuple[Annotated[int, Field(ge=0, le=1000)], Annotated[int, Field(ge=1, le=1000)], Annotated[int, Field(ge=1, le=10_000)]]
"""num_steps, topk, num_draft_tokens (the root included), as in SGLang."""

INT32_MAX = 2**31 - 1

ALIASES = {
    "speculative_num_steps": "num_steps",
    "speculative_eagle_topk": "topk",
    "eagle_topk": "topk",
    "speculative_num_draft_tokens": "num_draft_tokens",
    "kappa": "margin",
    "speculative_accept_threshold_single": "threshold_single",
    "speculative_accept_threshold_acc": "threshold_acc",
    "assistant_confidence_threshold": "confidence_threshold",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
"""Other names users bring for the same setting."""


def _shown(value: Any) -> str:
    """A value in one short line."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python refuses to write integers of thousands of digits
        return f"a huge {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def check_names(values: Mapping[Any, Any]) -> None:
    """Raise UserError for a setting whose name is not text."""
    if wrong := [name for name in values if not isinstance(name, str)]:
        raise UserError(f"the name of a setting is text, not {_shown(wrong[0])}")


class Settings(BaseModel):
    """A frozen model whose every error is one `UserError` line, with the nearest name for an unknown setting."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        fields = type(self).model_fields
        settings: dict[str, Any] = {}
        for alias, value in values.items():
            name = ALIASES[alias] if ALIASES.get(alias) in fields else alias
            if name not in fields:
                raise UserError(f"unknown setting {name!r}{nearest(name, fields)}")
            if name in settings:
                raise UserError(f"{name} is given twice, as {alias!r} too")
            annotation = fields[name].annotation
            choices = get_args(annotation) if get_origin(annotation) is Literal else ()
            if isinstance(value, bool) and annotation is not bool:
                raise UserError(f"{name}: expected a {'name' if choices else 'number'}, not {value}")
            if choices and value not in choices:
                raise UserError(f"unknown {name} {value!r}{nearest(str(value), choices)}")
            if isinstance(value, bytes | bytearray):
                raise UserError(f"{name}: expected text, not bytes")
            settings[name] = value
        try:
            super().__init__(**settings)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or type(self).__name__
            reason = first["msg"].removeprefix("Value error, ")
            given = "" if first["type"] == "value_error" and not first["loc"] else f", not {_shown(first['input'])}"
            raise UserError(f"{where}: {reason}{given}") from None

    @classmethod
    def parse(cls, text: str) -> Self:
        """From a JSON object, or the path of a file that holds one."""
        if not text.lstrip().startswith("{"):
            try:
                text = Path(text).read_text("utf-8-sig")
            except (OSError, UnicodeDecodeError, ValueError) as error:
                reason = getattr(error, "strerror", None) or "not text"
                raise UserError(f"{text!r} is neither a JSON object nor a readable file ({reason})") from None
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise UserError(f"expected a JSON object, not {type(values).__name__}")
        return cls(**values)

    def updated(self, values: Mapping[str, Any]) -> Self:
        """A copy with some settings replaced, validated again."""
        check_names(values)
        return type(self)(**{**self.model_dump(exclude_unset=True), **values})


POLICIES: dict[str, tuple[str, ...]] = {
    "adaptive": ("low", "high", "saturation", "alpha", "patience", "normalise"),
    "static": ("num_steps", "topk", "num_draft_tokens"),
    "off": (),
    "talon": ("num_steps", "topk", "num_draft_tokens", "talon_mu"),
    "accept_ema": ("candidate_steps", "alpha"),
    "heuristic": ("num_steps",),
    "confidence": ("num_steps", "confidence_threshold"),
    "goodput": ("num_steps", "topk", "num_draft_tokens", "probe"),
    "goodput_shapes": ("shapes", "probe"),
}
"""The settings of each policy."""

_GUARDS = ("guards", "budget", "budget_per_100", "max_promotions")
RULES: dict[str, tuple[str, ...]] = {
    "margin": ("margin", *_GUARDS),
    "strict": (),
    "margin_top1": ("margin", *_GUARDS),
    "threshold": ("threshold_single", "threshold_acc"),
    "typical": ("typical_epsilon", "typical_delta"),
    "relaxed_topk": ("relaxed_topk", "relaxed_delta"),
    "logit_ratio": ("logit_ratio",),
    "window": ("window", "window_entropy"),
    "rejection": (),
}
"""The settings of each acceptance rule."""

POLICY_SETTINGS = frozenset(name for names in POLICIES.values() for name in names)
RULE_SETTINGS = frozenset(name for names in RULES.values() for name in names)

OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "talon": {"num_steps": 15, "topk": 10, "num_draft_tokens": 60},
    "accept_ema": {"alpha": 0.2},
    "heuristic": {"num_steps": 15},
    "confidence": {"num_steps": 15},
    "goodput": {"num_steps": 10, "topk": 4, "num_draft_tokens": 64},
}
"""Defaults of single policies, where they differ from the field's."""


def _without_effect(policy: str, rule: str) -> dict[str, str]:
    """The settings that mean nothing under a policy and a rule, each with what makes it so."""
    if policy == "off":
        return dict.fromkeys(("rule", *POLICY_SETTINGS, *RULE_SETTINGS), "policy off")
    idle = dict.fromkeys(POLICY_SETTINGS.difference(POLICIES.get(policy, ())), f"policy {policy}")
    return idle | dict.fromkeys(RULE_SETTINGS.difference(RULES.get(rule, ())), f"rule {rule}")


class SpeculativeConfig(Settings):
    """How to speculate. The default is AdaptiveSpec: the adaptive tree policy with the margin rule, which is lossy.

    Attributes:
        policy: `adaptive`, `static` (always num_steps, topk, num_draft_tokens), `goodput` (the most tokens per second, given what a row
            costs on this machine), `goodput_shapes` (the same, choosing among `shapes` before drafting, for engines with captured graphs)
            or `off` (plain decoding); to compare with: `talon`, and for chains `accept_ema` (SGLang), `heuristic` and `confidence`
            (transformers).
        num_steps, topk, num_draft_tokens: the static shape, in SGLang's words (the root counts as a draft token); 3, 4, 4. Of talon the
            deepest level, the first layer's width and the budget; 15, 10, 60. Of goodput the largest tree; 10, 4, 64. Of heuristic and
            confidence num_steps is the longest chain; 15.
        low, high: the adaptive policy's corners, each num_steps, topk, num_draft_tokens.
        saturation: the confidence * acceptance ratio at which the tree is deepest (the paper's d).
        alpha: weight of the newest step in the rolling acceptance ratio, 0.3; in accept_ema's moving average, 0.2.
        patience: drafted steps in a row with nothing accepted until the circuit breaker opens.
        normalise: divide accepted tokens by the tree's deepest level (`depth`) or by the planned `num_steps`.
        talon_mu: talon keeps paths at least this probable relative to the best of their layer.
        candidate_steps: the depths among which accept_ema moves, ascending.
        confidence_threshold: a chain of confidence ends with the first token that the drafter gives less probability.
        shapes: those of goodput_shapes, each num_steps, topk, num_draft_tokens.
        probe: most steps that goodput decodes plainly, when drafting does not pay, before it asks the drafter again, for one request.
        rule: `margin`, `strict` (lossless), or one to compare with: `margin_top1`, `threshold` (SGLang; temperature above 0), `typical`
            (Medusa), `relaxed_topk` (TensorRT-LLM; temperature 0), `logit_ratio` (MARS), `window` (FLy; chains), and `rejection`, which no
            drafter here can serve.
        margin: kappa in (0, 1]: a drafted token that is not the target's choice is accepted when its probability relative to the
            target's top-1 exceeds kappa. None or 1 is strict, and lossless. 0.5 where the paper has 0.2: see docs/results.md. Also of
            margin_top1.
        guards: `protected` never promotes to or away from end-of-sequence, special and stop tokens; `none` is the paper's rule.
        budget: most nats a request may spend on promotions in all.
        budget_per_100: most nats per 100 emitted tokens.
        max_promotions: most promotions in one step.
        threshold_single, threshold_acc: SGLang's acceptance thresholds; both 1 is lossless.
        typical_epsilon, typical_delta: accept p > min(epsilon, delta * exp(-entropy)).
        relaxed_topk, relaxed_delta: accept the target's best so many tokens while p is within delta of the top-1's.
        logit_ratio: accept one of the two best tokens where their logits' ratio exceeds this.
        window, window_entropy: accept a mismatch of at least this entropy when so many exact tokens follow.
    """

    policy: Literal["adaptive", "static", "goodput", "goodput_shapes", "off", "talon", "accept_ema", "heuristic", "confidence"] = "adaptive"
    num_steps: Annotated[int, Field(ge=1, le=1000)] = 3
    topk: Annotated[int, Field(ge=1, le=1000)] = 4
    num_draft_tokens: Annotated[int, Field(ge=2, le=10_000)] = 4
    low: Shape = (3, 4, 4)
    high: Shape = (7, 1, 8)
    saturation: Annotated[float, Field(gt=0, le=1)] = 0.5
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.3
    patience: Annotated[int, Field(ge=1, le=INT32_MAX)] = 5
    normalise: Literal["depth", "num_steps"] = "depth"
    talon_mu: Annotated[float, Field(gt=0, le=1)] = 0.03
    candidate_steps: Annotated[tuple[Annotated[int, Field(ge=1, le=1000)], ...], Field(min_length=1)] = (1, 3, 5, 7)
    confidence_threshold: Annotated[float, Field(ge=0, le=1)] = 0.4
    shapes: Annotated[tuple[Shape, ...], Field(min_length=1, max_length=64)] = (
        (1, 4, 4),
        (2, 4, 6),
        (4, 4, 6),
        (5, 4, 8),
        (6, 4, 16),
        (7, 4, 32),
    )
    probe: Annotated[int, Field(ge=1, le=10_000)] = 16
    rule: Literal["margin", "strict", "margin_top1", "threshold", "typical", "relaxed_topk", "logit_ratio", "window", "rejection"] = (
        "margin"
    )
    margin: Annotated[float | None, Field(gt=0, le=1)] = 0.5
    guards: Literal["protected", "none"] = "protected"
    budget: Annotated[float | None, Field(ge=0)] = None
    budget_per_100: Annotated[float | None, Field(ge=0)] = None
    max_promotions: Annotated[int | None, Field(ge=0, le=INT32_MAX)] = None
    threshold_single: Annotated[float, Field(gt=0, le=1)] = 1.0
    threshold_acc: Annotated[float, Field(gt=0, le=1)] = 1.0
    typical_epsilon: Annotated[float, Field(gt=0, le=1)] = 0.09
    typical_delta: Annotated[float, Field(gt=0, le=1e9)] = 0.3
    relaxed_topk: Annotated[int, Field(ge=1, le=1000)] = 10
    relaxed_delta: Annotated[float, Field(ge=0, le=1)] = 0.6
    logit_ratio: Annotated[float, Field(gt=0, le=1)] = 0.9
    window: Annotated[int, Field(ge=1, le=1000)] = 6
    window_entropy: Annotated[float, Field(ge=0, le=10)] = 0.3

    @field_validator("margin", "budget", "budget_per_100", "max_promotions", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return None if isinstance(value, str) and value.lower() in ("off", "none", "strict") else value

    @field_validator("low", "high", "candidate_steps", mode="before")
    @classmethod
    def _numbers_from_text(cls, value: Any) -> Any:
        return tuple(value.replace("/", ",").split(",")) if isinstance(value, str) else value

    @field_validator("shapes", mode="before")
    @classmethod
    def _shapes_from_text(cls, value: Any) -> Any:
        return tuple(tuple(part.replace("/", ",").split(",")) for part in value.split("|")) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        for name, why in _without_effect(self.policy, self.rule).items():
            value = getattr(self, name)
            harmless = (type(self).model_fields[name].default, None, "strict" if name == "rule" else None)
            if name in self.model_fields_set and value not in harmless:
                raise ValueError(f"{name} has no effect with {why}; leave it out")
        for name, value in OWN_DEFAULTS.get(self.policy, {}).items():
            if name not in self.model_fields_set:
                self.__dict__[name] = value  # an effective value that still counts as not given: another policy won't inherit it
        return self

    @model_validator(mode="after")
    def _window_has_chains(self) -> Self:
        branching = {
            "static": self.topk > 1,
            "adaptive": (self.low[1], self.high[1]) != (1, 1),
            "talon": self.topk > 1,
            "goodput": self.topk > 1,
            "goodput_shapes": any(topk > 1 for _, topk, _ in self.shapes),
        }
        if self.rule == "window" and branching.get(self.policy):
            raise ValueError(
                f"rule window needs chains, and policy {self.policy} branches here; for example policy static with num_steps 15, topk 1, "
                "num_draft_tokens 16"
            )
        return self

    @model_validator(mode="after")
    def _guards_agree(self) -> Self:
        if self.guards == "none" and (self.budget, self.budget_per_100, self.max_promotions) != (None, None, None):
            raise ValueError(
                "guards=none switches every guard off; leave out budget, budget_per_100 and max_promotions, or the guards=none"
            )
        return self

    def for_request(self, wish: SpeculativeConfig | Mapping[str, Any] | bool | None) -> SpeculativeConfig:
        """The settings of one request, from these defaults and what the request says.

        Args:
            wish: None takes the defaults, and so does True unless they are plain decoding; False is plain decoding; a mapping
                replaces single settings, and what the defaults say about another policy or rule, or about guards that the request
                switches off, no longer counts; a whole configuration stands for itself.

        Raises:
            UserError: settings that do not exist, do not fit or have no effect.
        """
        if isinstance(wish, SpeculativeConfig):
            return wish
        if wish is None or (wish is True and self.policy != "off"):
            return self
        if wish is True:
            return SpeculativeConfig()
        if wish is False:
            return SpeculativeConfig(policy="off", margin=None)
        if not isinstance(wish, Mapping):
            raise UserError(f"speculative: expected settings, true or false, not {_shown(wish)}")
        check_names(wish)
        asked = {ALIASES.get(name, name): value for name, value in wish.items()}
        policy = asked.get("policy", self.policy)
        rule = asked.get("rule", self.rule)
        dropped = set(_without_effect(policy, rule)) if isinstance(policy, str) and isinstance(rule, str) else set()
        if asked.get("guards") == "none":
            dropped |= {"budget", "budget_per_100", "max_promotions"}
        inherited = {name: value for name, value in self.model_dump(exclude_unset=True).items() if name not in dropped | asked.keys()}
        return SpeculativeConfig(**inherited, **wish)

    @property
    def kappa(self) -> float:
        """The margin threshold, 1 when strict."""
        return self.margin if self.margin is not None and "margin" in RULES[self.rule] else 1.0

    @property
    def effective_rule(self) -> str:
        """The rule that decides: `strict` in place of a margin rule whose kappa is 1, or where nothing is drafted."""
        return "strict" if self.policy == "off" or ("margin" in RULES[self.rule] and self.kappa == 1) else self.rule

    @property
    def shape(self) -> Shape:
        """The static shape; talon's largest."""
        return self.num_steps, self.topk, self.num_draft_tokens


class SamplingParams(Settings):
    """What one request asks for, in vLLM's words.

    Order: min_tokens masks stop tokens, penalties, temperature, top_k, top_p, min_p, as in transformers. At temperature 0, which
    is greedy, the last three have no effect. Each node of a draft tree sees its own path, so all of this is exact however many
    tokens a step accepts.

    Attributes:
        temperature: 0 is greedy.
        top_k: only the so many most probable tokens; 0 or -1 is off. Ties at the edge stay.
        top_p: only the smallest set of most probable tokens that holds this much probability; 1 is off.
        min_p: only tokens at least this probable relative to the most probable; 0 is off.
        repetition_penalty: logits of tokens in prompt or answer are divided by it when positive, else multiplied; 1 is off.
        presence_penalty: subtracted from logits of tokens in the answer.
        frequency_penalty: subtracted as often as the token is in the answer.
        seed: of the position-keyed noise; None draws one. Answer i of n uses seed + i.
        n: answers per prompt.
        max_tokens: most tokens to generate.
        min_tokens: stop tokens are masked, and stop strings not looked for, until this many are generated.
        stop: strings that end the answer; the text ends before them.
        stop_token_ids: further tokens that end the answer, beside the model's own end-of-sequence tokens.
        include_stop_str_in_output: end the text after the stop string instead.
        ignore_eos: go on after end-of-sequence.
        logprobs: give each token's log-probability (of the target, before all of the above) with so many top alternatives.
    """

    temperature: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    seed: Annotated[int | None, Field(ge=0, lt=2**63)] = None
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] = 256
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    stop: tuple[Annotated[str, Field(min_length=1, strict=True)], ...] = ()
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: Annotated[int | None, Field(ge=0, le=1000)] = None

    @field_validator("stop", "stop_token_ids", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        values = () if value is None else (value,) if isinstance(value, str | int) else value
        if isinstance(values, list | tuple) and any(isinstance(one, bool) for one in values):
            raise ValueError("expected numbers or texts, not true or false")
        return values

    @model_validator(mode="after")
    def _they_agree(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n {self.n}: all answers at temperature 0 are the same; set a temperature, or n 1")
        return self

    @property
    def penalises(self) -> bool:
        """Whether any penalty is on."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def filters(self) -> bool:
        """Whether top-k, top-p or min-p take tokens away."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


class EngineConfig(Settings):
    """How the local engine runs.

    Attributes:
        dtype: `auto` is bf16 where the hardware has it, else fp32; `fp32` for exact comparisons.
        device: `auto` is CUDA when there is a GPU, else the CPU.
        context_length: longest prompt plus answer; None takes the model's own, at most 4096.
        max_running_requests: requests decoded together; others wait.
        prefill_chunk: prompt tokens per forward.
        aux_layers: whether a head's explicit feature layer ids mean the layers' `input` (vLLM) or `output` (SGLang).
        speculative_algorithm: EAGLE3, STANDALONE (a smaller model), NGRAM or NONE; None takes what the drafter is.
        prompt_lookup_max, prompt_lookup_min: longest and shortest n-gram that NGRAM looks up.
        trace: a file that gets every step of every request as a line of JSON, see docs/trace.md.
    """

    dtype: str = "auto"
    device: str = "auto"
    context_length: Annotated[int | None, Field(ge=2)] = None
    max_running_requests: Annotated[int, Field(ge=1, le=4096)] = 8
    prefill_chunk: Annotated[int, Field(ge=1, le=INT32_MAX)] = 512
    aux_layers: Literal["input", "output"] = "input"
    speculative_algorithm: str | None = None
    prompt_lookup_max: Annotated[int, Field(ge=1, le=1000)] = 4
    prompt_lookup_min: Annotated[int, Field(ge=1, le=1000)] = 1
    trace: str | None = None

    @field_validator("trace", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value
