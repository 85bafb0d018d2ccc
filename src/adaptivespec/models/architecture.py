"""What a decoder looks like: the numbers of a checkpoint's configuration that the forward pass needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency-dependent rotary scaling (`rope_type` "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """One dense decoder of the Llama 3.x, Qwen2 or Qwen3 family.

    `rope_factors` ([head_dim / 2] divisors of the rotary frequencies) is what GGUF files carry instead of `rope_scaling`.
    """

    architecture: str  # "llama", "qwen2" or "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    rope_factors: tuple[float, ...] | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def aux_layers(self) -> tuple[int, int, int]:
        """Layers whose *inputs* are EAGLE-3's features: 2, L // 2 and L - 3."""
        return 2, self.num_layers // 2, self.num_layers - 3
