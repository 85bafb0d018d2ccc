"""Tree policies to compare with: each against its source's own loop, and several in one batch."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from adaptivespec.method.baseline_policies import AcceptEMA, Confidence, Heuristic, Talon
from adaptivespec.method.costs import CostModel
from adaptivespec.method.goodput import Goodput
from adaptivespec.method.goodput_shapes import GoodputShapes
from adaptivespec.method.grouped import Grouped, grouped
from adaptivespec.method.policy import Adaptive, Root, Static, TreePolicy
from adaptivespec.method.registry import make_policy
from adaptivespec.method.tree import DraftTree, TreeShape, select_rows
from method.fakes import Nodes, acceptance_of, make_tree, unmake_tree
from method.test_policy import certain_root, chains
from method.tree_cases import trees

SETTINGS: dict = {
    "shape": (5, 4, 8), "low": (3, 4, 8), "high": (7, 4, 16), "saturation": 0.4, "alpha": 0.2, "patience": 3, "normalise": "num_steps",
    "mu": 0.1, "candidate_steps": (2, 4), "confidence_threshold": 0.7,
    "shapes": ((1, 1, 2), (3, 4, 8)), "probe": 5, "costs": CostModel(),
}  # fmt: skip


def test_policies_by_name() -> None:
    assert make_policy("off", **SETTINGS).reachable() == [TreeShape.off()]
    assert make_policy("static", **SETTINGS).reachable() == [TreeShape(5, 4, 8)]
    adaptive, talon, ema, heuristic, confidence = (
        make_policy(name, **SETTINGS) for name in ("adaptive", "talon", "accept_ema", "heuristic", "confidence")
    )
    assert isinstance(adaptive, Adaptive)
    assert (adaptive.low, adaptive.high) == (TreeShape(3, 4, 8), TreeShape(7, 4, 16))
    assert (adaptive.saturation, adaptive.alpha, adaptive.patience, adaptive.normalise) == (0.4, 0.2, 3, "num_steps")
    assert isinstance(talon, Talon)
    assert (talon.shape, talon.log_mu) == (TreeShape(5, 4, 8), math.log(0.1))
    assert isinstance(ema, AcceptEMA)
    assert (ema.depths, ema.alpha) == ([2, 4], 0.2)
    assert isinstance(heuristic, Heuristic)
    assert heuristic.depths == [1, 2, 3, 4, 5]
    assert isinstance(confidence, Confidence)
    assert (confidence.shape, confidence.threshold) == (TreeShape(5, 1, 6), 0.7)
    goodput, among_shapes = (make_policy(name, **SETTINGS) for name in ("goodput", "goodput_shapes"))
    assert isinstance(goodput, Goodput)
    assert (goodput.shape, goodput.probe, goodput.costs) == (TreeShape(5, 4, 8), 5, SETTINGS["costs"])
    assert isinstance(among_shapes, GoodputShapes)
    assert (among_shapes.reachable(), among_shapes.probe) == ([TreeShape(1, 1, 2), TreeShape(3, 4, 8)], 5)
    with pytest.raises(ValueError, match=r"unknown policy 'tallon'; known: accept_ema, .*goodput, goodput_shapes, .*talon"):
        make_policy("tallon", **SETTINGS)
    for name, wrong, message in [
        ("static", {"shape": (3, 1, 5)}, "shape 3,1,5: "),
        ("talon", {"mu": 0.0}, "talon policy: mu"),
        ("accept_ema", {"candidate_steps": (3, 1)}, "accept_ema policy: depths are positive and ascending"),
        ("accept_ema", {"candidate_steps": (0, 1)}, "accept_ema policy: depths"),
        ("accept_ema", {"alpha": 0.0}, "accept_ema policy: alpha"),
        ("heuristic", {"shape": (0, 1, 1)}, "heuristic policy: depths"),
        ("confidence", {"confidence_threshold": 1.5}, "confidence policy: threshold"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_policy(name, **(SETTINGS | wrong))


def test_reachable_shapes_literally() -> None:
    assert [str(shape) for shape in Talon().reachable()] == ["15,10,60"]
    assert [str(shape) for shape in AcceptEMA().reachable()] == ["1,1,2", "3,1,4", "5,1,6", "7,1,8"]
    assert [str(shape) for shape in Heuristic().reachable()] == [f"{n},1,{n + 1}" for n in range(1, 16)]
    assert [str(shape) for shape in Confidence().reachable()] == ["15,1,16"]
    assert [policy.per_level for policy in (Talon(), AcceptEMA(), Heuristic(), Confidence())] == [True, False, False, True]


# --- talon ----------------------------------------------------------------------------------------------------------------------


def slow_talon(nodes: Nodes, mu: float, budget: int) -> tuple[set[int], int]:
    """The nodes kept within the budget (the root excluded), and how many would be without one."""
    layer, kept, wanted = [0], [], 0
    for depth in range(1, max(nodes.depth) + 1):
        layer = [node for node in range(1, len(nodes.tokens)) if nodes.parents[node] in layer and nodes.log_probs[node] > -math.inf]
        if depth > 1 and layer:
            highest = max(math.exp(nodes.log_probs[node]) for node in layer)
            layer = [node for node in layer if math.exp(nodes.log_probs[node]) >= mu * highest]
        wanted += len(layer)
        kept += sorted(layer, key=lambda node: (-nodes.log_probs[node], node))[: budget - len(kept)]
    return set(kept), wanted


@given(trees(), st.sampled_from([0.9, 0.6, 0.3]), st.integers(2, 14))
@settings(max_examples=80)
def test_talon(tree: DraftTree, mu: float, nodes: int) -> None:
    assume(tree.tokens.shape[1] > 1)
    policy, batch = Talon(TreeShape(15, 10, nodes), mu), len(tree.size)
    keep = policy.prune(policy.initial(batch), tree, torch.full((batch,), nodes))
    going = policy.keep_going(policy.initial(batch), tree, torch.full((batch,), 15))
    for b, request in enumerate(unmake_tree(tree)):
        kept, wanted = slow_talon(request, mu, nodes - 1)
        assert {i + 1 for i, flag in enumerate(keep[b].tolist()) if flag} == kept
        assert all(request.parents[node] in kept | {0} for node in kept)
        assert going[b] == (wanted < nodes - 1)
    assert not policy.keep_going(policy.initial(batch), tree, torch.full((batch,), tree.levels)).any()


def test_talon_by_hand() -> None:
    """Layer 1 stays whole; of layer 2 what is near its best; a child of a node that went goes too."""
    probabilities = [1.0, 0.9, 0.01, 0.5, 0.02, 0.01, 0.4, 0.019]
    request = Nodes([0] * 8, [-1, 0, 0, 1, 1, 2, 3, 4], [math.log(p) for p in probabilities])
    keep = Talon(mu=0.045).prune(Talon().initial(1), make_tree([request]), torch.tensor([60]))
    assert keep.tolist() == [[True, True, True, False, False, True, False]]
    keep = Talon(mu=0.03).prune(Talon().initial(1), make_tree([request]), torch.tensor([4]))
    assert keep.tolist() == [[True, True, True, False, False, False, False]]


def test_candidates_that_do_not_exist_are_not_kept() -> None:
    request = Nodes([0] * 4, [-1, 0, 0, 1], [0.0, -0.1, -math.inf, -math.inf])
    policy, tree = Talon(), make_tree([request])
    assert policy.prune(policy.initial(1), tree, torch.tensor([60])).tolist() == [[True, False, False]]


# --- chains ---------------------------------------------------------------------------------------------------------------------


class SlowAcceptEMA:
    """SGLang's loop over candidates, at every step."""

    def __init__(self, candidates: list[int], alpha: float) -> None:
        self.candidates, self.alpha, self.index = candidates, alpha, len(candidates) // 2
        self.ema = candidates[self.index] - 1.0

    def step(self, accepted: int) -> None:
        self.ema = (1 - self.alpha) * self.ema + self.alpha * accepted
        while self.index > 0 and self.ema <= self.candidates[self.index - 1] - 0.5 - 0.25:
            self.index -= 1
        while self.index < len(self.candidates) - 1 and self.ema > self.candidates[self.index] - 0.5:
            self.index += 1


def drive(policy: TreePolicy, steps: list[list[tuple[int, bool]]]) -> list[list[int]]:
    """Planned depths of a batch before every step; each step gives per request the share of its chain accepted and whether it drafts."""
    batch, shapes = len(steps[0]), policy.reachable()
    state, depths = policy.initial(batch), []
    for step in steps:
        planned = [shapes[i].num_steps for i in policy.plan(state, certain_root(batch)).tolist()]
        depths.append(planned)
        drafted = [depth if drafts else 0 for depth, (_, drafts) in zip(planned, step, strict=True)]
        accepted = [min(count, depth) for depth, (count, _) in zip(drafted, step, strict=True)]
        tree = chains([*drafted, 1])
        state = policy.update(state, select_rows(tree, list(range(batch))), acceptance_of(accepted, tree.levels), torch.tensor(planned))
    return depths


STEPS = st.integers(1, 3).flatmap(
    lambda batch: st.lists(
        st.lists(st.tuples(st.integers(0, 15), st.sampled_from([True, True, True, False])), min_size=batch, max_size=batch),
        min_size=1,
        max_size=25,
    )
)


@given(STEPS, st.sampled_from([[1, 3, 5, 7], [1, 2, 8], [4], [2, 3]]), st.sampled_from([0.2, 0.7, 1.0]))
@settings(max_examples=60)
def test_accept_ema(steps: list[list[tuple[int, bool]]], candidates: list[int], alpha: float) -> None:
    depths = drive(AcceptEMA(candidates, alpha), steps)
    for b in range(len(steps[0])):
        slow = SlowAcceptEMA(candidates, alpha)
        for planned, step in zip(depths, steps, strict=True):
            if any(abs(slow.ema - (c - x)) < 1e-5 for c in candidates for x in (0.5, 0.75)):
                return  # fp32 may fall on the other side
            assert planned[b] == slow.candidates[slow.index]
            if step[b][1]:
                slow.step(min(step[b][0], planned[b]))


def test_accept_ema_climbs_and_falls() -> None:
    policy = AcceptEMA()
    assert [depth for [depth] in drive(policy, [[(15, True)]] * 30)][::29] == [5, 7]
    assert [depth for [depth] in drive(policy, [[(0, True)]] * 30)][::29] == [5, 1]


@given(STEPS, st.integers(1, 15))
@settings(max_examples=40)
def test_heuristic(steps: list[list[tuple[int, bool]]], deepest: int) -> None:
    depths = drive(Heuristic(deepest), steps)
    for b in range(len(steps[0])):
        depth = min(5, deepest)
        for planned, step in zip(depths, steps, strict=True):
            assert planned[b] == depth
            if step[b][1]:
                depth = min(deepest, depth + 2) if step[b][0] >= depth else max(1, depth - 1)


def test_heuristic_by_hand() -> None:
    assert [d for [d] in drive(Heuristic(), [[(n, True)] for n in (5, 7, 0, 8, 0, 15)])] == [5, 7, 9, 8, 10, 9]


@given(st.lists(st.lists(st.sampled_from([0.1, 0.39, 0.41, 0.9, 1.0]), min_size=4, max_size=4), min_size=1, max_size=4), st.integers(1, 4))
@settings(max_examples=40)
def test_confidence(rows: list[list[float]], level: int) -> None:
    """Asked after `level` levels; a second column stands for candidates of other requests, which do not exist here."""
    policy, batch = Confidence(), len(rows)
    log_probs = torch.tensor(rows).log().cumsum(1)[:, :level]
    tree = DraftTree.chain(torch.zeros(batch, level + 1, dtype=torch.int64), torch.cat([torch.zeros(batch, 1), log_probs], 1))
    wide = dataclasses.replace(
        tree,
        tokens=torch.cat([tree.tokens, tree.tokens[:, :1]], 1),
        parents=torch.cat([tree.parents, tree.parents[:, 1:2]], 1),
        depth=torch.cat([tree.depth, tree.depth[:, 1:2]], 1),
        log_probs=torch.cat([tree.log_probs, torch.full((batch, 1), -math.inf)], 1),
    )
    for shape in (tree, wide):
        going = policy.keep_going(policy.initial(batch), shape, torch.full((batch,), 15))
        assert going.tolist() == [row[level - 1] >= 0.4 for row in rows]
    assert not policy.keep_going(policy.initial(batch), tree, torch.full((batch,), level)).any()


# --- several policies in one batch ----------------------------------------------------------------------------------------------

MIXED: list[TreePolicy] = [Talon(TreeShape(15, 10, 6), 0.5), Adaptive(), AcceptEMA(), Confidence(), Static(TreeShape(3, 4, 4)), Heuristic()]


def test_a_policy_that_all_share_is_itself() -> None:
    assert grouped([MIXED[1]] * 3) is MIXED[1]
    both = grouped([MIXED[1], MIXED[2], MIXED[1]])
    assert isinstance(both, Grouped)
    assert not both.per_level
    assert grouped(MIXED[:2]).per_level
    assert both.reachable() == MIXED[1].reachable() + MIXED[2].reachable()


@given(trees(max_batch=6), st.data())
@settings(max_examples=60)
def test_each_of_a_mixed_batch_is_answered_by_its_own_policy(tree: DraftTree, data: st.DataObject) -> None:
    assume(tree.tokens.shape[1] > 1)
    batch = len(tree.size)
    own = [data.draw(st.sampled_from(MIXED)) for _ in range(batch)]
    both = Grouped(own)
    singles = [policy.initial(1) for policy in own]
    state = type(singles[0])(*(torch.cat([getattr(s, f.name) for s in singles]) for f in dataclasses.fields(singles[0])))
    root = Root(torch.zeros(batch, 2, dtype=torch.int64), torch.rand(batch, 2, generator=torch.Generator().manual_seed(0)).log())
    counts = torch.tensor([data.draw(st.integers(1, 8)) for _ in range(batch)])
    acceptance = acceptance_of([data.draw(st.integers(0, depth)) for depth in tree.depth.amax(1).tolist()], max(1, tree.levels))
    plan, going, keep = both.plan(state, root), both.keep_going(state, tree, counts), both.prune(state, tree, counts)
    after = both.update(state, tree, acceptance, counts)
    for b, policy in enumerate(own):
        mine, one, alone = select_rows(state, [b]), select_rows(tree, [b]), [b]
        assert both.reachable()[plan[b]] == policy.reachable()[policy.plan(mine, select_rows(root, alone))]
        assert torch.equal(going[alone], policy.keep_going(mine, one, counts[alone]))
        assert torch.equal(keep[alone], policy.prune(mine, one, counts[alone]))
        wanted = policy.update(mine, one, select_rows(acceptance, alone), counts[alone])
        for field in dataclasses.fields(wanted):
            assert torch.equal(getattr(after, field.name)[alone], getattr(wanted, field.name))
