"""What plain decoding answers, and what the target thinks of any answer."""

from __future__ import annotations

import json
from typing import Any

import torch

from bed_models import BedModels
from servers import Server

TIE = 1e-4
"""Nats: plain decoding's two best tokens closer than this may swap, because fp32 sums in another order for another number of rows."""


class Reference:
    """A server without speculation, whose answers are remembered, and the same target in transformers.

    Args:
        server: plain SGLang.
        bed: its models.
    """

    def __init__(self, server: Server, bed: BedModels) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.server = server
        self._model = AutoModelForCausalLM.from_pretrained(bed.target, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(bed.target)
        self._known: dict[str, dict[str, Any]] = {}

    def answer(self, prompt: str, **params: Any) -> dict[str, Any]:
        """`Server.generate`, each question once."""
        key = json.dumps([prompt, params], sort_keys=True)
        if key not in self._known:
            self._known[key] = self.server.generate(prompt, **params)
        return self._known[key]

    def logits(self, prompt: str, tokens: list[int]) -> torch.Tensor:
        """fp32 [len(tokens), V]: the target's logits where each of the tokens was chosen."""
        ids = [*self._tokenizer(prompt).input_ids, *tokens]
        with torch.no_grad():
            logits: torch.Tensor = self._model(torch.tensor([ids])).logits[0]
        return logits[len(ids) - len(tokens) - 1 : -1].float()

    def assert_same(self, prompt: str, tokens: list[int], expected: list[int]) -> None:
        """The same tokens, as far as `tokens` goes; or they part where plain decoding was at a tie."""
        parts = [i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b]
        if parts:
            best = self.logits(prompt, expected)[parts[0]].topk(2).values
            assert float(best[0] - best[1]) < TIE, f"{prompt!r}: {tokens} is not {expected}, from token {parts[0]} on"
        else:
            assert len(tokens) <= len(expected), f"{prompt!r}: {len(tokens)} tokens where plain decoding has {len(expected)}"
