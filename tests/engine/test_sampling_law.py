"""Sampling by statistics: the engine's speculative samples follow softmax(z / T), and kappa = 1 is lossless too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from adaptivespec import LLM, SamplingParams, SpeculativeConfig
from adaptivespec.models.kv_cache import Block
from adaptivespec.models.loading import LoadedModel
from tiny_heads import make_tiny_head
from tiny_models import VOCAB

PROMPT = [5, 9, 33]
SEEDS = 3000


def next_distribution(model: LoadedModel, contexts: list[list[int]], temperature: float) -> torch.Tensor:
    """float64 [contexts, V]: softmax(z / T) after each context (all of one length), from plain forwards."""
    decoder, n = model.decoder, len(contexts[0])
    count = len(contexts)
    visible = torch.ones(n, n, dtype=torch.bool).tril().expand(count, n, n)
    block = Block(list(range(count)), [0] * count, [0] * count, [n] * count, visible)
    tokens, positions = torch.tensor(contexts).flatten(), torch.arange(n).repeat(count)
    hidden, _ = decoder.forward(tokens, positions, decoder.new_cache(count, n), block)
    return (decoder.logits(hidden.view(count, n, -1)[:, -1]).double() / temperature).softmax(-1)


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square with rare outcomes pooled."""
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    return float(chisquare(observed[wanted > 0], wanted[wanted > 0] * counts.sum() / wanted.sum()).pvalue)


@pytest.mark.parametrize("margin", [None, 1.0], ids=["strict", "kappa1"])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_speculative_samples_follow_the_targets_law(model: LoadedModel, tmp_path: Path, temperature: float, margin: float | None) -> None:
    first = next_distribution(model, [PROMPT], temperature)[0]
    second = next_distribution(model, [[*PROMPT, token] for token in range(VOCAB)], temperature)
    joint = first[:, None] * second
    config = SpeculativeConfig(policy="static", num_steps=2, topk=3, num_draft_tokens=7, margin=margin, guards="none")
    llm = LLM(model, drafter=make_tiny_head(tmp_path, draft_vocab=128), speculative=config, max_running_requests=50, context_length=16)
    params = [SamplingParams(max_tokens=3, temperature=temperature, seed=seed, ignore_eos=True) for seed in range(SEEDS)]
    outputs = llm.generate([PROMPT] * SEEDS, params)
    pairs = torch.tensor([o.token_ids[:2] for o in outputs])
    assert sum(r.num_accepted for o in outputs for r in o.records) > SEEDS / 50
    for counts, law in (
        (torch.bincount(pairs[:, 0], minlength=VOCAB), first),
        (torch.bincount(pairs[:, 1], minlength=VOCAB), joint.sum(0)),
        (torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB**2), joint.flatten()),
    ):
        assert p_value(counts.numpy(), law.numpy() * SEEDS) > 1e-3
