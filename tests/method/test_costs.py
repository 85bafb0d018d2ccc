"""What steps cost: tables between and beyond their points, and factors that follow the load."""

from __future__ import annotations

import math

import pytest

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


def test_rows_beyond_are_the_table_and_grow() -> None:
    model = CostModel(TABLE)
    for count in (3, 70, 200):
        added = model.rows_beyond(2, 5, count)
        assert added == pytest.approx([TABLE.verify_at(2, 5 + n) - TABLE.verify_at(2, 5) for n in range(1, count + 1)])
    model.use(CostTable(TABLE.start, TABLE.level, {1: Curve((1,), (1.0,))}, 0.0))
    assert model.rows_beyond(2, 5, 3) == [0, 0, 0]


def test_factors_follow_the_load_and_shrug_at_frozen_steps() -> None:
    model = CostModel(TABLE)
    for _ in range(200):
        told = TABLE.step((1, 4), 8, 1)
        model.observe((1, 4), 8, 1, (told[0] * 2, told[1] * 3, told[2]))
    assert (model.draft, model.verifying(1, 8), model.resting(True)) == pytest.approx((2, 30, 0.5), rel=0.01)
    before = model.verifying(1, 8)
    model.observe((1, 4), 8, 1, (1e3, 1e3, 1e3))
    assert model.verifying(1, 8) < 1.05 * before
    drafting = model.draft
    model.observe((), 1, 1, (5.0, 30.0, 0.5))  # the drafter was not asked: nothing to learn about it
    assert model.draft == drafting
    assert model.plain(1) == pytest.approx(model.verifying(1, 1) + 0.5)
    for _ in range(200):  # a step with drafts has more to do beside its verify
        model.observe((), 1, 1, (0.0, 30.0, 0.25))
        model.observe((1, 4), 8, 1, (1.0, 30.0, 1.5))
    assert (model.resting(False), model.resting(True)) == pytest.approx((0.25, 1.5), rel=0.01)
    fixed = CostModel(TABLE, follows=False)
    fixed.observe((1, 4), 8, 1, (9.0, 99.0, 9.0))
    assert (fixed.draft, fixed.memory, fixed.arithmetic, fixed.rest, fixed.drafted_rest) == (1, 1, 1, 1, 1)
    model.use(TABLE)
    assert (model.draft, model.memory, model.arithmetic, model.rest, model.drafted_rest) == (1, 1, 1, 1, 1)


def waits(memory: float, batch: int = 1) -> Curve:
    """A verify that waits `memory` for its weights and computes 9 + 2 a row: whichever is longer, with a smooth turn."""
    rows = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    return Curve(tuple(batch * n for n in rows), tuple((memory**4 + (9 + 2 * batch * n) ** 4) ** 0.25 for n in rows))


def test_slow_memory_hardly_slows_a_batch_that_computes() -> None:
    table = CostTable(Curve((1,), (1.0,)), Curve((1,), (1.0,)), {1: waits(18.0), 8: waits(18.0, 8)}, 0.5)
    model, slow = CostModel(table, memory=2.0), {1: waits(36.0), 8: waits(36.0, 8)}
    for batch, rows in ((1, 1), (1, 8), (8, 8), (8, 16), (8, 32)):
        assert model.verifying(batch, rows) == pytest.approx(slow[batch].at(rows), rel=0.05), (batch, rows)


@pytest.mark.parametrize(("calibrated", "now"), [(18.0, 30.0), (30.0, 18.0), (20.0, 20.0)])
def test_memory_that_has_become_slower_or_faster(calibrated: float, now: float) -> None:
    """From steps of a few rows the model finds what others cost, though a factor for all rows could not be right."""
    model, true = CostModel(CostTable(Curve((1,), (1.0,)), Curve((1,), (1.0,)), {1: waits(calibrated)}, 0.5)), waits(now)
    before = list(model.rows_beyond(1, 1, 12))
    for _ in range(150):
        for rows in (3, 5, 8, 6):
            model.observe((1,), rows, 1, (1.0, true.at(rows), 0.5))
    for rows, off in ((1, 0.06), (4, 0.06), (8, 0.06), (12, 0.1), (16, 0.1)):
        assert model.verifying(1, rows) == pytest.approx(true.at(rows), rel=off), rows
    added = model.rows_beyond(1, 1, 12)
    assert (added == before) is (calibrated == now)
    assert added == pytest.approx([model.verifying(1, n) - model.verifying(1, 1) for n in range(2, 14)], rel=1e-3, abs=1e-3)


def test_arithmetic_is_the_further_half_of_a_curve() -> None:
    assert Curve((1, 8, 16, 32), (10.0, 11.0, 20.0, 36.0)).arithmetic_at(4) == pytest.approx(8)
    assert Curve((1, 32), (10.0, 10.0)).arithmetic_at(4) == Curve((1,), (10.0,)).arithmetic_at(4) == 0
    two = CostTable(Curve((1,), (1.0,)), Curve((1,), (1.0,)), {1: waits(20.0), 4: waits(20.0, 4)}, 0.5)
    assert two.arithmetic_at(2, 12) == pytest.approx(33 / two.verify_at(1, 1), rel=0.03)
    assert CostTable(Curve((1,), (1.0,)), Curve((1,), (1.0,)), {16: Curve((24, 32), (9.0, 12.0))}, 0.5).arithmetic_at(
        16, 16
    ) == pytest.approx(6 / 9)
