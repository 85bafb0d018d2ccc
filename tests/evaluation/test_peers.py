"""transformers as arms of the benchmark: the same weights, the same answers, and what it cannot do is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adaptivespec import LLM, SamplingParams
from adaptivespec.engine.transformers_model import as_transformers
from adaptivespec.errors import UserError
from adaptivespec.evaluation.arms import PEERS, Arm, parse_arm, parse_arms
from adaptivespec.evaluation.bench import describe, run_bench
from adaptivespec.evaluation.peers import Peers, check_peers
from adaptivespec.models.loading import load_model
from tiny_models import DRAFT_NOISE, FAMILIES, make_tiny_model, tiny_model, write_gguf

PROMPTS = [[5, 9, 33, 5, 9, 33, 5], [77], [0, 12, 100, 12]]  # 0 is the padding token given to transformers


@pytest.fixture(scope="module", params=FAMILIES)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("peers")
    draft = make_tiny_model(request.param, folder / "draft", noise=DRAFT_NOISE)
    return LLM(str(make_tiny_model(request.param, folder / "model")), drafter=draft, dtype="fp32")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_checkpoint_and_shared(family: str, dtype: str, tmp_path: Path) -> None:
    """bf16 linears may be prepacked: what comes back is equal bit for bit."""
    decoder = load_model(make_tiny_model(family, tmp_path / "model"), dtype).decoder
    theirs, original = as_transformers(decoder), tiny_model(family)
    frequencies = original.model.rotary_emb.inv_freq.clone()
    original.to(decoder.dtype)
    state, expected = theirs.state_dict(), original.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert torch.equal(theirs.model.rotary_emb.inv_freq, frequencies)
    assert theirs.get_input_embeddings().weight.data_ptr() == decoder.embedding.data_ptr()
    qkv = decoder.layers[0].attention.qkv
    if not qkv.packed:
        assert theirs.model.layers[0].self_attn.q_proj.weight.data_ptr() == qkv.weight.data_ptr()
    assert (theirs.lm_head.weight is theirs.get_input_embeddings().weight) == (family == "llama-tied")


def test_a_gguf_brings_its_rotary_factors(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "model")
    theirs = as_transformers(load_model(write_gguf(folder, tmp_path / "tiny.gguf"), "fp32").decoder)
    ids = torch.tensor([PROMPTS[0]])
    torch.testing.assert_close(theirs(ids).logits, tiny_model("llama")(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=24),
        SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=(101,)),
        SamplingParams(max_tokens=40, min_tokens=12, stop_token_ids=tuple(range(60, 90))),
        SamplingParams(max_tokens=24, repetition_penalty=1.3),
        SamplingParams(max_tokens=10_000, ignore_eos=True, stop_token_ids=(1,)),
    ],
    ids=["plain", "ignore_eos", "stop", "repetition", "context"],
)
def test_greedy_answers_equal_plain_decoding(llm: LLM, params: SamplingParams) -> None:
    if params.max_tokens > 100:
        llm = LLM(llm.model, drafter=llm.model.source.path.parent / "draft", context_length=48)
    plain, *others = run_bench(llm, parse_arms("ar; " + "; ".join(PEERS), peers=True), PROMPTS, params)
    for result in others:
        assert [o.token_ids for o in result.outputs] == [o.token_ids for o in plain.outputs], result.arm.label
        assert [o.finish_reason for o in result.outputs] == [o.finish_reason for o in plain.outputs], result.arm.label
    rows = {result.arm.label: describe(result, plain) for result in (plain, *others)}
    for name in PEERS:
        row = rows[name]
        assert row.keys() == rows["ar"].keys()
        assert (row["peer"]["name"], row["peer"]["engine"]) == (name, "transformers")
        assert row["peer"]["version"]
        assert row["speedup_vs_ar"]["ratio"] > 0
        assert {row[key] for key in ("acceptance_rate", "drafted", "promoted", "seconds_prefill", "seconds_verify")} == {None}
        assert row["accept_length"] == row["tokens"] / row["steps"]
    assert rows["ar"]["peer"] is None
    assert rows["hf"]["accept_length"] == 1
    assert rows["hf-assisted"]["accept_length"] > 1  # a draft model that agrees at three of four tokens


@pytest.mark.parametrize("name", PEERS)
def test_a_seed_gives_the_same_sample_again(llm: LLM, name: str) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.5, top_k=20, top_p=0.95, min_p=0.01, seed=3)
    peers = Peers(llm, [name])
    first, again, other = (peers.answer(name, PROMPTS[0], p).token_ids for p in (params, params, params.updated({"seed": 4})))
    assert first == again != other


def test_filters_reach_transformers(llm: LLM) -> None:
    """One token left is greedy decoding, whatever the temperature; without filters another text comes."""
    peers, greedy = Peers(llm, ["hf"]), llm.generate([PROMPTS[0]], SamplingParams(max_tokens=12), speculative=False)[0].token_ids
    for one in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert peers.answer("hf", PROMPTS[0], SamplingParams(max_tokens=12, temperature=2, seed=0, **one)).token_ids == greedy
    assert peers.answer("hf", PROMPTS[0], SamplingParams(max_tokens=12, temperature=9, seed=0)).token_ids != greedy


def test_ctrl_c_keeps_finished_prompts(llm: LLM) -> None:
    seen = [0]

    def interrupt(arm: Arm) -> None:
        seen[0] += 1
        if seen[0] == 5:
            raise KeyboardInterrupt

    results = run_bench(llm, parse_arms("hf; ar", peers=True), PROMPTS, SamplingParams(max_tokens=4, seed=0), on_answer=interrupt)
    assert [len(result.outputs) for result in results] == [2, 2]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"presence_penalty": 0.5}, "transformers has no equal of presence_penalty; leave that out"),
        ({"frequency_penalty": 0.5, "stop": ("x",)}, "no equal of frequency_penalty, stop"),
        ({"n": 2, "temperature": 1.0}, "no equal of n;"),
        ({"logprobs": 0}, "no equal of logprobs;"),
    ],
)
def test_settings_without_an_equal_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_peers(["hf"], 1, SamplingParams(**more))
    check_peers([], 8, SamplingParams(**more))


def test_batches_are_refused(llm: LLM) -> None:
    with pytest.raises(UserError, match="arm hf-lookup decodes one request at a time: it cannot be compared with batch 8"):
        run_bench(llm, parse_arms("ar; hf-lookup", peers=True), PROMPTS, SamplingParams(), batch=8)


def test_an_assistant_must_be_there_and_fit(tmp_path: Path) -> None:
    target = make_tiny_model("llama", tmp_path / "model")
    with pytest.raises(UserError, match="hf-assisted needs a smaller model as the drafter"):
        Peers(LLM(target, drafter="ngram", dtype="fp32"), ["hf-assisted"])
    padded = make_tiny_model("llama", tmp_path / "padded", padded_vocab=160)
    with pytest.raises(UserError, match="vocabularies of one size; target 128, draft model 160"):
        Peers(LLM(target, drafter=padded, dtype="fp32"), ["hf-assisted"])


def test_peers_stand_alone_and_only_in_the_benchmark() -> None:
    arm = parse_arm(" hf-assisted ", peers=True)
    assert (arm.label, arm.peer, arm.speculative, arm.is_plain) == ("hf-assisted", "hf-assisted", (), False)
    with pytest.raises(UserError, match="arm 'hf': hf is another engine, which only bench compares with"):
        parse_arm("hf")
    for text in ("hf:top_k=1", "ar+hf", "hf+hf-lookup"):
        with pytest.raises(UserError, match="which takes no settings and mixes with none"):
            parse_arm(text, peers=True)
    with pytest.raises(UserError, match="unknown arm 'hf-asisted'; did you mean 'hf-assisted'"):
        parse_arm("hf-asisted", peers=True)
