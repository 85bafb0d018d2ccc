"""A real model, where its files are: SGLang with the plug-in and the local engine draft, accept and answer alike.

ADAPTIVESPEC_TEST_QWEN names a Qwen2.5-Coder-0.5B-Instruct GGUF file (or a folder), ADAPTIVESPEC_TEST_QWEN_HEAD the folder of an EAGLE-3
head for it. Takes minutes and 8 GB of memory.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from adaptivespec import LLM, SamplingParams, SpeculativeConfig
from adaptivespec.engine.transformers_model import as_transformers
from adaptivespec.telemetry.stats import summarise
from servers import Server

MODEL, HEAD = (os.environ.get(name, "") for name in ("ADAPTIVESPEC_TEST_QWEN", "ADAPTIVESPEC_TEST_QWEN_HEAD"))
pytestmark = [
    pytest.mark.skipif(not (MODEL and HEAD), reason="ADAPTIVESPEC_TEST_QWEN and ADAPTIVESPEC_TEST_QWEN_HEAD name no files"),
    pytest.mark.timeout(3600),
]

QUESTIONS = [
    "Write a Python function that adds two numbers.",
    "A hen lays 2 eggs a day. How many does it lay in a week?",
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
]
TOKENS = 40
SHAPES = ((3, 1, 4), (3, 4, 8))
CLOSE = 0.05
"""How far the two accept lengths may lie apart: from the third level of a tree on, SGLang's drafter sees the keys of its place in the beam
instead of its parent's."""


def static(shape: tuple[int, int, int]) -> SpeculativeConfig:
    steps, topk, nodes = shape
    return SpeculativeConfig(policy="static", num_steps=steps, topk=topk, num_draft_tokens=nodes, margin=None)


def save_target(llm: LLM, folder: Path) -> None:
    """The target as a folder of safetensors, which SGLang can load on a CPU where it cannot load GGUF."""
    as_transformers(llm.model.decoder).save_pretrained(folder)
    llm.tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": llm.model.config.rope_theta}  # the model had it in its tensors
    (folder / "config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class Local:
    """What the local engine did: prompts, the target for SGLang, and by shape the answers' tokens and the accept length."""

    prompts: list[list[int]]
    target: Path
    answers: dict[tuple[int, int, int], list[list[int]]]
    accept_length: dict[tuple[int, int, int], float]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Local:
    """The local engine's part, done and out of memory."""
    folder = tmp_path_factory.mktemp("qwen")
    shapes_for = [static(shape) for shape in SHAPES]
    llm = LLM(MODEL, drafter=HEAD, dtype="fp32", shapes_for=shapes_for, max_running_requests=1, context_length=512)
    prompts = [llm.encode([{"role": "user", "content": question}]) for question in QUESTIONS]
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    outputs = {shape: llm.generate(prompts, params, speculative=static(shape)) for shape in SHAPES}
    save_target(llm, folder / "target")
    return Local(
        prompts,
        folder / "target",
        {shape: [output.token_ids for output in found] for shape, found in outputs.items()},
        {shape: summarise(r for output in found for r in output.records).accept_length for shape, found in outputs.items()},
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_as_the_local_engine(local: Local, logs: Path, shape: tuple[int, int, int], capsys: pytest.CaptureFixture[str]) -> None:
    with Server(
        logs / "qwen.log",
        static(shape).model_dump(mode="json", exclude_unset=True),
        model_path=local.target,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=HEAD,
        context_length=512,
        max_total_tokens=2048,
        max_running_requests=2,
    ) as server:
        answers = [server.generate(prompt, max_new_tokens=TOKENS) for prompt in local.prompts]
    said = [answer["meta_info"]["adaptivespec"] for answer in answers]
    theirs = 1 + sum(s["accepted"] for s in said) / sum(s["verify_steps"] for s in said)
    with capsys.disabled():
        print(f" [{shape}: accept length {theirs:.3f} in SGLang, {local.accept_length[shape]:.3f} in the local engine]", end="")
    assert [answer["output_ids"] for answer in answers] == local.answers[shape]
    assert theirs == pytest.approx(local.accept_length[shape], rel=CLOSE)
    assert theirs > 1.3
