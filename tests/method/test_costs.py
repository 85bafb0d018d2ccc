"""What steps cost: tables between and beyond their points, and factors that follow the load."""

from __future__ import annotations

import math

import pytest
import torch

from adaptivespec.method.costs import CostModel, CostTable, Curve

TABLE = CostTable(
    start=Curve((1, 4), (1.0, 1.3)),
    level=Curve((1, 4, 8), (1.0, 1.5, 1.2)),  # a kernel that is faster with 8 rows: not convex, and falling
    verify={1: Curve((1, 8, 16), (10.0, 10.0, 26.0)), 4: Curve((4, 16), (14.0, 38.0))},
    fixed=0.5,
)


def test_between_and_beyond_points() -> None:
    assert [TABLE.level.at(rows) for rows in (0, 1, 2.5, 4, 6, 8)] == pytest.approx([1, 1, 1.25, 1.5, 1.35, 1.2])
    assert TABLE.level.at(20) == 1.2  # a falling end does not go on falling
    assert TABLE.verify[1].at(20) == pytest.approx(34)
    assert Curve((3,), (2.0,)).at(99) == 2
    assert [TABLE.verify_at(batch, 12) for batch in (1, 2, 4, 9)] == pytest.approx([18, 22, 30, 30])
    assert TABLE.step((2, 4, 4), 8, 1) == pytest.approx((1.1 + 3.0, 10.0, 0.5))
    assert TABLE.draft_at(()) == 0


@pytest.mark.parametrize(
    ("rows", "seconds"), [((), ()), ((1, 1), (1.0, 2.0)), ((2, 1), (1.0, 2.0)), ((1,), (1.0, 2.0)), ((1,), (-1.0,)), ((1,), (math.nan,))]
)
def test_impossible_curves(rows: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="cost curve"):
        Curve(rows, seconds)


def test_impossible_tables() -> None:
    one = Curve((1,), (1.0,))
    for verify, fixed, message in [({}, 0.0, "verify curve"), ({0: one}, 0.0, "1 or more"), ({1: one}, -1.0, "fixed seconds")]:
        with pytest.raises(ValueError, match=message):
            CostTable(one, one, verify, fixed)
    with pytest.raises(ValueError, match="more than no time"):
        CostTable(one, one, {1: Curve((1,), (0.0,))}, 0.0)
    with pytest.raises(ValueError, match="calibrate, or give a cost table"):
        CostModel().plain(1)


def test_curves_on_a_device_are_the_table_and_grow() -> None:
    model = CostModel(TABLE)
    device = torch.device("cpu")
    for count in (3, 70, 200):
        added = model.rows_beyond(2, 5, count, device)
        assert added.tolist() == pytest.approx([TABLE.verify_at(2, 5 + n) - TABLE.verify_at(2, 5) for n in range(1, count + 1)])
    assert model.levels_of(2, 3, device).tolist() == pytest.approx([TABLE.level.at(rows) for rows in (2, 4, 6)])
    model.use(CostTable(TABLE.start, TABLE.level, {1: Curve((1,), (1.0,))}, 0.0))
    assert model.rows_beyond(2, 5, 3, device).tolist() == [0, 0, 0]


def test_factors_follow_the_load_and_shrug_at_frozen_steps() -> None:
    model = CostModel(TABLE)
    for _ in range(200):
        told = TABLE.step((1, 4), 8, 1)
        model.observe((1, 4), 8, 1, (told[0] * 2, told[1] * 3, told[2]))
    assert (model.draft, model.verify, model.rest) == pytest.approx((2, 3, 1), rel=0.01)
    before = model.verify
    model.observe((1, 4), 8, 1, (1e3, 1e3, 1e3))
    assert model.verify < 1.05 * before
    drafting = model.draft
    model.observe((), 1, 1, (5.0, 30.0, 0.5))  # the drafter was not asked: nothing to learn about it
    assert model.draft == drafting
    assert model.verifying(1, 8) == pytest.approx(model.verify * 10)
    assert model.plain(1) == pytest.approx(model.verify * 10 + model.rest * 0.5)
    fixed = CostModel(TABLE, follows=False)
    fixed.observe((1, 4), 8, 1, (9.0, 99.0, 9.0))
    assert (fixed.draft, fixed.verify, fixed.rest) == (1, 1, 1)
    model.use(TABLE)
    assert model.verify == 1
