"""ModelConfig from a Hugging Face folder's config.json; what the decoder cannot do is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from .architecture import ModelConfig, RopeScaling

_SUPPORTED = ("llama", "qwen2", "qwen3")


def config_from_folder(folder: str | Path) -> ModelConfig:
    """The decoder's configuration; stop tokens of generation_config.json are added to config.json's.

    Raises UserError for a missing or damaged file and for a model that AdaptiveSpec does not support.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json: not a Hugging Face model folder")
    values = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    return config_from_hf(values, str(folder / "config.json"), _ids(generation.get("eos_token_id")))


def config_from_hf(values: Mapping[str, Any], where: str = "config.json", more_eos: tuple[int, ...] = ()) -> ModelConfig:
    """The decoder's configuration from the contents of a config.json, of transformers 4 (`rope_theta`, `rope_scaling`) or 5
    (`rope_parameters`). `where` names the file in messages; `more_eos` are further stop tokens. Raises UserError.
    """
    kind = values.get("model_type")
    if kind not in _SUPPORTED:
        raise UserError(f"{where} has the model_type {kind!r}; supported: {', '.join(_SUPPORTED)}")
    _refuse_unsupported(values, kind, where)

    def require(name: str) -> Any:
        if values.get(name) is None:
            raise UserError(f"{where} lacks {name}")
        return values[name]

    heads, hidden = require("num_attention_heads"), require("hidden_size")
    kv_heads = values.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise UserError(f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    default_width = 128 if kind == "qwen3" else hidden // heads  # transformers' defaults
    theta, scaling = _rope(values, where)
    return ModelConfig(
        architecture=kind,
        vocab_size=require("vocab_size"),
        hidden_size=hidden,
        intermediate_size=require("intermediate_size"),
        num_layers=require("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=values.get("head_dim") or default_width,
        rms_norm_eps=values.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        max_position_embeddings=require("max_position_embeddings"),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        rope_scaling=scaling,
        bos_token_id=values.get("bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(_ids(values.get("eos_token_id")) + more_eos)),
    )


def _refuse_unsupported(values: Mapping[str, Any], kind: str, where: str) -> None:
    def refuse(what: str) -> None:
        raise UserError(f"{where}: {what} is not supported")

    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "unknown")
        refuse(f"a quantised checkpoint (quantization_config, method {method})")
    if values.get("hidden_act", "silu") != "silu":
        refuse(f"the activation {values['hidden_act']} (hidden_act; silu is)")
    if values.get("mlp_bias"):
        refuse("a bias in the MLP (mlp_bias)")
    if values.get("attention_bias") and kind != "qwen2":
        refuse("a bias on the attention's output projection (attention_bias)")
    window = values.get("sliding_window")
    types = values.get("layer_types")
    windowed = "sliding_attention" in types if types else _windowed_by_count(values, kind)
    if window and windowed and window < values.get("max_position_embeddings", window + 1):
        refuse(f"sliding-window attention (sliding_window {window})")
    if types and (other := set(types) - {"full_attention", "sliding_attention"}):
        refuse(f"attention of the type {sorted(other)[0]} (layer_types)")


def _windowed_by_count(values: Mapping[str, Any], kind: str) -> bool:
    """Qwen's rule where layer_types is absent: layers from max_window_layers on slide if use_sliding_window."""
    if kind == "llama":
        return bool(values.get("sliding_window"))
    layers: int = values.get("num_hidden_layers", 0)
    return bool(values.get("use_sliding_window")) and values.get("max_window_layers", 28) < layers


def _rope(values: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """The base and the scaling; transformers 5 keeps both in rope_parameters, 4 apart."""
    rope: dict[str, Any] = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    theta = rope.get("rope_theta", values.get("rope_theta", 10000.0))
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UserError(f"{where}: partial rotary embedding (partial_rotary_factor {partial}) is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"{where}: rotary scaling of type {kind!r} is not supported (supported: default, llama3)")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [name for name in names if rope.get(name) is None]:
        raise UserError(f"{where}: llama3 rotary scaling lacks {missing[0]}")
    return theta, RopeScaling(*(rope[name] for name in names))


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{file} cannot be read as JSON") from None
    if not isinstance(values, dict):
        raise UserError(f"{file} does not hold a JSON object")
    return values
