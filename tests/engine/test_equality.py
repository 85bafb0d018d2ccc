"""Strict speculative decoding equals plain decoding, token for token: every drafter, shape, batch and temperature."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptivespec import LLM, SamplingParams, SpeculativeConfig
from adaptivespec.method.costs import CostTable, Curve
from adaptivespec.models.loading import LoadedModel, load_model
from adaptivespec.models.native.build import library
from engine.fakes import ReferenceDrafter
from tiny_heads import make_tiny_head
from tiny_models import VOCAB, make_tiny_model

STATIC = [(3, 4, 4), (3, 1, 4), (5, 4, 8), (6, 8, 16), (7, 10, 60), (15, 1, 16), (1, 1, 2), (2, 3, 5)]
OFF = SpeculativeConfig(policy="off", margin=None)
ADAPTIVE = SpeculativeConfig(margin=None)
CONFIGS = [SpeculativeConfig(policy="static", num_steps=s, topk=k, num_draft_tokens=n, margin=None) for s, k, n in STATIC]
GOODPUT = SpeculativeConfig(policy="goodput", margin=None, probe=3)
SHAPES = SpeculativeConfig(policy="goodput_shapes", margin=None, shapes=((3, 4, 8), (5, 1, 6), (2, 2, 4)))
# A verify that is flat, then steep, then flat again, so that goodput's trees are of many sizes.
COSTS = CostTable(Curve((1, 8), (0.5, 0.8)), Curve((1, 16), (0.5, 0.9)), {1: Curve((1, 6, 8, 40), (10.0, 10.5, 14.0, 16.0))}, 0.2)
CONFIGS += [GOODPUT, SHAPES, ADAPTIVE, SpeculativeConfig(margin=None, low=(3, 4, 8), high=(7, 4, 16)), SpeculativeConfig(margin=1.0)]
SAMPLING = [SamplingParams(max_tokens=40), *(SamplingParams(max_tokens=40, temperature=t, seed=s) for t in (0.7, 1.0) for s in (0, 5))]
PROMPTS = [[5, 9, 33], [77], [12, 100, 101, 3, 64, 65, 66, 9], [8] * 20, [42, 17]]


PLAIN: dict[tuple[int, str], list[int]] = {}


def plain(model: LoadedModel, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Plain decoding, one request at a time."""
    keys = [(id(model), f"{prompt} {params}") for prompt in prompts]
    missing = [(key, prompt) for key, prompt in zip(keys, prompts, strict=True) if key not in PLAIN]
    llm = LLM(model, max_running_requests=1)
    PLAIN.update({key: llm.generate([prompt], params)[0].token_ids for key, prompt in missing})
    return [PLAIN[key] for key in keys]


def with_reference(model: LoadedModel, params: SamplingParams, hit: float, seed: int, slots: int) -> LLM:
    answers = dict(zip(map(tuple, PROMPTS), plain(model, PROMPTS, params), strict=True))
    drafter = ReferenceDrafter(answers, VOCAB, hit, seed)
    return LLM(model, drafter=drafter, shapes_for=CONFIGS, max_running_requests=slots, costs=COSTS)


@pytest.mark.parametrize("params", SAMPLING, ids=lambda p: f"T{p.temperature}s{p.seed}")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.policy}-{c.shape}-{c.low}-{c.margin}")
def test_prescribed_acceptance_alone(model: LoadedModel, config: SpeculativeConfig, params: SamplingParams) -> None:
    llm = with_reference(model, params, hit=0.8, seed=1, slots=1)
    outputs = llm.generate(PROMPTS, params, speculative=config)
    assert [o.token_ids for o in outputs] == plain(model, PROMPTS, params)
    # Otherwise nothing was proven: drafted tokens were accepted, and deeper than one level.
    assert max(r.num_accepted for o in outputs for r in o.records) >= min(2, config.num_steps)
    if config is GOODPUT:
        assert len({r.num_drafted for o in outputs for r in o.records}) > 2
    assert sum(len(r.path) < r.num_drafted for o in outputs for r in o.records) > 0


@pytest.mark.parametrize("hit", [0.0, 1.0])
def test_never_and_always_accepting(model: LoadedModel, hit: float) -> None:
    params = SamplingParams(max_tokens=30)
    llm = with_reference(model, params, hit, seed=0, slots=1)
    config = SpeculativeConfig(policy="static", num_steps=4, topk=1, num_draft_tokens=5, margin=None)
    outputs = llm.generate(PROMPTS, params, speculative=config)
    assert [o.token_ids for o in outputs] == plain(model, PROMPTS, params)
    accepted = [r.num_accepted for o in outputs for r in o.records[:-1]]
    if hit:
        assert set(accepted) == {4}
    else:  # a wrong token can be right by luck, at 1 in 128
        assert sum(accepted) <= len(accepted) // 4


@pytest.mark.parametrize("params", SAMPLING[:3], ids=lambda p: f"T{p.temperature}s{p.seed}")
@pytest.mark.parametrize("slots", [2, 3, 5])
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2], CONFIGS[5], ADAPTIVE, GOODPUT, SHAPES], ids=lambda c: f"{c.policy}-{c.shape}")
def test_prescribed_acceptance_in_ragged_batches(model: LoadedModel, config: SpeculativeConfig, slots: int, params: SamplingParams) -> None:
    llm = with_reference(model, params, hit=0.7, seed=slots, slots=slots)
    outputs = llm.generate(PROMPTS, params, speculative=config)
    assert [o.token_ids for o in outputs] == plain(model, PROMPTS, params)


def test_mixed_settings_in_one_batch(model: LoadedModel) -> None:
    params = [SamplingParams(max_tokens=20 + 5 * i, temperature=(0.0, 0.7)[i % 2], seed=i) for i in range(5)]
    alone = [plain(model, [p], s)[0] for p, s in zip(PROMPTS, params, strict=True)]
    drafter = ReferenceDrafter(dict(zip(map(tuple, PROMPTS), alone, strict=True)), VOCAB, 0.7)
    llm = LLM(model, drafter=drafter, shapes_for=CONFIGS, max_running_requests=5, costs=COSTS)
    for configs in ([OFF, CONFIGS[2], ADAPTIVE, CONFIGS[1], OFF], [OFF, GOODPUT, ADAPTIVE, SHAPES, GOODPUT]):
        outputs = llm.generate(PROMPTS, params, speculative=configs)
        assert [o.token_ids for o in outputs] == alone
        drafts = [o.metrics["speculative_decoding"]["num_draft_tokens"] > 0 for o in outputs]
        assert drafts == [config is not OFF for config in configs]
        assert [o.speculative for o in outputs] == configs


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.policy}-{c.shape}-{c.low}-{c.margin}")
@pytest.mark.parametrize("params", SAMPLING[:2], ids=lambda p: f"T{p.temperature}")
def test_eagle3_of_every_family(any_model: LoadedModel, tmp_path: Path, config: SpeculativeConfig, params: SamplingParams) -> None:
    head = make_tiny_head(tmp_path, draft_vocab=128)
    outputs = LLM(any_model, drafter=head, speculative=config, max_running_requests=1, costs=COSTS).generate(PROMPTS[:3], params)
    batched = LLM(any_model, drafter=head, speculative=config, max_running_requests=3, costs=COSTS).generate(PROMPTS[:3], params)
    expected = plain(any_model, PROMPTS[:3], params)
    assert [o.token_ids for o in outputs] == expected
    assert [o.token_ids for o in batched] == expected
    # the tree a request grows does not depend on its neighbours either, unless they compete for rows
    grown = [[[r.tokens for r in o.records] for o in some] for some in (outputs, batched)]
    assert config.policy.startswith("goodput") or grown[0] == grown[1]


@settings(max_examples=15)
@given(data=st.data())
def test_random_shapes_hits_and_batches(model: LoadedModel, data: st.DataObject) -> None:
    steps, topk = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    nodes = steps + 1 if topk == 1 else data.draw(st.integers(2, min(24, topk + (steps - 1) * topk**2) + 1))
    config = SpeculativeConfig(policy="static", num_steps=steps, topk=topk, num_draft_tokens=nodes, margin=None)
    params = SamplingParams(max_tokens=25, temperature=data.draw(st.sampled_from([0.0, 1.0])), seed=data.draw(st.integers(0, 3)))
    answers = dict(zip(map(tuple, PROMPTS), plain(model, PROMPTS, params), strict=True))
    drafter = ReferenceDrafter(answers, VOCAB, data.draw(st.floats(0, 1)), data.draw(st.integers(0, 99)))
    llm = LLM(model, drafter=drafter, speculative=config, max_running_requests=data.draw(st.integers(1, 5)))
    assert [o.token_ids for o in llm.generate(PROMPTS, params)] == list(answers.values())


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def bf16_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny target of each family in bf16, with heads of 32 that our kernels take."""
    overrides = {} if request.param == "qwen3" else {"hidden_size": 128}
    return load_model(make_tiny_model(request.param, tmp_path_factory.mktemp(request.param), **overrides), "bf16")


@pytest.mark.skipif(library() is None, reason="no kernels of ours here: elsewhere a bf16 row's bits depend on the rows beside it")
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("params", SAMPLING[:2], ids=lambda p: f"T{p.temperature}s{p.seed}")
@pytest.mark.parametrize("config", [CONFIGS[2], CONFIGS[4], ADAPTIVE, GOODPUT], ids=lambda c: f"{c.policy}-{c.shape}")
def test_bf16_with_our_kernels(bf16_model: LoadedModel, config: SpeculativeConfig, slots: int, params: SamplingParams) -> None:
    llm = with_reference(bf16_model, params, hit=0.8, seed=slots, slots=slots)
    outputs = llm.generate(PROMPTS, params, speculative=config)
    assert [o.token_ids for o in outputs] == plain(bf16_model, PROMPTS, params)
    assert max(r.num_accepted for o in outputs for r in o.records) > 1


@pytest.mark.skipif(library() is None, reason="no kernels of ours here")
def test_chunked_prefill_in_bf16_with_our_kernels(bf16_model: LoadedModel) -> None:
    params, prompt = SamplingParams(max_tokens=40), list(range(2, 90))
    whole, chunked = (LLM(bf16_model, prefill_chunk=chunk).generate([prompt], params)[0] for chunk in (512, 7))
    assert whole.token_ids == chunked.token_ids


def test_plain_equals_transformers_greedy(any_model: LoadedModel) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(any_model.source.path, dtype=torch.float32)
    for prompt in PROMPTS:
        ours = LLM(any_model, max_running_requests=1).generate([prompt], SamplingParams(max_tokens=40))[0]
        theirs = reference.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0)[0, len(prompt) :]
        assert ours.token_ids == theirs.tolist()


def test_chunked_prefill_changes_nothing(model: LoadedModel, tmp_path: Path) -> None:
    head = make_tiny_head(tmp_path)
    prompt, params = list(range(2, 90)), SamplingParams(max_tokens=20)
    outputs = [LLM(model, drafter=head, prefill_chunk=chunk).generate([prompt], params)[0] for chunk in (512, 7, 1)]
    assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids
    assert [r.tokens for r in outputs[0].records] == [r.tokens for r in outputs[1].records] == [r.tokens for r in outputs[2].records]
