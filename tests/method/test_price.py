"""What a second is worth, and when the drafter rests: host numbers alone."""

from __future__ import annotations

import itertools

import pytest

from adaptivespec.method.costs import CostModel, CostTable, Curve
from adaptivespec.method.price import Price
from adaptivespec.method.records import StepTotals


def costs(start: float = 0.5) -> CostModel:
    return CostModel(CostTable(Curve((1,), (start,)), Curve((1,), (0.1,)), {1: Curve((1, 11), (1.0, 2.0))}, 0.2), follows=False)


def alone(rows: int, accepted: int, draft_rows: tuple[int, ...], asked: bool = True) -> StepTotals:
    return StepTotals(1, rows, accepted + 1, draft_rows, 1, rows, accepted, asked)


def test_the_price_is_the_running_rate_and_no_less_than_plain_decoding() -> None:
    price = Price(costs(), 1, 16)
    assert price.tokens_per_second == pytest.approx(1 / 1.2)
    for _ in range(400):
        price.book(alone(4, 3, (1, 4, 4)))
    assert price.tokens_per_second == pytest.approx(4 / (0.5 + 0.2 + 1.3 + 0.2), rel=0.02)
    assert not price.rests
    for _ in range(400):
        price.book(alone(4, 0, (1, 4, 4)))
    assert price.tokens_per_second == pytest.approx(1 / 1.2)


def test_it_rests_when_drafting_loses_and_probes_less_and_less_often() -> None:
    price, rests = Price(costs(), 1, 16), []
    for _ in range(120):
        rests.append(price.rests)
        price.book(alone(1, 0, (), asked=False) if price.rests else alone(2, 0, (1,)))
    runs = [(resting, len(list(group))) for resting, group in itertools.groupby(rests)]
    assert [length for resting, length in runs if resting][:4] == [4, 8, 16, 16]
    assert [length for resting, length in runs if not resting][1:4] == [1, 1, 1]
    while price.rests:
        price.book(alone(1, 0, (), asked=False))
    for _ in range(5):  # one good probe brings it back, and it stays
        assert not price.rests
        price.book(alone(5, 4, (1, 1, 1, 1)))


def test_a_loss_is_counted_against_the_rows_of_others() -> None:
    """The same drafts pay beside others' rows only where those are not what makes them dear."""
    table = CostTable(Curve((1,), (0.0,)), Curve((1,), (0.0,)), {1: Curve((1, 4, 5, 20), (1.0, 1.0, 9.0, 9.0))}, 0.0)
    for others, rests in ((0, False), (3, True), (8, False)):
        price = Price(CostModel(table, follows=False), 1 + others, 16)
        for _ in range(40):
            if not price.rests:
                price.book(StepTotals(1 + others, 4 + others, 1 + others, (1,), 1, 4, 1, True))
        assert price.rests is rests, others


def test_others_pay_for_their_own_drafts() -> None:
    """One of 16 requests whose drafts are good does not rest because 15 others drafted too, under other settings."""
    together = CostModel(CostTable(Curve((1, 16), (0.1, 1.6)), Curve((1,), (0.0,)), {16: Curve((16, 64), (1.0, 1.4))}, 0.0), follows=False)
    price = Price(together, 16, 16)
    for _ in range(100):
        price.book(StepTotals(16, 64, 16 + 24, (16,), 1, 4, 2, True))
    assert not price.rests
    for _ in range(100):
        price.book(StepTotals(16, 64, 16 + 24, (16,), 1, 4, 0, True))
    assert price.rests
