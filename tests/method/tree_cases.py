"""Random batches for hypothesis: ragged trees with duplicated siblings and ties, logits with ties and masks, mixed settings."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from adaptivespec.method.acceptance import AcceptanceRule, VerifyInputs
from adaptivespec.method.guards import RuleParams
from adaptivespec.method.noise import gumbel
from adaptivespec.method.tree import DraftTree
from method.fakes import UNLIMITED, Nodes, make_tree

MAX_NODES = 12
MAX_CHILDREN = 4


@dataclass(frozen=True)
class Case:
    """What a rule is given."""

    tree: DraftTree
    inputs: VerifyInputs
    params: RuleParams

    @property
    def batch(self) -> int:
        return len(self.tree.size)

    def with_params(self, **settings: torch.Tensor) -> Case:
        return dataclasses.replace(self, params=dataclasses.replace(self.params, **settings))

    def alone(self, b: int) -> Case:
        """Request b as a batch of its own, without padding."""
        size, rows = int(self.tree.size[b]), slice(b, b + 1)
        tree, inputs, params = self.tree, self.inputs, self.params
        nodes = [x[rows, :size] for x in (tree.tokens, tree.parents, tree.depth, tree.log_probs)]
        flat = inputs.rows[b, :size]
        logits, scores, own = inputs.logits[flat], inputs.scores[flat], torch.arange(size)[None]
        settings = {field.name: getattr(params, field.name)[rows] for field in dataclasses.fields(params)}
        if len(params.protected) == 1:
            settings["protected"] = params.protected
        return Case(
            DraftTree(*nodes, tree.size[rows], int(tree.depth[b].max())),
            VerifyInputs(
                logits,
                scores,
                own,
                inputs.choice[rows, :size],
                inputs.top[rows, :size],
                inputs.temperature[rows],
                None if inputs.coins is None else inputs.coins[rows, :size],
            ),
            RuleParams(**settings),
        )


def check_rows_alone(rule: AcceptanceRule, case: Case) -> None:
    """A request of a batch is accepted as if it were alone."""
    together = rule.accept(case.tree, case.inputs, case.params)
    for b in range(case.batch):
        one = case.alone(b)
        alone = rule.accept(one.tree, one.inputs, one.params)
        levels = one.tree.levels
        for name in ("path", "promoted", "log_margin"):
            assert torch.equal(getattr(together, name)[b, :levels], getattr(alone, name)[0])
        assert together.num_accepted[b] == alone.num_accepted[0]
        assert together.bonus[b] == alone.bonus[0]


@st.composite
def parent_lists(draw: Any) -> list[int]:
    """Parents of a tree of 1 to MAX_NODES nodes with at most MAX_CHILDREN children each; parents precede children."""
    parents = [-1]
    for pick in draw(st.lists(st.integers(0, MAX_NODES - 1), max_size=MAX_NODES - 1)):
        open_nodes = [node for node in range(len(parents)) if parents.count(node) < MAX_CHILDREN]
        parents.append(open_nodes[pick % len(open_nodes)])
    return parents


@st.composite
def node_lists(draw: Any, vocab_size: int) -> Nodes:
    """A tree; log-probabilities fall in steps that include 0, so that ties occur."""
    parents = draw(parent_lists())
    size = len(parents)
    tokens = draw(st.lists(st.integers(0, vocab_size - 1), min_size=size, max_size=size))
    drops = draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=size, max_size=size))
    log_probs = [0.0]
    for node in range(1, size):
        log_probs.append(log_probs[parents[node]] - drops[node])
    return Nodes(tokens, parents, log_probs)


@st.composite
def trees(draw: Any, vocab_size: int = 20, max_batch: int = 4) -> DraftTree:
    """A ragged batch, with some slack in columns and levels."""
    requests = draw(st.lists(node_lists(vocab_size), min_size=1, max_size=max_batch))
    return make_tree(requests, draw(st.integers(0, 2)), draw(st.integers(0, 2)))


def _logits(rng: random.Random, batch: int, nodes: int, vocab_size: int) -> torch.Tensor:
    """Random logits, often rounded coarsely (ties) and partly masked; at least one token of each row is alive."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    logits = torch.randn(batch, nodes, vocab_size, generator=generator) * 1.5
    if step := rng.choice([0.0, 0.5, 1.0]):
        logits = (logits / step).round() * step
    dead = torch.rand(logits.shape, generator=generator) < rng.choice([0.0, 0.3])
    alive = torch.randint(vocab_size, (batch, nodes, 1), generator=generator)
    return logits.masked_fill(dead.scatter(2, alive, False), -math.inf)


@st.composite
def cases(draw: Any, max_batch: int = 4, chains: bool = False) -> Case:
    """Trees (or chains), target logits, coins and settings, mixed within the batch. Tokens are among the target's best few at their parent.

    Hypothesis draws (and shrinks) the trees; the numbers on them come from a seed, which is much faster.
    """
    parents = draw(st.lists(parent_lists(), min_size=1, max_size=max_batch))
    if chains:
        parents = [list(range(-1, len(request) - 1)) for request in parents]
    vocab_size = draw(st.integers(2, 20))
    slack = draw(st.integers(0, 2))
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))

    batch, width = len(parents), max(map(len, parents)) + slack
    temperature = torch.tensor(rng.choices([0.0, 0.0, 0.5, 1.0], k=batch))
    noise = None
    if temperature.any() or rng.random() < 0.5:
        rows = torch.tensor([rng.randrange(-(2**63), 2**63) for _ in range(batch * width)])
        noise = gumbel(rows, rows, vocab_size).reshape(batch, width, vocab_size)
    logits = _logits(rng, batch, width, vocab_size)
    for b, request in enumerate(parents):
        logits[b, len(request) :] = rng.choice([0.0, math.nan, math.inf])
    inputs = VerifyInputs.from_logits(logits, temperature, noise)
    inputs = dataclasses.replace(inputs, coins=torch.tensor([[rng.random() for _ in range(width)] for _ in range(batch)]))

    requests = []
    for b, request in enumerate(parents):
        nodes = Nodes([0], request, [0.0])
        best_first = inputs.scores[inputs.rows[b]].argsort(dim=-1, descending=True, stable=True).tolist()
        for parent in request[1:]:
            rank = rng.choice([0, 1, 1, 2, 2, 3, 5, 7]) % vocab_size
            nodes.tokens.append(best_first[parent][rank])
            nodes.log_probs.append(nodes.log_probs[parent] - 0.5 * rank)
        requests.append(nodes)

    def each(values: list[Any], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor(rng.choices(values, k=batch), dtype=dtype)

    params = RuleParams(
        kappa=each([0.2, 0.2, 0.05, 1e-6, 0.5, 1.0]),
        protect=each([False, True], torch.bool),
        protected=torch.tensor([rng.choices([False] * 7 + [True], k=vocab_size) for _ in range(rng.choice([1, batch]))]),
        spent=each([0.0, 0.0, 0.3, 2.0]),
        budget=each([math.inf, math.inf, math.inf, 0.0, 1.0, 3.0]),
        budget_per_100=each([math.inf, math.inf, math.inf, 0.0, 1.0, 2.0]),
        emitted=each([0, 1, 7, 99, 250], torch.int64),
        max_promotions=each([UNLIMITED, UNLIMITED, UNLIMITED, 0, 1, 2], torch.int64),
    )
    return Case(make_tree(requests, slack, extra_levels=rng.randrange(3)), inputs, params)
