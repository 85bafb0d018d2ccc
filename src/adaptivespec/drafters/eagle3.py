"""EAGLE-3 drafting: one transformer layer over the target's own features, in the layout of the public checkpoints.

Row t pairs the target's feature f_t with the embedding of token t + 1 and predicts token t + 2. Committed rows use true features;
while drafting, the layer's own output before its final norm stands in for them (Li et al., arXiv 2503.01840).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import UserError
from ..method.policy import PolicyState, Root, TreePolicy
from ..method.tree import DraftTree, TreeShape
from ..models.architecture import ModelConfig
from ..models.decoder import MLP, Attention, Decoder
from ..models.hf_config import config_from_hf
from ..models.kv_cache import Block, KVCache, make_block
from ..models.linear import Linear
from ..models.rotary import Rotary
from ..models.weights import SafetensorsWeights
from .grow import Level, grow

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "LlamaForCausalLM")


def read_config(folder: Path, target: ModelConfig) -> ModelConfig:
    """The head's architecture, checked against the target's.

    Raises:
        UserError: no or unreadable config.json, another kind of drafter, or a head trained for another model.
    """
    path = folder / "config.json"
    try:
        raw: Any = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{folder} has no config.json: not an EAGLE-3 head") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} is not a JSON object: not an EAGLE-3 head")
    names = raw.get("architectures") or []
    if not names or names[0] not in _ARCHITECTURES or raw.get("num_hidden_layers", 1) != 1:
        raise UserError(f"{folder} is not an EAGLE-3 head: architectures {names} with {raw.get('num_hidden_layers')} layers; "
                        f"needed {' or '.join(_ARCHITECTURES)} with 1 layer")  # fmt: skip
    eagle = raw.get("eagle_config") or {}
    if raw.get("norm_output") or eagle.get("norm_output") or raw.get("norm_before_residual") or eagle.get("norm_before_residual"):
        raise UserError(f"{folder}: heads with norm_output or norm_before_residual are not supported")
    if eagle.get("use_aux_hidden_state") is False:
        raise UserError(f"{folder}: heads without auxiliary hidden states (use_aux_hidden_state false) are not supported")
    wanted = raw.get("target_hidden_size") or raw.get("hidden_size")
    if wanted != target.hidden_size:
        raise UserError(f"{folder} is a head for a target of hidden size {wanted}; this target's is {target.hidden_size}")
    return config_from_hf({**raw, "model_type": "llama"}, str(path))


def feature_layers(folder: Path, target: ModelConfig, aux_layers: str = "input") -> tuple[int, int, int]:
    """The layers whose inputs are the head's features.

    Explicit ids in the config mean the inputs of those layers (vLLM), or their outputs with `aux_layers="output"` (SGLang).
    """
    raw: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
    ids = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return target.aux_layers
    shift = 1 if aux_layers == "output" else 0
    layers = tuple(int(i) + shift for i in ids)
    if len(layers) != 3 or not all(0 <= i < target.num_layers for i in layers):
        raise UserError(f"{folder}: eagle_aux_hidden_state_layer_ids {ids} must be three layers of the target's {target.num_layers}")
    return layers[0], layers[1], layers[2]


class Eagle3:
    """An EAGLE-3 head bound to its target.

    Args:
        folder: config.json and safetensors in the public layout.
        target: the decoder it drafts for; its embeddings are used when the head brings none.
        aux_layers: how to read explicit feature layer ids, `input` or `output`.

    Raises:
        UserError: a head of another model, an unsupported variant, a missing or misshapen tensor, or a d2t out of range.
    """

    def __init__(self, folder: Path, target: Decoder, aux_layers: str = "input") -> None:
        folder = Path(folder)
        dtype, device = target.dtype, target.device
        self.config = config = read_config(folder, target.config)
        self.feature_layers: tuple[int, ...] = feature_layers(folder, target.config, aux_layers)
        self.dtype, self.device = dtype, device
        weights = SafetensorsWeights(folder)
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
        self.hidden_norm = load("midlayer.hidden_norm.weight", hidden)
        self.input_norm = load("midlayer.input_layernorm.weight", hidden)
        self.post_norm = load("midlayer.post_attention_layernorm.weight", hidden)
        self.norm = load("norm.weight", hidden)
        self.draft_vocab = weights.shape("lm_head.weight")[0]
        self.lm_head = Linear(load("lm_head.weight", self.draft_vocab, hidden))
        self.embedding = self._embedding(weights, target, folder)
        self.target_ids = self._target_ids(weights, target.config.vocab_size, folder) if "d2t" in names else None
        if self.target_ids is None and self.draft_vocab != target.config.vocab_size:
            raise UserError(
                f"{folder} has no d2t although its vocabulary ({self.draft_vocab}) is not the target's ({target.config.vocab_size})"
            )
        self.rotary = Rotary(config, dtype, device)

    def _embedding(self, weights: SafetensorsWeights, target: Decoder, folder: Path) -> torch.Tensor:
        if "embed_tokens.weight" not in weights.names():
            if self.config.hidden_size != target.config.hidden_size:
                raise UserError(f"{folder} has no embed_tokens.weight and cannot share the target's: hidden sizes differ")
            return target.embedding
        rows, width = weights.shape("embed_tokens.weight")
        if rows < target.config.vocab_size or width != self.config.hidden_size:
            raise UserError(f"{folder}: embed_tokens.weight is {[rows, width]}, too small for the target's vocabulary or of another width")
        return weights.load("embed_tokens.weight", self.dtype).to(self.device)

    def _target_ids(self, weights: SafetensorsWeights, vocab_size: int, folder: Path) -> torch.Tensor:
        """int64 [draft vocabulary]: d2t holds offsets, so the target id of draft id i is i + d2t[i]."""
        offsets = weights.load("d2t", torch.int64)
        if offsets.shape != (self.draft_vocab,):
            raise UserError(f"{folder}: d2t has shape {list(offsets.shape)}, expected [{self.draft_vocab}]")
        ids = torch.arange(self.draft_vocab) + offsets
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise UserError(f"{folder}: d2t points outside the target's vocabulary of {vocab_size} tokens: a head of another model?")
        return ids.to(self.device)

    def allocate(self, num_slots: int, length: int, shapes: Sequence[TreeShape]) -> None:
        """A cache of `length` committed rows and the speculative rows of the largest of `shapes`, within the head's own context.

        Raises:
            UserError: the drafter already serves another LLM.
        """
        if hasattr(self, "cache"):
            raise UserError("this drafter object already serves another LLM: make one for each")
        self.speculative_rows = max(0, max(s.num_steps for s in shapes) - 1) * max(s.topk for s in shapes)
        self.length = min(length, self.config.max_position_embeddings - max(s.num_steps for s in shapes))
        rows = max(self.length, 0) + self.speculative_rows
        self.rotary.grow(rows)
        self.cache = KVCache(1, num_slots, self.config.num_kv_heads, rows, self.config.head_dim, self.dtype, self.device)
        self.committed = [0] * num_slots
        self.exhausted = [False] * num_slots
        self.hidden = torch.zeros(num_slots, self.config.hidden_size, dtype=self.dtype, device=self.device)

    def start(self, slot: int, prompt: Sequence[int]) -> None:
        """A new request takes a slot."""
        self.committed[slot], self.exhausted[slot] = 0, False

    @torch.inference_mode()
    def commit(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], features: torch.Tensor | None) -> None:
        """Extend the committed rows with true features; a request that leaves the head's context is drafted for no more."""
        assert features is not None
        counts = [len(t) for t in tokens]
        keep = []
        for i, slot in enumerate(slots):
            self.exhausted[slot] = self.exhausted[slot] or self.committed[slot] + counts[i] > self.length
            if not self.exhausted[slot]:
                keep.append(i)
        if not keep:
            return
        if len(keep) < len(slots):
            firsts = [sum(counts[:i]) for i in keep]
            features = torch.cat([features[first : first + counts[i]] for first, i in zip(firsts, keep, strict=True)])
        slots, counts = [slots[i] for i in keep], [counts[i] for i in keep]
        flat = torch.tensor([token for i in keep for token in tokens[i]], device=self.device)
        starts = [self.committed[slot] for slot in slots]
        positions = torch.tensor([start + j for start, n in zip(starts, counts, strict=True) for j in range(n)], device=self.device)
        width = max(counts)
        visible = (
            torch.ones(width, width, dtype=torch.bool, device=self.device).tril().expand(len(slots), width, width) if width > 1 else None
        )
        block = make_block(list(slots), starts, starts, counts, visible, self.dtype, self.device)
        out = self._layer(flat, self.fc(features), positions, block)
        ends = torch.tensor(counts, device=self.device).cumsum(0) - 1
        self.hidden[list(slots)] = out[ends]
        for slot, count in zip(slots, counts, strict=True):
            self.committed[slot] += count

    @torch.inference_mode()
    def begin(self, slots: Sequence[int], width: int) -> Root:
        """The head's best `width` continuations of each request."""
        tokens, log_probs = self._top(self.hidden[list(slots)], width)
        if any(out := [self.exhausted[slot] for slot in slots]):
            log_probs = log_probs.masked_fill(torch.tensor(out, device=self.device)[:, None], -math.inf)
        return Root(tokens, log_probs)

    @torch.inference_mode()
    def draft(
        self,
        slots: Sequence[int],
        last_tokens: torch.Tensor,
        root: Root,
        shapes: Sequence[TreeShape],
        policy: TreePolicy,
        state: PolicyState,
    ) -> DraftTree:
        """Grow one tree per request; see `Drafter.draft`."""
        shapes = [TreeShape.off() if self.exhausted[slot] else shape for slot, shape in zip(slots, shapes, strict=True)]
        hidden = self.hidden[list(slots)][:, None]  # [A, K, H]: the rows that the next level's nodes hang from

        def expand(level: Level) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal hidden
            if level.survivors is not None:
                hidden = hidden[level.survivors]
            parents = hidden.gather(1, level.parent_column[:, :, None].expand(-1, -1, hidden.shape[2]))
            requests = [slots[row] for row in level.rows]
            bases = [self.committed[slot] for slot in requests]
            width = level.tokens.shape[1]
            starts = [base + (level.index - 1) * width for base in bases]
            positions = [base + level.index - 1 for base, n in zip(bases, level.counts, strict=True) for _ in range(n)]
            # A lone node per level sees everything before it: no mask.
            visible = None if width == 1 else level.visible
            block = make_block(requests, bases, starts, level.counts, visible, self.dtype, self.device)
            position = torch.tensor(positions, device=self.device)
            if min(level.counts) == width:  # no column is padding: views instead of masks, which cost more than the tree's other steps
                out = self._layer(level.tokens.flatten(), parents.flatten(0, 1), position, block)
                tokens, log_probs = self._top(out, width)
                hidden = out.view(parents.shape)
                return tokens.view(*level.tokens.shape, width), log_probs.view(*level.tokens.shape, width)
            real = level.real
            out = self._layer(level.tokens[real], parents[real], position, block)
            tokens, log_probs = self._top(out, width)
            hidden = out.new_zeros(*level.tokens.shape, out.shape[1])
            hidden[real] = out
            all_tokens = tokens.new_zeros(*level.tokens.shape, width)
            all_log_probs = log_probs.new_full((*level.tokens.shape, width), -math.inf)
            all_tokens[real], all_log_probs[real] = tokens, log_probs
            return all_tokens, all_log_probs

        return grow(last_tokens, root, shapes, policy, state, expand)

    def _layer(self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, block: Block) -> torch.Tensor:
        """The draft layer: tokens [M], hidden [M, H] -> output before the final norm [M, H]."""
        eps, shape = self.config.rms_norm_eps, (self.config.hidden_size,)
        embedded = F.rms_norm(self.embedding[tokens], shape, self.input_norm, eps)
        x = torch.cat([embedded, F.rms_norm(hidden, shape, self.hidden_norm, eps)], -1)
        hidden = hidden + self.attention(x, self.rotary.angles(positions), self.rotary, self.cache, 0, block)
        return hidden + self.mlp(F.rms_norm(hidden, shape, self.post_norm, eps))

    def _top(self, hidden: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [M, H] -> target ids and log-probabilities [M, min(width, draft vocabulary)] of the best tokens."""
        logits = self.lm_head(F.rms_norm(hidden, (self.config.hidden_size,), self.norm, self.config.rms_norm_eps)).float()
        best, ids = logits.topk(min(width, self.draft_vocab), -1)
        log_probs = best - logits.logsumexp(-1, keepdim=True)
        return ids if self.target_ids is None else self.target_ids[ids], log_probs
