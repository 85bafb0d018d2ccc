"""Settings of the plug-in: SpeculativeConfig plus what only SGLang needs; what one request may change; rules and policies from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ...build import build_policy, build_rule, require_temperature
from ...config import ALIASES, POLICY_SETTINGS, SpeculativeConfig, check_names
from ...errors import UserError
from ...method.policy import TreePolicy

ENVIRONMENT = "ADAPTIVESPEC"
"""The environment variable that holds the settings: a JSON object, or the path of a file with one."""

REQUEST_KEY = "adaptivespec"
"""Where a request's own settings stand in SGLang's custom_params, and where meta_info echoes them."""


class SGLangConfig(SpeculativeConfig):
    """SpeculativeConfig, and how a batch shares one tree shape.

    Attributes:
        aggregate: SGLang drafts one shape for a whole batch; it comes from the `mean`, `min` or `max` of what the policy would do for each
            request.
        confidence: `current` reads the drafter's confidence before each step, as the paper does, and waits for the device to do so;
            `lagged` takes the step's before, which overlap scheduling has on the host already.
        graph_memory: GiB that the CUDA graphs of all shapes may take together; None is half of what is free after SGLang captured its own.
            Shapes that do not fit are replaced by their nearest neighbours.
        allow_untested_version: start although the plug-in was not tested with this version of SGLang. Hooks are checked all the same.
    """

    aggregate: Literal["mean", "min", "max"] = "mean"
    confidence: Literal["current", "lagged"] = "current"
    graph_memory: Annotated[float | None, Field(ge=0)] = None
    allow_untested_version: bool = False

    @model_validator(mode="after")
    def _sglang_can(self) -> Self:
        if self.policy == "off":
            raise ValueError(f"policy off drafts nothing: unset {ENVIRONMENT} and start SGLang without --speculative-algorithm")
        if self.policy == "static":
            for name in ("aggregate", "confidence", "graph_memory"):
                if name in self.model_fields_set and getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} has no effect with policy static; leave it out")
        return self

    @property
    def speculative(self) -> SpeculativeConfig:
        """The part that every engine has."""
        given = self.model_dump(exclude_unset=True)
        return SpeculativeConfig(**{name: value for name, value in given.items() if name in SpeculativeConfig.model_fields})

    @property
    def fixed_shape(self) -> bool:
        """Whether the settings name a static shape, so that the server's flags cannot."""
        return self.policy == "static" and bool(self.model_fields_set & {"num_steps", "topk", "num_draft_tokens"})


def load_settings(text: str | None = None) -> SGLangConfig:
    """The settings in `text`, or in the environment.

    Raises:
        UserError: they do not exist, do not fit, or SGLang cannot serve them.
    """
    settings = SGLangConfig.parse(os.environ.get(ENVIRONMENT, "") if text is None else text)
    served_policy(settings)
    build_rule(settings)
    return settings


def served_policy(config: SpeculativeConfig) -> TreePolicy:
    """The tree policy that settings name. Raises UserError for impossible shapes, and for a policy that needs what SGLang does not have."""
    policy = build_policy(config)
    if policy.per_level:
        raise UserError(
            f"policy {config.policy} decides while the tree is drafted, level by level, and SGLang drafts a shape that is fixed before; "
            "use adaptive, static, accept_ema or heuristic"
        )
    if policy.reads_costs:
        raise UserError(
            f"policy {config.policy} learns from draft probabilities and a step's seconds, which SGLang does not hand to its verify step; "
            "use adaptive, static, accept_ema or heuristic"
        )
    return policy


def request_config(defaults: SpeculativeConfig, custom_params: object, temperature: float) -> SpeculativeConfig:
    """One request's settings: the server's, changed by what its custom_params say under `adaptivespec`.

    Args:
        defaults: the server's settings.
        custom_params: SGLang's per-request parameters; keys of others are left alone.
        temperature: of the request, 0 when greedy.

    Raises:
        UserError: settings that do not exist, do not fit, have no effect, or that only the server can change.
    """
    wish = custom_params.get(REQUEST_KEY) if isinstance(custom_params, Mapping) else None
    config = _wished(defaults, wish)
    require_temperature(build_rule(config), temperature)
    return config


def _wished(defaults: SpeculativeConfig, wish: object) -> SpeculativeConfig:
    if wish is None or wish is True:
        return defaults
    if wish is False:
        return defaults.for_request({"rule": "strict"})
    if not isinstance(wish, Mapping):
        raise UserError(f"{REQUEST_KEY}: expected settings, true or false, not {type(wish).__name__}")
    check_names(wish)
    for name in wish:
        own = ALIASES.get(name, name)
        if own == "policy" or own in POLICY_SETTINGS or (own in SGLangConfig.model_fields and own not in SpeculativeConfig.model_fields):
            raise UserError(f"{name}: one tree shape serves a whole batch in SGLang, so this is set for the server, not for a request")
    return defaults.for_request(dict(wish))
