from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptivespec.method.acceptance import Acceptance, AcceptanceRule, Margin, Strict, VerifyInputs, child_margins, exact_children
from adaptivespec.method.guards import protected_mask
from adaptivespec.method.noise import gumbel
from adaptivespec.method.tree import DraftTree
from method.fakes import Nodes, make_tree, rule_params
from method.slow_oracles import SlowRequest, slow_accept, slow_sglang_walk
from method.tree_cases import Case, cases, check_rows_alone

RULES: list[AcceptanceRule] = [Strict(), Margin()]


def _inputs(logits: list, dtype: torch.dtype = torch.float32) -> VerifyInputs:
    rows = torch.tensor(logits, dtype=dtype)
    return VerifyInputs.from_logits(rows, torch.zeros(len(rows)))


def _margin(tree: DraftTree, inputs: VerifyInputs, **params) -> Acceptance:
    batch, vocab = len(inputs.rows), inputs.scores.shape[1]
    return Margin().accept(tree, inputs, rule_params(batch, vocab, **params))


# --- against the oracle ---------------------------------------------------------------------------------------------------------


@given(cases())
@settings(max_examples=60)
def test_strict_next_child(case: Case) -> None:
    next_child = Strict().next_child(case.tree, case.inputs, case.params)
    for b in range(case.batch):
        slow = SlowRequest(case, b)
        assert next_child[b, : slow.size].tolist() == [slow.strict_child(node) for node in range(slow.size)]
        assert (next_child[b, slow.size :] == -1).all()


@given(cases())
@settings(max_examples=150)
def test_margin_next_child(case: Case) -> None:
    next_child = Margin().next_child(case.tree, case.inputs, case.params)
    for b in range(case.batch):
        slow = SlowRequest(case, b)
        assert next_child[b, : slow.size].tolist() == [slow.margin_child_of_any(node) for node in range(slow.size)]
        assert (next_child[b, slow.size :] == -1).all()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@given(case=cases())
@settings(max_examples=60)
def test_accept(rule: AcceptanceRule, case: Case) -> None:
    acceptance = rule.accept(case.tree, case.inputs, case.params)
    levels = case.tree.levels
    assert acceptance.path.shape == acceptance.promoted.shape == acceptance.log_margin.shape == (case.batch, levels)
    for b in range(case.batch):
        slow = slow_accept(case, b, rule.name)
        accepted = len(slow.path)
        assert acceptance.path[b].tolist() == slow.path + [-1] * (levels - accepted)
        assert acceptance.num_accepted[b] == accepted
        assert acceptance.bonus[b] == slow.bonus
        assert acceptance.promoted[b].tolist() == slow.promoted + [False] * (levels - accepted)
        assert acceptance.log_margin[b].tolist() == slow.log_margin + [0.0] * (levels - accepted)


@given(cases())
@settings(max_examples=40)
def test_margins_and_matches_of_drafted_nodes(case: Case) -> None:
    margin, exact = child_margins(case.tree, case.inputs), exact_children(case.tree, case.inputs.choice)
    assert margin.dtype == torch.float64
    for b in range(case.batch):
        slow = SlowRequest(case, b)
        assert margin[b, 1 : slow.size].tolist() == [slow.log_margin(node) for node in range(1, slow.size)]
        assert exact[b, 1 : slow.size].tolist() == [slow.is_exact(node) for node in range(1, slow.size)]
        for column in (0, *range(slow.size, len(slow.tokens))):  # the root and padding
            assert margin[b, column] == -math.inf
            assert not exact[b, column]


# --- promises of the method -----------------------------------------------------------------------------------------------------


@given(cases())
@settings(max_examples=60)
def test_exact_children_are_never_passed_over_and_promotions_are_earned(case: Case) -> None:
    next_child = Margin().next_child(case.tree, case.inputs, case.params)
    for b in range(case.batch):
        slow = SlowRequest(case, b)
        for node in range(slow.size):
            child, choice = int(next_child[b, node]), slow.choice(node)
            assert child == -1 or slow.parents[child] == node
            if any(slow.tokens[sibling] == choice for sibling in slow.children(node)):
                assert slow.tokens[child] == choice
            elif child >= 0:
                assert slow.log_margin(child) > math.log(slow.kappa)
                assert slow.tokens[child] != choice
                assert slow.scores[node][slow.tokens[child]] > -math.inf
                assert slow.log_margin(child) >= max(
                    slow.log_margin(sibling)
                    for sibling in slow.children(node)
                    if not (slow.protect and slow.protected[slow.tokens[sibling]])
                )
                assert not (slow.protect and (slow.protected[choice] or slow.protected[slow.tokens[child]]))


@given(cases())
@settings(max_examples=60)
def test_kappa_1_is_strict(case: Case) -> None:
    case = case.with_params(kappa=torch.ones(case.batch, dtype=torch.float64))
    assert torch.equal(Margin().next_child(case.tree, case.inputs, case.params), Strict().next_child(case.tree, case.inputs, case.params))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@given(case=cases())
@settings(max_examples=40)
def test_a_row_of_a_batch_equals_itself_alone(rule: AcceptanceRule, case: Case) -> None:
    check_rows_alone(rule, case)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@given(case=cases())
@settings(max_examples=40)
def test_sglangs_walk_accepts_the_same(rule: AcceptanceRule, case: Case) -> None:
    """A target prediction rewritten with next_child steers SGLang's own kernel down the same path."""
    next_child = rule.next_child(case.tree, case.inputs, case.params)
    rewritten = torch.where(next_child >= 0, case.tree.tokens.gather(1, next_child.clamp(min=0)), case.inputs.choice)
    acceptance = rule.accept(case.tree, case.inputs, case.params)
    links = [link.tolist() for link in case.tree.to_sglang()]
    for b, tokens in enumerate(case.tree.tokens.tolist()):
        path, bonus = slow_sglang_walk(tokens, links[0][b], links[1][b], rewritten[b].tolist())
        assert acceptance.path[b, : len(path)].tolist() == path
        assert (acceptance.num_accepted[b], acceptance.bonus[b]) == (len(path), bonus)


# --- verify inputs --------------------------------------------------------------------------------------------------------------


@given(cases())
@settings(max_examples=40)
def test_verify_inputs(case: Case) -> None:
    inputs = case.inputs
    for b, size in enumerate(case.tree.size.tolist()):
        for node in range(size):
            scores = inputs.scores[inputs.rows[b, node]].tolist()
            assert inputs.choice[b, node] == scores.index(max(scores))  # ties: the lowest id
            assert inputs.top[b, node] == max(scores)
            if inputs.temperature[b] == 0:
                assert scores == inputs.logits[inputs.rows[b, node]].tolist()


def test_scores_add_temperature_times_noise() -> None:
    logits = torch.randn(2, 3, 7)
    logits[0, 0, 4] = -math.inf
    noise = gumbel(torch.arange(6), torch.arange(6), 7).reshape(2, 3, 7)
    inputs = VerifyInputs.from_logits(logits, torch.tensor([0.5, 2.0]), noise)
    for b, temperature in enumerate([0.5, 2.0]):
        wanted = logits[b].double() + temperature * noise[b].double()
        torch.testing.assert_close(inputs.scores[inputs.rows[b]].double(), wanted, rtol=1e-6, atol=1e-6)
    assert inputs.scores[0, 4] == -math.inf
    assert inputs.logits.data_ptr() == logits.data_ptr()


def test_scores_are_the_logits_themselves_without_noise() -> None:
    logits = torch.randn(1, 2, 5, dtype=torch.bfloat16)
    inputs = VerifyInputs.from_logits(logits, torch.zeros(1))
    assert inputs.scores.data_ptr() == logits.data_ptr()


def test_ties_choose_the_lowest_id_also_in_wide_rows() -> None:
    logits = torch.zeros(1, 1, 50_000)
    logits[..., [137, 20_000, 49_999]] = 3.0
    assert VerifyInputs.from_logits(logits, torch.zeros(1)).choice.item() == 137


# --- the rule by hand -----------------------------------------------------------------------------------------------------------


def test_an_exact_child_wins_over_a_sibling_with_a_long_tail() -> None:
    tree = make_tree([Nodes([0, 1, 2, 1, 1], [-1, 0, 0, 1, 3], [0.0] * 5)])
    logits = [[[0.0, 4.9, 5.0]] + [[0.0, 5.0, 0.0]] * 4]
    acceptance = _margin(tree, _inputs(logits))
    assert acceptance.path.tolist() == [[2, -1, -1]]
    assert acceptance.bonus.tolist() == [1]
    assert not acceptance.promoted.any()


def test_the_highest_margin_is_promoted_and_ties_take_the_lowest_index() -> None:
    tree = make_tree([Nodes([0, 1, 2, 2], [-1, 0, 0, 0], [0.0] * 4), Nodes([0, 2, 1, 3], [-1, 0, 0, 0], [0.0] * 4)])
    logits = [[[5.0, 4.0, 4.5, 0.0]] * 4, [[5.0, 4.5, 4.5, 4.5]] * 4]
    acceptance = _margin(tree, _inputs(logits), kappa=0.3)
    assert acceptance.path.tolist() == [[2], [1]]
    assert acceptance.promoted.tolist() == [[True], [True]]
    assert acceptance.log_margin.tolist() == [[-0.5], [-0.5]]


def test_a_margin_must_exceed_kappa() -> None:
    tree = make_tree([Nodes([0, 1], [-1, 0], [0.0] * 2)])
    log_half = math.log(0.5)
    assert _margin(tree, _inputs([[[0.0, log_half]] * 2], torch.float64), kappa=0.5).num_accepted.tolist() == [0]
    above = math.nextafter(log_half, 0)
    assert _margin(tree, _inputs([[[0.0, above]] * 2], torch.float64), kappa=0.5).num_accepted.tolist() == [1]


def test_an_equal_runner_up_is_not_promoted_at_kappa_1() -> None:
    tree = make_tree([Nodes([0, 1], [-1, 0], [0.0] * 2)])
    inputs = _inputs([[[3.0, 3.0]] * 2])
    assert _margin(tree, inputs, kappa=1.0).num_accepted.tolist() == [0]
    acceptance = _margin(tree, inputs, kappa=1 - 1e-9)
    assert acceptance.num_accepted.tolist() == [1]
    assert acceptance.promoted.tolist() == [[True]]
    assert acceptance.log_margin.tolist() == [[0.0]]


def test_0_2_is_a_gap_of_1_609_nats() -> None:
    tree = make_tree([Nodes([0, 1], [-1, 0], [0.0] * 2)] * 2)
    logits = [[[1.609, 0.0]] * 2, [[1.610, 0.0]] * 2]
    assert _margin(tree, _inputs(logits), kappa=0.2).num_accepted.tolist() == [1, 0]


def test_masked_tokens_are_never_promoted() -> None:
    tree = make_tree([Nodes([0, 1, 2], [-1, 0, 0], [0.0] * 3)])
    inputs = _inputs([[[0.0, -math.inf, -50.0]] * 3])
    acceptance = _margin(tree, inputs, kappa=1e-300)
    assert acceptance.path.tolist() == [[2]]


def test_an_unchosen_duplicate_does_not_hide_the_chosen_ones_children() -> None:
    tree = make_tree([Nodes([0, 1, 1, 2, 3], [-1, 0, 0, 1, 2], [0.0] * 5)])
    inputs = _inputs([[[0.0, 9.0, 0.0, 0.0], [0.0, 0.0, 0.0, 9.0], [0.0, 0.0, 0.0, 9.0], [9.0, 0, 0, 0], [9.0, 0, 0, 0]]])
    for rule in RULES:
        acceptance = rule.accept(tree, inputs, rule_params(1, 4))
        assert acceptance.path.tolist() == [[1, -1]]
        assert acceptance.bonus.tolist() == [3]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("vocab", [2, 11])
def test_trees_of_one_node(rule: AcceptanceRule, vocab: int) -> None:
    logits = torch.randn(3, 1, vocab)
    acceptance = rule.accept(
        DraftTree.root_only(torch.tensor([0, 1, 1])), VerifyInputs.from_logits(logits, torch.zeros(3)), rule_params(3, vocab)
    )
    assert acceptance.path.shape == acceptance.promoted.shape == acceptance.log_margin.shape == (3, 0)
    assert acceptance.num_accepted.tolist() == [0, 0, 0]
    assert torch.equal(acceptance.bonus, logits[:, 0].argmax(-1))
    assert (acceptance.path.dtype, acceptance.promoted.dtype, acceptance.log_margin.dtype) == (torch.int64, torch.bool, torch.float64)


def test_nothing_below_a_rejected_node_is_accepted() -> None:
    tree = DraftTree.chain(torch.tensor([[0, 1, 2]]), torch.zeros(1, 3))
    inputs = _inputs([[[9.0, 0.0, 0.0], [0.0, 0.0, 9.0], [9.0, 0.0, 0.0]]])  # node 2 would be exact, node 1 is wrong
    acceptance = _margin(tree, inputs)
    assert acceptance.path.tolist() == [[-1, -1]]
    assert acceptance.bonus.tolist() == [0]


@given(st.integers(0, 2**32))
@settings(max_examples=20)
def test_neighbours_do_not_matter(seed: int) -> None:
    """Per step: what stands at other nodes changes nothing at this one (without budgets)."""
    generator = torch.Generator().manual_seed(seed)
    tree = DraftTree.chain(torch.randint(0, 5, (1, 6), generator=generator), torch.zeros(1, 6))
    logits = torch.randn(1, 6, 5, generator=generator)
    other = torch.randn(1, 6, 5, generator=generator)
    other[0, 2] = logits[0, 2]
    first, second = (
        Margin().next_child(tree, VerifyInputs.from_logits(rows, torch.zeros(1)), rule_params(1, 5)) for rows in (logits, other)
    )
    assert first[0, 2] == second[0, 2]


def test_protected_mask() -> None:
    assert protected_mask(4, [0, 2, 4, 7, -1]).tolist() == [[True, False, True, False]]
    assert protected_mask(3, []).tolist() == [[False] * 3]


def test_protected_tokens_are_neither_promoted_nor_replaced() -> None:
    tree = make_tree([Nodes([0, 1, 2], [-1, 0, 0], [0.0] * 3)] * 3)
    row = [0.0, 4.9, 4.5, 5.0]  # choice 3, runner-up 1
    inputs = _inputs([[row] * 3] * 3)
    # unguarded; the runner-up is protected, so the next best is promoted; the choice is protected, so nothing is
    masks = torch.stack([protected_mask(4, ids)[0] for ids in ([1, 3], [1], [3])])
    params = dataclasses.replace(rule_params(3, 4, protect=[False, True, True]), protected=masks)
    assert Margin().accept(tree, inputs, params).path.tolist() == [[1], [2], [-1]]


def test_an_exact_protected_token_is_accepted() -> None:
    tree = make_tree([Nodes([0, 3], [-1, 0], [0.0] * 2)])
    assert _margin(tree, _inputs([[[0.0, 0.0, 0.0, 5.0]] * 2]), protect=True, protected=[3]).path.tolist() == [[1]]


def test_budgets_by_hand() -> None:
    tree = DraftTree.chain(torch.tensor([[0, 1, 1, 1]]).repeat(4, 1), torch.zeros(4, 4))
    inputs = _inputs([[[1.0, 0.0]] * 4] * 4)  # each level costs one nat
    acceptance = _margin(tree, inputs, kappa=0.1, budget=[math.inf, 2.0, 1.9, 0.99])
    assert acceptance.num_accepted.tolist() == [3, 2, 1, 0]
    acceptance = _margin(tree, inputs, kappa=0.1, budget=2.0, spent=[0.0, 0.5, 1.0, 1.1])
    assert acceptance.num_accepted.tolist() == [2, 1, 1, 0]
    acceptance = _margin(tree, inputs, kappa=0.1, max_promotions=[0, 1, 2, 3])
    assert acceptance.num_accepted.tolist() == [0, 1, 2, 3]
    # e.g. the first row: 1 <= 2 * 100 / 100, 2 <= 2 * 101 / 100, but 3 > 2 * 102 / 100
    acceptance = _margin(tree, inputs, kappa=0.1, budget_per_100=[2.0, 1.0, 1.0, 1.0], emitted=[0, 0, 99, 100])
    assert acceptance.num_accepted.tolist() == [2, 1, 2, 2]


@pytest.mark.parametrize(("exact", "promotions"), [(98, 1), (99, 2)])
def test_the_allowance_grows_along_the_path(exact: int, promotions: int) -> None:
    """A promotion for one nat, exact tokens, another promotion: the second is affordable once 100 tokens stand before it."""
    tree = DraftTree.chain(torch.tensor([[0, 1, *[0] * exact, 1]]), torch.zeros(1, exact + 3))
    inputs = _inputs([[[1.0, 0.0]] * (exact + 3)])
    acceptance = _margin(tree, inputs, kappa=0.1, budget_per_100=1.0)
    assert acceptance.num_accepted.tolist() == [exact + promotions]
    assert acceptance.promoted.sum().item() == promotions


def test_an_exact_match_needs_no_budget() -> None:
    tree = DraftTree.chain(torch.tensor([[0, 0, 0]]), torch.zeros(1, 3))
    acceptance = _margin(tree, _inputs([[[1.0, 0.0]] * 3]), budget=0.0, budget_per_100=0.0, max_promotions=0, spent=5.0)
    assert acceptance.num_accepted.tolist() == [2]
