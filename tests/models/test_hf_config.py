"""config.json: both spellings, stop tokens, and everything that is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adaptivespec.errors import UserError
from adaptivespec.models.architecture import RopeScaling
from adaptivespec.models.hf_config import config_from_folder, config_from_hf

BASE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config(kind: str = "llama", **values: Any) -> Any:
    return config_from_hf({"model_type": kind, **BASE, **values})


def test_both_spellings_of_rope_agree() -> None:
    old = config(rope_theta=500000.0, rope_scaling=LLAMA3)
    new = config(rope_parameters={"rope_theta": 500000.0, **LLAMA3})
    assert old == new
    assert old.rope_theta == 500000.0
    assert old.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    assert config(rope_theta=1e6, rope_scaling=None).rope_scaling is None
    assert config(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}).rope_theta == 1e6


def test_families() -> None:
    llama, qwen2, qwen3 = config("llama"), config("qwen2", tie_word_embeddings=True), config("qwen3", head_dim=32)
    assert (llama.qkv_bias, llama.qk_norm, llama.head_dim, llama.tie_word_embeddings) == (False, False, 16, False)
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.tie_word_embeddings) == (True, False, True)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 32)
    assert config("llama", num_key_value_heads=None).num_kv_heads == 4


def test_published_qwen_configs_are_accepted() -> None:
    """Qwen2.5 and Qwen3 name a sliding window that they do not use."""
    config("qwen2", sliding_window=32768, use_sliding_window=False, max_window_layers=24)
    config("qwen2", sliding_window=128, use_sliding_window=True, max_window_layers=6)  # no layer is beyond the sixth
    config("qwen2", sliding_window=128, use_sliding_window=True, layer_types=["full_attention"] * 6)
    config("qwen3", head_dim=128, sliding_window=None, use_sliding_window=False, attention_bias=False)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("gemma3", {}, "model_type 'gemma3'; supported: llama, qwen2, qwen3"),
        (None, {}, "model_type None"),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 3}, r"sliding-window .* \(sliding_window 128\)"),
        ("qwen3", {"sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ("llama", {"sliding_window": 128}, "sliding-window"),
        ("llama", {"layer_types": ["linear_attention"]}, "attention of the type linear_attention"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "type 'linear' is not supported"),
        ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "type 'yarn' is not supported"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "llama3 rotary scaling lacks factor"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "method awq"),
        ("llama", {"hidden_act": "gelu"}, "activation gelu"),
        ("llama", {"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ("llama", {"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_refusals(kind: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        config(kind, **values)
    assert str(caught.value).startswith("config.json")


def write(folder: Path, config_values: Any, generation: Any = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config_values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("eos", "generation", "wanted"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (None, None, ()),
        (2, {"eos_token_id": [3, 2, 4]}, (2, 3, 4)),
        (2, {"eos_token_id": 7}, (2, 7)),
        (2, {"temperature": 0.6}, (2,)),
    ],
)
def test_stop_tokens_are_merged(eos: Any, generation: Any, wanted: tuple[int, ...], tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "llama", **BASE, "eos_token_id": eos}, generation)
    assert config_from_folder(tmp_path).eos_token_ids == wanted


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config.json"):
        config_from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        config_from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="does not hold a JSON object"):
        config_from_folder(tmp_path)
