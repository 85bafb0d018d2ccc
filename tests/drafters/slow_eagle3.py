"""EAGLE-3 drafting as slowly and plainly as it can be written: no cache, no batch, every row recomputed for every node.

Written from the description of the public checkpoints alone; shares no code with the package.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


class SlowHead:
    def __init__(self, folder: Path, embedding: torch.Tensor) -> None:
        self.w = load_file(folder / "model.safetensors")
        self.c = json.loads((folder / "config.json").read_text())
        self.embedding = self.w.get("embed_tokens.weight", embedding)

    def rope(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, heads, dim], row t at position t."""
        n, _, dim = x.shape
        angle = torch.arange(n)[:, None] / self.c["rope_theta"] ** (torch.arange(0, dim, 2) / dim)[None]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def layer(self, hidden: list[torch.Tensor], tokens: list[int]) -> torch.Tensor:
        """Rows t of (h_t, token t + 1) -> the layer's output of the last row, before the final norm."""
        w, p = self.w, "midlayer."
        heads, kv, dim = self.c["num_attention_heads"], self.c["num_key_value_heads"], self.c["head_dim"]
        h = torch.stack(hidden)
        x = torch.cat([rms(self.embedding[torch.tensor(tokens)], w[p + "input_layernorm.weight"]), rms(h, w[p + "hidden_norm.weight"])], -1)
        q = self.rope((x @ w[p + "self_attn.q_proj.weight"].T).view(-1, heads, dim))
        k = self.rope((x @ w[p + "self_attn.k_proj.weight"].T).view(-1, kv, dim))
        v = (x @ w[p + "self_attn.v_proj.weight"].T).view(-1, kv, dim)
        out = []
        for head in range(heads):
            group = head // (heads // kv)
            weights = torch.softmax(k[:, group] @ q[-1, head] / dim**0.5, 0)
            out.append(weights @ v[:, group])
        residual = rms(h[-1], w[p + "hidden_norm.weight"]) if self.c.get("norm_before_residual") else h[-1]
        h_last = residual + torch.cat(out) @ w[p + "self_attn.o_proj.weight"].T
        y = rms(h_last, w[p + "post_attention_layernorm.weight"])
        gate, up = y @ w[p + "mlp.gate_proj.weight"].T, y @ w[p + "mlp.up_proj.weight"].T
        return h_last + (torch.nn.functional.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T

    def best(self, hidden: torch.Tensor, k: int) -> list[tuple[int, float]]:
        """The k best (target token id, log-probability)."""
        log_probs = torch.log_softmax(rms(hidden, self.w["norm.weight"]) @ self.w["lm_head.weight"].T, -1)
        values, ids = log_probs.topk(k)
        offsets = self.w.get("d2t")
        return [(int(i) + (int(offsets[i]) if offsets is not None else 0), float(v)) for v, i in zip(values, ids, strict=True)]

    def tree(self, features: torch.Tensor, tokens: list[int], steps: int, topk: int, nodes: int) -> list[tuple[tuple[int, ...], float]]:
        """The drafted nodes as (path of tokens, cumulative log-probability), best `nodes` - 1 of all candidates, any order.

        features [n, 3H] pair with tokens (the tokens that follow them).
        """
        true = [f @ self.w["fc.weight"].T for f in features]

        def expand(path: list[int], states: list[torch.Tensor]) -> torch.Tensor:
            return self.layer(true + states, tokens + path)

        root = expand([], [])
        frontier = [([token], lp, [root]) for token, lp in self.best(root, topk)]
        candidates = [(tuple(path), lp) for path, lp, _ in frontier]
        for _ in range(steps - 1):
            children = []
            for path, lp, states in frontier:
                out = expand(path, states)
                children += [([*path, token], lp + more, [*states, out]) for token, more in self.best(out, topk)]
            candidates += [(tuple(path), lp) for path, lp, _ in children]
            frontier = sorted(children, key=lambda c: -c[1])[:topk]
        return sorted(candidates, key=lambda c: -c[1])[: nodes - 1]
