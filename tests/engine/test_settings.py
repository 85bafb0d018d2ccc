"""Settings of each request: speculation on, off and in between, n answers, log-probabilities, and what the result echoes.

With test_stopping.py (the stop before the cap, end-of-sequence among drafts, aborted requests, counted drafts), test_sampling_law.py
(chi-square), test_drafters.py (penalties, fp32 equality) and test_real_model.py (near-ties) this holds what users met as faults elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adaptivespec import LLM, SamplingParams, SpeculativeConfig
from adaptivespec.errors import UserError
from adaptivespec.models.loading import LoadedModel, load_model
from engine.fakes import ReferenceDrafter
from tiny_models import DRAFT_NOISE, VOCAB, make_tiny_model

PROMPT, OTHER = [5, 9, 33], [12, 100, 101, 3]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """AdaptiveSpec with a draft model that agrees often."""
    draft = make_tiny_model("llama", tmp_path_factory.mktemp("draft"), noise=DRAFT_NOISE)
    return LLM(model, drafter=draft)


def counts(output: Any) -> dict[str, Any]:
    return output.metrics["speculative_decoding"]


def test_one_request_of_a_batch_opts_out(llm: LLM) -> None:
    off, on, also = llm.generate([PROMPT] * 3, PARAMS, speculative=[False, None, True])
    assert (counts(off)["num_draft_tokens"], counts(off)["num_spec_steps"], len(off.records)) == (0, 0, 23)
    assert counts(on)["num_draft_tokens"] > 0
    assert counts(also) == counts(on)
    assert off.speculative.policy == "off"


def test_effective_settings_are_echoed(llm: LLM) -> None:
    wishes: list[Any] = [
        {"margin": 0.3},
        {"policy": "static", "eagle_topk": 2, "num_draft_tokens": 5},
        {"budget": 0.0},
        SpeculativeConfig(),
    ]
    outputs = llm.generate([PROMPT] * 4, PARAMS, speculative=wishes)
    effective = [o.speculative for o in outputs]
    assert [c.margin for c in effective] == [0.3, 0.5, 0.5, 0.5]
    assert (effective[1].policy, effective[1].shape) == ("static", (3, 2, 5))
    assert effective[2].budget == 0.0
    assert {str(r.shape) for r in outputs[1].records} == {"3,2,5"}
    assert outputs[2].records[-1].spent == counts(outputs[2])["spent_budget"] == 0.0
    assert all(o.params == PARAMS for o in outputs)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"margn": 0.5}, "unknown setting 'margn'; did you mean 'margin'"),
        ({"margin": 0}, "margin"),
        ({"margin": 0.2, "kappa": 0.3}, "given twice"),
        ({"num_steps": 5}, "num_steps has no effect with policy adaptive"),
        ({"policy": "static", "topk": 1, "num_draft_tokens": 9}, "topk 1 is a chain"),
        ("yes", "speculative: expected settings, true or false"),
        ([None, None], "1 prompts but 2 speculative settings"),
    ],
)
def test_wrong_speculative_settings_are_refused_before_any_work(llm: LLM, wish: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        llm.generate([PROMPT], PARAMS, speculative=wish)
    assert not llm.scheduler.waiting


def test_the_summary_adds_up(llm: LLM) -> None:
    [output] = llm.generate([PROMPT], PARAMS.updated({"max_tokens": 40}), speculative={"margin": 0.05})
    c = counts(output)
    assert list(c) == [
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "acceptance_histogram",
        "num_spec_steps",
        "num_accepted_draft_tokens",
        "num_draft_tokens",
        "num_spec_tokens",
        "num_promoted_tokens",
        "spent_budget",
    ]
    assert sum(c["acceptance_histogram"]) == c["num_spec_steps"] == len(output.records)
    assert sum(j * n for j, n in enumerate(c["acceptance_histogram"])) == c["num_accepted_draft_tokens"] > 0
    assert c["mean_acceptance_length"] == pytest.approx(1 + c["num_accepted_draft_tokens"] / c["num_spec_steps"])
    assert c["draft_acceptance_rate"] == c["num_accepted_draft_tokens"] / c["num_draft_tokens"]
    assert c["num_promoted_tokens"] == sum(r.num_promoted for r in output.records) > 0
    assert c["spent_budget"] == pytest.approx(output.records[-1].spent)


def test_ragged_accept_lengths_of_a_wide_tree(model: LoadedModel) -> None:
    """Two requests, topk 4, 5 steps, 8 draft tokens: one accepts everything, the other nothing."""
    config = SpeculativeConfig(policy="static", num_steps=5, topk=4, num_draft_tokens=8, margin=None)
    right, wrong = (LLM(model).generate([p], PARAMS)[0].token_ids for p in (PROMPT, OTHER))
    drafter = ReferenceDrafter({tuple(PROMPT): right, tuple(OTHER): [(t + 1) % VOCAB for t in wrong]}, VOCAB, hit=1.0)
    outputs = LLM(model, drafter=drafter, speculative=config).generate([PROMPT, OTHER], PARAMS)
    assert [o.token_ids for o in outputs] == [right, wrong]
    lengths = [counts(o)["mean_acceptance_length"] for o in outputs]
    assert lengths[0] > 2 > lengths[1]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 2}, {"frequency_penalty": 0.5, "temperature": 0.8, "seed": 2}])
def test_logprobs_with_and_without_speculation(llm: LLM, settings: dict[str, Any]) -> None:
    params = PARAMS.updated({**settings, "logprobs": 3})
    drafted, plain = llm.generate([OTHER] * 2, params, speculative=[{"margin": None}, False])
    assert counts(drafted)["num_accepted_draft_tokens"] > 0
    for ours, theirs, token in zip(drafted.logprobs or [], plain.logprobs or [], plain.token_ids, strict=True):
        assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank) == (token, theirs.rank)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert list(ours.top) == list(theirs.top)
        assert list(ours.top.values()) == pytest.approx(list(theirs.top.values()), abs=1e-3)
    assert len(plain.logprobs or []) == 24
    silent = llm.generate([OTHER], PARAMS.updated(settings), speculative=False)[0]
    assert silent.logprobs is None
    assert silent.token_ids == plain.token_ids


def test_logprobs_end_where_the_tokens_end(llm: LLM) -> None:
    whole = llm.generate([PROMPT], PARAMS, speculative=False)[0].token_ids
    params = PARAMS.updated({"stop_token_ids": whole[6], "logprobs": 0})
    output = llm.generate([PROMPT], params, speculative={"margin": None})[0]
    assert [p.token_id for p in output.logprobs or []] == output.token_ids == whole[: whole.index(whole[6]) + 1]


def test_n_answers_are_those_of_seeds_in_a_row(llm: LLM) -> None:
    params = PARAMS.updated({"temperature": 1.0, "seed": 2**63 - 2, "n": 3})
    outputs = llm.generate([PROMPT, OTHER], params)
    assert [(o.prompt_token_ids, o.index) for o in outputs] == [(p, i) for p in (PROMPT, OTHER) for i in range(3)]
    for output in outputs:
        one = params.updated({"n": 1, "seed": (2**63 - 2 + output.index) % 2**63})
        assert llm.generate([output.prompt_token_ids], one)[0].token_ids == output.token_ids
    assert len({tuple(o.token_ids) for o in outputs}) == 6
    unseeded = llm.generate([PROMPT], PARAMS.updated({"temperature": 1.0, "n": 4}))
    assert len({tuple(o.token_ids) for o in unseeded}) == 4
    again = PARAMS.updated({"temperature": 1.0, "seed": unseeded[2].seed})  # the result says which seed was drawn
    assert llm.generate([PROMPT], again)[0].token_ids == unseeded[2].token_ids


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0}, "n: .*greater than or equal to 1"),
        ({"n": 2}, "all answers at temperature 0 are the same"),
        ({"top_p": 0}, "top_p: .*greater than 0"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"stop": ""}, "stop"),
        ({"logprobs": -1}, "logprobs"),
        ({"topp": 0.9}, "unknown setting 'topp'; did you mean 'top_p'"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens 4 is more than max_tokens 3"),
    ],
)
def test_wrong_sampling_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        SamplingParams(**settings)
    assert "\n" not in str(error.value)


def test_a_stream_is_one_answer(llm: LLM) -> None:
    with pytest.raises(UserError, match="a stream is one answer; n 2 needs generate"):
        llm.stream(PROMPT, PARAMS.updated({"temperature": 1.0, "n": 2}))


def test_the_first_token_is_streamed_before_anything_is_drafted(llm: LLM) -> None:
    chunks = llm.stream(PROMPT, PARAMS)
    assert len(next(chunks).token_ids) == 1
    assert not llm.scheduler.running[0].records
    chunks.close()


def test_answers_are_handed_out_as_they_finish(llm: LLM) -> None:
    finished: list[int] = []
    params = [PARAMS.updated({"max_tokens": n}) for n in (20, 1, 6)]
    outputs = llm.generate([PROMPT] * 3, params, on_finish=lambda output: finished.append(len(output.token_ids)))
    assert finished == [1, 6, 20]
    assert [len(o.token_ids) for o in outputs] == [20, 1, 6]


def test_chat(llm: LLM, model: LoadedModel, tmp_path: Path) -> None:
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "so?"}]
    [one] = llm.chat(conversation, PARAMS)
    two = llm.chat([conversation, conversation[:1]], PARAMS)
    assert llm.tokenizer.decode(one.prompt_token_ids) == "u:hi\na:yes\nu:so?\na:"
    assert two[0].token_ids == one.token_ids == llm.generate(conversation, PARAMS)[0].token_ids
    for wrong in ([], ["hi"], [{"content": "hi"}], [[], conversation]):
        with pytest.raises(UserError, match="a conversation is a list of messages"):
            llm.chat(wrong, PARAMS)  # type: ignore[arg-type]
    folder = make_tiny_model("llama", tmp_path)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template"):
        LLM(load_model(folder, "fp32")).chat(conversation, PARAMS)
