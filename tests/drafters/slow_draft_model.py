"""Drafting with a model as slowly and plainly as it can be written: transformers runs every path from its first token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


class SlowDraftModel:
    """The model of `folder`, drafting for a target of `target_vocab` tokens."""

    def __init__(self, folder: Path, target_vocab: int) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.target_vocab = target_vocab

    @torch.no_grad()
    def best(self, tokens: list[int], k: int) -> list[tuple[int, float]]:
        """The k best (target token id, log-probability) after `tokens`."""
        ids = torch.tensor([[min(t, self.model.config.vocab_size - 1) for t in tokens]])
        log_probs = torch.log_softmax(self.model(ids).logits[0, -1, : self.target_vocab], -1)
        values, best = log_probs.topk(k)
        return list(zip(best.tolist(), values.tolist(), strict=True))

    def tree(self, tokens: list[int], steps: int, topk: int, nodes: int) -> dict[tuple[int, ...], float]:
        """The best `nodes` - 1 candidates as path of tokens -> cumulative log-probability."""
        frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        candidates: list[tuple[tuple[int, ...], float]] = []
        for _ in range(steps):
            children = [((*path, t), lp + more) for path, lp in frontier for t, more in self.best([*tokens, *path], topk)]
            candidates += children
            frontier = sorted(children, key=lambda c: -c[1])[:topk]
        return dict(sorted(candidates, key=lambda c: -c[1])[: nodes - 1])
