"""What an engine refuses before it reads weights: devices that are not there, and settings that nothing here can serve."""

from __future__ import annotations

import re

import torch

from ..config import EngineConfig, SpeculativeConfig
from ..errors import UserError
from ..models.loading import LoadedModel, choose_dtype


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
