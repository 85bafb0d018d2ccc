"""What a head was trained on, for its model card. `python -m recipes.eagle3_head.describe`

Counts of answers and tokens by kind of prompt and temperature, how answers ended, and how many held-out tokens the draft vocabulary holds.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from .answers import is_looping
from .config import AnswerConfig, Run, command, read_rows
from .store import Answer, chunk_files, read_answers
from .train import load_heldout


def describe_answers(answers: Iterable[Answer], kinds: Sequence[str], config: AnswerConfig, eos: set[int]) -> dict[str, Any]:
    """Counts over answers.

    Args:
        answers: the training answers.
        kinds: of each prompt.
        config: what they were made with.
        eos: ids that end an answer.
    """
    count, tokens, rows = 0, 0, 0
    by_kind: Counter[str] = Counter()
    by_temperature: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for answer in answers:
        own = answer.tokens[answer.prompt_length :].tolist()
        count, tokens, rows = count + 1, tokens + len(own), rows + len(answer.tokens)
        by_kind[kinds[answer.index]] += len(own)
        by_temperature[str(config.temperature(answer.index))] += 1
        ends["ended" if own[-1] in eos else "looped" if is_looping(own) else "cut"] += 1
    return {
        "answers": count,
        "answer_tokens": tokens,
        "tokens_with_prompts": rows,
        "answer_tokens_by_kind": dict(by_kind),
        "answers_by_temperature": dict(by_temperature),
        "ends": {end: round(number / max(count, 1), 3) for end, number in ends.items()},
    }


def coverage(heldout: dict[str, list[Answer]], vocabulary: torch.Tensor, vocab_size: int) -> dict[str, float]:
    """The share of held-out answer tokens that the draft vocabulary holds, by kind: no head can draft the others."""
    inside = torch.zeros(vocab_size, dtype=torch.bool)
    inside[vocabulary] = True
    return {
        kind: round(float(torch.cat([inside[a.tokens[a.prompt_length :].long()] for a in answers]).float().mean()), 4)
        for kind, answers in heldout.items()
    }


@command
def main() -> None:
    """Print the description as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/eagle3-smollm2-135m"), help="the run")
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    from adaptivespec.models.catalogue import resolve_model
    from adaptivespec.models.loading import open_checkpoint

    run = Run(args.out)
    target, _ = open_checkpoint(resolve_model(args.model).path)
    kinds = [row["kind"] for row in read_rows(run.prompts)]
    config = AnswerConfig(**json.loads((run.folder / "answers_config.json").read_text(encoding="utf-8")))
    out: dict[str, Any] = describe_answers(read_answers(chunk_files(run.answers)), kinds, config, set(target.eos_token_ids))
    if run.checkpoint.exists():
        state = torch.load(run.checkpoint, weights_only=True, mmap=True)
        out["coverage"] = coverage(load_heldout(run), state["vocabulary"], target.vocab_size)
        out["steps"], _, _, out["tokens_seen"] = state["counters"]
        out["passes"] = round(out["tokens_seen"] / max(out["answer_tokens"], 1), 2)
        out["training_seconds"] = round(state["seconds"])
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
