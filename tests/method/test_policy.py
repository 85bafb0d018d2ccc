from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from adaptivespec.method.policy import Adaptive, PolicyState, Root, Static, TreePolicy
from adaptivespec.method.tree import DraftTree, TreeShape
from method.fakes import acceptance_of, make_tree, unmake_tree
from method.slow_oracles import SlowAdaptive, slow_shape
from method.tree_cases import trees

LOW, HIGH = TreeShape(3, 4, 4), TreeShape(7, 1, 8)
EIGHT = ["3,4,4", "4,4,5", "4,3,5", "5,3,6", "5,2,6", "6,2,7", "6,1,7", "7,1,8"]
CHANGES = [Fraction(1, 8), Fraction(1, 6), Fraction(3, 8), Fraction(1, 2), Fraction(5, 8), Fraction(5, 6), Fraction(7, 8)]


def fp32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


def neighbours(x: float, count: int = 1) -> list[float]:
    """The fp32 number nearest to x with `count` neighbours on either side, ascending, within 0..1."""
    below, above = [torch.tensor(x)], [torch.tensor(x)]
    for _ in range(count):
        below.append(torch.nextafter(below[-1], torch.tensor(-1.0)))
        above.append(torch.nextafter(above[-1], torch.tensor(2.0)))
    return [s for s in (value.item() for value in [*below[:0:-1], *above]) if 0 <= s <= 1]


def certain_root(batch: int) -> Root:
    """Confidence exactly 1."""
    return Root(torch.zeros(batch, 1, dtype=torch.int64), torch.zeros(batch, 1))


def state_for(policy: Adaptive, signals: list[float]) -> PolicyState:
    """Requests whose signal is exactly s when the drafter is certain and saturation is a power of 2."""
    state = policy.initial(len(signals))
    return dataclasses.replace(state, rar=torch.tensor(signals) * policy.saturation)


def plan_at(policy: Adaptive, signals: list[float]) -> list[TreeShape]:
    state, root = state_for(policy, signals), certain_root(len(signals))
    assert policy.signal(state, root).tolist() == signals
    return [policy.reachable()[i] for i in policy.plan(state, root).tolist()]


def chains(depths: list[int]) -> DraftTree:
    nodes = max(depths) + 1
    tokens = torch.zeros(len(depths), nodes, dtype=torch.int64)
    return DraftTree.chain(tokens, torch.zeros(len(depths), nodes), torch.tensor(depths) + 1)


# --- shapes ---------------------------------------------------------------------------------------------------------------------


def test_the_eight_reachable_shapes() -> None:
    assert [str(shape) for shape in Adaptive().reachable()] == EIGHT


@pytest.mark.parametrize("index", range(7))
def test_shapes_change_where_the_method_says(index: int) -> None:
    change = CHANGES[index]
    around = neighbours(float(change), 12)
    below, above = [s for s in around if s < change], [s for s in around if s > change]
    assert len(below) >= 12
    assert len(above) >= 12
    assert {str(shape) for shape in plan_at(Adaptive(), below)} == {EIGHT[index]}
    assert {str(shape) for shape in plan_at(Adaptive(), above)} == {EIGHT[index + 1]}


def test_exactly_at_a_change_rounds_half_up() -> None:
    # depth and nodes grow at 1/8, 3/8, 5/8, 7/8: x + 0.5 reaches the next integer; topk falls, and is 2 + 0.5 + 0.5 = 3 still at 1/2
    shapes = plan_at(Adaptive(), [0.0, 1 / 8, 3 / 8, 1 / 2, 5 / 8, 7 / 8, 1.0])
    assert [str(shape) for shape in shapes] == ["3,4,4", "4,4,5", "5,3,6", "5,3,6", "6,2,7", "7,1,8", "7,1,8"]


def test_half_to_even_would_reach_other_shapes() -> None:
    s = torch.tensor([1 / 8, 3 / 8, 1 / 2, 5 / 8, 7 / 8])
    low, high = torch.tensor([3.0, 4.0, 4.0]), torch.tensor([7.0, 1.0, 8.0])
    even = {",".join(map(str, row)) for row in torch.round(low + s[:, None] * (high - low)).int().tolist()}
    assert even - set(EIGHT)


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=50))
@settings(max_examples=40)
def test_interpolation(signals: list[float]) -> None:
    signals = [s for s in signals if s == 0 or s > 1e-30] or [0.0]
    policy = Adaptive()
    for s, shape in zip(signals, plan_at(policy, signals), strict=True):
        assert (shape.num_steps, shape.topk, shape.num_draft_tokens) == slow_shape(LOW, HIGH, s)


@st.composite
def shapes(draw) -> TreeShape:
    steps, topk = draw(st.integers(1, 12)), draw(st.sampled_from([1, 1, 2, 3, 4, 10]))
    most = min(60, topk + (steps - 1) * topk**2)
    return TreeShape(steps, topk, 1 + (most if topk == 1 else draw(st.sampled_from([most, most // 2, 1]))))


def is_valid(numbers: tuple[int, int, int]) -> bool:
    try:
        TreeShape(*numbers)
    except ValueError:
        return False
    return True


def witnesses(low: TreeShape, high: TreeShape) -> list[float]:
    """Signals at which every reachable shape shows: all changes with fp32 neighbours, and a grid."""
    found = {i / 97 for i in range(98)}
    for a, b in ((low.num_steps, high.num_steps), (low.topk, high.topk), (low.num_draft_tokens, high.num_draft_tokens)):
        for k in range(abs(b - a)):
            found |= set(neighbours((k + 0.5) / abs(b - a), 2))
    return sorted({fp32(s) for s in found})


@given(shapes(), shapes())
@settings(max_examples=40)
def test_random_corners(low: TreeShape, high: TreeShape) -> None:
    """Accepted pairs reach exactly the exact interpolation's shapes; a refused pair has an invalid one on its way."""
    signals = witnesses(low, high)
    wanted = [slow_shape(low, high, s) for s in signals]
    if not all(map(is_valid, wanted)):
        with pytest.raises(ValueError, match=f"adaptive policy from {low} to {high}: shape "):
            Adaptive(low, high)
        return
    policy = Adaptive(low, high)
    reachable = policy.reachable()
    assert (reachable[0], reachable[-1]) == (low, high)
    assert len(set(reachable)) == len(reachable)
    assert reachable == [TreeShape(*numbers) for numbers in dict.fromkeys(wanted)]
    assert plan_at(policy, signals) == [TreeShape(*numbers) for numbers in wanted]


@pytest.mark.parametrize("deep", range(1, 16))
def test_chains_of_every_depth_can_be_corners(deep: int) -> None:
    """Depth and nodes change at the same signals, which fp32 sums of different size would round apart."""
    policy = Adaptive(TreeShape.off(), TreeShape(deep, 1, deep + 1))
    assert [str(shape) for shape in policy.reachable()] == ["0,1,1"] + [f"{n},1,{n + 1}" for n in range(1, deep + 1)]
    around = [s for k in range(deep) for s in neighbours((k + 0.5) / deep, 40)]
    assert {shape.num_draft_tokens - shape.num_steps for shape in plan_at(policy, around)} == {1}


def test_wide_corners_of_the_method() -> None:
    policy = Adaptive(TreeShape(3, 4, 8), TreeShape(7, 4, 16))
    assert {shape.topk for shape in policy.reachable()} == {4}
    assert [shape.num_draft_tokens for shape in policy.reachable()] == [8, 9, 9, 10, 11, 11, 12, 13, 13, 14, 15, 15, 16]


def test_equal_corners_are_static() -> None:
    policy = Adaptive(LOW, LOW)
    assert policy.reachable() == [LOW]
    assert plan_at(policy, [0.0, 0.5, 1.0]) == [LOW] * 3


def test_an_invalid_shape_on_the_way_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"adaptive policy from 2,4,20 to 12,1,13: shape \d+,\d+,\d+: "):
        Adaptive(TreeShape(2, 4, 20), TreeShape(12, 1, 13))


@pytest.mark.parametrize(
    "bad", [{"saturation": 0}, {"saturation": 1.5}, {"alpha": 0}, {"alpha": 1.1}, {"patience": 0}, {"normalise": "x"}, {"alpha": math.nan}]
)
def test_bad_settings_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match="adaptive policy: "):
        Adaptive(**bad)


# --- signal ---------------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(1e-6, 1), st.floats(0, 1), st.booleans()), min_size=1, max_size=8), st.floats(0.05, 1))
@settings(max_examples=60)
def test_signal(requests: list[tuple[float, float, bool]], saturation: float) -> None:
    policy = Adaptive(saturation=saturation)
    confidence, rar, tripped = (torch.tensor(column) for column in zip(*requests, strict=True))
    state = dataclasses.replace(policy.initial(len(requests)), rar=rar.float(), tripped=tripped)
    root = Root(torch.zeros(len(requests), 2, dtype=torch.int64), torch.stack([confidence.float().log(), confidence.float().log() - 1], 1))
    torch.testing.assert_close(root.confidence, confidence.float())
    for got, (c, r, open_breaker) in zip(policy.signal(state, root).tolist(), requests, strict=True):
        assert got == pytest.approx(0 if open_breaker else min(1.0, c * r / saturation), rel=1e-5, abs=1e-7)


def test_a_drafter_that_cannot_draft_plans_the_smallest_tree() -> None:
    policy = Adaptive()
    root = Root(torch.zeros(2, 1, dtype=torch.int64), torch.tensor([[-math.inf], [0.0]]))
    assert policy.plan(policy.initial(2), root).tolist() == [0, 7]


# --- rolling acceptance ratio and circuit breaker -------------------------------------------------------------------------------

STEPS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.booleans()), min_size=1, max_size=30)


@given(st.lists(STEPS, min_size=1, max_size=4), st.sampled_from(["depth", "num_steps"]), st.sampled_from([0.3, 1.0]), st.integers(1, 5))
@settings(max_examples=60)
def test_rolling_acceptance_ratio_and_breaker(
    histories: list[list[tuple[int, int, bool]]], normalise: str, alpha: float, patience: int
) -> None:
    """Each request of the batch follows its own history: (deepest level, accepted, a miss after all)."""
    policy = Adaptive(normalise=normalise, alpha=alpha, patience=patience)
    state, slow = policy.initial(len(histories)), [SlowAdaptive(alpha, patience) for _ in histories]
    for step in range(min(map(len, histories))):
        now = [history[step] for history in histories]
        depths = [deepest for deepest, _, _ in now]
        accepted = [0 if miss else min(count, deepest) for deepest, count, miss in now]
        state = policy.update(state, chains(depths), acceptance_of(accepted, max(depths)), torch.full((len(now),), 8))
        for request, count, deepest in zip(slow, accepted, depths, strict=True):
            request.step(count, deepest, deepest if normalise == "depth" else 8)
        assert state.rar.tolist() == pytest.approx([request.rar for request in slow], abs=1e-6)
        assert state.misses.tolist() == [request.misses for request in slow]
        assert state.tripped.tolist() == [request.low_next for request in slow]
        planned = policy.plan(state, certain_root(len(now))).tolist()
        assert all(index == 0 for index, request in zip(planned, slow, strict=True) if request.low_next)
    assert (state.rar.dtype, state.misses.dtype, state.tripped.dtype) == (torch.float32, torch.int64, torch.bool)


def _update(policy: TreePolicy, state: PolicyState, depth: int, accepted: int, num_steps: int | None = None) -> PolicyState:
    return policy.update(state, chains([depth]), acceptance_of([accepted], depth), torch.tensor([num_steps or depth]))


def test_ratio_by_hand() -> None:
    policy = Adaptive()
    state = policy.initial(1)
    assert state.rar.tolist() == [0.5]
    state = _update(policy, state, depth=4, accepted=4)
    assert state.rar.tolist() == pytest.approx([0.65])
    state = _update(policy, state, depth=5, accepted=1)
    assert state.rar.tolist() == pytest.approx([0.7 * 0.65 + 0.3 * 0.2])


def test_ratio_divides_by_the_level_really_reached() -> None:
    # asked for 7 levels, drafted 2, both accepted
    assert _update(Adaptive(), Adaptive().initial(1), 2, 2, 7).rar.tolist() == pytest.approx([0.65])
    by_plan = Adaptive(normalise="num_steps")
    assert _update(by_plan, by_plan.initial(1), 2, 2, 7).rar.tolist() == pytest.approx([0.7 * 0.5 + 0.3 * 2 / 7])


def test_the_breaker_sends_a_confident_wrong_drafter_to_low() -> None:
    policy = Adaptive()
    state, certain = policy.initial(1), certain_root(1)
    shapes = [policy.reachable()[int(policy.plan(state, certain))]]
    for _ in range(12):
        state = _update(policy, state, depth=shapes[-1].num_steps, accepted=0)
        shapes.append(policy.reachable()[int(policy.plan(state, certain))])
        if len(shapes) in (6, 11):
            assert state.rar.tolist() == [0.5]
            assert state.tripped.tolist() == [True]
            assert state.misses.tolist() == [0]
    assert shapes[0] == HIGH
    # the ratio alone falls to 0.5 * 0.7^4 = 0.12 after four misses: s = 0.24
    assert str(shapes[4]) == "4,3,5"
    assert [i for i, shape in enumerate(shapes) if shape == LOW] == [5, 10]
    # one step later, with RAR back near 0.5, the confident drafter may try again
    assert str(shapes[6]) == "6,2,7"


def test_one_accepted_token_starts_the_count_again() -> None:
    policy = Adaptive()
    state = policy.initial(1)
    for accepted in (0, 0, 0, 0, 1, 0, 0, 0, 0):
        state = _update(policy, state, 3, accepted)
        assert not state.tripped.item()
    assert state.misses.tolist() == [4]
    assert _update(policy, state, 3, 0).tripped.item()


def test_steps_that_drafted_nothing_change_nothing() -> None:
    policy = Adaptive()
    state = policy.initial(1)
    for _ in range(4):
        state = _update(policy, state, 3, 0)
    undrafted = policy.update(state, DraftTree.root_only(torch.tensor([1])), acceptance_of([0], 0), torch.tensor([3]))
    assert [x.tolist() for x in (undrafted.rar, undrafted.misses, undrafted.tripped)] == [state.rar.tolist(), [4], [False]]
    tripped = _update(policy, undrafted, 3, 0)
    waiting = policy.update(tripped, DraftTree.root_only(torch.tensor([1])), acceptance_of([0], 0), torch.tensor([3]))
    assert (waiting.tripped.tolist(), waiting.rar.tolist()) == ([True], [0.5])
    assert policy.plan(waiting, certain_root(1)).tolist() == [0]


def test_states_are_never_changed_in_place() -> None:
    policy = Adaptive()
    state = policy.initial(2)
    before = [x.clone() for x in (state.rar, state.misses, state.tripped)]
    policy.update(state, chains([3, 3]), acceptance_of([0, 2], 3), torch.tensor([3, 3]))
    policy.plan(state, certain_root(2))
    assert all(torch.equal(x, y) for x, y in zip(before, (state.rar, state.misses, state.tripped), strict=True))


def test_reachable_cannot_be_changed_from_outside() -> None:
    policy = Adaptive()
    policy.reachable().clear()
    assert len(policy.reachable()) == 8


# --- what all policies share ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [(3, 4, 4), (3, 1, 4), (7, 10, 60), (0, 1, 1)], ids=str)
def test_static(numbers: tuple[int, int, int]) -> None:
    policy = Static(TreeShape(*numbers))
    assert policy.reachable() == [TreeShape(*numbers)]
    state = policy.initial(3)
    assert policy.plan(state, certain_root(3)).tolist() == [0, 0, 0]
    assert policy.update(state, chains([2, 1, 0]), acceptance_of([1, 0, 0], 2), torch.tensor([2, 2, 2])) is state


@pytest.mark.parametrize("policy", [Static(LOW), Adaptive()], ids=lambda policy: policy.name)
def test_depth_is_as_planned(policy: TreePolicy) -> None:
    assert not policy.per_level
    for level in range(1, 8):
        going = policy.keep_going(policy.initial(3), chains([level] * 3), torch.tensor([1, 3, 7]))
        assert going.tolist() == [level < planned for planned in (1, 3, 7)]


@given(trees(max_batch=3), st.lists(st.integers(1, 14), min_size=3, max_size=3))
@settings(max_examples=40)
def test_pruning_keeps_the_best_and_leaves_a_tree(tree: DraftTree, counts: list[int]) -> None:
    batch = len(tree.size)
    assume(tree.tokens.shape[1] > 1)
    for policy in (Static(LOW), Adaptive()):
        keep = policy.prune(policy.initial(batch), tree, torch.tensor(counts[:batch]))
        for nodes, row, count in zip(unmake_tree(tree), keep.tolist(), counts, strict=False):
            best = sorted(range(1, len(nodes.tokens)), key=lambda node, nodes=nodes: (-nodes.log_probs[node], node))[: count - 1]
            assert {i + 1 for i, kept in enumerate(row) if kept} == set(best)
            assert all(nodes.parents[node] in {0, *best} for node in best)


def test_update_takes_the_depth_of_ragged_trees() -> None:
    policy = Adaptive()
    requests = unmake_tree(chains([4, 2, 0]))
    tree = make_tree(requests, extra_columns=2, extra_levels=3)
    state = policy.update(policy.initial(3), tree, acceptance_of([2, 2, 0], 7), torch.tensor([7, 7, 7]))
    assert state.rar.tolist() == pytest.approx([0.5, 0.65, 0.5])
