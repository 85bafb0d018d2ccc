"""With the margin off the plug-in answers as plain decoding does, though every decoding step drafts another shape."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from adaptivespec import LLM, SamplingParams, SpeculativeConfig
from bed_models import KNOWN, UNKNOWN, BedModels
from reference import Reference
from servers import ROTATION, Server

PROMPTS = KNOWN + UNKNOWN


@pytest.mark.parametrize("prompt", PROMPTS)
def test_alone(rotating: Server, plain: Reference, prompt: str) -> None:
    answer = rotating.generate(prompt)
    expected = plain.answer(prompt)
    plain.assert_same(prompt, answer["output_ids"], expected["output_ids"])
    assert len(answer["output_ids"]) == len(expected["output_ids"])
    said = answer["meta_info"]["adaptivespec"]
    assert said["rule"] == "strict"
    assert said["promoted"] == 0
    turns = [said["shapes"].get(shape, 0) for shape in ROTATION.split(";")]
    assert sum(turns) == said["verify_steps"]
    assert max(turns) - min(turns) <= 1  # a new shape at every step
    assert said["drafted"] == sum(steps * (int(shape.split(",")[2]) - 1) for shape, steps in said["shapes"].items())
    if prompt in KNOWN:  # otherwise nothing was proven
        assert said["accept_length"] > 1.8
        assert len(said["accepted_histogram"]) > 3


def test_ragged_batches_of_eight(rotating: Server, plain: Reference) -> None:
    prompts = PROMPTS + [prompt * 3 for prompt in PROMPTS]
    wishes = [{"max_new_tokens": 5 + 7 * i % 60} for i in range(len(prompts))]
    answers = rotating.generate_all(prompts, wishes)
    for prompt, wish, answer in zip(prompts, wishes, answers, strict=True):
        expected = plain.answer(prompt, **wish)["output_ids"]
        plain.assert_same(prompt, answer["output_ids"], expected)
        assert len(answer["output_ids"]) == len(expected) == wish["max_new_tokens"]


def test_joining_and_aborting(rotating: Server, plain: Reference) -> None:
    """Four long requests run; two of them are aborted and four more join."""
    started = [threading.Event() for _ in range(4)]

    def follow(i: int) -> dict[str, Any]:
        chunks = []
        for chunk in rotating.stream(PROMPTS[i], rid=f"long-{i}", max_new_tokens=200):
            chunks.append(chunk)
            started[i].set()
        return chunks[-1]

    with ThreadPoolExecutor(8) as pool:
        long = [pool.submit(follow, i) for i in range(4)]
        for event in started:
            assert event.wait(300)
        for i in (0, 2):
            rotating.post("/abort_request", {"rid": f"long-{i}"})
        joined = list(pool.map(lambda i: rotating.generate(PROMPTS[i], max_new_tokens=40), range(4, 8)))
        ends = [future.result() for future in long]
    reasons = [end["meta_info"]["finish_reason"]["type"] for end in ends]
    assert [reasons[1], reasons[3]] == ["length", "length"]
    assert "abort" in (reasons[0], reasons[2])
    for i, end in enumerate(ends):
        plain.assert_same(PROMPTS[i], end["output_ids"], plain.answer(PROMPTS[i], max_new_tokens=200)["output_ids"])
        assert end["output_ids"]
    for i, answer in enumerate(joined, start=4):
        plain.assert_same(PROMPTS[i], answer["output_ids"], plain.answer(PROMPTS[i], max_new_tokens=40)["output_ids"])
        assert len(answer["output_ids"]) == 40


def test_a_shared_prefix(rotating: Server, plain: Reference) -> None:
    """RadixAttention serves the second prompt's beginning from the cache."""
    long = "".join(KNOWN)
    rotating.generate(long)
    longer = long + " and on"
    answer = rotating.generate(longer)
    assert answer["meta_info"]["cached_tokens"] > len(long) // 2
    plain.assert_same(longer, answer["output_ids"], plain.answer(longer)["output_ids"])


SAMPLING = [(0.7, 1.0, 0), (1.0, 1.0, 0), (0.8, 0.9, 0), (1.2, 1.0, 5)]


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), SAMPLING)
def test_sampling_is_the_local_engines(rotating: Server, bed: BedModels, temperature: float, top_p: float, top_k: int) -> None:
    """Noise belongs to positions, so a seed gives the same answer here, with any shape and in any batch, and in plain local decoding."""
    local = LLM(
        str(bed.target), drafter="none", dtype="fp32", max_running_requests=8, speculative=SpeculativeConfig(policy="off", margin=None)
    )
    params = [
        SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=24, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]
    expected = [output.token_ids for output in local.generate(PROMPTS, params)]
    wishes = [
        {"temperature": temperature, "top_p": top_p, "top_k": top_k or -1, "sampling_seed": seed, "max_new_tokens": 24}
        for seed in range(len(PROMPTS))
    ]
    together = [answer["output_ids"] for answer in rotating.generate_all(PROMPTS, wishes)]
    assert together == expected
    assert rotating.generate(PROMPTS[0], **wishes[0])["output_ids"] == expected[0]
