"""The decoder against transformers, and what verifying costs: one process, interleaved, JSON at the end.

    python benchmarks/decoder.py --model smollm2-135m

Prints plain decoding in tokens/s for this engine and for transformers' `generate` on the same weights, and the time of one target
step for 1 to 64 new rows. Not part of the tests: nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from adaptivespec import LLM, SamplingParams
from adaptivespec.engine.transformers_model import as_transformers
from adaptivespec.evaluation.prompts import load_prompts
from adaptivespec.models.kv_cache import Block


def median_ms(run: Callable[[], Any], count: int) -> float:
    """Median milliseconds of `count` runs after three warm ones."""
    times = []
    for i in range(count + 3):
        began = time.perf_counter()
        run()
        if i >= 3:
            times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


def verify_cost(llm: LLM, context: int, rows: list[int], rounds: int) -> dict[int, float]:
    """Median ms of one target step (decoder, head and choice) for so many new rows, interleaved."""
    decoder, cache, device = llm.model.decoder, llm.runner.cache, llm.model.decoder.device
    times: dict[int, list[float]] = {n: [] for n in rows}

    @torch.inference_mode()
    def step(n: int) -> None:
        visible = torch.ones(1, n, n, dtype=torch.bool).tril() if n > 1 else None
        block = Block([0], [context], [context], [n], visible)
        tokens, positions = torch.arange(n, device=device) + 100, torch.arange(context, context + n, device=device)
        hidden, _ = decoder.forward(tokens, positions, cache, block, aux_layers=decoder.config.aux_layers if n > 1 else ())
        decoder.logits(hidden).max(-1)

    for i in range(rounds + 3):
        for n in rows:
            began = time.perf_counter()
            step(n)
            if i >= 3:
                times[n].append(time.perf_counter() - began)
    return {n: 1000 * statistics.median(values) for n, values in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--context", type=int, default=256, help="cached rows before the measured step")
    args = parser.parse_args()
    llm = LLM(args.model, drafter="none", dtype=args.dtype, max_running_requests=1)
    theirs = as_transformers(llm.model.decoder)
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    ours_tokens = ours_seconds = theirs_tokens = theirs_seconds = 0.0
    agree = 0
    prompts = [llm.encode(p.messages) for p in load_prompts(limit=args.prompts)]
    llm.generate([prompts[0]], params.updated({"max_tokens": 8}))
    theirs.generate(torch.tensor([prompts[0]]), max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    for prompt in prompts:
        began = time.perf_counter()
        output = llm.generate([prompt], params)[0]
        middle = time.perf_counter()
        answer = theirs.generate(torch.tensor([prompt]), max_new_tokens=args.max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        theirs_seconds += time.perf_counter() - middle
        ours_seconds += middle - began
        ours_tokens += len(output.token_ids)
        theirs_tokens += answer.shape[1] - len(prompt)
        agree += output.token_ids == answer[0, len(prompt) :].tolist()
    rows = verify_cost(llm, args.context, [1, 2, 4, 8, 16, 32, 64], args.rounds)
    result = {
        "model": args.model,
        "dtype": str(llm.model.decoder.dtype),
        "threads": torch.get_num_threads(),
        "plain_tokens_per_second": ours_tokens / ours_seconds,
        "transformers_tokens_per_second": theirs_tokens / theirs_seconds,
        "ratio": (ours_tokens / ours_seconds) / (theirs_tokens / theirs_seconds),
        "identical_answers": f"{agree} of {len(prompts)}",
        "step_ms_by_rows": rows,
        "step_relative_to_one_row": {n: ms / rows[1] for n, ms in rows.items()},
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
