"""Stop tokens, max_tokens and min_tokens inside accepted blocks, streaming, slots, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptivespec import LLM, SamplingParams, SpeculativeConfig
from adaptivespec.engine.request import Request
from adaptivespec.errors import UserError
from adaptivespec.method.acceptance import Strict
from adaptivespec.method.policy import Static
from adaptivespec.method.tree import TreeShape
from adaptivespec.models.loading import LoadedModel
from adaptivespec.telemetry.stats import summarise
from engine.fakes import ReferenceDrafter
from tiny_heads import make_tiny_head
from tiny_models import VOCAB

CHAIN = SpeculativeConfig(policy="static", num_steps=5, topk=1, num_draft_tokens=6, margin=None)
PROMPT = [5, 9, 33]
LONG = SamplingParams(max_tokens=60, ignore_eos=True)


def request(stop: set[int], **params: int) -> Request:
    policy = Static(TreeShape.off())
    sampling = SamplingParams(**{"max_tokens": 5, **params})
    return Request([1], sampling, CHAIN, policy, Strict(), policy.initial(1), 0, frozenset(stop), frozenset(stop), sampling.max_tokens)


def test_the_stop_token_comes_before_the_cap() -> None:
    r = request({99})
    r.emit([10, 11, 99, 20, 21], [False, True, False, False, False])
    assert (r.token_ids, r.finish_reason, r.promoted) == ([10, 11, 99], "stop", [False, True, False])


def test_the_cap_cuts_a_block() -> None:
    r = request({99})
    r.emit([1, 2, 3, 4, 5, 6, 99], [False] * 7)
    assert (r.token_ids, r.finish_reason) == ([1, 2, 3, 4, 5], "length")


def test_a_stop_token_as_the_last_allowed_one_is_a_stop() -> None:
    r = request({99}, max_tokens=2)
    r.emit([1, 99, 3], [False] * 3)
    assert (r.token_ids, r.finish_reason) == ([1, 99], "stop")


def oracle(model: LoadedModel, params: SamplingParams = LONG, hit: float = 1.0) -> tuple[LLM, list[int]]:
    """An engine whose drafter is always right, and the plain answer."""
    answer = LLM(model).generate([PROMPT], params)[0].token_ids
    return LLM(model, drafter=ReferenceDrafter({tuple(PROMPT): answer}, VOCAB, hit), speculative=CHAIN), answer


@pytest.mark.parametrize("position", [1, 2, 3, 4, 6, 7])
def test_a_stop_token_inside_the_accepted_block(model: LoadedModel, position: int) -> None:
    llm, answer = oracle(model)
    stop = answer[position]
    first = answer.index(stop)
    output = llm.generate([PROMPT], LONG.updated({"stop_token_ids": (stop,)}))[0]
    assert (output.token_ids, output.finish_reason) == (answer[: first + 1], "stop")


def test_eos_as_the_second_of_five_drafts_leaves_nothing_after_it(model: LoadedModel) -> None:
    llm, answer = oracle(model)
    stop = answer[2]  # the first token comes from the prompt, so this is the second drafted one
    assert stop not in answer[:2]
    output = llm.generate([PROMPT], LONG.updated({"stop_token_ids": (stop,)}))[0]
    assert output.token_ids == answer[:3]
    assert len(output.records) == 1
    assert output.records[0].num_drafted == 5
    assert output.records[0].num_accepted == 5  # counted before the stop token cut the block


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 8, 13])
def test_max_tokens_inside_a_block(model: LoadedModel, count: int) -> None:
    llm, answer = oracle(model)
    output = llm.generate([PROMPT], LONG.updated({"max_tokens": count}))[0]
    assert (output.token_ids, output.finish_reason) == (answer[:count], "length")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("minimum", [0, 1, 2, 5, 9])
def test_min_tokens_masks_stop_tokens_like_plain_decoding(model: LoadedModel, minimum: int, temperature: float) -> None:
    free = SamplingParams(max_tokens=30, temperature=temperature, seed=3, ignore_eos=True)
    stops = tuple(set(LLM(model).generate([PROMPT], free)[0].token_ids[:6]))
    params = free.updated({"min_tokens": minimum, "stop_token_ids": stops})
    llm, answer = oracle(model, params)
    assert len(answer) >= max(1, minimum)
    assert not set(answer[:-1][: max(minimum - 1, 0)]) & set(stops)
    assert llm.generate([PROMPT], params)[0].token_ids == answer


def test_counts_are_of_what_was_really_drafted(model: LoadedModel) -> None:
    """Steps of shapes 0, 3 and 8 report 11 drafted tokens."""
    llm, _ = oracle(model)
    shapes = iter([TreeShape.off(), TreeShape(3, 1, 4), TreeShape(8, 1, 9)])

    class OneAfterTheOther(Static):
        def __init__(self) -> None:
            self.all = [TreeShape.off(), TreeShape(3, 1, 4), TreeShape(8, 1, 9)]

        def reachable(self) -> list[TreeShape]:
            return self.all

        def plan(self, state, root):  # type: ignore[no-untyped-def]
            return super().plan(state, root) + self.all.index(next(shapes))

    [running] = llm.submit(PROMPT, LONG, speculative=CHAIN)
    running.policy = OneAfterTheOther()
    for _ in range(4):  # the prompt first
        llm.step()
    summary = summarise(running.records)
    assert [r.num_drafted for r in running.records] == [0, 3, 8]
    assert (summary.drafted, summary.steps) == (11, 3)
    assert summary.accept_length == (summary.accepted + 3) / 3
    assert summary.acceptance_rate == summary.accepted / 11
    llm.abort(running)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streaming_gives_the_same_answer_in_pieces(model: LoadedModel, temperature: float) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=1)
    llm, _ = oracle(model, params, hit=0.6)
    whole = llm.generate([PROMPT], params)[0]
    chunks = list(llm.stream(PROMPT, params))
    assert [t for c in chunks for t in c.token_ids] == whole.token_ids
    assert "".join(c.text for c in chunks) == whole.text
    assert [c.output for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].output is not None
    assert chunks[-1].output.token_ids == whole.token_ids


def test_leaving_a_stream_early_frees_its_slot(model: LoadedModel) -> None:
    llm = LLM(model, max_running_requests=2)
    for _ in range(5):
        stream = llm.stream(PROMPT, LONG)
        next(stream)
        stream.close()
    assert sorted(llm.scheduler.free) == [0, 1]
    assert not llm.scheduler.running


def test_fifty_requests_half_aborted_leave_every_slot_free(model: LoadedModel, tmp_path: Path) -> None:
    llm = LLM(model, drafter=make_tiny_head(tmp_path), speculative=SpeculativeConfig(margin=None), max_running_requests=4)
    expected = LLM(model).generate([[7 + i] for i in range(50)], SamplingParams(max_tokens=6))
    requests = [r for i in range(50) for r in llm.submit([7 + i], SamplingParams(max_tokens=6))]
    steps = 0
    while any(r.finish_reason is None for r in requests):
        llm.step()
        steps += 1
        llm.abort(requests[(2 * steps) % 50])
    assert sorted(llm.scheduler.free) == [0, 1, 2, 3]
    done = [(r, e) for r, e in zip(requests, expected, strict=True) if r.finish_reason != "abort"]
    assert len(done) >= 20
    assert all(r.token_ids == e.token_ids for r, e in done)


def test_a_queue_of_short_requests_does_not_stop_the_others(model: LoadedModel) -> None:
    llm = LLM(model, max_running_requests=2)
    [long] = llm.submit(PROMPT, LONG)
    for i in range(20):
        llm.submit([7 + i], SamplingParams(max_tokens=1))
    for _ in range(20):
        llm.step()
    assert len(long.token_ids) >= 10


def test_the_context_ends_an_answer(model: LoadedModel) -> None:
    llm = LLM(model, context_length=20)
    output = llm.generate([PROMPT], LONG)[0]
    assert len(PROMPT) + len(output.token_ids) == 20
    assert output.finish_reason == "length"


def test_speculation_up_to_the_very_end_of_the_context(model: LoadedModel) -> None:
    answer = LLM(model, context_length=30).generate([PROMPT], LONG)[0].token_ids
    drafter = ReferenceDrafter({tuple(PROMPT): answer}, VOCAB, 1.0)
    output = LLM(model, drafter=drafter, speculative=CHAIN, context_length=30).generate([PROMPT], LONG)[0]
    assert output.token_ids == answer


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1, 128], "token id 128 is outside the model's vocabulary of 128"),
        ([3] * 40, "the prompt has 40 tokens; the context of 40 must hold it and at least one more"),
    ],
)
def test_prompts_that_do_not_fit_are_refused_before_any_work(model: LoadedModel, prompt: list[int], message: str) -> None:
    llm = LLM(model, context_length=40)
    with pytest.raises(UserError, match=message):
        llm.generate([PROMPT, prompt])
    assert not llm.scheduler.waiting
    assert not llm.scheduler.running


def test_refusals_of_settings(model: LoadedModel) -> None:
    llm = LLM(model)
    with pytest.raises(UserError, match="policy adaptive needs a drafter"):
        llm.generate([PROMPT], speculative=SpeculativeConfig())
    with pytest.raises(UserError, match="context_length 9999 is more than the model's 512"):
        LLM(model, context_length=9999)
    with pytest.raises(UserError, match="unknown setting 'max_running_request'; did you mean 'max_running_requests'"):
        LLM(model, max_running_request=2)
    with pytest.raises(UserError, match="2 prompts but 1 sampling settings"):
        llm.generate([PROMPT, PROMPT], [SamplingParams()])
    with pytest.raises(UserError, match="topk 1 is a chain"):
        LLM(model, drafter="none", speculative=SpeculativeConfig(policy="static", topk=1, num_draft_tokens=9))
    drafted = LLM(model, drafter=ReferenceDrafter({}, VOCAB), speculative=CHAIN)
    with pytest.raises(UserError, match="larger than this LLM has room for"):
        drafted.generate([PROMPT], speculative=SpeculativeConfig(policy="static", num_steps=7, topk=10, num_draft_tokens=65))


def test_streams_and_generate_share_an_engine(model: LoadedModel) -> None:
    params = SamplingParams(max_tokens=12)
    prompts = [[5, 9], [7], [8, 8, 8]]
    expected = [o.token_ids for o in LLM(model).generate(prompts, params)]
    for slots in (1, 3):
        llm = LLM(model, max_running_requests=slots)
        first, second = llm.stream(prompts[0], params), llm.stream(prompts[1], params)
        got: list[list[int]] = [[], []]
        got[0] += next(first).token_ids
        got[1] += next(second).token_ids
        assert llm.generate(prompts[2], params)[0].token_ids == expected[2]  # moves both streams on, perhaps to their ends
        for chunks, tokens in ((first, got[0]), (second, got[1])):
            for chunk in chunks:
                tokens += chunk.token_ids
        assert got == expected[:2]


def test_a_failed_prefill_leaves_the_engine_usable(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(model, max_running_requests=2)
    open_stream = llm.stream(PROMPT, LONG)
    tokens = next(open_stream).token_ids
    with monkeypatch.context() as patched:
        patched.setattr(llm.runner, "prefill", lambda request: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[7], [8], [9]])
    assert [r.prompt for r in llm.scheduler.running] == [PROMPT]
    assert len(llm.scheduler.free) == 1
    tokens += [t for chunk in open_stream for t in chunk.token_ids]
    assert tokens == LLM(model).generate([PROMPT], LONG)[0].token_ids
    assert sorted(llm.scheduler.free) == [0, 1]


def test_prompt_forms(model: LoadedModel) -> None:
    llm = LLM(model)
    params = SamplingParams(max_tokens=3)
    one = llm.generate([PROMPT], params)[0].token_ids
    assert llm.generate(PROMPT, params)[0].token_ids == one
    chat = [{"role": "user", "content": "hi"}]
    assert llm.generate(chat, params)[0].token_ids == llm.generate([chat], params)[0].token_ids
    for wrong in ([1.5, 2], [True, 2], [None]):
        with pytest.raises(UserError, match="a prompt is a text, a list of token ids"):
            llm.generate([wrong], params)  # type: ignore[list-item]
    with pytest.raises(UserError, match="not valid Unicode"):
        llm.generate("\udcff", params)


def test_a_drafter_object_serves_one_llm(model: LoadedModel, tmp_path: Path) -> None:
    from adaptivespec.drafters.eagle3 import Eagle3

    drafter = Eagle3(make_tiny_head(tmp_path), model.decoder)
    LLM(model, drafter=drafter)
    with pytest.raises(UserError, match="already serves another LLM"):
        LLM(model, drafter=drafter)


def test_a_missing_drafter_is_refused_before_weights_are_read(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaptivespec.engine.llm.load_model", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(UserError, match="no drafter 'nosuch'"):
        LLM(model_folder, drafter="nosuch")
    with pytest.raises(UserError, match="policy adaptive needs a drafter"):
        LLM(model_folder, speculative=SpeculativeConfig())
