"""Sampling through the rules, against closed forms and plain sampling. Seeds are fixed, so nothing here is flaky."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from adaptivespec.method.acceptance import Acceptance, AcceptanceRule, Margin, Strict, VerifyInputs
from adaptivespec.method.noise import gumbel
from adaptivespec.method.tree import DraftTree
from method.fakes import Nodes, make_tree, rule_params

COUNT = 40_000


def _repeat(nodes: Nodes, count: int) -> DraftTree:
    one = make_tree([nodes])
    many = [x.expand(count, *x.shape[1:]) for x in (one.tokens, one.parents, one.depth, one.log_probs, one.size)]
    return DraftTree(*many, one.levels)


def _accept(
    nodes: Nodes, logits: torch.Tensor, temperature: float, rule: AcceptanceRule, kappa: float = 1.0, count: int = COUNT
) -> Acceptance:
    """The same tree and logits [N, V] for `count` requests with seeds 0, 1, 2, ...; the root's own choice has position 10."""
    tree = _repeat(nodes, count)
    width, vocab = logits.shape
    noise = gumbel(torch.arange(count).repeat_interleave(width), (10 + tree.depth).flatten(), vocab).reshape(count, width, vocab)
    inputs = VerifyInputs.from_logits(logits.expand(count, width, vocab), torch.full((count,), temperature), noise)
    return rule.accept(tree, inputs, rule_params(count, vocab, kappa=kappa))


def _first_tokens(nodes: Nodes, acceptance: Acceptance) -> torch.Tensor:
    first = acceptance.path[:, 0]
    return torch.where(first >= 0, torch.tensor(nodes.tokens)[first.clamp(min=0)], acceptance.bonus)


ROW = torch.tensor([1.0, 0.3, -0.5, 2.0, 1.9, -1.5])


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("kappa", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("drafted", [0, 2, 3, 5])
def test_closed_form_of_a_single_child(temperature: float, kappa: float, drafted: int) -> None:
    """P(emit x) = p / (p + kappa^(1/T) (1 - p))."""
    nodes = Nodes([0, drafted], [-1, 0], [0.0, -1.0])
    acceptance = _accept(nodes, ROW.expand(2, 6), temperature, Margin(), kappa)
    p = (ROW.double() / temperature).softmax(0)[drafted].item()
    expected = p / (p + kappa ** (1 / temperature) * (1 - p))
    emitted = (_first_tokens(nodes, acceptance) == drafted).double().mean().item()
    assert abs(emitted - expected) < 3.5 * math.sqrt(expected * (1 - expected) / COUNT)
    promoted = acceptance.promoted.double().mean().item()
    assert abs(promoted - (expected - p)) < 3.5 * math.sqrt(expected * (1 - expected) / COUNT)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("kappa", [0.2, 0.5])
def test_no_probability_rises_by_more_than_kappa_allows(temperature: float, kappa: float) -> None:
    """... than the factor kappa^(-1/T), with three siblings that compete; tokens not drafted only lose."""
    nodes = Nodes([0, 2, 0, 5], [-1, 0, 0, 0], [0.0, -1.0, -2.0, -3.0])
    acceptance = _accept(nodes, ROW.expand(4, 6), temperature, Margin(), kappa)
    own = (ROW.double() / temperature).softmax(0)
    emitted = torch.bincount(_first_tokens(nodes, acceptance), minlength=6).double() / COUNT
    sigma = (emitted * (1 - emitted) / COUNT).sqrt()
    assert (emitted <= own * kappa ** (-1 / temperature) + 3.5 * sigma).all()
    assert (emitted[[2, 0, 5]] > own[[2, 0, 5]]).all()
    assert (emitted[[1, 3, 4]] < own[[1, 3, 4]]).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_an_exact_sibling_is_never_traded_for_a_promotion(temperature: float) -> None:
    """With every token drafted the choice always has its child, so even kappa near 0 samples exactly."""
    nodes = Nodes([0, *range(6)], [-1] + [0] * 6, [0.0] * 7)
    acceptance = _accept(nodes, ROW.expand(7, 6), temperature, Margin(), 1e-9)
    assert not acceptance.promoted.any()
    picks = torch.bincount(_first_tokens(nodes, acceptance), minlength=6)
    assert stats.chisquare(picks.numpy(), ((ROW.double() / temperature).softmax(0) * COUNT).numpy()).pvalue > 1e-3


# A model whose next token depends on the last one: row a holds the logits after token a, row 6 those after the prompt.
MODEL = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))
# Two levels: three siblings, then 3, 2 and 0 children. The root stands for the whole prompt.
TREE = Nodes([0, 0, 3, 4, 1, 2, 0, 5, 3], [-1, 0, 0, 0, 1, 1, 1, 2, 2], [0.0] * 9)
TREE_LOGITS = MODEL[torch.tensor([6, *TREE.tokens[1:]])]


@pytest.mark.parametrize("rule", [Margin(), Strict()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_kappa_1_is_lossless(rule: AcceptanceRule, temperature: float) -> None:
    """The first two emitted tokens: the law of plain sampling, and the very tokens that plain sampling draws."""
    acceptance = _accept(TREE, TREE_LOGITS, temperature, rule)
    seeds = torch.arange(COUNT)
    noise = [gumbel(seeds, torch.full_like(seeds, position), 6) for position in (10, 11)]

    def plain(last: torch.Tensor, position: int) -> torch.Tensor:
        return (MODEL[last] + temperature * noise[position - 10]).argmax(1)

    first = _first_tokens(TREE, acceptance)
    # what was not emitted in this step comes from the next one's root: the same noise, since it is a matter of position
    tokens, second = torch.tensor(TREE.tokens), acceptance.path[:, 1]
    drafted = torch.where(second >= 0, tokens[second.clamp(min=0)], acceptance.bonus)
    later = plain(first, 11)
    second_token = torch.where(acceptance.num_accepted == 0, later, drafted)

    assert torch.equal(first, plain(torch.full_like(seeds, 6), 10))
    assert torch.equal(second_token, plain(first, 11))
    assert {0, 1, 2} == set(acceptance.num_accepted.tolist())

    law = (MODEL.double() / temperature).softmax(1)
    joint = law[6][:, None] * law[:6]
    pairs = torch.bincount(first * 6 + second_token, minlength=36)
    assert stats.chisquare(pairs.numpy(), (joint.flatten() * COUNT).numpy()).pvalue > 1e-3


def test_a_loose_kappa_is_lossy() -> None:
    """The chi-square above can tell: kappa 0.5 fails it."""
    acceptance = _accept(TREE, TREE_LOGITS, 1.0, Margin(), kappa=0.5)
    picks = torch.bincount(_first_tokens(TREE, acceptance), minlength=6)
    assert stats.chisquare(picks.numpy(), (MODEL[6].double().softmax(0) * COUNT).numpy()).pvalue < 1e-6


@pytest.mark.parametrize("temperature", [0.01, 0.1, 0.5])
def test_small_temperatures_approach_temperature_0(temperature: float) -> None:
    """Continuous in T: the share of decisions that differ from those at temperature 0 shrinks with it."""
    nodes = Nodes([0, 4, 0], [-1, 0, 0], [0.0] * 3)
    row = torch.tensor([1.0, 0.3, -0.5, 2.0, 1.5, -1.5])
    cold = _accept(nodes, row.expand(3, 6), 0.0, Margin(), 0.5, count=1)
    assert cold.path.tolist() == [[1]]  # margin -0.5 > log 0.5
    warm = _accept(nodes, row.expand(3, 6), temperature, Margin(), 0.5)
    differs = (warm.path[:, 0] != 1).double().mean().item()
    assert differs < {0.01: 1e-3, 0.1: 0.2, 0.5: 0.6}[temperature]
