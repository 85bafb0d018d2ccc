"""How a training run went, as a picture. `python -m recipes.eagle3_head.plot`

Loss and held-out accuracy against the answer tokens seen, from train_log.jsonl; can be run while training does.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .config import Run, command


def read_log(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training rows and evaluation rows by step. A resumed run repeats the steps after its checkpoint: the later row counts."""
    losses: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a killed run
            continue
        (evaluations if "heldout" in row else losses)[row["step"]] = row
    return [losses[step] for step in sorted(losses)], [evaluations[step] for step in sorted(evaluations)]


def plot(log: Path, to: Path) -> Path:
    """Write the picture (PNG or SVG, by the name's ending)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    losses, evaluations = read_log(log)
    if not losses:
        raise SystemExit(f"{log}: no training steps yet")
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    tokens = [row["tokens_seen"] / 1e6 for row in losses]
    left.plot(tokens, [row["loss"] for row in losses], color="tab:gray")
    left.set(xlabel="answer tokens seen (millions)", ylabel="loss (all unroll steps)")
    seen = [row["tokens_seen"] / 1e6 for row in evaluations]
    for kind, style in zip(evaluations[0]["heldout"] if evaluations else [], ("-", "--", ":", "-."), strict=False):
        for step, colour in ((1, "tab:blue"), (3, "tab:orange"), (5, "tab:green")):
            accuracy = [row["heldout"][kind]["accuracy"][step - 1] for row in evaluations]
            right.plot(seen, accuracy, style, color=colour, marker=".", label=f"{kind}, step {step}")
    right.set(xlabel="answer tokens seen (millions)", ylabel="held-out top-1 accuracy", ylim=(0, 1))
    if evaluations:
        right.legend(fontsize="small", ncols=len(evaluations[0]["heldout"]))
    figure.savefig(to, dpi=120)
    plt.close(figure)
    return to


@command
def main() -> None:
    """Draw a run's log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/eagle3-smollm2-135m"), help="the run")
    parser.add_argument("--to", type=Path, help="the picture; default: training.png in the run's folder")
    args = parser.parse_args()
    print(plot(Run(args.out).log, args.to or args.out / "training.png"))


if __name__ == "__main__":
    main()
