"""The policy that plans as SGLang's plug-in must, in the local engine."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch

from adaptivespec import LLM, SamplingParams, SpeculativeConfig
from adaptivespec.method.policy import Adaptive, Root
from adaptivespec.models.loading import load_model
from tiny_models import DRAFT_NOISE, make_tiny_model

PROMPTS = ["Tell me why.", "the sea", "0123456789", "def f(x):", "A"]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "shared_shape.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_llm(folder: Path, batch: int) -> LLM:
    target = make_tiny_model("llama", folder / "target")
    drafter = make_tiny_model("llama", folder / "drafter", noise=DRAFT_NOISE)
    return LLM(load_model(target, "fp32"), drafter=drafter, max_running_requests=batch)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return make_llm(tmp_path_factory.mktemp("alone"), 1)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return make_llm(tmp_path_factory.mktemp("three"), 3)


@pytest.mark.parametrize("margin", [None, 0.2])
@pytest.mark.parametrize("aggregate", [None, "mean", "min", "max"])
def test_alone_and_current_it_is_the_plain_policy(benchmark: ModuleType, alone: LLM, aggregate: str | None, margin: float | None) -> None:
    prompts = [alone.encode(text) for text in PROMPTS]
    plain = alone.generate(prompts, PARAMS, speculative=SpeculativeConfig(margin=margin))
    wrapped = benchmark.answer(alone, prompts, PARAMS, margin, benchmark.SharedShape(Adaptive(), aggregate))
    for ours, theirs in zip(wrapped, plain, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert [r.shape for r in ours.records] == [r.shape for r in theirs.records]
    assert len({record.shape for request in wrapped for record in request.records}) > 3


def test_lagged_shapes_are_those_of_the_step_before(benchmark: ModuleType, alone: LLM) -> None:
    """Two cautious steps, then the shape of the step before's confidence and acceptance ratio."""
    policy = Adaptive()
    [request] = benchmark.answer(alone, [alone.encode(PROMPTS[0])], PARAMS, None, benchmark.SharedShape(policy, None, True))
    shapes, records = policy.reachable(), request.records
    assert [record.shape for record in records[:2]] == [shapes[0]] * 2
    for before, record in pairwise(records[1:]):
        state = policy.initial(1)
        state.rar[0] = before.rar
        root = Root(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[before.confidence]]).log())
        assert record.shape == shapes[int(policy.plan(state, root))]


@pytest.mark.parametrize("lagged", [False, True])
@pytest.mark.parametrize("aggregate", ["mean", "min", "max"])
def test_a_batch_shares_its_shape_and_strict_text_stays(benchmark: ModuleType, three: LLM, aggregate: str, lagged: bool) -> None:
    prompts = [three.encode(text) for text in PROMPTS[:3]]
    plain = three.generate(prompts, PARAMS, speculative=False)
    requests = benchmark.answer(three, prompts, PARAMS, None, benchmark.SharedShape(Adaptive(), aggregate, lagged))
    assert [request.token_ids for request in requests] == [output.token_ids for output in plain]
    shortest = min(len(request.records) for request in requests)
    for step in range(shortest):  # all three were admitted before the first step
        assert len({request.records[step].shape for request in requests}) == 1


def test_its_lines_compare_with_the_first(benchmark: ModuleType, three: LLM) -> None:
    prompts = [three.encode(text) for text in PROMPTS]
    arms = benchmark.arms()
    assert len({arm.label for arm in arms}) == len(arms) == 9
    base = benchmark.answer(three, prompts, PARAMS, None, arms[0].policy)
    row = benchmark.described(arms[0].label, None, base, base)
    assert (row["ratio"], row["interval"], row["same_text"]) == (1.0, [1.0, 1.0], len(PROMPTS))
    static = benchmark.answer(three, prompts, PARAMS, None, arms[-1].policy)
    assert benchmark.described("static", None, static, base)["drafted_per_step"] == 3.0
    assert "| strict | static |" in benchmark.table([benchmark.described("static", None, static, base)])
