"""ModelConfig from a GGUF file's metadata; what the decoder cannot do is refused by name."""

from __future__ import annotations

import torch

from ..errors import UserError
from .architecture import ModelConfig
from .gguf_file import GGUFFile
from .gguf_weights import ROPE_FACTORS, head_dim
from .raw_read import read_elements

_SUPPORTED = ("llama", "qwen2", "qwen3")
_CONTROL = 3  # tokenizer.ggml.token_type
# Control tokens that llama.cpp, too, takes as the end of a generation whatever eos_token_id says.
_END_TEXTS = frozenset({"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"})


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The decoder's configuration. Raises UserError naming what the file lacks or what AdaptiveSpec does not support."""
    arch = file.require("general.architecture")
    if arch not in _SUPPORTED:
        raise UserError(f"{file.path} has the architecture {arch!r}; supported: {', '.join(_SUPPORTED)}")

    context = file.count(f"{arch}.context_length")
    _refuse_unsupported(file, arch, context)
    width, heads = head_dim(file), file.count(f"{arch}.attention.head_count")
    kv_heads = file.count(f"{arch}.attention.head_count_kv", heads)
    if heads % kv_heads:
        raise UserError(f"{file.path}: {heads} attention heads are no multiple of {kv_heads} key heads")
    if (rotated := file.count(f"{arch}.rope.dimension_count", width)) != width:
        raise UserError(f"{file.path}: partial rotary embedding ({rotated} of {width} dimensions) is not supported")
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"tensor token_embd.weight is missing from {file.path}")
    return ModelConfig(
        architecture=arch,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=file.count(f"{arch}.embedding_length"),
        intermediate_size=file.count(f"{arch}.feed_forward_length"),
        num_layers=file.count(f"{arch}.block_count"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        rms_norm_eps=file.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope_theta=file.number(f"{arch}.rope.freq_base", 10000.0),
        max_position_embeddings=context,
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        rope_factors=_rope_factors(file),
        bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(file),
    )


def _refuse_unsupported(file: GGUFFile, arch: str, context: int) -> None:
    if file.get(f"{arch}.expert_count", 0):
        raise UserError(f"{file.path}: mixture-of-experts models are not supported")
    window = file.get(f"{arch}.attention.sliding_window", 0)
    if not isinstance(window, int) or 0 < window < context:
        raise UserError(f"{file.path}: sliding-window attention (window {window}) is not supported")
    scaling = file.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none":
        raise UserError(f"{file.path}: rotary scaling of type {scaling!r} is not supported (llama3 scaling is)")
    if (linear := file.get(f"{arch}.rope.scale_linear", 1.0)) != 1.0:
        raise UserError(f"{file.path}: linear rotary scaling (factor {linear}) is not supported")


def _rope_factors(file: GGUFFile) -> tuple[float, ...] | None:
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.type_name != "F32" or tensor.shape != (head_dim(file) // 2,):
        raise UserError(f"tensor {ROPE_FACTORS} in {file.path} is not one F32 number for each rotary frequency")
    factors = torch.empty(tensor.shape)
    with file.path.open("rb", buffering=0) as stream:
        read_elements(stream, tensor.offset, torch.float32, factors)
    return tuple(factors.tolist())


def _eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    ids = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    kinds, texts = file.get("tokenizer.ggml.token_type", []), file.get("tokenizer.ggml.tokens", [])
    ids += [i for i, (kind, text) in enumerate(zip(kinds, texts, strict=False)) if kind == _CONTROL and text in _END_TEXTS]
    return tuple(dict.fromkeys(i for i in ids if i is not None))
