"""One shape for a batch: the room it takes, how requests agree, and what stands in for a shape that is not prepared."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.integrations.sglang.shapes import Shapes
from adaptivespec.method.baseline_policies import AcceptEMA
from adaptivespec.method.policy import Adaptive, PolicyState, Root, Static
from adaptivespec.method.tree import TreeShape


def state_of(*rar: float, tripped: tuple[bool, ...] | None = None) -> PolicyState:
    fresh = Adaptive().initial(len(rar))
    return dataclasses.replace(fresh, rar=torch.tensor(rar), tripped=torch.tensor(tripped or (False,) * len(rar)))


def root_of(*confidence: float) -> Root:
    return Root(torch.zeros(len(confidence), 1, dtype=torch.int64), torch.tensor(confidence).log()[:, None])


def test_room_holds_every_shape() -> None:
    assert Shapes(Adaptive()).room == TreeShape(7, 4, 8)
    assert Shapes(AcceptEMA()).room == TreeShape(7, 1, 8)
    assert Shapes(Static(TreeShape(5, 4, 8))).room == TreeShape(5, 4, 8)


def test_confidence_needs_two_roots() -> None:
    assert Shapes(Adaptive()).root_width == 4
    assert Shapes(Adaptive(TreeShape(2, 1, 3), TreeShape(6, 1, 7))).root_width == 2
    assert Shapes(AcceptEMA()).root_width == 1


@pytest.mark.parametrize(("aggregate", "expected"), [("mean", "5,3,6"), ("min", "3,4,4"), ("max", "7,1,8")])
def test_requests_agree_on_one_shape(aggregate: str, expected: str) -> None:
    shapes = Shapes(Adaptive(), aggregate)
    signals = shapes.signal(state_of(0.5, 0.5, 0.5), root_of(0.9, 0.05, 0.5))
    assert [round(s, 2) for s in signals.tolist()] == [0.9, 0.05, 0.5]
    assert str(shapes.all[int(shapes.plan(signals))]) == expected
    assert shapes.plan_on_host(signals.tolist()) == int(shapes.plan(signals))


def test_one_request_gets_what_the_policy_plans() -> None:
    policy = Adaptive()
    shapes = Shapes(policy)
    for confidence in torch.linspace(0.01, 1, 40).tolist():
        state, root = state_of(0.5), root_of(confidence)
        assert shapes.plan(shapes.signal(state, root)).tolist() == policy.plan(state, root).tolist()


def test_chains_of_other_policies_agree_too() -> None:
    policy = AcceptEMA((1, 3, 5, 7))
    shapes = Shapes(policy)
    for level in (1, 3, 5, 7):
        state = policy.initial(1)
        state = dataclasses.replace(state, level=state.level * 0 + level)
        assert shapes.all[int(shapes.plan(shapes.signal(state, root_of(0.3))))].num_steps == level


def test_requests_without_a_signal_have_no_say() -> None:
    shapes = Shapes(Adaptive())
    assert shapes.plan_on_host([None, 1.0, float("nan")]) == 7
    assert shapes.plan_on_host([None, None]) == 0


def test_circuit_breaker_forces_the_low_shape() -> None:
    shapes = Shapes(Adaptive())
    assert shapes.plan(shapes.signal(state_of(0.5, tripped=(True,)), root_of(0.99))).tolist() == [0]


@given(st.integers(1, 8))
def test_nearest_prepared_shape_stands_in(count: int) -> None:
    shapes = Shapes(Adaptive())
    prepared = shapes.prepare_only(count)
    assert len(prepared) == count
    assert prepared == shapes.prepared
    places = [shapes.all.index(shape) for shape in prepared]
    for index in range(len(shapes.all)):
        distance = abs(shapes.all.index(shapes.stand_in(index)) - index)
        assert distance == min(abs(place - index) for place in places)
