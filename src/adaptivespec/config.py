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
        static, adaptive = ("num_steps", "topk", "num_draft_tokens"), ("low", "high", "saturation", "alpha", "patience", "normalise")
        rule = ("margin", "guards", "budget", "budget_per_100", "max_promotions")
        unused = {"static": adaptive, "adaptive": static, "off": (*static, *adaptive, *rule)}[self.policy]
        for name in unused:
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

    @property
    def kappa(self) -> float:
        """The margin threshold, 1 when strict."""
        return 1.0 if self.margin is None else self.margin

    @property
    def shape(self) -> Shape:
        """The static shape."""
        return self.num_steps, self.topk, self.num_draft_tokens


class SamplingParams(Settings):
    """What one request asks for.

    Attributes:
        temperature: 0 is greedy.
        seed: of the position-keyed noise; None draws one.
        max_tokens: most tokens to generate.
        min_tokens: stop tokens are masked until this many are generated.
        stop_token_ids: further tokens that end the answer, beside the model's own end-of-sequence tokens.
        ignore_eos: go on after end-of-sequence.
    """

    temperature: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    seed: Annotated[int | None, Field(ge=0, lt=2**63)] = None
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] = 256
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    ignore_eos: bool = False

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        return self


class EngineConfig(Settings):
    """How the local engine runs.

    Attributes:
        dtype: `auto` is bf16 where the hardware has it, else fp32; `fp32` for exact comparisons.
        device: `auto` is CUDA when there is a GPU, else the CPU.
        context_length: longest prompt plus answer; None takes the model's own, at most 4096.
        max_running_requests: requests decoded together; others wait.
        prefill_chunk: prompt tokens per forward.
        aux_layers: whether a head's explicit feature layer ids mean the layers' `input` (vLLM) or `output` (SGLang).
    """

    dtype: str = "auto"
    device: str = "auto"
    context_length: Annotated[int | None, Field(ge=2)] = None
    max_running_requests: Annotated[int, Field(ge=1)] = 8
    prefill_chunk: Annotated[int, Field(ge=1)] = 512
    aux_layers: Literal["input", "output"] = "input"
