"""Several rules in one batch decide as each would alone; masks of protected tokens are made once per set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_cases import Case, cases

from adaptivespec.method import guards
from adaptivespec.method.acceptance import Margin, Strict
from adaptivespec.method.baselines import LogitRatio, MarginTop1
from adaptivespec.method.grouped import accept_by_rule, rows_by_rule
from adaptivespec.method.guards import ProtectedMasks
from adaptivespec.method.policy import PolicyState
from adaptivespec.method.tree import split_rows, stack_rows

RULES = (Strict(), Margin(), LogitRatio(), MarginTop1())


def test_strict_rows_join_the_margins() -> None:
    strict, margin, other, _ = RULES
    assert rows_by_rule([margin, strict, other, margin]) == {margin: [0, 1, 3], other: [2]}
    assert rows_by_rule([strict, other]) == {strict: [0], other: [1]}
    assert rows_by_rule([strict]) == {strict: [0]}


@given(cases(max_batch=4), st.lists(st.sampled_from(RULES), min_size=4, max_size=4))
def test_a_mixed_batch_decides_row_by_row(case: Case, rules: list[Strict]) -> None:
    rules = rules[: case.batch]
    strict = torch.tensor([rule is RULES[0] for rule in rules])
    case = case.with_params(kappa=case.params.kappa.masked_fill(strict, 1.0))
    together = accept_by_rule(rows_by_rule(rules), case.tree, case.inputs, case.params)
    for b, rule in enumerate(rules):
        one = case.alone(b)
        alone = rule.accept(one.tree, one.inputs, one.params)
        for name in ("path", "promoted", "log_margin"):
            assert torch.equal(getattr(together, name)[b, : one.tree.levels], getattr(alone, name)[0])
        assert together.num_accepted[b] == alone.num_accepted[0]
        assert together.bonus[b] == alone.bonus[0]


def test_masks_are_made_once_and_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = ProtectedMasks(16, torch.device("cpu"))
    first = masks.of([frozenset({2}), frozenset({2})])
    assert first.nonzero().tolist() == [[0, 2]]
    assert masks.of([frozenset({2})]) is first
    assert masks.of([frozenset({2}), frozenset({5})]).nonzero().tolist() == [[0, 2], [1, 5]]
    monkeypatch.setattr(guards, "_MASKS_KEPT", 4)
    for i in range(20):
        assert masks.of([frozenset({i % 16, 3})])[0, 3]
    assert len(masks._masks) <= 4


@pytest.mark.parametrize("count", [1, 3])
def test_stacking_undoes_splitting(count: int) -> None:
    rar = torch.arange(count) / 8
    state = PolicyState(rar, torch.arange(count), rar > 0.1, rar + 1, rar + 2, rar[:, None].repeat(1, 2), rar)
    parts = split_rows(state, count)
    assert [part.misses.tolist() for part in parts] == [[i] for i in range(count)]
    assert torch.equal(stack_rows(parts).ema, state.ema)
    assert torch.equal(stack_rows(parts).tripped, state.tripped)
