"""Tiny random EAGLE-3 heads in the layouts that public ones come in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file


def make_tiny_head(
    folder: Path,
    hidden: int = 64,
    target_hidden: int | None = None,
    vocab: int = 128,
    draft_vocab: int = 48,
    own_embeddings: bool = False,
    seed: int = 0,
    max_positions: int = 512,
    layout: Literal["public", "speculators"] = "public",
    format: Literal["safetensors", "bin"] = "safetensors",
    tensors: dict[str, torch.Tensor | None] | None = None,
    **config: Any,
) -> Path:
    """Write config.json and the weights.

    Args:
        folder: made where it is not there.
        hidden, target_hidden, vocab, draft_vocab: sizes; `vocab` and `target_hidden` are the target's.
        own_embeddings: bring embed_tokens instead of sharing the target's.
        seed: of the weights, the same in every layout and format.
        max_positions: the head's context.
        layout: names of the public checkpoints, or those of the speculators library.
        format: model.safetensors, or pytorch_model.bin.
        tensors: replaces (or with None removes) single tensors, by their names in the public layout.
        config: further or other settings; in the speculators layout those of the top level.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return 0.15 * torch.randn(*shape, generator=generator)

    heads, kv_heads, dim, inner = 4, 2, 16, 96
    values = {
        "fc.weight": random(hidden, 3 * (target_hidden or hidden)),
        "midlayer.self_attn.q_proj.weight": random(heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": random(kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": random(kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": random(hidden, heads * dim),
        "midlayer.mlp.gate_proj.weight": random(inner, hidden),
        "midlayer.mlp.up_proj.weight": random(inner, hidden),
        "midlayer.mlp.down_proj.weight": random(hidden, inner),
        "midlayer.hidden_norm.weight": 1 + random(hidden),
        "midlayer.input_layernorm.weight": 1 + random(hidden),
        "midlayer.post_attention_layernorm.weight": 1 + random(hidden),
        "norm.weight": 1 + random(hidden),
        "lm_head.weight": random(draft_vocab, hidden) * 4,
    }
    if draft_vocab != vocab:
        kept = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        values["d2t"] = kept - torch.arange(draft_vocab)
        values["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, kept, True)
    if own_embeddings:
        values["embed_tokens.weight"] = random(vocab, hidden)
    for name, tensor in (tensors or {}).items():
        if tensor is None:
            del values[name]
        else:
            values[name] = tensor
    if layout == "speculators":
        values = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in values.items()}
    if format == "bin":
        torch.save(values, folder / "pytorch_model.bin")
    else:
        save_file(values, folder / "model.safetensors")
    description: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_positions,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    if layout == "speculators":
        del description["architectures"], description["draft_vocab_size"]
        description = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "draft_vocab_size": draft_vocab,
            "norm_before_residual": False,
            "target_hidden_size": target_hidden,
            "transformer_layer_config": description,
        }
    elif target_hidden:
        description["target_hidden_size"] = target_hidden
    description.update(config)
    (folder / "config.json").write_text(json.dumps(description))
    return folder
