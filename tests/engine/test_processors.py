"""Penalties, masks and filters against slow oracles and transformers' own; each node of a tree counts its own path."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from adaptivespec import SamplingParams, SpeculativeConfig
from adaptivespec.engine.occurrences import Occurrences
from adaptivespec.engine.processors import keep_probable, penalise
from adaptivespec.engine.request import Request
from adaptivespec.engine.sampling import token_logprobs, verify_inputs
from adaptivespec.method.acceptance import Strict
from adaptivespec.method.noise import gumbel
from adaptivespec.method.policy import Static
from adaptivespec.method.tree import DraftTree, TreeShape
from method.fakes import Nodes, make_tree

VOCAB = 11
TOKEN = st.integers(0, VOCAB - 1)


def request(prompt: list[int], emitted: list[int], stop: frozenset[int] = frozenset(), **params: Any) -> Request:
    policy = Static(TreeShape.off())
    sampling = SamplingParams(**{"max_tokens": 99, **params})
    r = Request(prompt, sampling, SpeculativeConfig(), policy, Strict(), policy.initial(1), sampling.seed or 0, stop, stop, 99)
    r.occurrences = Occurrences(prompt if sampling.repetition_penalty != 1 else ()) if sampling.penalises else None
    r.emit(emitted, [False] * len(emitted))
    return r


def slow_row(z: list[float], r: Request, path: list[int]) -> list[float]:
    """One row, one token at a time, from the whole text before it."""
    p, answer = r.params, [*r.token_ids, *path]
    out = []
    for token, value in enumerate(z):
        if token in r.stop_ids and len(answer) < p.min_tokens:
            value = -math.inf
        if token in {*r.prompt, *answer}:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        if token in answer:
            value -= p.frequency_penalty * answer.count(token) + p.presence_penalty
        out.append(value)
    return out


@st.composite
def cases(draw: Any) -> tuple[Request, Nodes]:
    prompt, emitted = draw(st.lists(TOKEN, min_size=1, max_size=8)), draw(st.lists(TOKEN, min_size=1, max_size=8))
    tokens, parents = [emitted[-1]], [-1]
    for _ in range(draw(st.integers(0, 7))):
        parents.append(draw(st.integers(0, len(tokens) - 1)))
        tokens.append(draw(TOKEN))
    settings = {
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3, 0.7])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.5, -1.0])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.4, -0.3])),
        "min_tokens": draw(st.integers(0, 12)),
        "temperature": draw(st.sampled_from([0.0, 0.7])),
        "seed": draw(st.integers(0, 5)),
    }
    stop = draw(st.frozensets(st.integers(VOCAB, VOCAB + 1), max_size=1)) | draw(st.frozensets(TOKEN, max_size=2)) - set(emitted)
    return request(prompt, emitted, frozenset(t for t in stop if t < VOCAB), **settings), Nodes(tokens, parents, [0.0] * len(tokens))


@given(st.lists(cases(), min_size=1, max_size=4), st.integers(0, 2**31))
def test_every_node_counts_its_own_path(batch: list[tuple[Request, Nodes]], seed: int) -> None:
    requests, trees = [r for r, _ in batch], [nodes for _, nodes in batch]
    sizes = [len(nodes.tokens) for nodes in trees]
    logits = 3 * torch.randn(sum(sizes), VOCAB, generator=torch.Generator().manual_seed(seed))
    given_logits = logits.clone()
    rows = torch.zeros(len(batch), max(sizes), dtype=torch.int64)
    for b, size in enumerate(sizes):
        rows[b] = sum(sizes[:b])
        rows[b, :size] += torch.arange(size)
    cached = [len(r.prompt) + len(r.token_ids) - 1 for r in requests]
    inputs = verify_inputs(logits, rows, requests, make_tree(trees), cached, sizes)
    torch.testing.assert_close(logits, given_logits, rtol=0, atol=0)  # log-probabilities are made of these
    for b, (r, nodes) in enumerate(batch):
        for node in range(sizes[b]):
            path = nodes.path(node)
            row = int(inputs.rows[b, node])
            wanted = slow_row(given_logits[row].tolist(), r, path)
            torch.testing.assert_close(inputs.logits[row], torch.tensor(wanted), rtol=1e-5, atol=1e-5)
            position = torch.tensor([cached[b] + len(path) + 1])
            noise = gumbel(torch.tensor([r.seed]), position, VOCAB)[0]
            scores = torch.tensor(wanted) + r.params.temperature * noise
            torch.testing.assert_close(inputs.scores[row], scores, rtol=1e-5, atol=1e-5)
            assert inputs.top[b, node] == inputs.scores[row].max()
            assert inputs.scores[row, inputs.choice[b, node]] == inputs.top[b, node]


def test_a_mixed_batch_leaves_plain_greedy_rows_alone() -> None:
    requests = [request([1], [2]), request([1], [2], temperature=1.0), request([1], [2], repetition_penalty=2.0)]
    logits = torch.randn(3, VOCAB, dtype=torch.bfloat16)
    tree = DraftTree.root_only(torch.tensor([2, 2, 2]))
    inputs = verify_inputs(logits, torch.arange(3)[:, None], requests, tree, [1, 1, 1], [1, 1, 1])
    assert inputs.scores[0].tolist() == logits[0].tolist()
    alone = verify_inputs(
        logits[1:2], torch.zeros(1, 1, dtype=torch.int64), requests[1:2], DraftTree.root_only(torch.tensor([2])), [1], [1]
    )
    assert inputs.scores[1].tolist() == alone.scores[0].tolist()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 5000},
        {"top_p": 0.01},
        {"top_p": 0.6},
        {"top_p": 0.95},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"top_k": 40, "top_p": 0.8},
        {"top_k": 300, "top_p": 0.99, "min_p": 0.02},
        {"top_k": -1, "min_p": 1.0},
    ],
)
def test_filters_equal_those_of_transformers(settings: dict[str, Any], temperature: float) -> None:
    """In flat rows the nucleus is most of the vocabulary, in peaked ones a few tokens."""
    rows = torch.cat([scale * torch.randn(3, 2000, generator=torch.Generator().manual_seed(7)) for scale in (0.2, 1.0, 4.0)])
    expected = TemperatureLogitsWarper(temperature)(None, rows.double())  # fp32 sums lose the edge of a wide nucleus
    if settings.get("top_k", 0) > 0:
        expected = TopKLogitsWarper(settings["top_k"])(None, expected)
    if "top_p" in settings:
        expected = TopPLogitsWarper(settings["top_p"])(None, expected)
    if "min_p" in settings:
        expected = MinPLogitsWarper(settings["min_p"])(None, expected)
    ours = rows.clone()
    keep_probable(ours, request([1], [2], temperature=temperature, **settings))
    assert torch.equal(ours.isinf(), expected.isinf())
    assert torch.equal(ours[~ours.isinf()], rows[~ours.isinf()])


def test_repetition_penalty_equals_that_of_transformers() -> None:
    logits = torch.randn(1, VOCAB)
    r = request([1, 2, 2], [3, 3], repetition_penalty=1.4)
    expected = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([[1, 2, 2, 3, 3]]), logits.clone())
    penalise(logits, r, [3], torch.ones(1, 1, dtype=torch.bool))
    torch.testing.assert_close(logits, expected)


def test_top_p_of_a_masked_row_keeps_masked_tokens_out() -> None:
    logits = torch.tensor([[2.0, -math.inf, 1.0, -math.inf, -5.0]])
    keep_probable(logits, request([1], [2], temperature=1.0, top_p=0.9999999))
    assert logits.isinf().tolist() == [[False, True, False, True, False]]


def test_token_logprobs() -> None:
    logits = torch.randn(2, VOCAB)
    exact = logits.double().log_softmax(-1)
    first, second = token_logprobs(logits, [4, int(logits[1].argmax())], 3)
    assert (first.token_id, second.rank) == (4, 1)
    assert first.logprob == pytest.approx(exact[0, 4].item(), abs=1e-5)
    assert first.rank == 1 + int((logits[0] > logits[0, 4]).sum())
    assert list(second.top) == logits[1].topk(3).indices.tolist()
    assert second.top[second.token_id] == second.logprob
    assert token_logprobs(logits, [4, 4], 0)[0].top == {}
