"""EAGLE-3 checkpoints in the layouts they come in: the public one (`midlayer.*`) and the speculators library's (`layers.0.*`)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from ..models.architecture import ModelConfig
from ..models.bin_weights import BinWeights
from ..models.hf_config import config_from_hf
from ..models.weights import SafetensorsWeights, Weights

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "LlamaForCausalLM")
_IDS = "eagle_aux_hidden_state_layer_ids"
_LAYER = "midlayer."
_USED = re.compile(
    r"(fc|norm|lm_head|embed_tokens)\.weight|d2t|midlayer\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj"
    r"|hidden_norm|input_layernorm|post_attention_layernorm)\.weight"
)
# Derived from the rest, or the target's own tensors that training keeps beside the head's.
_HARMLESS = re.compile(r"t2d|(.*\.)?rotary_emb\.inv_freq|verifier_(norm|lm_head)\.weight")


@dataclass(frozen=True)
class HeadConfig:
    """What a head's config.json says.

    Attributes:
        model: its one layer; `vocab_size` is the target's.
        feature_layers: the target's layers whose inputs are its features.
        norm_before_residual: whether the layer's residual is the normed hidden row instead of the row itself.
    """

    model: ModelConfig
    feature_layers: tuple[int, int, int]
    norm_before_residual: bool


def is_head(folder: Path) -> bool:
    """Whether a folder holds a head for a target's features (one of EAGLE's or of the speculators library) and not a whole model.

    Raises:
        UserError: its config.json cannot be read.
    """
    raw = _read_json(folder, "neither an EAGLE-3 head nor a draft model")
    if "speculators_model_type" in raw or any("eagle" in str(name).lower() for name in raw.get("architectures") or []):
        return True
    # Some heads call themselves a Llama: what tells is the `fc` that fuses the target's features.
    return raw.get("num_hidden_layers", 1) == 1 and "fc.weight" in _open_weights(folder).names()


def _read_json(folder: Path, else_it_is: str) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{folder} has no config.json: {else_it_is}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} is not a JSON object: {else_it_is}")
    return raw


def read_head_config(folder: Path, target: ModelConfig, aux_layers: str = "input") -> HeadConfig:
    """The head's configuration, checked against the target's.

    Args:
        folder: holds config.json.
        target: the target's configuration.
        aux_layers: explicit feature layer ids mean the inputs of those layers (`input`, as in vLLM) or their outputs (`output`,
            as in SGLang).

    Raises:
        UserError: no or unreadable config.json, another kind of drafter, or a head trained for another model.
    """
    path, raw = folder / "config.json", _read_json(folder, "not an EAGLE-3 head")
    eagle = raw.get("eagle_config")
    settings = {**raw, **eagle} if isinstance(eagle, dict) else raw
    layer = _speculators_layer(raw, path) if "speculators_model_type" in raw else _public_layer(raw, folder)
    for name in ("norm_output", "norm_before_fc", "fc_norm"):
        if settings.get(name):
            raise UserError(f"{folder}: heads with {name} are not supported")
    if settings.get("use_aux_hidden_state") is False:
        raise UserError(f"{folder}: heads without auxiliary hidden states (use_aux_hidden_state false) are not supported")
    wanted = raw.get("target_hidden_size") or layer.get("hidden_size")
    if wanted != target.hidden_size:
        raise UserError(f"{folder} is a head for a target of hidden size {wanted}; this target's is {target.hidden_size}")
    layers = _feature_layers(settings.get(_IDS), target, aux_layers, folder)
    return HeadConfig(config_from_hf({**layer, "model_type": "llama"}, str(path)), layers, bool(settings.get("norm_before_residual")))


def _public_layer(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    names = raw.get("architectures") or []
    if not names or names[0] not in _ARCHITECTURES or raw.get("num_hidden_layers", 1) != 1:
        raise UserError(f"{folder} is not an EAGLE-3 head: architectures {names} with {raw.get('num_hidden_layers')} layers; "
                        f"needed {' or '.join(_ARCHITECTURES)} with 1 layer")  # fmt: skip
    return raw


def _speculators_layer(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """The layer's own configuration, which this layout keeps apart."""
    if raw["speculators_model_type"] != "eagle3":
        raise UserError(f"{path}: speculators of type {raw['speculators_model_type']!r} are not supported (eagle3 is)")
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise UserError(f"{path} lacks transformer_layer_config")
    if layer.get("model_type", "llama") != "llama" or layer.get("num_hidden_layers", 1) != 1:
        found = f"{layer.get('num_hidden_layers')} layers of type {layer.get('model_type')}"
        raise UserError(f"{path}: a head with {found} is not supported; needed 1 of type llama")
    if "norm_before_residual" not in raw:  # the library and vLLM assume opposite defaults
        raise UserError(f"{path} does not say norm_before_residual: add true or false, as the head was trained")
    return layer


def _feature_layers(ids: Any, target: ModelConfig, aux_layers: str, folder: Path) -> tuple[int, int, int]:
    if not ids:
        return target.aux_layers
    shift = 1 if aux_layers == "output" else 0
    try:
        layers = tuple(int(i) + shift for i in ids)
    except (TypeError, ValueError):
        layers = ()
    if len(layers) != 3 or not all(0 <= i < target.num_layers for i in layers):
        raise UserError(f"{folder}: {_IDS} {ids} must be three layers of the target's {target.num_layers}")
    return layers[0], layers[1], layers[2]


def open_head_weights(folder: Path) -> Weights:
    """A head's tensors under the names of the public layout, from safetensors or else from pytorch_model.bin.

    Raises:
        UserError: neither is there, a damaged file, a pickle that could run code, or a tensor that no supported head has.
    """
    weights = _open_weights(folder)
    if any(name.startswith("layers.0.") for name in weights.names()):
        weights = _Speculators(weights)
    if extra := sorted(name for name in weights.names() if not _USED.fullmatch(name) and not _HARMLESS.fullmatch(name)):
        raise UserError(f"{folder} has the tensor {extra[0]}, which no supported EAGLE-3 head has: another kind of drafter?")
    return weights


def _open_weights(folder: Path) -> Weights:
    if any(folder.glob("*.safetensors")):
        return SafetensorsWeights(folder)
    if BinWeights.exist_in(folder):
        return BinWeights(folder)
    raise UserError(f"{folder} has no weights: neither *.safetensors nor pytorch_model.bin")


class _Speculators:
    """Weights in the speculators layout under the public layout's names."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._stored = {re.sub(r"^layers\.0\.", _LAYER, name): name for name in weights.names()}

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._weights.load(self._stored.get(name, name), dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(self._stored.get(name, name))
