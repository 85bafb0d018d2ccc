"""What a step takes, part by part, beside what its bytes would take at the memory's speed: one process, JSON at the end.

    python benchmarks/step.py --model qwen2.5-coder-0.5b

The floor of a part is its weights' bytes over the read bandwidth of this process, which a large dot product measures between the steps.
The linears are timed one after another in the order of a step, so that the weights before one have pushed its own out of the caches; what
a whole step takes longer is everything else. Nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from typing import Any

import torch

from adaptivespec import LLM
from adaptivespec.drafters.eagle3 import Eagle3
from adaptivespec.models.kv_cache import Block
from adaptivespec.models.linear import Linear

Times = dict[str, list[float]]


class Bench:
    """A model, a cache, and steps on it."""

    def __init__(self, llm: LLM, context: int) -> None:
        self.decoder, self.cache, self.context = llm.model.decoder, llm.runner.cache, context
        self.drafter = llm.drafter if isinstance(llm.drafter, Eagle3) else None
        self.stream = torch.ones(1 << 26)  # 256 MiB

    def read(self) -> float:
        """Bytes per second of a dot product of a large vector with itself."""
        began = time.perf_counter()
        torch.dot(self.stream, self.stream)
        return self.stream.nbytes / (time.perf_counter() - began)

    @torch.inference_mode()
    def step(self, rows: int) -> None:
        """Decoder, head and choice for so many new rows of one request."""
        decoder, context = self.decoder, self.context
        visible = torch.ones(1, rows, rows, dtype=torch.bool).tril() if rows > 1 else None
        block = Block([0], [context], [context], [rows], visible)
        hidden, _ = decoder.forward(torch.arange(rows) + 100, torch.arange(context, context + rows), self.cache, block)
        decoder.logits(hidden).max(-1)

    @torch.inference_mode()
    def linears(self, rows: int) -> dict[str, float]:
        """Seconds of the linears by part, one after another as a step runs them."""
        seconds: dict[str, float] = defaultdict(float)
        inputs: dict[int, torch.Tensor] = {}

        def run(name: str, linear: Linear) -> None:
            x = inputs.setdefault(linear.in_features, torch.ones(rows, linear.in_features, dtype=self.decoder.dtype))
            began = time.perf_counter()
            linear(x)
            seconds[name] += time.perf_counter() - began

        for layer in self.decoder.layers:
            attention, mlp = layer.attention, layer.mlp
            for name, linear in (("qkv", attention.qkv), ("out", attention.out), ("gate_up", mlp.gate_up), ("down", mlp.down)):
                run(name, linear)
        run("head", self.decoder.lm_head)
        return seconds

    @torch.inference_mode()
    def level(self, rows: int) -> None:
        """One level of drafting, on so many nodes of one request."""
        drafter, context = self.drafter, self.context
        assert drafter is not None
        visible = torch.eye(rows, dtype=torch.bool)[None] if rows > 1 else None
        block = Block([0], [context], [context], [rows], visible)
        hidden = torch.ones(rows, drafter.hidden_size, dtype=drafter.dtype)
        drafter._top(drafter._run(torch.arange(rows) + 100, hidden, torch.full((rows,), context), block), rows)


def weight_bytes(linears: dict[str, list[Linear]]) -> dict[str, int]:
    """Bytes by part."""
    return {name: sum(linear.num_bytes for linear in own) for name, own in linears.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", help="an EAGLE-3 head, none for none; default: the model's own")
    parser.add_argument("--rows", default="1,2,4,8,16,32")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--context", type=int, default=256, help="cached rows before the measured step")
    args = parser.parse_args()
    bench = Bench(LLM(args.model, drafter=args.drafter, dtype="bf16", max_running_requests=1), args.context)
    rows = [int(n) for n in args.rows.split(",")]
    decoder = bench.decoder
    linears = {
        "qkv": [layer.attention.qkv for layer in decoder.layers],
        "out": [layer.attention.out for layer in decoder.layers],
        "gate_up": [layer.mlp.gate_up for layer in decoder.layers],
        "down": [layer.mlp.down for layer in decoder.layers],
        "head": [decoder.lm_head],
    }
    steps: dict[int, list[float]] = {n: [] for n in rows}
    levels: dict[int, list[float]] = {n: [] for n in (1, 2, 4)} if bench.drafter is not None else {}
    parts: dict[int, Times] = {n: defaultdict(list) for n in rows}
    speeds = []
    for i in range(args.rounds + 2):
        for n in rows:
            speed, began = bench.read(), time.perf_counter()
            bench.step(n)
            taken = time.perf_counter() - began
            drafted = {}
            for m in levels:
                bench.step(1)  # pushes the head's weights out of the caches, as a verify does
                middle = time.perf_counter()
                bench.level(m)
                drafted[m] = time.perf_counter() - middle
            seconds = bench.linears(n)
            seconds["everything else"] = taken - sum(seconds.values())
            if i >= 2:
                speeds.append(speed)
                steps[n].append(taken)
                for m, value in drafted.items():
                    levels[m].append(value)
                for name, value in seconds.items():
                    parts[n][name].append(value)
    fastest = max(speeds)
    sizes = weight_bytes(linears)
    result: dict[str, Any] = {
        "model": args.model,
        "threads": torch.get_num_threads(),
        "read_gb_per_second": {"best": fastest / 1e9, "median": statistics.median(speeds) / 1e9},
        "step_megabytes": sum(sizes.values()) / 1e6,
        "step_floor_ms": 1000 * sum(sizes.values()) / fastest,
        "step_ms": {n: 1000 * statistics.median(values) for n, values in steps.items()},
        "step_best_ms": {n: 1000 * min(values) for n, values in steps.items()},
        "part_floor_ms": {name: 1000 * size / fastest for name, size in sizes.items()},
        "part_ms": {n: {name: 1000 * statistics.median(values) for name, values in own.items()} for n, own in parts.items()},
    }
    if bench.drafter is not None:
        d = bench.drafter
        size = sum(linear.num_bytes for linear in (d.attention.qkv, d.attention.out, d.mlp.gate_up, d.mlp.down, d.lm_head))
        result["level_floor_ms"] = 1000 * size / fastest
        result["level_ms"] = {n: 1000 * statistics.median(values) for n, values in levels.items()}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
