"""A fake target, fake drafters and the slowest possible engine around them, to test the method and engines without a model.

>>> target = FakeTarget(vocab_size=16)
>>> drafter = FakeDrafter(target, accept=[2, 0, 3])       # the target's own choice down to level 2, then 0, then 3, and again
>>> requests = run(target, drafter, Strict(), Static(TreeShape(3, 2, 6)), prompts=[[1, 2]], max_tokens=20)
>>> assert requests[0].emitted[:20] == target.generate([1, 2], 20)

Everything is plain Python over lists, one request and one node at a time; only the method under test sees tensors.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from adaptivespec.method.acceptance import Acceptance, AcceptanceRule, VerifyInputs
from adaptivespec.method.guards import RuleParams, protected_mask
from adaptivespec.method.noise import gumbel
from adaptivespec.method.policy import PolicyState, Root, Static, TreePolicy
from adaptivespec.method.records import StepRecord
from adaptivespec.method.tree import DraftTree, TreeShape

UNLIMITED = 1 << 30
ALWAYS = UNLIMITED
NEVER = 0


@dataclass
class Nodes:
    """One request's tree as lists; node 0 is the root."""

    tokens: list[int]
    parents: list[int]
    log_probs: list[float]

    @property
    def depth(self) -> list[int]:
        depth: list[int] = []
        for parent in self.parents:
            depth.append(0 if parent < 0 else depth[parent] + 1)
        return depth

    def path(self, node: int) -> list[int]:
        """Drafted tokens from the root's child down to `node`."""
        tokens = []
        while node > 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]


def make_tree(requests: Sequence[Nodes], extra_columns: int = 0, extra_levels: int = 0) -> DraftTree:
    """A padded batch of trees, as `DraftTree` promises it; the extras are slack that an engine may have."""
    width = max(len(nodes.tokens) for nodes in requests) + extra_columns

    def padded(rows: Iterable[Sequence[Any]], fill: float) -> torch.Tensor:
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])

    return DraftTree(
        tokens=padded((nodes.tokens for nodes in requests), 0),
        parents=padded((nodes.parents for nodes in requests), -1),
        depth=padded((nodes.depth for nodes in requests), 0),
        log_probs=padded((nodes.log_probs for nodes in requests), -math.inf),
        size=torch.tensor([len(nodes.tokens) for nodes in requests]),
        levels=max(max(nodes.depth) for nodes in requests) + extra_levels,
    )


def unmake_tree(tree: DraftTree) -> list[Nodes]:
    """The real nodes of every request."""
    rows = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.log_probs.tolist(), tree.size.tolist(), strict=True)
    return [Nodes(tokens[:size], parents[:size], log_probs[:size]) for tokens, parents, log_probs, size in rows]


def layout(shape: TreeShape) -> list[int]:
    """Parents of a tree with exactly the shape's nodes: its deepest path first, then siblings, breadth first."""
    parents, depth, children = [-1], [0], [0]

    def add(parent: int) -> None:
        parents.append(parent)
        depth.append(depth[parent] + 1)
        children.append(0)
        children[parent] += 1

    for node in range(min(shape.num_steps, shape.num_draft_tokens - 1)):
        add(node)
    parent = 0
    while len(parents) < shape.num_draft_tokens:
        if children[parent] < shape.topk and depth[parent] < shape.num_steps:
            add(parent)
        else:
            parent += 1
    return parents


class FakeTarget:
    """A toy language model whose logits depend on the last `order` tokens alone.

    Args:
        vocab_size: V.
        seed: another model for every seed.
        order: how many tokens of context count.
        scale: standard deviation of the logits.
        step: round logits to multiples of it, so that ties occur.
    """

    def __init__(self, vocab_size: int = 16, seed: int = 0, order: int = 3, scale: float = 1.5, step: float | None = None) -> None:
        self.vocab_size, self.seed, self.order, self.scale, self.step = vocab_size, seed, order, scale, step
        self._rows: dict[tuple[int, ...], torch.Tensor] = {}
        self._scores: dict[tuple[Any, ...], torch.Tensor] = {}

    def logits(self, context: Sequence[int]) -> torch.Tensor:
        """fp32 [V] after the context."""
        key = tuple(context[-self.order :])
        if key not in self._rows:
            rng = random.Random(f"{self.seed}:{key}")
            row = [rng.gauss(0, self.scale) for _ in range(self.vocab_size)]
            if self.step:
                row = [round(x / self.step) * self.step for x in row]
            self._rows[key] = torch.tensor(row)
        return self._rows[key]

    def scores(self, context: Sequence[int], temperature: float = 0.0, seed: int = 0) -> torch.Tensor:
        """fp32 [V]: logits plus position-keyed noise. A token's position is the number of tokens before it."""
        key = (tuple(context[-self.order :]), len(context), temperature, seed)
        if key not in self._scores:
            noise = gumbel(torch.tensor([seed]), torch.tensor([len(context)]), self.vocab_size)[:, None] if temperature else None
            inputs = VerifyInputs.from_logits(self.logits(context)[None, None], torch.tensor([temperature]), noise)
            self._scores[key] = inputs.scores[0]
        return self._scores[key]

    def choose(self, context: Sequence[int], temperature: float = 0.0, seed: int = 0) -> int:
        """The token that plain decoding emits next."""
        scores = self.scores(context, temperature, seed).tolist()
        return scores.index(max(scores))

    def generate(self, prompt: Sequence[int], count: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
        """Plain decoding."""
        context = list(prompt)
        for _ in range(count):
            context.append(self.choose(context, temperature, seed))
        return context[len(prompt) :]

    def verify(
        self,
        contexts: Sequence[Sequence[int]],
        tree: DraftTree,
        temperatures: Sequence[float],
        seeds: Sequence[int],
        garbage: float = math.nan,
    ) -> VerifyInputs:
        """One row per node; rows of padding hold `garbage`. A context ends with the tree's root."""
        batch, width = tree.tokens.shape
        logits = torch.full((batch, width, self.vocab_size), garbage)
        positions = torch.tensor([len(context) for context in contexts])[:, None] + tree.depth
        noise = gumbel(torch.tensor(seeds).repeat_interleave(width), positions.flatten(), self.vocab_size) if any(temperatures) else None
        for b, (context, nodes) in enumerate(zip(contexts, unmake_tree(tree), strict=True)):
            for node in range(len(nodes.tokens)):
                logits[b, node] = self.logits([*context, *nodes.path(node)])
        return VerifyInputs.from_logits(logits, torch.tensor(temperatures), None if noise is None else noise.reshape(logits.shape))


class DraftsTrees(Protocol):
    """What `run` needs of a drafter."""

    def root(self, contexts: Sequence[Sequence[int]]) -> Root: ...

    def draft(
        self, contexts: Sequence[Sequence[int]], shapes: Sequence[TreeShape], temperatures: Sequence[float], seeds: Sequence[int]
    ) -> list[Nodes]: ...


class FakeDrafter:
    """Drafts trees whose acceptance is prescribed: it knows what the target will choose.

    Args:
        target: the target it cheats on.
        accept: how many levels of each step's tree hold the target's choice (ALWAYS, NEVER, or one number per step, repeated);
            everything else in the tree is wrong, best wrong token first, so that a lossy rule finds something to promote.
        confidence: the drafter's top-1 probability at the root.
    """

    def __init__(self, target: FakeTarget, accept: int | Sequence[int] = ALWAYS, confidence: float = 0.9) -> None:
        self.target, self.confidence = target, confidence
        self._accept = itertools.cycle([accept] if isinstance(accept, int) else accept)

    def root(self, contexts: Sequence[Sequence[int]]) -> Root:
        log_probs = torch.full((len(contexts), 1), math.log(self.confidence))
        return Root(torch.zeros(len(contexts), 1, dtype=torch.int64), log_probs)

    def draft(
        self, contexts: Sequence[Sequence[int]], shapes: Sequence[TreeShape], temperatures: Sequence[float], seeds: Sequence[int]
    ) -> list[Nodes]:
        accept = next(self._accept)
        rows = zip(contexts, shapes, temperatures, seeds, strict=True)
        return [self._tree(context, layout(shape), accept, temperature, seed) for context, shape, temperature, seed in rows]

    def _tree(self, context: Sequence[int], parents: list[int], accept: int, temperature: float, seed: int) -> Nodes:
        nodes = Nodes([context[-1]], parents[:1], [0.0])
        wrong: dict[int, Iterable[int]] = {}
        for node, parent in enumerate(parents[1:], 1):
            prefix = [*context, *nodes.path(parent)]
            scores = self.target.scores(prefix, temperature, seed)
            if parent not in wrong:
                choice = self.target.choose(prefix, temperature, seed)
                wrong[parent] = (token for token in scores.argsort(descending=True, stable=True).tolist() if token != choice)
            # the first nodes of a layout are its deepest path
            right = parent == node - 1 < accept
            nodes.tokens.append(self.target.choose(prefix, temperature, seed) if right else next(iter(wrong[parent])))
            siblings = parents[:node].count(parent)
            nodes.parents.append(parent)
            nodes.log_probs.append(nodes.log_probs[parent] - 0.25 - 0.5 * siblings)
        return nodes


class RandomDrafter:
    """Random trees, whatever the shape asked for, of tokens among the target's best few: acceptance is left to chance."""

    def __init__(self, target: FakeTarget, seed: int = 0, max_nodes: int = 10, best: int = 3) -> None:
        self.target, self.rng, self.max_nodes, self.best = target, random.Random(seed), max_nodes, best

    def root(self, contexts: Sequence[Sequence[int]]) -> Root:
        confidence = torch.tensor([[self.rng.uniform(0.01, 1)] for _ in contexts])
        return Root(torch.zeros(len(contexts), 1, dtype=torch.int64), confidence.log())

    def draft(
        self, contexts: Sequence[Sequence[int]], shapes: Sequence[TreeShape], temperatures: Sequence[float], seeds: Sequence[int]
    ) -> list[Nodes]:
        trees = []
        for context, temperature, seed in zip(contexts, temperatures, seeds, strict=True):
            nodes = Nodes([context[-1]], [-1], [0.0])
            for node in range(1, self.rng.randint(1, self.max_nodes)):
                parent = self.rng.choice([0, node - 1, self.rng.randrange(node)])
                scores = self.target.scores([*context, *nodes.path(parent)], temperature, seed)
                nodes.tokens.append(self.rng.choice(scores.topk(min(self.best, len(scores))).indices.tolist()))
                nodes.parents.append(parent)
                nodes.log_probs.append(nodes.log_probs[parent] - self.rng.choice([0.0, 0.5, 1.0]))
            trees.append(nodes)
        return trees


class PrescribedPolicy(Static):
    """Shapes in a prescribed order, one a step, from the start again when they run out."""

    name = "prescribed"

    def __init__(self, shapes: Sequence[TreeShape]) -> None:
        super().__init__(shapes[0])
        self._reachable = list(dict.fromkeys(shapes))
        self._order = itertools.cycle([self._reachable.index(shape) for shape in shapes])

    def reachable(self) -> list[TreeShape]:
        return list(self._reachable)

    def plan(self, state: PolicyState, root: Root) -> torch.Tensor:
        return torch.full_like(state.misses, next(self._order))


def rule_params(batch: int, vocab_size: int, protected: Iterable[int] = (), **settings: Any) -> RuleParams:
    """`RuleParams` for a batch from numbers or lists of numbers; unnamed settings are kappa 0.2 and no guards (the paper's rule)."""
    defaults: dict[str, Any] = {
        "kappa": 0.2,
        "protect": False,
        "spent": 0.0,
        "budget": math.inf,
        "budget_per_100": math.inf,
        "emitted": 0,
        "max_promotions": UNLIMITED,
    }
    if unknown := settings.keys() - defaults.keys():
        raise TypeError(f"unknown settings {sorted(unknown)}")
    dtypes = {"protect": torch.bool, "emitted": torch.int64, "max_promotions": torch.int64}
    tensors = {
        name: torch.as_tensor(value, dtype=dtypes.get(name, torch.float64)).expand(batch).contiguous()
        for name, value in (defaults | settings).items()
    }
    return RuleParams(protected=protected_mask(vocab_size, protected), **tensors)


def acceptance_of(num_accepted: Sequence[int], levels: int) -> Acceptance:
    """An `Acceptance` of so many exact tokens down a chain."""
    batch = len(num_accepted)
    path = torch.full((batch, levels), -1)
    for b, count in enumerate(num_accepted):
        path[b, :count] = torch.arange(1, count + 1)
    nothing = torch.zeros(batch, levels, dtype=torch.float64)
    return Acceptance(path, torch.tensor(num_accepted), torch.zeros(batch, dtype=torch.int64), nothing.bool(), nothing)


@dataclass
class Request:
    """A running request of `run`."""

    prompt: list[int]
    emitted: list[int] = field(default_factory=list)
    spent: float = 0.0
    records: list[StepRecord] = field(default_factory=list)
    block_sizes: list[int] = field(default_factory=list)


def run(
    target: FakeTarget,
    drafter: DraftsTrees,
    rule: AcceptanceRule,
    policy: TreePolicy,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    temperatures: Sequence[float] | None = None,
    seeds: Sequence[int] | None = None,
    protected: Iterable[int] = (),
    **settings: Any,
) -> list[Request]:
    """Decode all prompts together until each has at least `max_tokens` tokens; nothing is cut off, nothing stops early.

    Args:
        target, drafter, rule, policy: who plays.
        prompts: one list of tokens per request.
        max_tokens: see above.
        temperatures, seeds: one per request, 0 by default.
        protected: protected token ids.
        settings: for `rule_params`, numbers or one number per request (not spent and emitted, which `run` counts).
    """
    requests = [Request(list(prompt)) for prompt in prompts]
    temperatures, seeds = list(temperatures or [0.0] * len(prompts)), list(seeds or [0] * len(prompts))
    protected = list(protected)
    state, shapes = policy.initial(len(requests)), policy.reachable()
    while min(len(request.emitted) for request in requests) < max_tokens:
        contexts = [request.prompt + request.emitted for request in requests]
        root = drafter.root(contexts)
        planned = [shapes[i] for i in policy.plan(state, root).tolist()]
        tree = make_tree(drafter.draft(contexts, planned, temperatures, seeds))
        inputs = target.verify(contexts, tree, temperatures, seeds)
        totals = {"spent": [r.spent for r in requests], "emitted": [len(r.emitted) for r in requests]}
        acceptance = rule.accept(tree, inputs, rule_params(len(requests), target.vocab_size, protected, **totals, **settings))
        rar = state.rar.tolist()
        state = policy.update(state, tree, acceptance, torch.tensor([shape.num_steps for shape in planned]))
        for b, (request, nodes) in enumerate(zip(requests, unmake_tree(tree), strict=True)):
            count = int(acceptance.num_accepted[b])
            path = acceptance.path[b, :count].tolist()
            margins = acceptance.log_margin[b, :count].tolist()
            for margin in margins:
                request.spent += -margin
            request.emitted += [*(nodes.tokens[node] for node in path), int(acceptance.bonus[b])]
            request.block_sizes.append(count + 1)
            request.records.append(
                StepRecord(
                    shape=planned[b],
                    tokens=nodes.tokens,
                    parents=nodes.parents,
                    path=path,
                    promoted=acceptance.promoted[b, :count].tolist(),
                    log_margins=margins,
                    bonus=int(acceptance.bonus[b]),
                    confidence=root.confidence[b].item() if len(nodes.tokens) > 1 else None,
                    rar=rar[b],
                    spent=request.spent,
                    batch=len(requests),
                    seconds_draft=0.0,
                    seconds_verify=0.0,
                    seconds_rest=0.0,
                )
            )
    return requests
