"""Our bf16 linear beside oneDNN's, on the shapes of a model's step: one process, interleaved, JSON at the end.

    python benchmarks/linear.py                 # the linears of Qwen2.5-Coder-0.5B, random weights; a minute, 4 GB
    python benchmarks/linear.py --rows 1,4,16

Every weight of the model is read in turn, so that none is still in the caches from the call before. Nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

from adaptivespec.models.linear import can_prepack
from adaptivespec.models.native import ops
from adaptivespec.models.native.build import library

SHAPES = {"q, k, v": (1152, 896, 24), "attention's output": (896, 896, 24), "gate and up": (9728, 896, 24), "down": (896, 4864, 24)}
SHAPES |= {"head": (151936, 896, 1)}
"""Outputs, inputs, how many of them."""


def main() -> None:
    """Print milliseconds per step, ours and oneDNN's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,4,6,8,12,16,32,128")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if library() is None or not can_prepack():
        sys.exit("error: this CPU, torch or compiler runs only one of the two")
    mkldnn = torch.ops.mkldnn
    ours, theirs, num_bytes = {}, {}, 0
    for name, (out, inner, count) in SHAPES.items():
        weights = [torch.randn(out, inner).mul_(0.02).bfloat16() for _ in range(count)]
        ours[name] = [ops.pack(weight) for weight in weights]
        theirs[name] = [mkldnn._reorder_linear_weight(weight, 1) for weight in weights]
        num_bytes += sum(weight.numel() * 2 for weight in weights)
    found = {}
    for rows in map(int, args.rows.split(",")):
        x = {inner: torch.randn(rows, inner).bfloat16() for _, inner, _ in SHAPES.values()}

        def pass_over(name: str, run: Callable[..., object], packed: dict[str, list[torch.Tensor]], x: torch.Tensor) -> float:
            began = time.perf_counter()
            for weight in packed[name]:
                run(x, weight)
            return 1e3 * (time.perf_counter() - began)

        times: dict[str, list[tuple[float, float]]] = {name: [] for name in SHAPES}
        for _ in range(args.rounds):
            for name, (out, inner, _) in SHAPES.items():
                first = pass_over(name, lambda x, w, out=out: ops.linear(x, w, out, None, None), ours, x[inner])
                second = pass_over(name, lambda x, w: mkldnn._linear_pointwise(x, w, None, "none", [], ""), theirs, x[inner])
                times[name].append((first, second))
        parts = {name: [round(statistics.median(each), 2) for each in zip(*pairs, strict=True)] for name, pairs in times.items()}
        totals = [[sum(pairs[i][k] for pairs in times.values()) for i in range(args.rounds)] for k in (0, 1)]
        mine, other = (statistics.median(total) for total in totals)
        ratio = statistics.median(b / a for a, b in zip(*totals, strict=True))
        print(f"{rows:4d} rows: ours {mine:6.1f} ms, oneDNN {other:6.1f} ms, {ratio:.2f} times as fast", flush=True)
        found[rows] = {"ours": round(mine, 2), "onednn": round(other, 2), "ratio": round(ratio, 3), "parts": parts}
    print(json.dumps({"megabytes": num_bytes / 1e6, "threads": torch.get_num_threads(), "torch": torch.__version__, "rows": found}))


if __name__ == "__main__":
    main()
