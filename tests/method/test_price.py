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
    return StepTotals(1, rows, accepted + 1, draft_rows, 1, rows, accepted, int(asked))


def test_the_price_is_the_running_rate_and_no_less_than_plain_decoding() -> None:
    price = Price(costs(), 1, 16)
    assert price.tokens_per_second == pytest.approx(1 / 1.2)
    for _ in range(400):
        price.book(alone(4, 3, (1, 4, 4)))
    assert price.tokens_per_second == pytest.approx(4 / (0.5 + 0.2 + 1.3 + 0.2), rel=0.02)
    assert price.asks(1)
    for _ in range(400):
        price.book(alone(4, 0, (1, 4, 4)))
    assert price.tokens_per_second == pytest.approx(1 / 1.2)


def test_it_rests_when_drafting_loses_and_probes_less_and_less_often() -> None:
    price, rests = Price(costs(), 1, 16), []
    for _ in range(120):
        rests.append(not price.asks(1))
        price.book(alone(2, 0, (1,)) if price.asks(1) else alone(1, 0, (), asked=False))
    runs = [(resting, len(list(group))) for resting, group in itertools.groupby(rests)]
    assert [length for resting, length in runs if resting][:4] == [4, 8, 16, 16]
    assert [length for resting, length in runs if not resting][1:4] == [1, 1, 1]
    while not price.asks(1):
        price.book(alone(1, 0, (), asked=False))
    for _ in range(5):  # one good probe brings it back, and it stays
        assert price.asks(1)
        price.book(alone(5, 4, (1, 1, 1, 1)))


def test_a_loss_is_counted_against_the_rows_of_others() -> None:
    """The same drafts pay beside others' rows only where those are not what makes them dear."""
    table = CostTable(Curve((1,), (0.0,)), Curve((1,), (0.0,)), {1: Curve((1, 4, 5, 20), (1.0, 1.0, 9.0, 9.0))}, 0.0)
    for others, rests in ((0, False), (3, True), (8, False)):
        price = Price(CostModel(table, follows=False), 1 + others, 16)
        for _ in range(40):
            if price.asks(1):
                price.book(StepTotals(1 + others, 4 + others, 1 + others, (1,), 1, 4, 1, True))
        assert (price.asks(1) == 0) is rests, others


def test_others_pay_for_their_own_drafts() -> None:
    """One of 16 requests whose drafts are good does not rest because 15 others drafted too, under other settings."""
    together = CostModel(CostTable(Curve((1, 16), (0.1, 1.6)), Curve((1,), (0.0,)), {16: Curve((16, 64), (1.0, 1.4))}, 0.0), follows=False)
    price = Price(together, 16, 16)
    for _ in range(100):
        price.book(StepTotals(16, 64, 16 + 24, (16,), 1, 4, 2, True))
    assert price.asks(1)
    for _ in range(100):
        price.book(StepTotals(16, 64, 16 + 24, (16,), 1, 4, 0, True))
    assert not price.asks(1)


def test_a_probe_of_one_request_speaks_for_all() -> None:
    """What one of eight gained beside seven that did not draft is judged as if all had: its rows are free, those of all would not be."""
    table = CostTable(Curve((1,), (0.0,)), Curve((1,), (0.0,)), {1: Curve((8, 12, 24), (1.0, 1.0, 4.0))}, 0.0)
    price = Price(CostModel(table, follows=False), 8, 16)
    while price.asks(8):
        assert price.asks(8) == 8
        price.book(StepTotals(8, 24, 16, (8, 8), 8, 24, 8, 8))  # 8 tokens more for 3 s more, at 8 a second
    for pause in (4, 8):
        for _ in range(pause):
            assert price.asks(8) == 0
            price.book(StepTotals(8, 8, 8, (), 8, 8, 0, 0))
        assert price.asks(8) == 1
        price.book(StepTotals(8, 10, 9, (1, 1), 8, 10, 1, 1))
    assert price.asks(8) == 0
    for _ in range(16):
        price.book(StepTotals(8, 8, 8, (), 8, 8, 0, 0))
    price.book(StepTotals(8, 9, 9, (1, 1), 8, 9, 1, 1))  # 16 rows take a second more, for 8 tokens: level
    assert price.asks(8) == 0
    for _ in range(16):
        price.book(StepTotals(8, 8, 8, (), 8, 8, 0, 0))
    price.book(StepTotals(8, 10, 12, (1, 1), 8, 10, 4, 1))  # 32 tokens for 3 s
    assert price.asks(8) == 8
    price.book(StepTotals(8, 24, 8, (8, 8), 8, 24, 0, 8))  # luck: what one gained is not believed of all
    assert price.asks(8) == 0


def test_a_probe_beside_drafts_of_others_pays_its_share() -> None:
    """Eight of 16 requests draft under other settings, so half of a forward that costs the same for one and for all is a probe's."""
    table = CostTable(Curve((1, 16), (1.0, 1.0)), Curve((1,), (0.0,)), {1: Curve((16,), (1.0,))}, 0.0)
    for accepted, asks in ((1, 0), (2, 8)):
        price = Price(CostModel(table, follows=False), 16, 1)
        while price.asks(8):
            price.book(StepTotals(16, 32, 16, (16,), 8, 16, 0, 8))
        for _ in range(4):
            price.book(StepTotals(16, 24, 24, (8,), 8, 8, 0, 0))
        assert price.asks(8) == 1
        price.book(StepTotals(16, 25, 24 + accepted, (9,), 8, 9, accepted, 1))  # 8 or 16 tokens more, for half a second at 24 a second
        assert price.asks(8) == asks


def test_new_books_begin_with_what_their_neighbours_found() -> None:
    table = costs()
    found = Price(table, 4, 16)
    while found.asks(4):
        found.book(StepTotals(4, 8, 4, (4,), 4, 8, 0, 4))
    assert Price(table, 3, 16, found).asks(3) == 0
    assert Price(table, 3, 16).asks(3) == 3
    rich = Price(table, 1, 16)
    for _ in range(100):
        rich.book(alone(5, 4, (1, 1, 1, 1)))
    heir, stranger = Price(table, 4, 16, rich), Price(table, 4, 16)
    for steps in itertools.count(1):  # good news from elsewhere is believed no more than none
        for price in (heir, stranger):
            price.book(StepTotals(4, 8, 4, (4,), 4, 8, 0, 4))
        assert heir.asks(4) == stranger.asks(4)
        if not heir.asks(4):
            break
        assert steps < 20
