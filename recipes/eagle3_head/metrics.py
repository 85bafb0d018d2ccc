"""How good a head is on held-out answers: accuracy per unroll step, and the accept length of chains walked along each answer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class ChainAccuracy:
    """Collects, per answer, which unroll steps from which starts predicted the target's own token.

    Held-out answers are greedy, so a right prediction is exactly what strict verification at temperature 0 would accept.
    """

    steps: int = 7
    right: list[int] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    emitted: dict[int, int] = field(default_factory=dict)  # chain depth -> tokens emitted while walking
    verified: dict[int, int] = field(default_factory=dict)  # chain depth -> verify steps taken
    depths: tuple[int, ...] = (3, 5, 7)

    def __post_init__(self) -> None:
        self.right, self.seen = [0] * self.steps, [0] * self.steps

    def add(self, correct: torch.Tensor) -> None:
        """One answer: bool [A, steps]; [j, i] says whether step i from start j was right. Entries past the answer's end are ignored."""
        length = len(correct)
        for i in range(self.steps):
            self.right[i] += int(correct[: length - i, i].sum())
            self.seen[i] += max(length - i, 0)
        # Leading right steps at each start; a chain never runs past the answer.
        runs = correct.int().cumprod(1).tolist()
        for depth in self.depths:
            at = 0
            while at < length:
                accepted = sum(runs[at][: min(depth, length - at)])
                at += accepted + 1
                self.emitted[depth] = self.emitted.get(depth, 0) + min(accepted + 1, length - at + accepted + 1)
                self.verified[depth] = self.verified.get(depth, 0) + 1

    @property
    def accuracy(self) -> list[float]:
        """Top-1 accuracy at each unroll step, given the target's own tokens before it."""
        return [r / max(n, 1) for r, n in zip(self.right, self.seen, strict=True)]

    @property
    def accept_length(self) -> dict[int, float]:
        """Mean tokens per verify step, bonus included, for strict chains of each depth."""
        return {depth: self.emitted[depth] / self.verified[depth] for depth in self.depths if self.verified.get(depth)}

    def summary(self) -> dict[str, object]:
        """For logs and JSON."""
        return {
            "accuracy": [round(x, 4) for x in self.accuracy],
            "accept_length": {str(depth): round(x, 3) for depth, x in self.accept_length.items()},
            "predictions": self.seen[0],
        }
