"""Strict equals plain for every drafter: shapes, alone and among others that join and leave, greedy, sampled and penalised."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from adaptivespec import LLM, SamplingParams, SpeculativeConfig
from adaptivespec.drafters.ngram import NGram, _Context
from adaptivespec.engine.request import Request
from adaptivespec.errors import UserError
from adaptivespec.models.loading import LoadedModel, load_model
from engine.overfit_head import features_of, overfit_head
from tiny_models import DRAFT_NOISE, VOCAB, make_tiny_model

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


def deep(drafter: str, config: str, sampling: str) -> int:
    """Tokens that some step must accept. The draft model of a random target is never sure, so its trees branch early."""
    return 3 if drafter != "draft_model" or (config == "chain" and "sampled" not in sampling) else 1


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


class WellRead(NGram):
    """Prompt lookup in whose context the answers stand already, since a random target does not repeat itself."""

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__(VOCAB, torch.device("cpu"))
        self.texts = texts

    def start(self, slot: int, prompt: Sequence[int]) -> None:
        self._contexts[slot] = _Context(*self._sizes)
        for text in [t for t in self.texts if t[: len(prompt)] == list(prompt)]:
            self._contexts[slot].extend(text)
        self._contexts[slot].extend(prompt[:1])


@pytest.fixture(scope="module")
def build(model: LoadedModel, plain: dict[str, list[list[int]]], tmp_path_factory: pytest.TempPathFactory) -> Build:
    """An LLM with the named drafter, each right often and wrong often. The draft model is the target, disturbed, with a vocabulary
    padded further; the head has learnt the answers by heart.
    """
    folder = tmp_path_factory.mktemp("drafters")
    texts = [prompt + answer for answers in plain.values() for prompt, answer in zip(PROMPTS, answers, strict=True)]
    head = overfit_head(folder / "head", model.decoder, [text for text in texts if len(text) > 3])
    draft = make_tiny_model("llama", folder / "draft", noise=DRAFT_NOISE / 4, padded_vocab=136)
    drafters = {"eagle3": lambda: head, "draft_model": lambda: draft, "ngram": lambda: WellRead(texts)}
    return lambda drafter, **settings: LLM(model, drafter=drafters[drafter](), **settings)


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
    # Otherwise little was proven: several tokens were accepted in one step, and others rejected.
    assert max(r.num_accepted for o in outputs for r in o.records) >= deep(drafter, config, sampling)
    assert sum(r.num_accepted for o in outputs for r in o.records) >= 20
    assert any(r.num_accepted < r.num_drafted for o in outputs for r in o.records)


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
    assert max(record.num_accepted for r in requests for record in r.records) >= deep(drafter, config, sampling)


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


@pytest.mark.parametrize("slots", [1, 3])
def test_the_head_is_given_the_features_of_the_text(build: Build, model: LoadedModel, slots: int) -> None:
    """Strict output would not show it: wrong features only make a head guess worse."""
    llm = build("eagle3", speculative=CONFIGS["5,4,8"], max_running_requests=slots)
    drafter = llm.drafter
    assert drafter is not None
    given: dict[int, list[tuple[list[int], torch.Tensor]]] = {}
    commit = drafter.commit

    def watch(slots: Sequence[int], tokens: Sequence[Sequence[int]], features: torch.Tensor | None) -> None:
        assert features is not None
        rows = features.split([len(block) for block in tokens])
        for slot, block, own in zip(slots, tokens, rows, strict=True):
            given.setdefault(slot, []).append((list(block), own.clone()))
        commit(slots, tokens, features)

    drafter.commit = watch  # type: ignore[method-assign]
    outputs = llm.generate(PROMPTS[:slots], SamplingParams(max_tokens=30))
    for slot, output in enumerate(outputs):
        following = [token for block, _ in given[slot] for token in block]
        features = torch.cat([own for _, own in given[slot]])
        text = [*output.prompt_token_ids, *output.token_ids]
        assert following == text[1 : len(following) + 1]
        torch.testing.assert_close(features, features_of(model.decoder, text)[: len(features)], rtol=1e-4, atol=1e-4)
        assert max(r.num_accepted for r in output.records) >= 2


def test_eos_as_the_second_of_five_drafts_of_the_target_itself(model_folder: Path, model: LoadedModel) -> None:
    """draft = target: every draft is right, and nothing follows the end of the answer."""
    answer = LLM(model).generate([PROMPTS[0]], SamplingParams(max_tokens=30, ignore_eos=True))[0].token_ids
    eos = answer[2]
    assert eos not in answer[:2]
    llm = LLM(model, drafter=model_folder, speculative=static(5, 1, 6))
    llm.model = dataclasses.replace(model, config=dataclasses.replace(model.config, eos_token_ids=(eos,)))
    [output] = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=30))
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (answer[:3], "stop", eos)
    assert [r.num_accepted for r in output.records] == [5]


@pytest.mark.parametrize("drafter", ["draft_model", "eagle3"])
def test_bf16_parts_from_plain_only_where_two_tokens_nearly_tie(model_folder: Path, tmp_path: Path, drafter: str) -> None:
    target = load_model(model_folder, "bf16")
    plain = [o.token_ids for o in LLM(target, max_running_requests=1).generate(PROMPTS, SamplingParams(max_tokens=60, logprobs=2))]
    if drafter == "draft_model":
        place = make_tiny_model("llama", tmp_path / "draft", noise=DRAFT_NOISE)
    else:
        fp32 = load_model(model_folder, "fp32").decoder
        place = overfit_head(tmp_path / "head", fp32, [p + a for p, a in zip(PROMPTS, plain, strict=True)], steps=120)
    llm = LLM(target, drafter=place, speculative=CONFIGS["5,4,8"], max_running_requests=5)
    for prompt, ours, theirs in zip(PROMPTS, llm.generate(PROMPTS, SamplingParams(max_tokens=60)), plain, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(ours.token_ids, theirs, strict=False)) if a != b), None)
        if same is None:
            assert ours.token_ids == theirs
            continue
        [there] = LLM(target).generate([prompt + theirs[:same]], SamplingParams(max_tokens=1, logprobs=2))
        best, second = list((there.logprobs or [])[0].top.values())
        assert best - second < 0.15  # logits of these sizes are 1/32 to 1/16 apart in bf16
