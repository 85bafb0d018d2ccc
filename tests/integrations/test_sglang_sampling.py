"""The batched filters and noise are the local engine's, row by row."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec import SamplingParams, SpeculativeConfig
from adaptivespec.engine.processors import keep_probable as keep_probable_locally
from adaptivespec.engine.request import Request
from adaptivespec.integrations.sglang.sampling import SamplingRows, keep_probable, scores
from adaptivespec.method.acceptance import Strict
from adaptivespec.method.noise import gumbel
from adaptivespec.method.policy import Static
from adaptivespec.method.tree import TreeShape
from integrations.sglang_fakes import TOP_K_ALL

VOCAB = 13


def rows_of(params: list[SamplingParams], bounded: bool = False) -> SamplingRows:
    ks = [p.top_k if p.top_k > 0 else TOP_K_ALL for p in params]
    return SamplingRows(
        temperature=torch.tensor([p.temperature for p in params]),
        seeds=torch.tensor([p.seed or 0 for p in params]),
        top_k=torch.tensor(ks),
        top_p=torch.tensor([p.top_p for p in params]),
        min_p=torch.tensor([p.min_p for p in params]),
        samples=any(p.temperature > 0 for p in params),
        filters=any(p.filters for p in params),
        widest=max(ks) if bounded else None,
    )


def locally(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    policy = Static(TreeShape.off())
    row = logits.clone()
    if params.filters:
        request = Request([1], params, SpeculativeConfig(), policy, Strict(), policy.initial(1), 0, frozenset(), frozenset(), 9)
        keep_probable_locally(row, request)
    return row


@st.composite
def settings(draw: Any) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, VOCAB, 99])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.5, 0.05])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.4])),
        seed=draw(st.integers(0, 99)),
    )


@st.composite
def logits_of(draw: Any, rows: int) -> torch.Tensor:
    values = st.one_of(st.integers(-3, 4).map(float), st.floats(-6, 6, width=32))  # ties, and none
    z = torch.tensor([[draw(values) for _ in range(VOCAB)] for _ in range(rows)])
    for row in z:
        row[draw(st.integers(0, VOCAB - 1))] = -math.inf  # a grammar's mask
    return z


@given(st.data())
def test_filters_are_the_local_engines(data: st.DataObject) -> None:
    params = data.draw(st.lists(settings(), min_size=1, max_size=4))
    logits = data.draw(logits_of(len(params)))
    expected = torch.cat([locally(logits[i : i + 1], p) for i, p in enumerate(params)])
    assert torch.equal(keep_probable(logits, rows_of(params)), expected)


@given(st.data())
def test_bounded_top_k_needs_no_whole_sort(data: st.DataObject) -> None:
    params = [p for p in data.draw(st.lists(settings(), min_size=1, max_size=4)) if p.top_k > 0] or [
        SamplingParams(temperature=1.0, top_k=3)
    ]
    logits = data.draw(logits_of(len(params)))
    assert torch.equal(keep_probable(logits, rows_of(params, bounded=True)), keep_probable(logits, rows_of(params)))


def test_scores_add_the_noise_of_the_position() -> None:
    params = [SamplingParams(temperature=0.8, seed=7), SamplingParams(temperature=0.0)]
    logits, positions = torch.randn(2, VOCAB), torch.tensor([5, 5])
    filtered, noisy = scores(logits, rows_of(params), positions)
    assert torch.equal(filtered, logits)
    assert torch.equal(noisy[1], logits[1])
    assert torch.equal(noisy[:1], torch.addcmul(logits[:1], gumbel(torch.tensor([7]), positions[:1], VOCAB), torch.tensor([[0.8]])))


def test_greedy_batches_cost_nothing() -> None:
    logits = torch.randn(2, VOCAB)
    filtered, noisy = scores(logits, rows_of([SamplingParams(), SamplingParams()]), torch.tensor([1, 2]))
    assert filtered is logits
    assert noisy is logits


def test_rows_repeat_for_the_nodes_of_a_tree() -> None:
    rows = rows_of([SamplingParams(temperature=0.5, seed=1), SamplingParams(temperature=0.7, seed=2)]).repeat(3)
    assert rows.seeds.tolist() == [1, 1, 1, 2, 2, 2]
    assert rows.samples
