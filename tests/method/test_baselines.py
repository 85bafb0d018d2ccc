"""Rules to compare with: each against its formula, its off value, and the laws of those that sample."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from scipy import stats

from adaptivespec.method.acceptance import Acceptance, AcceptanceRule, Margin, Strict, VerifyInputs
from adaptivespec.method.baselines import LogitRatio, MarginTop1, RelaxedTopK, Typical, Window
from adaptivespec.method.coins import Rejection, Threshold
from adaptivespec.method.noise import gumbel, uniform
from adaptivespec.method.registry import make_rule
from adaptivespec.method.tree import DraftTree
from method.fakes import Nodes, make_tree, rule_params
from method.slow_baselines import SlowBaseline, SlowMarginTop1, TooClose
from method.test_closed_forms import COUNT, MODEL, ROW, TREE, TREE_LOGITS, _repeat
from method.tree_cases import Case, cases, check_rows_alone

PARAMETERS: dict[str, Any] = {
    "threshold_single": 0.5, "threshold_acc": 0.6, "typical_epsilon": 0.1, "typical_delta": 0.2, "relaxed_topk": 3, "relaxed_delta": 0.4,
    "logit_ratio": 0.7, "window": 2, "window_entropy": 0.5,
}  # fmt: skip
SLOW: list[tuple[AcceptanceRule, Callable[[SlowBaseline, int], int]]] = [
    (Typical(), lambda slow, node: slow.typical(node, 0.09, 0.3)),
    (Typical(0.4, 0.9), lambda slow, node: slow.typical(node, 0.4, 0.9)),
    (RelaxedTopK(), lambda slow, node: slow.relaxed_topk(node, 10, 0.6)),
    (RelaxedTopK(2, 0.1), lambda slow, node: slow.relaxed_topk(node, 2, 0.1)),
    (LogitRatio(), lambda slow, node: slow.logit_ratio(node, 0.9)),
    (LogitRatio(0.3), lambda slow, node: slow.logit_ratio(node, 0.3)),
    (Threshold(), lambda slow, node: slow.threshold(node, 1.0, 1.0)),
    (Threshold(0.3, 0.5), lambda slow, node: slow.threshold(node, 0.3, 0.5)),
]
ALL: list[AcceptanceRule] = [Typical(), RelaxedTopK(3), LogitRatio(), MarginTop1(), Window(2), Threshold(0.5, 0.7)]


# --- against the oracle ---------------------------------------------------------------------------------------------------------


def _check_next_child(rule: AcceptanceRule, case: Case, slow_child: Callable[[SlowBaseline, int], int], kind: type = SlowBaseline) -> None:
    next_child = rule.next_child(case.tree, case.inputs, case.params)
    assert (next_child[~case.tree.drafted][case.tree.depth[~case.tree.drafted] > 0] == -1).all()
    for b in range(case.batch):
        slow = kind(case, b)
        assert (next_child[b, slow.size :] == -1).all()
        for node in range(slow.size):
            try:
                wanted = slow_child(slow, node)
            except TooClose:
                continue
            assert next_child[b, node] == wanted


@pytest.mark.parametrize(("rule", "slow_child"), SLOW, ids=[f"{rule.name}-{i % 2}" for i, (rule, _) in enumerate(SLOW)])
@given(case=cases())
@settings(max_examples=60)
def test_next_child(rule: AcceptanceRule, slow_child: Callable[[SlowBaseline, int], int], case: Case) -> None:
    _check_next_child(rule, case, slow_child)


@given(cases())
@settings(max_examples=60)
def test_margin_top1(case: Case) -> None:
    _check_next_child(MarginTop1(), case, lambda slow, node: slow.margin_child_of_any(node), SlowMarginTop1)
    cold = dataclasses.replace(
        case, inputs=dataclasses.replace(case.inputs, temperature=torch.zeros(case.batch), scores=case.inputs.logits)
    )
    cold = dataclasses.replace(
        cold, inputs=VerifyInputs.from_rows(cold.inputs.logits, cold.inputs.logits, cold.inputs.rows, cold.inputs.temperature)
    )
    ours, theirs = (rule.accept(cold.tree, cold.inputs, cold.params) for rule in (Margin(), MarginTop1()))
    for field in dataclasses.fields(Acceptance):
        assert torch.equal(getattr(ours, field.name), getattr(theirs, field.name))


@pytest.mark.parametrize(("size", "entropy"), [(1, 0.0), (2, 0.5), (6, 0.3)])
@given(case=cases(chains=True))
@settings(max_examples=40)
def test_window(size: int, entropy: float, case: Case) -> None:
    _check_next_child(Window(size, entropy), case, lambda slow, node: slow.window(node, size, entropy))


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
@given(case=cases())
@settings(max_examples=25)
def test_a_row_of_a_batch_equals_itself_alone(rule: AcceptanceRule, case: Case) -> None:
    check_rows_alone(rule, case)


@given(cases())
@settings(max_examples=25)
def test_some_requests_of_a_batch(case: Case) -> None:
    """`VerifyInputs.of_requests` leaves the flat rows alone and the answers the same."""
    rows = list(range(case.batch))[::-2]
    part = case.inputs.of_requests(rows)
    assert part.logits.data_ptr() == case.inputs.logits.data_ptr()
    for name in ("rows", "choice", "top", "temperature", "coins"):
        assert torch.equal(torch.nan_to_num(getattr(part, name)), torch.nan_to_num(getattr(case.inputs, name)[rows]))


# --- off values -----------------------------------------------------------------------------------------------------------------

OFF: list[AcceptanceRule] = [Typical(1.0, 1e9), RelaxedTopK(1, 0.0), RelaxedTopK(1, 1.0), LogitRatio(1.0), Window(99, 0.0)]


@pytest.mark.parametrize("rule", OFF, ids=lambda rule: rule.name)
@given(case=cases(chains=True))
@settings(max_examples=30)
def test_off_values_are_strict(rule: AcceptanceRule, case: Case) -> None:
    assert torch.equal(rule.next_child(case.tree, case.inputs, case.params), Strict().next_child(case.tree, case.inputs, case.params))


@given(cases())
@settings(max_examples=30)
def test_off_values_are_strict_on_trees(case: Case) -> None:
    case = case.with_params(kappa=torch.ones(case.batch, dtype=torch.float64))
    strict = Strict().next_child(case.tree, case.inputs, case.params)
    for rule in (*OFF[:-1], MarginTop1()):
        assert torch.equal(rule.next_child(case.tree, case.inputs, case.params), strict)


# --- by hand --------------------------------------------------------------------------------------------------------------------


def _accept(rule: AcceptanceRule, tokens: list[int], logits: list[list[float]], temperature: float = 0.0) -> Acceptance:
    """A chain of `tokens` behind root 0."""
    tree = DraftTree.chain(torch.tensor([[0, *tokens]]), torch.zeros(1, len(tokens) + 1))
    return rule.accept(tree, VerifyInputs.from_logits(torch.tensor([logits]), torch.tensor([temperature])), rule_params(1, len(logits[0])))


FLAT, SHARP = [1.0, 0.9, 0.0], [9.0, 0.0, 0.0]  # the target's choice is 0; entropies 1.06 and 0.003
EXACT, WRONG = 0, 1


@pytest.mark.parametrize(
    ("tokens", "rows", "accepted"),
    [
        ([EXACT, EXACT, EXACT], [SHARP] * 4, 3),  # nothing to decide
        ([WRONG, EXACT, EXACT], [FLAT, SHARP, SHARP, SHARP], 3),  # unsure, and two exact ones follow
        ([WRONG, EXACT, EXACT], [SHARP] * 4, 0),  # sure: rejected, whatever follows
        ([WRONG, EXACT, WRONG], [FLAT] * 4, 0),  # the window holds a mismatch
        ([WRONG, EXACT], [FLAT] * 3, 0),  # the draft's end cuts the window short
        ([EXACT, WRONG, EXACT], [FLAT] * 4, 1),  # likewise, behind an exact token
        ([EXACT, WRONG, EXACT, EXACT], [FLAT] * 5, 4),
        ([WRONG, EXACT, EXACT, WRONG, EXACT, EXACT], [FLAT] * 7, 6),  # windows side by side
        ([WRONG, EXACT, EXACT, WRONG], [FLAT] * 5, 3),  # the last one has no window
        ([WRONG, WRONG, EXACT, EXACT], [FLAT] * 5, 0),  # the first one's window holds the second
    ],
)
def test_windows_literally(tokens: list[int], rows: list[list[float]], accepted: int) -> None:
    acceptance = _accept(Window(size=2, entropy=0.3), tokens, rows)
    assert acceptance.num_accepted.tolist() == [accepted]
    assert acceptance.promoted[0].tolist() == [token == WRONG and i < accepted for i, token in enumerate(tokens)]
    assert acceptance.bonus.tolist() == [0]


def test_a_window_of_six_needs_six() -> None:
    for exact in range(4, 8):
        accepted = _accept(Window(), [WRONG] + [EXACT] * exact, [FLAT] * (exact + 2)).num_accepted.item()
        assert accepted == (exact + 1 if exact >= 6 else 0)


def test_the_windows_entropy_is_of_three_terms() -> None:
    """Uniform over V tokens: the three largest terms are 3 / V * log V."""
    for vocab, entropy in ((3, math.log(3)), (12, 0.25 * math.log(12))):
        row = [0.0] * vocab
        for offset, accepted in ((-1e-4, 2), (1e-4, 0)):
            assert _accept(Window(1, entropy + offset), [WRONG, EXACT], [row] * 3).num_accepted.item() == accepted


def test_logit_ratio_is_strict_where_the_best_logit_is_not_positive() -> None:
    assert _accept(LogitRatio(), [WRONG], [[1.0, 0.95]] * 2).num_accepted.item() == 1
    assert _accept(LogitRatio(), [WRONG], [[1.0, 0.85]] * 2).num_accepted.item() == 0
    assert _accept(LogitRatio(), [WRONG], [[101.0, 100.85]] * 2).num_accepted.item() == 1  # not invariant to a shift
    assert _accept(LogitRatio(), [WRONG], [[0.0, 0.0]] * 2).num_accepted.item() == 0
    assert _accept(LogitRatio(), [WRONG], [[-1.0, -1.0]] * 2).num_accepted.item() == 0


def test_margin_top1_turns_sampling_greedy_on_drafted_tokens() -> None:
    """The target's top-1 is drafted and always emitted; the margin rule emits it hardly more often than it should."""
    nodes = Nodes([0, 3], [-1, 0], [0.0, -1.0])
    p = ROW.double().softmax(0)[3].item()
    naive, ours = (
        _sampled(rule, nodes, ROW.expand(2, 6), kappa=0.99).num_accepted.double().mean().item() for rule in (MarginTop1(), Margin())
    )
    assert naive == 1
    assert ours == pytest.approx(p, abs=0.02)


def test_rules_by_name() -> None:
    for name in ("strict", "margin", "margin_top1", "threshold", "typical", "relaxed_topk", "logit_ratio", "window", "rejection"):
        assert make_rule(name, **PARAMETERS).name == name
    threshold, relaxed, window = (make_rule(name, **PARAMETERS) for name in ("threshold", "relaxed_topk", "window"))
    assert isinstance(threshold, Threshold)
    assert (threshold.single, threshold.acc) == (0.5, 0.6)
    assert isinstance(relaxed, RelaxedTopK)
    assert (relaxed.k, relaxed.delta) == (3, 0.4)
    assert isinstance(window, Window)
    assert (window.size, window.entropy) == (2, 0.5)
    with pytest.raises(ValueError, match="unknown rule 'fly'; known: logit_ratio, margin, margin_top1, rejection"):
        make_rule("fly", **PARAMETERS)


# --- laws of the rules that sample; seeds are fixed, so nothing here is flaky -----------------------------------------------------


def _sampled(
    rule: AcceptanceRule, nodes: Nodes, logits: torch.Tensor, temperature: float = 1.0, kappa: float = 1.0, count: int = COUNT
) -> Acceptance:
    """The same tree and logits [N, V] for `count` requests with seeds 0, 1, 2, ...; the root's own choice has position 10."""
    tree, (width, vocab) = _repeat(nodes, count), logits.shape
    return _sampled_tree(rule, tree, logits.expand(count, width, vocab), temperature, kappa)


def _sampled_tree(
    rule: AcceptanceRule, tree: DraftTree, logits: torch.Tensor, temperature: float, kappa: float = 1.0, q: torch.Tensor | None = None
) -> Acceptance:
    count, width, vocab = logits.shape
    seeds, positions = torch.arange(count)[:, None], 10 + tree.depth
    noise = gumbel(seeds.expand(count, width).flatten(), positions.flatten(), vocab).reshape(count, width, vocab)
    inputs = VerifyInputs.from_logits(logits, torch.full((count,), temperature), noise)
    inputs = dataclasses.replace(inputs, coins=uniform(seeds, positions), q=q)
    return rule.accept(tree, inputs, rule_params(count, vocab, kappa=kappa))


def _tokens(tree_tokens: torch.Tensor, acceptance: Acceptance, level: int) -> torch.Tensor:
    """What was emitted at a level, -1 where the step did not get there."""
    node = acceptance.path[:, level]
    drafted = tree_tokens.gather(1, node.clamp(min=0)[:, None])[:, 0]
    own = torch.where(acceptance.num_accepted == level, acceptance.bonus, -1)
    return torch.where(node >= 0, drafted, own)


def _p_value(tokens: torch.Tensor, law: torch.Tensor) -> float:
    return float(stats.chisquare(torch.bincount(tokens, minlength=6).numpy(), (law * len(tokens)).numpy()).pvalue)


def _check_law(tree_tokens: torch.Tensor, acceptance: Acceptance, temperature: float) -> None:
    """The first token, and the second after each accepted first one, have the law of plain sampling."""
    law = (MODEL.double() / temperature).softmax(1)
    first, second = (_tokens(tree_tokens, acceptance, level) for level in (0, 1))
    assert _p_value(first, law[6]) > 1e-3
    checked = 0
    for token in range(6):
        after = second[(acceptance.num_accepted > 0) & (first == token)]
        if len(after) > 300:
            assert _p_value(after, law[token]) > 1e-3
            checked += 1
    assert checked >= 1


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_thresholds_of_one_are_lossless(temperature: float) -> None:
    acceptance = _sampled(Threshold(1.0, 1.0), TREE, TREE_LOGITS, temperature)
    _check_law(torch.tensor(TREE.tokens).expand(COUNT, -1), acceptance, temperature)
    assert {0, 1, 2} == set(acceptance.num_accepted.tolist())
    assert not acceptance.promoted.any()


def test_loose_thresholds_are_lossy() -> None:
    """The chi-square above can tell."""
    for rule in (Threshold(0.1, 1.0), Threshold(1.0, 0.5)):
        first = _tokens(torch.tensor(TREE.tokens).expand(COUNT, -1), _sampled(rule, TREE, TREE_LOGITS), 0)
        assert _p_value(first, MODEL[6].double().softmax(0)) < 1e-6


@pytest.mark.parametrize(("single", "acc"), [(1.0, 1.0), (1.0, 0.5), (0.2, 1.0), (0.9, 0.1)])
def test_closed_form_of_thresholds(single: float, acc: float) -> None:
    """A lone child stands with min(1, p / acc), or always from p = single on."""
    p = ROW.double().softmax(0)
    for drafted in (0, 3, 5):
        acceptance = _sampled(Threshold(single, acc), Nodes([0, drafted], [-1, 0], [0.0, -1.0]), ROW.expand(2, 6))
        wanted = 1.0 if p[drafted] >= single else min(1.0, p[drafted].item() / acc)
        assert acceptance.num_accepted.double().mean().item() == pytest.approx(wanted, abs=3.5 * math.sqrt(0.25 / COUNT))
        assert (acceptance.bonus[acceptance.num_accepted == 0] != drafted).all()


def test_with_every_token_drafted_something_stands() -> None:
    nodes = Nodes([0, *range(6)], [-1] + [0] * 6, [0.0] * 7)
    acceptance = _sampled(Threshold(), nodes, ROW.expand(7, 6))
    assert (acceptance.num_accepted == 1).double().mean() > 0.9999
    assert _p_value(_tokens(torch.tensor(nodes.tokens).expand(COUNT, -1), acceptance, 0), ROW.double().softmax(0)) > 1e-3


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_rejection_sampling_is_lossless(temperature: float) -> None:
    """Chains of two that are drawn from the drafter's own q, which is another model altogether."""
    generator = torch.Generator().manual_seed(3)
    q = (torch.randn(7, 6, generator=generator) * 1.5).softmax(1)
    last, tokens = torch.full((COUNT,), 6), [torch.zeros(COUNT, dtype=torch.int64)]
    contexts = [last]
    for _ in range(2):
        last = q[last].multinomial(1, generator=generator)[:, 0]
        tokens.append(last)
        contexts.append(last)
    tree = DraftTree.chain(torch.stack(tokens, 1), torch.zeros(COUNT, 3))
    rows = torch.stack(contexts, 1)  # the model's state at every node
    acceptance = _sampled_tree(Rejection(), tree, MODEL[rows], temperature, q=q[rows].flatten(0, 1))
    _check_law(tree.tokens, acceptance, temperature)
    # E[min(1, p / q)] = sum of min(p, q)
    wanted = torch.minimum((MODEL[6].double() / temperature).softmax(0), q[6].double()).sum().item()
    assert (acceptance.num_accepted > 0).double().mean().item() == pytest.approx(wanted, abs=3.5 * math.sqrt(0.25 / COUNT))


def test_a_drafter_that_equals_the_target_is_never_rejected() -> None:
    tree = DraftTree.chain(torch.tensor([[0, 3, 1]]).repeat(200, 1), torch.zeros(200, 3))
    logits = MODEL[torch.tensor([6, 3, 1])].expand(200, 3, 6)
    acceptance = _sampled_tree(Rejection(), tree, logits, 1.0, q=(logits.softmax(-1) * (1 - 1e-6)).flatten(0, 1))
    assert (acceptance.num_accepted == 2).all()


@pytest.mark.parametrize("rule", [Threshold(), Rejection()], ids=lambda rule: rule.name)
def test_masked_tokens_are_never_drawn(rule: AcceptanceRule) -> None:
    row = ROW.clone()
    row[[3, 4]] = -math.inf
    tree = DraftTree.chain(torch.tensor([[0, 3]]).repeat(5000, 1), torch.zeros(5000, 2))
    q = torch.full((10_000, 6), 1 / 6)
    acceptance = _sampled_tree(rule, tree, row.expand(5000, 2, 6), 1.0, q=q)
    assert (acceptance.num_accepted == 0).all()
    assert set(acceptance.bonus.tolist()) <= {0, 1, 2, 5}


def test_what_a_rule_needs_is_asked_for() -> None:
    tree = make_tree([Nodes([0, 1], [-1, 0], [0.0] * 2)])
    inputs = VerifyInputs.from_logits(torch.zeros(1, 2, 3), torch.ones(1))
    with pytest.raises(ValueError, match="coins"):
        Threshold().accept(tree, inputs, rule_params(1, 3))
    with pytest.raises(ValueError, match="q rows"):
        Rejection().accept(tree, dataclasses.replace(inputs, coins=torch.ones(1, 2)), rule_params(1, 3))
