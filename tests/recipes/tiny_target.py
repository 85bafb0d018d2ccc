"""A tiny random target and the settings the recipe's tests share."""

from __future__ import annotations

import torch
from recipes.eagle3_head.config import AnswerConfig, HeadConfig, TrainConfig

from adaptivespec.models.architecture import ModelConfig

EOS = 0
TARGET = ModelConfig(
    architecture="llama",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    eos_token_ids=(EOS,),
)
ANSWERS = AnswerConfig(max_new_tokens=20, batch_size=9, chunk_answers=8, max_answer_tokens=10**6)
HEAD = HeadConfig(intermediate_size=24, draft_vocab_size=48)
TRAIN = TrainConfig(
    steps=14, decay_steps=5, warmup_steps=2, batch_size=4, unroll=3, checkpoint_steps=5, evaluate_steps=1000, learning_rate=3e-3
)


class RandomWeights:
    """Random tensors under a checkpoint's names: a function of name and shape."""

    def __init__(self, config: ModelConfig) -> None:
        c, width = config, config.head_dim
        self.shapes = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size), "model.norm.weight": (c.hidden_size,)}
        for i in range(c.num_layers):
            layer = f"model.layers.{i}."
            self.shapes |= {
                layer + "self_attn.q_proj.weight": (c.num_heads * width, c.hidden_size),
                layer + "self_attn.k_proj.weight": (c.num_kv_heads * width, c.hidden_size),
                layer + "self_attn.v_proj.weight": (c.num_kv_heads * width, c.hidden_size),
                layer + "self_attn.o_proj.weight": (c.hidden_size, c.num_heads * width),
                layer + "mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
                layer + "mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
                layer + "mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
                layer + "input_layernorm.weight": (c.hidden_size,),
                layer + "post_attention_layernorm.weight": (c.hidden_size,),
            }

    def names(self) -> frozenset[str]:
        return frozenset(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(ord(c) * (i + 1) for i, c in enumerate(name)))
        noise = torch.randn(self.shapes[name], generator=generator)
        return (1 + 0.2 * noise if noise.dim() == 1 else 0.25 * noise).to(dtype)
