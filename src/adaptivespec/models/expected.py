"""The tensors that a configuration asks for, compared with a checkpoint's before any of them is read."""

from __future__ import annotations

import re

from ..errors import UserError
from .architecture import ModelConfig
from .weights import Weights

_HARMLESS = re.compile(r".*\.rotary_emb\.inv_freq|lm_head\.weight")  # derived from the config; a tied head's second copy


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the decoder, in Hugging Face's names."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if config.qkv_bias:
            layer |= {"self_attn.q_proj.bias": (queries,), "self_attn.k_proj.bias": (keys,), "self_attn.v_proj.bias": (keys,)}
        if config.qk_norm:
            layer |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_tensors(config: ModelConfig, weights: Weights, where: str) -> None:
    """Raise UserError for a tensor that is missing, has another shape, or that this decoder would ignore."""
    shapes = tensor_shapes(config)
    names = weights.names()
    for name, shape in shapes.items():
        if name not in names:
            raise UserError(f"tensor {name} is missing from {where}")
        if weights.shape(name) != shape:
            raise UserError(f"tensor {name} in {where} has shape {list(weights.shape(name))}; the configuration asks for {list(shape)}")
    extra = sorted(name for name in names - shapes.keys() if not _HARMLESS.fullmatch(name))
    if extra:
        raise UserError(f"{where} has the tensor {extra[0]}, which no {config.architecture} decoder of this configuration uses")
