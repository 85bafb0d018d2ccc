"""A tiny EAGLE-3 head that knows some texts by heart, so that engine tests see deep acceptance with a real head."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from adaptivespec.models.decoder import Decoder
from adaptivespec.models.kv_cache import Block
from tiny_heads import make_tiny_head

HEADS, KV_HEADS, DIM, EPS = 4, 2, 16, 1e-6  # those of make_tiny_head


def features_of(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    """The target's features [n, 3H] of a whole text, from one forward."""
    n = len(tokens)
    block = Block([0], [0], [0], [n], torch.ones(1, n, n, dtype=torch.bool).tril())
    layers = decoder.config.aux_layers
    features = decoder.forward(torch.tensor(tokens), torch.arange(n), decoder.new_cache(1, n), block, layers)[1]
    assert features is not None
    return features.clone()


def overfit_head(folder: Path, decoder: Decoder, texts: list[list[int]], steps: int = 250) -> Path:
    """Train `make_tiny_head`'s head on texts (prompt and answer) until it repeats them, from true features and from its own output."""
    make_tiny_head(folder, draft_vocab=128)
    w = {name: tensor.requires_grad_() for name, tensor in load_file(folder / "model.safetensors").items()}
    length = max(map(len, texts)) - 2
    features = torch.zeros(len(texts), length, 3 * 64)
    tokens, wanted = torch.zeros(len(texts), length, dtype=torch.int64), torch.full((len(texts), length), -100)
    for i, text in enumerate(texts):
        n = len(text) - 2  # row t has feature t and token t + 1, and predicts token t + 2
        features[i, :n] = features_of(decoder, text)[:n]
        tokens[i, :n], wanted[i, :n] = torch.tensor(text[1:-1]), torch.tensor(text[2:])
    embedded = decoder.embedding[tokens].clone()
    angle = torch.arange(length)[:, None] / 10000.0 ** (torch.arange(0, DIM, 2) / DIM)[None]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def rope(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (64,), w[name], EPS)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"midlayer.{name}_proj.weight"].T

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        x = torch.cat([norm(embedded, "midlayer.input_layernorm.weight"), norm(hidden, "midlayer.hidden_norm.weight")], -1)
        q = rope(linear(x, "self_attn.q").unflatten(-1, (HEADS, DIM))).transpose(1, 2)
        k = rope(linear(x, "self_attn.k").unflatten(-1, (KV_HEADS, DIM))).transpose(1, 2).repeat_interleave(HEADS // KV_HEADS, 1)
        v = linear(x, "self_attn.v").unflatten(-1, (KV_HEADS, DIM)).transpose(1, 2).repeat_interleave(HEADS // KV_HEADS, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + linear(attended, "self_attn.o")
        y = norm(hidden, "midlayer.post_attention_layernorm.weight")
        return hidden + linear(F.silu(linear(y, "mlp.gate")) * linear(y, "mlp.up"), "mlp.down")

    def loss(hidden: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((norm(hidden, "norm.weight") @ w["lm_head.weight"].T).flatten(0, 1), wanted.flatten())

    optimiser = torch.optim.Adam(list(w.values()), lr=5e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        out = layer(features @ w["fc.weight"].T)
        total = loss(out)
        for _ in range(2):  # as when drafting: row t has the output of row t - 1 in place of a feature
            out = layer(F.pad(out.detach()[:, :-1], (0, 0, 1, 0)))
            total = total + loss(out)
        total.backward()
        optimiser.step()
    save_file({name: tensor.detach() for name, tensor in w.items()}, folder / "model.safetensors")
    return folder
