"""One lean decoder for Llama 3.x, Qwen2 and Qwen3: flattened rows in, hidden rows and EAGLE-3 features out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from .architecture import ModelConfig
from .kv_cache import Block, CacheView, KVCache
from .linear import Linear
from .native.layers import NativeView, native_attention, native_layers, native_mlp, run_mlp
from .norm import RMSNorm
from .rotary import Rotary, rotate

if TYPE_CHECKING:
    from .weights import Weights


class Attention:
    """Grouped-query attention with a fused query/key/value projection and, for Qwen3, normalised queries and keys."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, dtype: torch.dtype, device: torch.device) -> None:
        def load(name: str) -> torch.Tensor:
            return weights.load(prefix + name, dtype).to(device)

        bias = torch.cat([load(f"{x}_proj.bias") for x in "qkv"]) if config.qkv_bias else None
        self.qkv = Linear(torch.cat([load(f"{x}_proj.weight") for x in "qkv"]), bias)
        self.out = Linear(load("o_proj.weight"))
        self.heads, self.kv_heads, self.dim, self.eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        self.q_norm = RMSNorm(load("q_norm.weight"), config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(load("k_norm.weight"), config.rms_norm_eps) if config.qk_norm else None
        self.native = native_attention(self)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, view: CacheView | NativeView, layer: int) -> torch.Tensor:
        """x [M, H or 2H], residual [M, H] -> residual + attention [M, H]; writes the new keys and values into the cache."""
        if isinstance(view, NativeView):
            assert self.native is not None
            return view.attention(layer, self.native, x, residual)
        qkv = self.qkv(x).view(len(x), self.heads + 2 * self.kv_heads, self.dim)
        mine = rotated = qkv[:, : self.heads + self.kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            rotated = torch.cat([self.q_norm(mine[:, : self.heads]), self.k_norm(mine[:, self.heads :])], 1)
        rotate(rotated, view.angles, out=mine)  # in place, so that keys and values stay side by side
        return self.out(view.attend(layer, qkv[:, : self.heads], qkv[:, self.heads :]), residual)


class MLP:
    """SwiGLU with fused gate and up projections."""

    def __init__(self, weights: Weights, prefix: str, dtype: torch.dtype, device: torch.device) -> None:
        gate_up = [weights.load(f"{prefix}{x}_proj.weight", dtype).to(device) for x in ("gate", "up")]
        self.gate_up = Linear(torch.cat(gate_up))
        self.down = Linear(weights.load(f"{prefix}down_proj.weight", dtype).to(device))
        self.native = native_mlp(self)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x, residual [M, H] -> residual + MLP [M, H]."""
        if self.native is not None:
            return run_mlp(self.native, x, residual)
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate).mul_(up), residual)


class Layer:
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int, dtype: torch.dtype, device: torch.device) -> None:
        prefix = f"model.layers.{index}."
        self.attention = Attention(config, weights, f"{prefix}self_attn.", dtype, device)
        self.mlp = MLP(weights, f"{prefix}mlp.", dtype, device)
        self.input_norm = RMSNorm(weights.load(f"{prefix}input_layernorm.weight", dtype).to(device), config.rms_norm_eps)
        self.post_norm = RMSNorm(weights.load(f"{prefix}post_attention_layernorm.weight", dtype).to(device), config.rms_norm_eps)


class Decoder:
    """The target model (or a draft model): `forward` for rows, `logits` for the rows that need them.

    Args:
        config: the architecture.
        weights: tensors under their Hugging Face names.
        dtype: bf16 for speed, fp32 for exact comparison.
        device: "cpu" or a CUDA device.
    """

    def __init__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        # The big tables first: their transient copies then meet an almost empty process, which keeps the peak low.
        self.embedding = weights.load("model.embed_tokens.weight", dtype).to(self.device)
        head = self.embedding if config.tie_word_embeddings else weights.load("lm_head.weight", dtype).to(self.device)
        self.lm_head = Linear(head)
        del head
        self.layers = [Layer(config, weights, i, dtype, self.device) for i in range(config.num_layers)]
        self.native = native_layers(self.layers)
        self.norm = RMSNorm(weights.load("model.norm.weight", dtype).to(self.device), config.rms_norm_eps)
        self.rotary = Rotary(config, dtype, self.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights as they are kept: a tied head that was packed counts beside its embeddings."""
        linears = [
            linear for layer in self.layers for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
        ]
        tied = self.config.tie_word_embeddings and not self.lm_head.packed
        tables = self.embedding.numel() * self.embedding.element_size() + (0 if tied else self.lm_head.num_bytes)
        return tables + sum(linear.num_bytes for linear in linears)

    def new_cache(self, num_slots: int, length: int) -> KVCache:
        """An empty cache for `num_slots` requests of up to `length` rows each."""
        config = self.config
        self.rotary.grow(length)
        sizes = (config.num_layers, num_slots, config.num_kv_heads, length, config.head_dim)
        group = config.num_heads // config.num_kv_heads if self.native is not None else 0
        return KVCache(*sizes, self.dtype, self.device, native_group=group)

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, cache: KVCache, block: Block, aux_layers: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the flattened rows of one block.

        Args:
            tokens: [M] int64 ids.
            positions: [M] rotary positions (a tree node's is cached + depth, not its cache row).
            cache: written and read.
            block: where rows go and what they see.
            aux_layers: layers whose inputs an EAGLE-3 drafter wants as features.

        Returns:
            Normed hidden rows [M, H], and the inputs of `aux_layers` concatenated, [M, 3H], None without.
        """
        x, view = self.embedding[tokens], cache.view(block, self.rotary.angles(positions))
        if isinstance(view, NativeView):
            assert self.native is not None
            taken = view.run(self.native, x, aux_layers)
            return self.norm(x), taken
        features = {}
        for i, layer in enumerate(self.layers):
            if i in aux_layers:
                features[i] = x
            x = layer.attention(layer.input_norm(x), x, view, i)
            x = layer.mlp(layer.post_norm(x), x)
        return self.norm(x), torch.cat([features[i] for i in aux_layers], -1) if aux_layers else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed hidden rows [M, H] -> [M, V]."""
        return self.lm_head(hidden)
