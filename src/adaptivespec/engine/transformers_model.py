"""transformers' own model on a decoder's weights: what the engine is compared with, and what tests hold it against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..drafters.draft_model import DraftModel
from ..errors import UserError
from ..models.decoder import Decoder

if TYPE_CHECKING:
    from .llm import LLM


def as_transformers(decoder: Decoder) -> Any:
    """A `LlamaForCausalLM`, `Qwen2ForCausalLM` or `Qwen3ForCausalLM` with the decoder's weights, dtype and device.

    Embeddings, norms, biases and unpacked linears are the decoder's own tensors (of fused projections, slices); prepacked linears are
    unpacked into copies, bit for bit, a second time in memory.

    Raises:
        UserError: biases or norms that transformers' model of this architecture does not have.
    """
    import transformers

    c = decoder.config
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[c.architecture]
    if (c.qkv_bias, c.qk_norm) != (c.architecture == "qwen2", c.architecture == "qwen3"):
        raise UserError(f"transformers' {c.architecture} has other biases or norms in its attention than this model")
    config = config_class(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_position_embeddings,
        tie_word_embeddings=c.tie_word_embeddings,
        bos_token_id=c.bos_token_id,
        eos_token_id=list(c.eos_token_ids),
    )
    with torch.device("meta"):
        model = model_class(config).to(decoder.dtype)
    model.load_state_dict(_tensors(decoder), assign=True)
    model.tie_weights()
    # The frequencies are no part of the state; the decoder's hold whatever scaling the checkpoint asks for.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(decoder.device)
    model.model.rotary_emb.inv_freq = decoder.rotary.freq.to(decoder.device)
    return model.eval().requires_grad_(False)


def draft_decoder(llm: LLM) -> Decoder | None:
    """The smaller model's decoder where that is the drafter, else None."""
    return llm.drafter.decoder if isinstance(llm.drafter, DraftModel) else None


def _tensors(decoder: Decoder) -> dict[str, torch.Tensor]:
    """The decoder's weights under their Hugging Face names, fused projections cut up."""
    c = decoder.config
    tied = decoder.embedding if c.tie_word_embeddings else decoder.lm_head.unpacked()
    tensors = {"model.embed_tokens.weight": decoder.embedding, "lm_head.weight": tied, "model.norm.weight": decoder.norm.weight}
    heads = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
    for i, layer in enumerate(decoder.layers):
        prefix, attention = f"model.layers.{i}.", layer.attention
        for name, weight in zip("qkv", torch.split(attention.qkv.unpacked(), heads), strict=True):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = weight
        if attention.qkv.bias is not None:
            for name, bias in zip("qkv", torch.split(attention.qkv.bias, heads), strict=True):
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = bias
        if attention.q_norm is not None and attention.k_norm is not None:
            tensors[f"{prefix}self_attn.q_norm.weight"] = attention.q_norm.weight
            tensors[f"{prefix}self_attn.k_norm.weight"] = attention.k_norm.weight
        gate, up = layer.mlp.gate_up.unpacked().chunk(2)
        tensors |= {
            f"{prefix}self_attn.o_proj.weight": attention.out.unpacked(),
            f"{prefix}mlp.gate_proj.weight": gate,
            f"{prefix}mlp.up_proj.weight": up,
            f"{prefix}mlp.down_proj.weight": layer.mlp.down.unpacked(),
            f"{prefix}input_layernorm.weight": layer.input_norm.weight,
            f"{prefix}post_attention_layernorm.weight": layer.post_norm.weight,
        }
    return tensors
