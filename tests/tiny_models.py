"""Tiny random models for tests, in the formats that real ones come in. No downloads.

>>> folder = make_tiny_model("llama", tmp_path)          # a Hugging Face folder with a character tokenizer
>>> file = write_gguf(folder, tmp_path / "tiny.gguf")    # the same model as llama.cpp would store it
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

FAMILIES = ("llama", "llama-tied", "qwen2", "qwen3")
VOCAB, EOS, BOS = 128, 0, 1
DRAFT_NOISE = 0.02  # the disturbed model's greedy choice is the undisturbed one's at 76 to 82 % of its greedy text, in every family
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
_ARCH = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
_LLAMA3_ROPE = {  # original context below max_position_embeddings, so that all three frequency bands occur
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny_model(family: str, seed: int = 0, noise: float = 0.0, padded_vocab: int | None = None, **overrides: Any) -> Any:
    """A transformers model with weights wide enough for decided logits, and biases and norms that are not trivial.

    Vocabulary 128, hidden 64, 6 layers, 4 heads sharing 2 key heads, 512 positions; `overrides` replace config values.

    Args:
        family: one of FAMILIES.
        seed: of the weights.
        noise: disturbs the weights of this seed by this share of their spread: a draft model that often agrees with the undisturbed
            one, see DRAFT_NOISE.
        padded_vocab: rows of the vocabulary's tables, the first ones as without padding.
        overrides: config values.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": family == "llama-tied",
    }
    if family == "llama":
        kind, config = LlamaForCausalLM, LlamaConfig(**{**common, "rope_parameters": _LLAMA3_ROPE, **overrides})
    elif family == "llama-tied":
        kind, config = LlamaForCausalLM, LlamaConfig(**{**common, **overrides})
    elif family == "qwen2":
        kind, config = Qwen2ForCausalLM, Qwen2Config(**{**common, **overrides})
    else:  # heads wider than hidden / heads, as in Qwen3's small models
        kind, config = Qwen3ForCausalLM, Qwen3Config(**{**common, "head_dim": 32, **overrides})
    model = kind(config).eval()
    generator, disturbance = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            drawn = torch.randn(parameter.shape, generator=generator)
            if noise:
                drawn += noise * torch.randn(parameter.shape, generator=disturbance)
            parameter.copy_(1 + 0.2 * drawn if "norm" in name else 0.3 * drawn if name.endswith("bias") else 0.15 * drawn)
    if padded_vocab is not None:
        model.resize_token_embeddings(padded_vocab, mean_resizing=False)
    return model


def make_tiny_model(family: str, folder: Path, seed: int = 0, sharded: bool = False, **more: Any) -> Path:
    """Save `tiny_model` (`more` goes to it) and a tokenizer (one token per ASCII character, with a chat template) into `folder`."""
    tiny_model(family, seed, **more).save_pretrained(folder, max_shard_size="100KB" if sharded else "5GB")
    add_tokenizer(folder)
    return folder


def add_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose ids are ASCII codes; 0 is <eos> and 1 is <bos>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {chr(i): i for i in range(VOCAB)} | {"<eos>": EOS, "<bos>": BOS}
    del vocab["\x00"], vocab["\x01"]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<bos>", special=True)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<eos>", chat_template=CHAT_TEMPLATE
    )
    wrapped.save_pretrained(folder)


def write_gguf(folder: Path, path: Path, extra: dict[str, Any] | None = None, tensors: dict[str, np.ndarray] | None = None) -> Path:
    """Store the model of a Hugging Face folder as llama.cpp's converter does, in F32.

    Args:
        folder: from `make_tiny_model`, not sharded.
        path: the file to write.
        extra: further metadata (str, int, float, bool or list values).
        tensors: further tensors.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = config["model_type"]
    rope = config["rope_parameters"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    for key, value in (extra or {}).items():
        _add(writer, key, value)
    names = gguf.get_tensor_name_map(_ARCH[arch], config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        array = tensor.numpy()
        if arch == "llama" and ".q_proj." in name:
            array = _permute(array, heads)
        if arch == "llama" and ".k_proj." in name:
            array = _permute(array, kv_heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), array)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _rope_factors(rope, width))
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    add[type(value)](key, value)


def _permute(array: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of query and key rows (convert_hf_to_gguf.py, LlamaModel.permute)."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _rope_factors(rope: dict[str, Any], width: int) -> np.ndarray:
    """llama.cpp's divisors of the rotary frequencies for Llama 3.1 (convert_hf_to_gguf.py)."""
    factor, low, high, old = (rope[k] for k in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
    factors = []
    for i in range(0, width, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / width)
        smooth = (old / wavelength - low) / (high - low)
        factors.append(1.0 if wavelength < old / high else factor if wavelength > old / low else 1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)
