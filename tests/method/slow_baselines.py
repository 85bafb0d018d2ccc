"""The rules of `baselines.py` and `coins.py` once more, one child at a time, straight from their defining formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

from method.slow_oracles import SlowRequest
from method.tree_cases import Case

CLOSE = 1e-5
"""Comparisons of numbers nearer than this are left open: fp32 may decide them either way."""


class TooClose(Exception):
    """The oracle cannot tell."""


def above(a: float, b: float) -> bool:
    if a != b and abs(a - b) < CLOSE:
        raise TooClose
    return a > b


class SlowBaseline(SlowRequest):
    """Request b of a case, with the target's probabilities."""

    def __init__(self, case: Case, b: int) -> None:
        super().__init__(case, b)
        self.logits = case.inputs.logits[case.inputs.rows[b]].tolist()
        self.temperature = float(case.inputs.temperature[b])
        self.coins = case.inputs.coins[b].tolist() if case.inputs.coins is not None else []

    def p(self, node: int) -> list[float]:
        z = [value / (self.temperature or 1.0) for value in self.logits[node]]
        weights = [math.exp(value - max(z)) for value in z]
        return [weight / sum(weights) for weight in weights]

    def best_of(self, node: int, qualifies: Callable[[int, int], bool]) -> int:
        """The exact child first, then of those that qualify the one with the highest p."""
        if (exact := self.strict_child(node)) >= 0:
            return exact
        p, best = self.p(node), -1
        for child in self.children(node):
            x = self.tokens[child]
            alive = self.logits[node][x] > -math.inf
            if qualifies(node, x) and alive and (best < 0 or self.logits[node][x] > self.logits[node][self.tokens[best]]):
                best = child
        assert best < 0 or p[self.tokens[best]] > 0
        return best

    def typical(self, node: int, epsilon: float, delta: float) -> int:
        p = self.p(node)
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        return self.best_of(node, lambda _, x: above(p[x], min(epsilon, delta * math.exp(-entropy))))

    def relaxed_topk(self, node: int, k: int, delta: float) -> int:
        p, z = self.p(node), self.logits[node]
        if k == 1:
            return self.strict_child(node)
        return self.best_of(node, lambda _, x: sum(other > z[x] for other in z) < k and not above(max(p) - delta, p[x]))

    def logit_ratio(self, node: int, ratio: float) -> int:
        z = self.logits[node]
        first, second = sorted(z)[-1], sorted(z)[-2]
        return self.best_of(node, lambda _, x: z[x] >= second and first > 0 and above(second / first, ratio))

    def threshold(self, node: int, single: float, acc: float) -> int:
        p, tried = self.p(node), 0.0
        for child in self.children(node):
            x = self.tokens[child]
            tried += p[x]
            if p[x] > 0 and (not above(self.coins[node], tried / acc) or not above(single, p[x])):
                return child
        return -1

    def window(self, node: int, size: int, entropy: float) -> int:
        child = node + 1
        if child >= self.size:
            return -1
        largest = sorted(self.p(node))[-3:]
        unsure = not above(entropy, -sum(x * math.log(x) for x in largest if x > 0))
        ahead = range(child + 1, child + 1 + size)
        agrees = all(later < self.size and self.is_exact(later) for later in ahead)
        alive = self.logits[node][self.tokens[child]] > -math.inf
        return child if self.is_exact(child) or (unsure and agrees and alive) else -1


class SlowMarginTop1(SlowBaseline):
    """The margin rule with the target's own top-1 in place of the best score."""

    def log_margin(self, child: int) -> float:
        z = self.logits[self.parents[child]]
        return (z[self.tokens[child]] - max(z)) / (self.temperature or 1.0)
