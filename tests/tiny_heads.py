"""Tiny random EAGLE-3 heads in the public layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    tensors: dict[str, torch.Tensor | None] | None = None,
    **config: Any,
) -> Path:
    """Write config.json and model.safetensors; `tensors` replaces (or with None removes) single tensors."""
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
    save_file(values, folder / "model.safetensors")
    description = {
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
        **({"target_hidden_size": target_hidden} if target_hidden else {}),
        **config,
    }
    (folder / "config.json").write_text(json.dumps(description))
    return folder
