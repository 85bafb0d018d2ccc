"""Settings, defined once for every engine: frozen, validated, from Python, JSON or flags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .errors import UserError, nearest

Shape = tuple[int, int, int]
"""num_steps, topk, num_draft_tokens (the root included), as in SGLang."""

INT32_MAX = 2**31 - 1

ALIASES = {
    "speculative_num_steps": "num_steps",
    "speculative_eagle_topk": "topk",
    "eagle_topk": "topk",
    "speculative_num_draft_tokens": "num_draft_tokens",
    "kappa": "margin",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
"""Other names users bring for the same setting."""


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
            if isinstance(value, bool) and fields[name].annotation is not bool:
                raise UserError(f"{name}: expected a {'number' if name != 'policy' else 'name'}, not {value}")
            settings[name] = value
        try:
            super().__init__(**settings)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or type(self).__name__
            reason = first["msg"].removeprefix("Value error, ")
            given = "" if first["type"] == "value_error" and not first["loc"] else f", not {first['input']!r}"
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
        return type(self)(**{**self.model_dump(exclude_unset=True), **values})


_STATIC = ("num_steps", "topk", "num_draft_tokens")
_ADAPTIVE = ("low", "high", "saturation", "alpha", "patience", "normalise")
_RULE = ("margin", "guards", "budget", "budget_per_100", "max_promotions")
_WITHOUT_EFFECT = {"static": _ADAPTIVE, "adaptive": _STATIC, "off": (*_STATIC, *_ADAPTIVE, *_RULE)}
"""Settings that mean nothing under each policy."""


class SpeculativeConfig(Settings):
    """How to speculate. The default is AdaptiveSpec: the adaptive tree policy with the margin rule, which is lossy.

    Attributes:
        policy: `adaptive`, `static` (always num_steps, topk, num_draft_tokens) or `off` (plain decoding).
        num_steps, topk, num_draft_tokens: the static shape, in SGLang's words (the root counts as a draft token).
        low, high: the adaptive policy's corners, each num_steps, topk, num_draft_tokens.
        saturation: the confidence * acceptance ratio at which the tree is deepest (the paper's d).
        alpha: weight of the newest step in the rolling acceptance ratio.
        patience: drafted steps in a row with nothing accepted until the circuit breaker opens.
        normalise: divide accepted tokens by the tree's deepest level (`depth`) or by the planned `num_steps`.
        margin: kappa in (0, 1]: a drafted token that is not the target's choice is accepted when its probability relative to the
            target's top-1 exceeds kappa. None or 1 is strict, and lossless.
        guards: `protected` never promotes to or away from end-of-sequence, special and stop tokens; `none` is the paper's rule.
        budget: most nats a request may spend on promotions in all.
        budget_per_100: most nats per 100 emitted tokens.
        max_promotions: most promotions in one step.
    """

    policy: Literal["adaptive", "static", "off"] = "adaptive"
    num_steps: Annotated[int, Field(ge=1, le=1000)] = 3
    topk: Annotated[int, Field(ge=1, le=1000)] = 4
    num_draft_tokens: Annotated[int, Field(ge=2, le=10_000)] = 4
    low: Shape = (3, 4, 4)
    high: Shape = (7, 1, 8)
    saturation: Annotated[float, Field(gt=0, le=1)] = 0.5
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.3
    patience: Annotated[int, Field(ge=1, le=INT32_MAX)] = 5
    normalise: Literal["depth", "num_steps"] = "depth"
    margin: Annotated[float | None, Field(gt=0, le=1)] = 0.2
    guards: Literal["protected", "none"] = "protected"
    budget: Annotated[float | None, Field(ge=0)] = None
    budget_per_100: Annotated[float | None, Field(ge=0)] = None
    max_promotions: Annotated[int | None, Field(ge=0, le=INT32_MAX)] = None

    @field_validator("margin", "budget", "budget_per_100", "max_promotions", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return None if isinstance(value, str) and value.lower() in ("off", "none", "strict") else value

    @field_validator("low", "high", mode="before")
    @classmethod
    def _shape_from_text(cls, value: Any) -> Any:
        return tuple(value.replace("/", ",").split(",")) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        for name in _WITHOUT_EFFECT[self.policy]:
            if (
                name in self.model_fields_set
                and getattr(self, name) != type(self).model_fields[name].default
                and getattr(self, name) is not None
            ):
                raise ValueError(f"{name} has no effect with policy {self.policy}; leave it out")
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
                replaces single settings, and what the defaults say about another policy, or about guards that the request
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
            raise UserError(f"speculative: expected settings, true or false, not {wish!r}")
        asked = {ALIASES.get(name, name): value for name, value in wish.items()}
        policy = asked.get("policy", self.policy)
        dropped = set(_WITHOUT_EFFECT.get(policy, ())) if isinstance(policy, str) else set()
        if asked.get("guards") == "none":
            dropped |= {"budget", "budget_per_100", "max_promotions"}
        inherited = {name: value for name, value in self.model_dump(exclude_unset=True).items() if name not in dropped | asked.keys()}
        return SpeculativeConfig(**inherited, **wish)

    @property
    def kappa(self) -> float:
        """The margin threshold, 1 when strict."""
        return 1.0 if self.margin is None else self.margin

    @property
    def shape(self) -> Shape:
        """The static shape."""
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
    repetition_penalty: Annotated[float, Field(gt=0, le=1e3)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    seed: Annotated[int | None, Field(ge=0, lt=2**63)] = None
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] = 256
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: Annotated[int | None, Field(ge=0, le=1000)] = None

    @field_validator("stop", "stop_token_ids", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return () if value is None else (value,) if isinstance(value, str | int) else value

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
    max_running_requests: Annotated[int, Field(ge=1)] = 8
    prefill_chunk: Annotated[int, Field(ge=1)] = 512
    aux_layers: Literal["input", "output"] = "input"
    speculative_algorithm: str | None = None
    prompt_lookup_max: Annotated[int, Field(ge=1, le=1000)] = 4
    prompt_lookup_min: Annotated[int, Field(ge=1, le=1000)] = 1
    trace: str | None = None

    @field_validator("trace", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value
