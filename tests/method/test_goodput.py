"""The goodput policies: their choices equal brute force for the stated objective, alone and in a batch, level by level and among shapes."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptivespec.method.costs import CostModel, CostTable, Curve
from adaptivespec.method.goodput import Goodput, PricedPolicy
from adaptivespec.method.goodput_shapes import GoodputShapes
from adaptivespec.method.grouped import Grouped
from adaptivespec.method.learned import HostTree
from adaptivespec.method.policy import PolicyState, Root, Static
from adaptivespec.method.records import StepTotals
from adaptivespec.method.tree import DraftTree, TreeShape
from method.fakes import Nodes, acceptance_of, make_tree
from method.test_policy import certain_root, chains

SECONDS = st.lists(st.floats(0.01, 3), min_size=10, max_size=10)
SHAPES = [TreeShape(1, 1, 2), TreeShape(2, 2, 4), TreeShape(3, 1, 4), TreeShape(4, 3, 9)]


def model(verify: list[float], level: float = 0.1, start: float = 0.1) -> CostModel:
    """A verify of 1, 2, ... rows takes these seconds, whatever the batch."""
    curve = Curve(tuple(range(1, len(verify) + 1)), tuple(verify))
    return CostModel(CostTable(Curve((1,), (start,)), Curve((1,), (level,)), {1: curve}, 0.2), follows=False)


def at_price(policy: PricedPolicy, own: int, tokens_per_second: float) -> float:
    """Make a second cost so many tokens (no less than plain decoding brings), and say what it costs."""
    price = policy.price(own)
    price._tokens, price._seconds = tokens_per_second, 1.0
    return price.tokens_per_second


def chances(policy: PricedPolicy, state: PolicyState, tree: DraftTree) -> list[list[float]]:
    """What the policy thinks of every node."""
    return [policy.learned.chances(own, power) for own, power in zip(HostTree.of(tree), state.power.tolist(), strict=True)]


def beside(policy: PricedPolicy, own: int, requests: int, rows: int) -> None:
    """As if the last step had held so many other requests and rows."""
    policy.observe(StepTotals(own + requests, own + rows, own + requests, (), own, own, 0, 0))


@st.composite
def small_trees(draw, batch: int) -> DraftTree:
    """Up to five drafted nodes per request; candidates at -inf among them."""
    requests = []
    for _ in range(batch):
        parents, log_probs = [-1], [0.0]
        for node in range(1, 1 + draw(st.integers(1, 5))):
            parent = draw(st.integers(0, node - 1))
            parents.append(parent)
            log_probs.append(-math.inf if draw(st.integers(0, 7)) == 0 else log_probs[parent] - draw(st.floats(0, 2)))
        requests.append(Nodes([0] * len(parents), parents, log_probs))
    return make_tree(requests)


def closed_sets(tree: DraftTree, chance: list[list[float]], limit: int) -> list[tuple[float, int]]:
    """(expected accepted tokens, drafted nodes) of every set of real nodes with the parent of each, no more than `limit` a request."""
    choices = []
    for b, parents in enumerate(tree.parents.tolist()):
        nodes = [n for n in range(1, len(parents)) if parents[n] >= 0 and tree.log_probs[b, n] > -math.inf]
        sets = [s for r in range(min(limit, len(nodes)) + 1) for s in itertools.combinations(nodes, r)]
        choices.append([s for s in sets if all(parents[n] == 0 or parents[n] in s for n in s)])
    return [
        (sum(chance[b][n] for b, own in enumerate(chosen) for n in own), sum(map(len, chosen))) for chosen in itertools.product(*choices)
    ]


@given(st.data(), st.integers(1, 2), SECONDS, st.floats(0, 3), st.integers(2, 5))
@settings(max_examples=60)
def test_pruning_equals_brute_force(data, batch: int, verify: list[float], price: float, limit: int) -> None:
    tree = data.draw(small_trees(batch))
    policy = Goodput(model(verify), TreeShape(9, 4, limit))
    others = data.draw(st.sampled_from([(0, 0), (1, 3)]))
    beside(policy, batch, *others)
    state = policy.initial(batch)
    price = at_price(policy, batch, price)
    chance = torch.tensor(chances(policy, state, tree))
    keep = policy.prune(state, tree, torch.full((batch,), limit))
    base = batch + others[1]

    def worth(expected: float, nodes: int) -> float:
        curve = policy.costs.known.verify[1]
        return expected - price * (curve.at(base + nodes) - curve.at(base))

    best = max(worth(*one) for one in closed_sets(tree, chance.tolist(), limit - 1))
    kept = torch.cat([torch.ones(batch, 1, dtype=torch.bool), keep], 1)
    assert worth(chance[:, 1:][keep].sum().item(), int(keep.sum())) == pytest.approx(best, abs=1e-4)
    assert kept.gather(1, tree.parents.clamp(min=0))[kept].all()
    assert (keep.sum(1) < limit).all()
    assert not (keep & (tree.log_probs[:, 1:] == -math.inf)).any()


@given(st.data(), SECONDS, st.floats(0, 3), st.floats(0.001, 0.5))
@settings(max_examples=60)
def test_a_level_more_is_drafted_if_and_only_if_it_pays(data, verify: list[float], price: float, level: float) -> None:
    tree, width = data.draw(small_trees(1)), 2
    policy = Goodput(model(verify, level), TreeShape(9, width, 20))
    state = policy.initial(1)
    price = at_price(policy, 1, price)
    chance, depth = chances(policy, state, tree)[0], tree.depth[0].tolist()
    curve = policy.costs.known.verify[1]

    def most(chances: list[float]) -> float:
        """Of any set of so many nodes the likeliest are worth most, and they are closed."""
        ranked = sorted((c for c in chances if c > 0), reverse=True)
        return max(sum(ranked[:n]) - price * (curve.at(1 + n) - curve.at(1)) for n in range(len(ranked) + 1))

    frontier = sorted((c for c, d in zip(chance[1:], depth[1:], strict=True) if d == tree.levels), reverse=True)[:width]
    predicted = [c * chance for c in frontier for chance in slow_brood(state.rar.item(), width)]
    gain = most(chance[1:] + predicted) - most(chance[1:])
    going = policy.keep_going(state, tree, torch.tensor([9])).item()
    if abs(gain - price * level) > 1e-4:
        assert going == (gain > price * level and max(frontier, default=0) > 0)
    assert not policy.keep_going(state, tree, torch.tensor([tree.levels])).item()


def test_requests_compete_for_rows_and_levels() -> None:
    """Rows are dear: the sure request gets them all, and goes on alone; when they are free both do."""
    tree = make_tree([Nodes([0] * 3, [-1, 0, 1], [0.0, -0.01, -0.02]), Nodes([0] * 3, [-1, 0, 1], [0.0, -2.0, -4.0])])
    dear, free = Goodput(model([1 + 0.5 * n for n in range(10)], 0.01)), Goodput(model([1.0] * 10, 1e-4))
    state = dataclasses.replace(dear.initial(2), rar=torch.tensor([0.9, 0.9]))
    at_price(dear, 2, 1.2)
    assert dear.prune(state, tree, torch.tensor([9, 9])).tolist() == [[True, True], [False, False]]
    assert dear.keep_going(state, tree, torch.tensor([9, 9])).tolist() == [True, False]
    assert free.prune(state, tree, torch.tensor([9, 9])).all()
    assert free.keep_going(state, tree, torch.tensor([9, 9])).all()


def test_the_rest_of_a_batch_counts() -> None:
    """Beside a static tree the goodput request starts where the other's rows end: there rows are free."""
    steep = [1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    goodput, static = Goodput(model(steep)), Static(TreeShape(3, 1, 4))
    nodes = Nodes([0] * 4, [-1, 0, 1, 2], [0.0, -0.7, -1.4, -2.1])
    assert not goodput.prune(goodput.initial(1), make_tree([nodes]), torch.tensor([9])).any()
    beside(goodput, 1, 1, 4)
    for policies in ([goodput, static], [static, goodput]):
        both, tree = Grouped(policies), make_tree([nodes] * 2)
        state = both.initial(2)
        assert both.prune(state, tree, torch.tensor([9 if p is goodput else 4 for p in policies])).all()
        after = both.update(state, tree, acceptance_of([1, 2], 3), torch.tensor([3, 3]))
        assert after.evidence[policies.index(goodput), 1] > 0
        assert after.evidence[policies.index(static), 1] == 0


def test_one_object_learns_from_all_its_requests() -> None:
    policy = Goodput(model([1.0] * 10))
    state = policy.initial(1)
    tree = DraftTree.chain(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([[0.0, -1.2, -2.4, -3.6]]))
    fresh = chances(policy, policy.initial(1), tree)[0][1]
    for _ in range(200):
        state = policy.update(state, tree, acceptance_of([3], 3), torch.tensor([3]))
        policy.observe(StepTotals(1, 4, 4, (1, 1, 1), 1, 4, 3, 1))
    newcomer = chances(policy, policy.initial(1), tree)[0]
    assert fresh == pytest.approx(math.exp(-1.2), abs=0.05)
    assert newcomer[1] > 0.9
    assert newcomer[3] > 0.8
    assert state.rar.item() > 0.8


def test_nothing_verified_teaches_nothing() -> None:
    policy = Goodput(model([1.0] * 10))
    state = policy.initial(1)
    assert policy.update(state, DraftTree.root_only(torch.tensor([1])), acceptance_of([0], 0), torch.tensor([3])) is state
    pruned = dataclasses.replace(DraftTree.root_only(torch.tensor([1])), levels=3, draft_rows=(1, 4, 4))
    assert policy.update(state, pruned, acceptance_of([0], 0), torch.tensor([3])) is state


def test_it_rests_by_the_size_of_the_batch() -> None:
    policy = Goodput(model([1.0] * 10, start=0.5))
    assert policy.asks(9) == 9
    for _ in range(40):
        if policy.asks(1):
            policy.observe(StepTotals(1, 1, 1, (1,), 1, 1, 0, 1))
    assert not policy.asks(1)
    assert policy.asks(9) == 9
    assert policy.asks(2) == 0  # met for the first time: as its neighbour does


# --- among shapes -----------------------------------------------------------------------------------------------------------------


def slow_brood(r: float, width: int) -> list[float]:
    """A node's children before anything was learned of lesser siblings."""
    return [r, *((1 - r) * 0.5**j for j in range(1, width))]


def slow_expected(first: list[float], r: float, shape: TreeShape) -> float:
    """The best nodes of the predicted tree, grown level by level."""
    frontier = first[: shape.topk]
    found = list(frontier)
    for _ in range(shape.num_steps - 1):
        children = [c * chance for c in frontier for chance in slow_brood(r, shape.topk)]
        found += children
        frontier = sorted(children, reverse=True)[: shape.topk]
    return sum(sorted(found, reverse=True)[: shape.num_draft_tokens - 1])


@given(st.lists(st.tuples(st.floats(0.05, 0.95), st.floats(0, 1)), min_size=1, max_size=3), SECONDS, st.floats(0, 3))
@settings(max_examples=50)
def test_the_shape_equals_brute_force(requests: list[tuple[float, float]], verify: list[float], price: float) -> None:
    policy = GoodputShapes(model(verify), SHAPES)
    assert policy.reachable() == SHAPES
    batch = len(requests)
    best = torch.tensor([[math.log(c) + k * math.log1p(-c) for k in range(4)] for c, _ in requests])
    root = Root(torch.zeros(batch, 4, dtype=torch.int64), best)
    state = policy.initial(batch)
    state = dataclasses.replace(state, rar=torch.tensor([r for _, r in requests], dtype=torch.float32))
    price = at_price(policy, batch, price)
    expected = policy.expected(state, root)
    levels = best.shape[1]
    tree = make_tree([Nodes([0] * (levels + 1), [-1] + [0] * levels, [0.0, *row]) for row in best.tolist()])
    first = [own[1:] for own in chances(policy, state, tree)]
    table = policy.costs.known
    worths = []
    for s, shape in enumerate(policy.reachable()):
        slow = [slow_expected(own, rar, shape) for own, rar in zip(first, state.rar.tolist(), strict=True)]
        assert expected[:, s].tolist() == pytest.approx(slow, abs=1e-4)
        level = (shape.num_steps - 1) * table.level.at(batch * shape.topk)
        worths.append(sum(slow) - price * (table.verify_at(batch, batch * shape.num_draft_tokens) + level))
    planned = policy.plan(state, root).tolist()
    assert len(set(planned)) == 1
    assert worths[planned[0]] == pytest.approx(max(worths), abs=1e-3)


def test_a_long_run_keeps_no_more_than_a_short_one() -> None:
    policy = GoodputShapes(model([1.0] * 10), SHAPES)
    state, root = policy.initial(1), certain_root(1)

    def kept() -> int:
        return sum(map(len, policy.costs._beyond.values())) + len(policy.costs._tabled) + len(policy._prices)

    for steps in (20, 200):
        for step in range(steps):
            policy.plan(state, root)
            policy.observe(StepTotals(1 + step % 3, 2 + step % 5, 1, (), 1, 1, 0, 0))
            policy.costs.observe((), 1, 1, (0.0, 1.0, 0.1))
        if steps == 20:
            before = kept()
    assert kept() == before


def test_a_probe_pays_for_rows_as_if_all_drafted_like_it() -> None:
    """A row more for each of eight is free, a second is not; alone the request could have eight."""
    verify = CostTable(Curve((1,), (0.01,)), Curve((1, 64), (0.0, 1e-3)), {1: Curve((8, 16, 17, 80), (1.0, 1.0, 2.0, 66.0))}, 0.0)
    policy = Goodput(CostModel(verify, follows=False))
    nodes = Nodes([0] * 4, [-1, 0, 1, 2], [0.0, -0.01, -0.02, -0.03])
    assert policy.asks(8) == 8
    books = policy.price(8)
    books._pause, books._left = 4, 0
    assert policy.asks(8) == 1
    assert policy.prune(policy.initial(1), make_tree([nodes]), torch.tensor([9])).tolist() == [[True, False, False]]
    books._pause = 0
    assert policy.asks(8) == 8
    assert policy.prune(policy.initial(8), make_tree([nodes] * 8), torch.tensor([9] * 8)).sum().item() == 8
    assert policy.asks(1) == 1
    alone = Goodput(CostModel(verify, follows=False))
    assert alone.prune(alone.initial(1), make_tree([nodes]), torch.tensor([9])).all()


def test_shapes_keep_the_defaults_while_drafting() -> None:
    policy = GoodputShapes(model([1.0] * 10), [TreeShape(3, 1, 4), TreeShape(3, 1, 4)])
    assert (policy.per_level, policy.reads_costs) == (False, True)
    assert policy.reachable() == [TreeShape(3, 1, 4)]
    assert policy.keep_going(policy.initial(1), chains([2]), torch.tensor([3])).item()
    assert policy.prune(policy.initial(1), chains([3]), torch.tensor([3])).tolist() == [[True, True, False]]
    assert policy.plan(policy.initial(2), certain_root(2)).tolist() == [0, 0]
    for shapes in ([], [TreeShape.off(), TreeShape(3, 1, 4)]):
        with pytest.raises(ValueError, match="needs shapes, each of which drafts"):
            GoodputShapes(model([1.0]), shapes)
    with pytest.raises(ValueError, match="probe is at least 1"):
        Goodput(model([1.0]), probe=0)
