"""Stage 4: how good is an exported head? `python -m recipes.eagle3_head.evaluate --head src/adaptivespec/heads/smollm2-135m`

Reads only the exported files and the held-out answers, with a forward pass of its own, written from the description of the public
layout and sharing nothing with training: a mistake in the export (a forgotten scale, wrong offsets, other feature rows) shows up as a
difference from the accuracy that training logged. Prints top-1 accuracy at unroll steps 1..7 and the accept length of strict chains.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from .config import Run, command, write_atomic
from .metrics import ChainAccuracy
from .store import Answer
from .train import load_heldout


def stretched(frequencies: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's: low frequencies divided by `factor`, high ones kept, a linear blend between the two bounds."""
    turns = frequencies * scaling["original_max_position_embeddings"] / (2 * torch.pi)  # rotations within the original context
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling["factor"])


class ExportedHead:
    """A head in the public EAGLE-3 layout, evaluated one answer at a time in plain torch.

    Args:
        folder: holds config.json and model.safetensors.
        embedding: [V, H] of the target.
        dtype: to compute in.
    """

    def __init__(self, folder: Path, embedding: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        raw = load_file(folder / "model.safetensors")
        self.target_ids = torch.arange(len(raw["d2t"])) + raw["d2t"]
        if raw["t2d"].nonzero()[:, 0].tolist() != self.target_ids.tolist():
            raise SystemExit("d2t and t2d disagree")
        self.tensors = {name: value.to(dtype) for name, value in raw.items() if name not in ("d2t", "t2d")}
        self.embedding, self.dtype = embedding.to(dtype), dtype
        dim = self.config["head_dim"]
        frequencies = self.config["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        if scaling := self.config.get("rope_scaling"):
            frequencies = stretched(frequencies, scaling)
        angles = torch.outer(torch.arange(self.config["max_position_embeddings"], dtype=torch.float32), frequencies)
        self.cos, self.sin = angles.cos(), angles.sin()

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return wide.to(self.dtype) * self.tensors[name]

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [n, heads, dim], half-rotation layout."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(self.dtype)

    @torch.no_grad()
    def correct(self, answer: Answer, steps: int) -> torch.Tensor:
        """bool [A, steps]: whether drafting from answer row j, along the answer's own tokens, has step i right."""
        t, c = self.tensors, self.config
        heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        tokens = answer.tokens.long()
        first, count = answer.prompt_length - 1, len(answer.hidden)
        # Step 1: row r pairs feature r with the embedding of token r + 1 and predicts token r + 2.
        num_rows = first + count
        state = answer.features[:num_rows].to(self.dtype) @ t["fc.weight"].T
        positions = torch.arange(num_rows)
        starts = torch.arange(count)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        masks: list[torch.Tensor] = []
        out = torch.zeros(count, steps, dtype=torch.bool)
        for step in range(steps):
            if step:
                positions = (first + starts + step).clamp(max=len(tokens) - 3)
            embed = self.embedding[tokens[positions + 1]]
            x = torch.cat([self._norm(embed, "midlayer.input_layernorm.weight"), self._norm(state, "midlayer.hidden_norm.weight")], -1)
            attention = "midlayer.self_attn."
            k = self._rotate((x @ t[attention + "k_proj.weight"].T).view(-1, kv, dim), positions)
            v = (x @ t[attention + "v_proj.weight"].T).view(-1, kv, dim)
            keys.append(k.repeat_interleave(heads // kv, 1))
            values.append(v.repeat_interleave(heads // kv, 1))
            if step == 0:  # every start sees the rows up to its own
                masks.append(torch.arange(num_rows)[None] <= (first + starts)[:, None])
                x, state, positions = x[first:], state[first:], positions[first:]
            else:  # and of its own draft what came before
                masks.append(torch.eye(count, dtype=torch.bool))
            q = self._rotate((x @ t[attention + "q_proj.weight"].T).view(-1, heads, dim), positions)
            scores = torch.einsum("qhd,khd->hqk", q.float(), torch.cat(keys).float()) / dim**0.5
            scores = scores.masked_fill(~torch.cat(masks, 1), float("-inf"))
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), torch.cat(values).float()).flatten(1).to(self.dtype)
            state = state + mixed @ t[attention + "o_proj.weight"].T
            y = self._norm(state, "midlayer.post_attention_layernorm.weight")
            gate = torch.nn.functional.silu(y @ t["midlayer.mlp.gate_proj.weight"].T)
            state = state + (gate * (y @ t["midlayer.mlp.up_proj.weight"].T)) @ t["midlayer.mlp.down_proj.weight"].T
            logits = self._norm(state, "norm.weight") @ t["lm_head.weight"].T
            guess = self.target_ids[logits.max(-1)[1]]
            real = count - step
            if real > 0:
                out[:real, step] = guess[:real] == tokens[first + 2 + step : first + 2 + step + real]
        return out

    def evaluate(self, answers: list[Answer], steps: int = 7, on_answer: Callable[[], None] = lambda: None) -> ChainAccuracy:
        """Accuracy and accept length over answers."""
        metrics = ChainAccuracy(steps)
        for answer in answers:
            metrics.add(self.correct(answer, steps))
            on_answer()
        return metrics


@command
def main() -> None:
    """Evaluate a head on a run's held-out answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/eagle3-smollm2-135m"), help="the run whose held-out answers are used")
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from adaptivespec.models.catalogue import resolve_model
    from adaptivespec.models.loading import choose_dtype, open_checkpoint

    dtype = choose_dtype(args.dtype, torch.device("cpu"))
    weights = open_checkpoint(resolve_model(args.model).path)[1]
    head = ExportedHead(args.head, weights.load("model.embed_tokens.weight", dtype), dtype)
    heldout = load_heldout(Run(args.out))
    result: dict[str, object] = {}
    table = Table("held out", *(f"step {i}" for i in range(1, 8)), "chain 3", "chain 5", "chain 7")
    heldout["all"] = [answer for answers in heldout.values() for answer in answers]
    for kind, answers in heldout.items():
        metrics = head.evaluate(list(track(answers, description=kind, transient=True)))
        result[kind] = metrics.summary()
        lengths = metrics.accept_length.values()
        table.add_row(f"{kind} ({len(answers)})", *(f"{x:.3f}" for x in metrics.accuracy), *(f"{x:.2f}" for x in lengths))
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    write_atomic(args.out / "evaluation.json", json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
