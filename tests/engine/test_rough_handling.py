"""Interruptions at the worst moments, handles used in odd orders, and nonsense for every parameter: one clear line, nothing broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaptivespec import LLM, EngineConfig, SamplingParams, SpeculativeConfig
from adaptivespec.engine.request import Request
from adaptivespec.errors import UserError
from adaptivespec.models.loading import LoadedModel
from tiny_models import DRAFT_NOISE, make_tiny_model

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
PROMPTS = [[5, 9, 33], [77], [8, 8, 8]]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("draft"), noise=DRAFT_NOISE)


@pytest.mark.parametrize("where", ["draft", "emit", "compact", "commit", "before the end"])
def test_an_interrupted_step_gives_up_who_ran_in_it_and_nothing_else(
    model: LoadedModel, draft: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C in the middle of accepting nobody goes on from half-written state, and no slot is lost or given out twice."""
    llm = LLM(model, drafter=draft, speculative=SpeculativeConfig(margin=None), max_running_requests=2)
    expected = [o.token_ids for o in llm.generate(PROMPTS, PARAMS)]
    stream = llm.stream(PROMPTS[0], PARAMS)
    before = [next(stream), next(stream)]
    runner, cache, drafter = llm.runner, llm.runner.cache, llm.drafter

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    calls = []

    def second_time(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if where == "emit":
            original = Request.emit
            patched.setattr(Request, "emit", lambda self, *a: (original(self, *a), second_time() if self.records else None))
        elif where == "compact":
            patched.setattr(cache, "compact", interrupt)
        elif where == "draft":
            patched.setattr(drafter, "begin", interrupt)
        elif where == "commit":  # of the step in which the stream runs; a prompt commits too, in a slot of its own
            commit = drafter.commit
            patched.setattr(drafter, "commit", lambda slots, *rest: interrupt() if 0 in slots else commit(slots, *rest))
        else:
            step = runner.step
            patched.setattr(runner, "step", lambda requests: (step(requests), interrupt()))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[1:], PARAMS)
    assert llm.scheduler.free == [0, 1]
    assert not llm.scheduler.waiting
    rest = list(stream)
    assert rest[-1].output is not None
    said = [t for chunk in [*before, *rest] for t in chunk.token_ids]
    assert said == expected[0][: len(said)]
    assert rest[-1].output.finish_reason == "abort"
    assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == expected


def test_a_callback_that_fails_costs_nothing(model: LoadedModel) -> None:
    llm = LLM(model, max_running_requests=2)
    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS, PARAMS, on_finish=lambda output: 1 / 0)
    assert llm.scheduler.free == [0, 1]
    assert not llm.scheduler.waiting
    assert len(llm.generate(PROMPTS, PARAMS)) == 3


def test_a_running_request_has_no_output_yet(model: LoadedModel) -> None:
    llm = LLM(model)
    [request] = llm.submit(PROMPTS[0], PARAMS)
    for _ in range(3):
        llm.step()
        with pytest.raises(UserError, match="still running"):
            llm.output(request)
    llm.abort(request)
    output = llm.output(request)
    assert (output.finish_reason, len(output.token_ids)) == ("abort", 3)
    llm.abort(request)
    assert llm.output(request) == output
    request.token_ids.append(7)
    assert len(output.token_ids) == 3


def test_a_refused_engine_leaves_an_old_trace_alone(model: LoadedModel, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("precious\n")
    with pytest.raises(UserError, match="context_length"):
        LLM(model, trace=trace, context_length=9999)
    assert trace.read_text() == "precious\n"
    LLM(model, trace=trace)
    assert "precious" not in trace.read_text()
    for wrong in (tmp_path, tmp_path / "nowhere" / "t.jsonl", "\0"):
        with pytest.raises(UserError, match="cannot write the trace"):
            LLM(model, trace=wrong)


MESSAGE = {"role": "user", "content": "hi"}
NOT_PROMPTS: list[Any] = [
    None, 5, object(), b"abc", bytearray(b"abc"), [b"abc"], [None], ["a", 5], [[5], 5], [[5.0]], [[True]], {}, MESSAGE, {5, 6}, iter([5]),
    np.array([5, 6]), torch.tensor([5, 6]), [MESSAGE, 5], [[{"role": "user"}]], "\udcff",
]  # fmt: skip


@pytest.mark.parametrize("prompt", NOT_PROMPTS, ids=lambda p: f"{type(p).__name__}-{str(p)[:20]!a}")
def test_what_is_no_prompt_is_refused(model: LoadedModel, prompt: Any) -> None:
    llm = LLM(model)
    for call in (llm.generate, lambda p, s: next(llm.stream(p, s)), llm.submit, llm.chat):
        with pytest.raises(UserError) as error:
            call(prompt, PARAMS)
        assert "\n" not in str(error.value)
    assert not llm.scheduler.waiting


@pytest.mark.parametrize("params", [{}, {"max_tokens": 3}, "x", 5, 0, True, False, SpeculativeConfig(), iter([])], ids=str)
def test_what_are_no_params_is_refused(model: LoadedModel, params: Any) -> None:
    llm = LLM(model)
    for call in (llm.generate, llm.stream, llm.submit):
        with pytest.raises(UserError, match="expected SamplingParams"):
            call(PROMPTS[0], params)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafter": 5}, "drafter: expected a name"),
        ({"drafter": b"x"}, "drafter: expected a name"),
        ({"dtype": "bf16"}, "this model is loaded already, in float32"),
        ({"dtype": "junk"}, "unknown dtype"),
        ({"prompt_lookup_max": 7}, "prompt_lookup_max has no effect"),
        ({"aux_layers": "output"}, "aux_layers output has no effect"),
        ({"speculative_algorithm": "EAGLE"}, "EAGLE3"),
        ({"speculative": 5}, "speculative: expected settings"),
        ({"speculative": {1: 2}}, "the name of a setting is text"),
        ({"speculative": {"low": (1, 1, 2), "high": (10**7, 1, 10**7 + 1)}}, "high"),
        ({"shapes_for": [{"margn": 1}]}, "did you mean 'margin'"),
        ({"max_running_requests": 10**6}, "max_running_requests"),
        ({"max_running_requests": 10**5000}, "max_running_requests"),
    ],
)
def test_nonsense_for_the_engine(model: LoadedModel, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        LLM(model, **settings)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (SamplingParams, {"temperature": np.zeros((2, 2))}),
        (SamplingParams, {"temperature": torch.zeros(30, 30)}),
        (SamplingParams, {"seed": 10**5000}),
        (SamplingParams, {"max_tokens": b"5"}),
        (SamplingParams, {"stop": [b"x"]}),
        (SamplingParams, {"stop": True}),
        (SamplingParams, {"stop_token_ids": [True]}),
        (SamplingParams, {"repetition_penalty": 1e-320}),
        (SpeculativeConfig, {"margin": float("nan")}),
        (EngineConfig, {"dtype": 5}),
    ],
)
def test_nonsense_for_settings(kind: Any, values: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        kind(**values)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300
