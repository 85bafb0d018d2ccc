"""From settings to what runs, policies, rules and devices, and the refusal of settings that nothing here can serve."""

from __future__ import annotations

import re

import torch

from ..config import EngineConfig, SpeculativeConfig
from ..errors import UserError
from ..method.acceptance import AcceptanceRule
from ..method.policy import TreePolicy
from ..method.registry import make_policy, make_rule
from ..models.loading import LoadedModel, choose_dtype


def build_policy(config: SpeculativeConfig) -> TreePolicy:
    """The tree policy that settings name. Raises UserError for impossible shapes."""
    try:
        return make_policy(
            config.policy,
            shape=config.shape,
            low=config.low,
            high=config.high,
            saturation=config.saturation,
            alpha=config.alpha,
            patience=config.patience,
            normalise=config.normalise,
            mu=config.talon_mu,
            candidate_steps=config.candidate_steps,
            confidence_threshold=config.confidence_threshold,
        )
    except ValueError as error:
        raise UserError(str(error)) from None


def build_rule(config: SpeculativeConfig) -> AcceptanceRule:
    """The acceptance rule that settings name. Raises UserError for one that no drafter of this engine can serve."""
    rule = make_rule(
        config.effective_rule,
        threshold_single=config.threshold_single,
        threshold_acc=config.threshold_acc,
        typical_epsilon=config.typical_epsilon,
        typical_delta=config.typical_delta,
        relaxed_topk=config.relaxed_topk,
        relaxed_delta=config.relaxed_delta,
        logit_ratio=config.logit_ratio,
        window=config.window,
        window_entropy=config.window_entropy,
    )
    if rule.needs_q:
        raise UserError(
            f"rule {rule.name} needs a drafter that samples and hands over its probabilities; the drafters here propose their best tokens: "
            "use rule strict, which is lossless at every temperature"
        )
    return rule


def require_temperature(rule: AcceptanceRule, temperature: float) -> None:
    """Raise UserError for a rule that is not defined at the request's temperature."""
    if temperature == 0 and not rule.serves_greedy:
        raise UserError(f"rule {rule.name} samples: it needs a temperature above 0, not 0")
    if temperature > 0 and not rule.serves_sampling:
        raise UserError(f"rule {rule.name} is defined at temperature 0 only, not {temperature:g}")


def choose_device(name: str) -> str:
    """`auto` is CUDA when there is a GPU. Raises UserError for a device that is not there or not supported."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not re.fullmatch(r"cuda(:\d+)?", name):
        raise UserError(f"device {name!r} is not supported; known: auto, cpu, cuda, cuda:0, cuda:1, ...")
    if name != "cpu" and int(name.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return name


def require_drafter(config: SpeculativeConfig, has_drafter: bool) -> None:
    """Raise UserError for settings that draft where nothing can."""
    if config.policy != "off" and not has_drafter:
        advice = "name one (--drafter, drafter= in Python), or use policy off (arm ar)"
        raise UserError(f"policy {config.policy} needs a drafter, and this model has none: {advice}")


def nothing_is_ignored(config: EngineConfig, kind: str | None, loaded: LoadedModel | None, named: bool) -> None:
    """Raise UserError for engine settings that would have no effect."""
    if loaded is not None:
        decoder = loaded.decoder
        if config.dtype != "auto" and choose_dtype(config.dtype, decoder.device) != decoder.dtype:
            raise UserError(f"dtype {config.dtype}: this model is loaded already, in {str(decoder.dtype).removeprefix('torch.')}")
        if config.device != "auto" and torch.device(choose_device(config.device)).type != decoder.device.type:
            raise UserError(f"device {config.device}: this model is loaded already, on {decoder.device}")
    if not named and config.speculative_algorithm is not None:
        raise UserError(f"speculative_algorithm {config.speculative_algorithm} has no effect on a drafter object; leave it out")
    for name in ("prompt_lookup_max", "prompt_lookup_min"):
        if name in config.model_fields_set and kind != "ngram":
            raise UserError(f"{name} has no effect without the drafter ngram; leave it out")
    if config.aux_layers != "input" and kind != "eagle3":
        raise UserError(f"aux_layers {config.aux_layers} has no effect without an EAGLE-3 head; leave it out")
