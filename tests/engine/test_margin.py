"""The margin rule inside the engine: what is promoted, guards, budgets, and that kappa = 1 is lossless."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from adaptivespec import LLM, SamplingParams, SpeculativeConfig
from adaptivespec.engine.request import RequestOutput
from adaptivespec.method.noise import gumbel
from adaptivespec.models.kv_cache import Block
from adaptivespec.models.loading import LoadedModel
from engine.fakes import ReferenceDrafter
from tiny_models import EOS, VOCAB

PROMPTS = [[5, 9, 33], [77], [12, 100, 101, 3]]
SHAPE = {"policy": "static", "num_steps": 4, "topk": 4, "num_draft_tokens": 12}


def scores_along(model: LoadedModel, output: RequestOutput, temperature: float, seed: int) -> torch.Tensor:
    """Scores [T, V] that plain decoding has before each generated token, from one forward over the whole answer."""
    ids = [*output.prompt_token_ids, *output.token_ids]
    n, decoder = len(ids), model.decoder
    block = Block([0], [0], [0], [n], torch.ones(1, n, n, dtype=torch.bool).tril())
    hidden, _ = decoder.forward(torch.tensor(ids), torch.arange(n), decoder.new_cache(1, n), block)
    first = len(output.prompt_token_ids)
    logits = decoder.logits(hidden)[first - 1 : n - 1]
    if not temperature:
        return logits
    noise = gumbel(torch.full((len(logits),), seed), torch.arange(first, n), VOCAB)
    return logits + temperature * noise


def lossy(model: LoadedModel, params: SamplingParams, slots: int = 1, **settings: object) -> list[RequestOutput]:
    """Answers with drafts that are mostly wrong: the drafter recites other prompts' answers."""
    answers = [o.token_ids for o in LLM(model).generate(PROMPTS, params)]
    drafter = ReferenceDrafter(dict(zip(map(tuple, PROMPTS), answers, strict=True)), VOCAB, hit=0.5, seed=3)
    llm = LLM(model, drafter=drafter, speculative=SpeculativeConfig(**{**SHAPE, **settings}), max_running_requests=slots)
    return llm.generate(PROMPTS, params)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kappa", [0.02, 0.1])
def test_every_promotion_is_within_the_margin_and_everything_else_is_the_targets_choice(
    model: LoadedModel, kappa: float, temperature: float, slots: int
) -> None:
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=11)
    promotions = 0
    for output in lossy(model, params, slots, margin=kappa, guards="none"):
        scores = scores_along(model, output, temperature, 11)
        tokens = torch.tensor(output.token_ids)
        log_margin = scores.gather(1, tokens[:, None])[:, 0] - scores.max(1).values
        promoted = torch.tensor(output.promoted)
        assert (log_margin[~promoted] > -1e-4).all()
        assert (log_margin[promoted] > math.log(kappa) - 1e-4).all()
        assert (log_margin[promoted] < 0).all()
        promotions += int(promoted.sum())
        recorded = [m for r in output.records for m, flag in zip(r.log_margins, r.promoted, strict=True) if flag]
        kept = log_margin[promoted].tolist()  # max_tokens may cut promotions of the last block off
        assert recorded[: len(kept)] == pytest.approx(kept, abs=1e-4)
    assert promotions > 0


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_kappa_one_is_plain_decoding(model: LoadedModel, temperature: float) -> None:
    params = SamplingParams(max_tokens=50, temperature=temperature, seed=2)
    expected = [o.token_ids for o in LLM(model).generate(PROMPTS, params)]
    assert [o.token_ids for o in lossy(model, params, margin=1.0, guards="none")] == expected


def test_protected_tokens_are_neither_promoted_nor_replaced(model: LoadedModel) -> None:
    params = SamplingParams(max_tokens=80, temperature=1.0, seed=4, ignore_eos=True, stop_token_ids=())
    guarded = {EOS, 1}
    for output in lossy(model, params, margin=0.01):
        scores = scores_along(model, output, 1.0, 4)
        choices = scores.max(1).indices.tolist()
        for token, choice, promoted in zip(output.token_ids, choices, output.promoted, strict=True):
            if promoted:
                assert token not in guarded
                assert choice not in guarded


@pytest.mark.parametrize("budget", [0.0, 1.0, 3.0])
def test_a_budget_is_never_exceeded(model: LoadedModel, budget: float) -> None:
    params = SamplingParams(max_tokens=80)
    free = lossy(model, params, margin=0.05)
    bound = lossy(model, params, margin=0.05, budget=budget)
    assert max(o.records[-1].spent for o in free) > budget
    assert all(r.spent <= budget for o in bound for r in o.records)
    assert budget == 0 or any(o.records[-1].spent > 0 for o in bound)


def test_a_budget_per_100_tokens_is_never_exceeded(model: LoadedModel) -> None:
    for output in lossy(model, SamplingParams(max_tokens=120), margin=0.05, budget_per_100=1.5):
        emitted = 1
        for record in output.records:
            emitted += record.num_accepted + 1
            assert record.spent <= 1.5 * (emitted + 100) / 100
        assert all(a.spent <= b.spent for a, b in pairwise(output.records))


@pytest.mark.parametrize("most", [0, 1])
def test_max_promotions_per_step(model: LoadedModel, most: int) -> None:
    outputs = lossy(model, SamplingParams(max_tokens=60), margin=0.02, max_promotions=most)
    assert max(r.num_promoted for o in outputs for r in o.records) == most
