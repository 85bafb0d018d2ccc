"""Strict equals plain for every drafter: shapes, alone and among others that join and leave, greedy, sampled and penalised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from adaptivespec import LLM, SamplingParams, SpeculativeConfig
from adaptivespec.engine.request import Request
from adaptivespec.errors import UserError
from adaptivespec.models.loading import LoadedModel
from tiny_heads import make_tiny_head
from tiny_models import DRAFT_NOISE, make_tiny_model

PROMPTS = [[5, 9, 33, 9], [77], [12, 100, 101, 3, 12, 100, 101, 3, 12], [8] * 20, [42, 17, 42, 17, 42, 40]]
LENGTHS = [40, 7, 25, 1, 33]
DRAFTERS = ["eagle3", "draft_model", "ngram"]
SAMPLING = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, top_k=60, top_p=0.95, min_p=0.01, seed=3),
    "penalties": SamplingParams(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2),
    "sampled penalties": SamplingParams(temperature=0.6, repetition_penalty=1.1, frequency_penalty=0.4, min_tokens=9, seed=1),
}


def lengths(sampling: str) -> list[SamplingParams]:
    """The settings of each prompt: ragged in length too."""
    p = SAMPLING[sampling]
    return [p.updated({"max_tokens": n, "min_tokens": min(n, p.min_tokens)}) for n in LENGTHS]


def static(steps: int, topk: int, nodes: int) -> SpeculativeConfig:
    return SpeculativeConfig(policy="static", num_steps=steps, topk=topk, num_draft_tokens=nodes, margin=None)


CONFIGS = {
    "chain": static(4, 1, 5),
    "3,4,4": static(3, 4, 4),
    "5,4,8": static(5, 4, 8),
    "7,10,60": static(7, 10, 60),
    "adaptive": SpeculativeConfig(margin=None),
    "adaptive wide": SpeculativeConfig(margin=1.0, low=(3, 4, 8), high=(7, 4, 16)),
}
MIXED = [CONFIGS["adaptive"], SpeculativeConfig(policy="off", margin=None), CONFIGS["5,4,8"], CONFIGS["adaptive wide"], CONFIGS["chain"]]

Build = Callable[..., LLM]


@pytest.fixture(scope="module")
def build(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """An LLM with the named drafter. The draft model is the target, disturbed, with a vocabulary padded further."""
    folder = tmp_path_factory.mktemp("drafters")
    places = {
        "eagle3": make_tiny_head(folder / "head", draft_vocab=128),
        "draft_model": make_tiny_model("llama", folder / "draft", noise=DRAFT_NOISE, padded_vocab=136),
        "ngram": "ngram",
    }
    return lambda drafter, **settings: LLM(model, drafter=places[drafter], **settings)


@pytest.fixture(scope="module")
def plain(model: LoadedModel) -> dict[str, list[list[int]]]:
    """Plain decoding of every prompt alone."""
    llm = LLM(model, max_running_requests=1)
    return {name: [llm.generate([p], s)[0].token_ids for p, s in zip(PROMPTS, lengths(name), strict=True)] for name in SAMPLING}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_alone(build: Build, plain: dict[str, list[list[int]]], drafter: str, config: str, sampling: str) -> None:
    llm = build(drafter, speculative=CONFIGS[config], max_running_requests=1)
    outputs = llm.generate(PROMPTS, lengths(sampling))
    assert [o.token_ids for o in outputs] == plain[sampling]
    accepted = sum(o.metrics["speculative_decoding"]["num_accepted_draft_tokens"] for o in outputs)
    assert sum(o.metrics["speculative_decoding"]["num_draft_tokens"] for o in outputs) > accepted
    if sampling == "greedy" and drafter != "eagle3":  # a random head is right by luck only
        assert accepted >= 5


def join_and_leave(llm: LLM, configs: list[SpeculativeConfig], sampling: str) -> list[Request]:
    """Requests come in at different steps; two more than are counted leave in the middle."""
    params = lengths(sampling)
    requests: list[Request] = []
    for i, (prompt, own, config) in enumerate(zip(PROMPTS, params, configs, strict=True)):
        requests += llm.submit(prompt, own, speculative=config)
        for _ in range(2):
            llm.step()
        if i in (1, 3):
            [other] = llm.submit([99, 98, 97], own.updated({"max_tokens": 30}), speculative=config)
            llm.step()
            llm.step()
            llm.abort(other)
    while any(r.finish_reason is None for r in requests):
        llm.step()
    assert not llm.scheduler.running
    return requests


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("slots", [2, 5])
@pytest.mark.parametrize("config", [*CONFIGS, "mixed"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_among_others(build: Build, plain: dict[str, list[list[int]]], drafter: str, config: str, slots: int, sampling: str) -> None:
    configs = MIXED if config == "mixed" else [CONFIGS[config]] * len(PROMPTS)
    requests = join_and_leave(build(drafter, max_running_requests=slots), configs, sampling)
    assert [r.token_ids for r in requests] == plain[sampling]
    assert [r.finish_reason == "abort" for r in requests] == [False] * 5


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_lossy_answers_do_not_depend_on_neighbours(build: Build, drafter: str) -> None:
    """With the margin rule the drafted trees decide what is said, so they must not depend on the batch either."""
    configs = [
        SpeculativeConfig(margin=m, low=low) for m, low in zip([0.1, 0.2, 0.9, 0.01, 0.05], [(3, 4, 4), (3, 2, 4)] * 3, strict=False)
    ]
    params = [
        SamplingParams(max_tokens=30, temperature=t, seed=i, frequency_penalty=f)
        for i, (t, f) in enumerate([(0.0, 0.0), (0.7, 0.0), (0.0, 0.3), (1.0, 0.2), (0.0, 0.0)])
    ]
    llm = build(drafter, max_running_requests=5)
    together = llm.generate(PROMPTS, params, speculative=configs)
    alone = [llm.generate([p], s, speculative=c)[0] for p, s, c in zip(PROMPTS, params, configs, strict=True)]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert [[r.tokens for r in o.records] for o in together] == [[r.tokens for r in o.records] for o in alone]
    assert sum(sum(o.promoted) for o in together) > 0
    assert [o.promoted for o in together] == [o.promoted for o in alone]


def test_the_wrong_tokenizer_pair_is_refused_before_any_weights(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_tiny_model("llama", tmp_path / "other")
    file = other / "tokenizer.json"
    text = file.read_text()
    assert '"a": 97' in text
    file.write_text(text.replace('"a": 97', '"a": 98').replace('"b": 98', '"b": 97', 1))
    monkeypatch.setattr("adaptivespec.engine.llm.load_model", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(UserError, match="97"):
        LLM(model_folder, drafter=other)
