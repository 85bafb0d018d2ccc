"""The method once more, as slow and obvious as possible: one request, one node, Python numbers."""

from __future__ import annotations

import itertools
import math
import struct
from dataclasses import dataclass
from fractions import Fraction

from adaptivespec.method.tree import TreeShape
from method.tree_cases import Case


class SlowRequest:
    """Request b of a case, as lists."""

    def __init__(self, case: Case, b: int) -> None:
        tree, inputs, params = case.tree, case.inputs, case.params
        self.size = int(tree.size[b])
        self.tokens = tree.tokens[b].tolist()
        self.parents = tree.parents[b].tolist()
        self.scores = inputs.scores[inputs.rows[b]].tolist()
        self.kappa = float(params.kappa[b])
        self.protect = bool(params.protect[b])
        self.protected = params.protected[b if len(params.protected) > 1 else 0].tolist()
        self.spent = float(params.spent[b])
        self.budget = float(params.budget[b])
        self.budget_per_100 = float(params.budget_per_100[b])
        self.emitted = int(params.emitted[b])
        self.max_promotions = int(params.max_promotions[b])

    def choice(self, node: int) -> int:
        return self.scores[node].index(max(self.scores[node]))

    def children(self, node: int) -> list[int]:
        return [child for child in range(1, self.size) if self.parents[child] == node]

    def log_margin(self, child: int) -> float:
        row = self.scores[self.parents[child]]
        return row[self.tokens[child]] - max(row)

    def is_exact(self, child: int) -> bool:
        return self.tokens[child] == self.choice(self.parents[child])

    def strict_child(self, node: int) -> int:
        for child in self.children(node):
            if self.is_exact(child):
                return child
        return -1

    def margin_child(self, node: int, spent: float, promotions: int, emitted: int) -> int:
        """The margin rule at a node that was reached having spent, promoted and emitted so much."""
        if (exact := self.strict_child(node)) >= 0:
            return exact
        best, best_margin = -1, -math.inf
        for child in self.children(node):
            margin = self.log_margin(child)
            if self.protect and (self.protected[self.tokens[child]] or self.protected[self.choice(node)]):
                continue
            if margin > math.log(self.kappa) and margin > best_margin:
                best, best_margin = child, margin
        if best < 0 or promotions + 1 > self.max_promotions:
            return -1
        if spent - best_margin > self.budget or spent - best_margin > self.budget_per_100 * (emitted + 100) / 100:
            return -1
        return best

    def margin_child_of_any(self, node: int) -> int:
        """The same for any node, also one that the rule would never reach: its ancestors' edges count as if taken."""
        path, above = [], node
        while above > 0:
            path.append(above)
            above = self.parents[above]
        spent, promotions = self.spent, 0
        for child in reversed(path):
            if not self.is_exact(child):
                spent -= self.log_margin(child)
                promotions += 1
        return self.margin_child(node, spent, promotions, self.emitted + len(path))


@dataclass
class SlowAcceptance:
    path: list[int]
    bonus: int
    promoted: list[bool]
    log_margin: list[float]


def slow_accept(case: Case, b: int, rule: str) -> SlowAcceptance:
    """Walk request b from the root with what was spent so far in hand."""
    request = SlowRequest(case, b)
    node, spent, result = 0, request.spent, SlowAcceptance([], -1, [], [])
    while True:
        if rule == "strict":
            child = request.strict_child(node)
        else:
            child = request.margin_child(node, spent, sum(result.promoted), request.emitted + len(result.path))
        if child < 0:
            result.bonus = request.choice(node)
            return result
        promoted = not request.is_exact(child)
        cost = -request.log_margin(child) if promoted else 0.0
        spent += cost
        result.path.append(child)
        result.promoted.append(promoted)
        result.log_margin.append(-cost)
        node = child


def slow_ancestors(parents: list[int], node: int) -> set[int]:
    """The node and everything above it."""
    found = {node}
    while parents[node] >= 0:
        node = parents[node]
        found.add(node)
    return found


def slow_sglang_links(parents: list[int], size: int) -> tuple[list[int], list[int]]:
    """SGLang's linked form: a node's first child, and the next child of the same parent; -1 for none."""
    next_token, next_sibling = [-1] * len(parents), [-1] * len(parents)
    for node in range(size):
        children = [child for child in range(1, size) if parents[child] == node]
        if children:
            next_token[node] = children[0]
        for child, sibling in itertools.pairwise(children):
            next_sibling[child] = sibling
    return next_token, next_sibling


def slow_sglang_walk(tokens: list[int], next_token: list[int], next_sibling: list[int], target_predict: list[int]) -> tuple[list[int], int]:
    """What SGLang's verify_tree_greedy kernel accepts, and the bonus token."""
    node, path = 0, []
    while True:
        child = next_token[node]
        while child != -1 and tokens[child] != target_predict[node]:
            child = next_sibling[child]
        if child == -1:
            return path, target_predict[node]
        path.append(child)
        node = child


MASK_64, MASK_32 = 2**64 - 1, 2**32 - 1


def slow_splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)


def slow_hash(seed: int, position: int, token: int) -> int:
    """31 bits for one token at one place; Python integers stand in for unsigned ones."""
    mixed = slow_splitmix64(slow_splitmix64(seed & MASK_64) ^ (position & MASK_64))
    high, low = mixed >> 32, mixed & MASK_32
    x = ((token * 0x9E3779B1) & MASK_32) ^ high
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK_32
    x = ((((x ^ (x >> 13)) + low) & MASK_32) * 0xC2B2AE35) & MASK_32
    return (x ^ (x >> 16)) & 0x7FFFFFFF


def to_fp32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


def slow_uniform(hashed: int) -> float:
    """The uniform in (0, 1) of a hash, with fp32's rounding."""
    return min(to_fp32(to_fp32(float(hashed)) + 0.5) * 2.0**-31, 1 - 2.0**-24)


def slow_gumbel(seed: int, position: int, token: int) -> float:
    return -math.log(-math.log1p(-slow_uniform(slow_hash(seed, position, token))))


def slow_shape(low: TreeShape, high: TreeShape, s: float) -> tuple[int, int, int]:
    """floor(low + s * (high - low) + 1/2) without rounding errors."""
    numbers = zip((low.num_steps, low.topk, low.num_draft_tokens), (high.num_steps, high.topk, high.num_draft_tokens), strict=True)
    steps, topk, nodes = (math.floor(a + Fraction(s) * (b - a) + Fraction(1, 2)) for a, b in numbers)
    return steps, topk, nodes


class SlowAdaptive:
    """One request's rolling acceptance ratio and circuit breaker."""

    def __init__(self, alpha: float = 0.3, patience: int = 5) -> None:
        self.alpha, self.patience = alpha, patience
        self.rar, self.misses, self.low_next = 0.5, 0, False

    def step(self, accepted: int, deepest: int, divide_by: int) -> None:
        if deepest == 0:
            return
        self.low_next = False
        self.rar = (1 - self.alpha) * self.rar + self.alpha * accepted / divide_by
        self.misses = self.misses + 1 if accepted == 0 else 0
        if self.misses == self.patience:
            self.rar, self.misses, self.low_next = 0.5, 0, True
