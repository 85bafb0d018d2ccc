"""EAGLE-3 drafting: one transformer layer over the target's own features.

Row t pairs the target's feature f_t with the embedding of token t + 1 and predicts token t + 2. Committed rows use true features;
while drafting, the layer's own output before its final norm stands in for them (Li et al., arXiv 2503.01840).
"""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import UserError
from ..models.decoder import MLP, Attention, Decoder
from ..models.kv_cache import Block, KVCache
from ..models.linear import Linear
from ..models.norm import RMSNorm
from ..models.rotary import Rotary
from ..models.weights import Weights
from .eagle3_checkpoint import open_head_weights, read_head_config
from .model_drafter import ModelDrafter


class Eagle3(ModelDrafter):
    """An EAGLE-3 head bound to its target.

    Args:
        folder: config.json and weights, in a layout of `eagle3_checkpoint`.
        target: the decoder it drafts for; its embeddings are used when the head brings none.
        aux_layers: how to read explicit feature layer ids, `input` or `output`.

    Raises:
        UserError: a head of another model, an unsupported variant, a missing or misshapen tensor, or a d2t out of range.
    """

    feeds_hidden = True

    def __init__(self, folder: Path, target: Decoder, aux_layers: str = "input") -> None:
        folder = Path(folder)
        dtype, device = target.dtype, target.device
        head = read_head_config(folder, target.config, aux_layers)
        self.config = config = head.model
        super().__init__(config.max_position_embeddings, config.hidden_size, dtype, device)
        self.feature_layers = head.feature_layers
        self.norm_before_residual = head.norm_before_residual
        weights = open_head_weights(folder)
        names, hidden = weights.names(), config.hidden_size
        heads, dim = config.num_heads, config.head_dim

        def check(name: str, *shape: int) -> None:
            if (found := weights.shape(name)) != shape:
                raise UserError(f"{folder}: tensor {name} is {list(found)}, expected {list(shape)}: a head of another model?")

        def load(name: str, *shape: int) -> torch.Tensor:
            check(name, *shape)
            return weights.load(name, dtype).to(device)

        self.fc = Linear(load("fc.weight", hidden, 3 * target.config.hidden_size))
        for part, size in (("q", heads * dim), ("k", config.num_kv_heads * dim), ("v", config.num_kv_heads * dim)):
            check(f"midlayer.self_attn.{part}_proj.weight", size, 2 * hidden)
        check("midlayer.self_attn.o_proj.weight", hidden, heads * dim)
        for part in ("gate", "up"):
            check(f"midlayer.mlp.{part}_proj.weight", config.intermediate_size, hidden)
        check("midlayer.mlp.down_proj.weight", hidden, config.intermediate_size)
        self.attention = Attention(config, weights, "midlayer.self_attn.", dtype, device)
        self.mlp = MLP(weights, "midlayer.mlp.", dtype, device)
        self.hidden_norm, self.input_norm, self.post_norm, self.norm = (
            RMSNorm(load(f"{name}.weight", hidden), config.rms_norm_eps)
            for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
        )
        self.draft_vocab = weights.shape("lm_head.weight")[0]
        self.lm_head = Linear(load("lm_head.weight", self.draft_vocab, hidden))
        self.embedding = self._embedding(weights, target, folder)
        self.target_ids = self._target_ids(weights, target.config.vocab_size, folder) if "d2t" in names else None
        if self.target_ids is None and self.draft_vocab != target.config.vocab_size:
            raise UserError(
                f"{folder} has no d2t although its vocabulary ({self.draft_vocab}) is not the target's ({target.config.vocab_size})"
            )
        self.rotary = Rotary(config, dtype, device)

    def _embedding(self, weights: Weights, target: Decoder, folder: Path) -> torch.Tensor:
        if "embed_tokens.weight" not in weights.names():
            if self.config.hidden_size != target.config.hidden_size:
                raise UserError(f"{folder} has no embed_tokens.weight and cannot share the target's: hidden sizes differ")
            return target.embedding
        rows, width = weights.shape("embed_tokens.weight")
        if rows < target.config.vocab_size or width != self.config.hidden_size:
            raise UserError(f"{folder}: embed_tokens.weight is {[rows, width]}, too small for the target's vocabulary or of another width")
        return weights.load("embed_tokens.weight", self.dtype).to(self.device)

    def _target_ids(self, weights: Weights, vocab_size: int, folder: Path) -> torch.Tensor:
        """int64 [draft vocabulary]: d2t holds offsets, so the target id of draft id i is i + d2t[i]."""
        offsets = weights.load("d2t", torch.int64)
        if offsets.shape != (self.draft_vocab,):
            raise UserError(f"{folder}: d2t has shape {list(offsets.shape)}, expected [{self.draft_vocab}]")
        ids = torch.arange(self.draft_vocab) + offsets
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise UserError(f"{folder}: d2t points outside the target's vocabulary of {vocab_size} tokens: a head of another model?")
        return ids.to(self.device)

    def _new_cache(self, num_slots: int, rows: int) -> KVCache:
        self.rotary.grow(rows)
        sizes = (1, num_slots, self.config.num_kv_heads, rows, self.config.head_dim)
        group = self.config.num_heads // self.config.num_kv_heads if self.attention.native is not None else 0
        return KVCache(*sizes, self.dtype, self.device, native_group=group)

    def _fuse(self, features: torch.Tensor | None) -> torch.Tensor | None:
        assert features is not None
        return self.fc(features)

    def _run(self, tokens: torch.Tensor, hidden: torch.Tensor | None, positions: torch.Tensor, block: Block) -> torch.Tensor:
        """The draft layer: tokens [M], hidden [M, H] -> output before the final norm [M, H]."""
        assert hidden is not None
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_norm(self.embedding[tokens]), normed], -1)
        residual = normed if self.norm_before_residual else hidden
        hidden = self.attention(x, residual, self.cache.view(block, self.rotary.angles(positions)), 0)
        return self.mlp(self.post_norm(hidden), hidden)

    def _top(self, hidden: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [M, H] -> target ids and log-probabilities [M, min(width, draft vocabulary)] of the best tokens."""
        logits = self.lm_head(self.norm(hidden))
        log_probs, ids = logits.log_softmax(-1, dtype=torch.float32).topk(min(width, self.draft_vocab), -1)
        return ids if self.target_ids is None else self.target_ids[ids], log_probs
