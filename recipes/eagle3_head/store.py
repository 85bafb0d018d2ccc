"""Chunks of answered prompts on disk: tokens, the features the head sees, and the hidden states its targets come from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


@dataclass
class Answer:
    """One prompt with the target's answer; n tokens, p of them the prompt's.

    Attributes:
        index: line of the prompt file.
        tokens: [n] int32.
        prompt_length: p.
        features: [n - 1, 3H], the target's features at every token but the last (which it was never fed).
        hidden: [n - 1 - p, H], its normed final states at positions p .. n - 2, which predict tokens p + 1 .. n - 1.
    """

    index: int
    tokens: torch.Tensor
    prompt_length: int
    features: torch.Tensor
    hidden: torch.Tensor

    @property
    def num_answer_tokens(self) -> int:
        """n - p."""
        return len(self.tokens) - self.prompt_length


def chunk_files(folder: Path) -> list[Path]:
    """Finished chunks in the order they were written."""
    return sorted(folder.glob("chunk-*.safetensors"))


def chunk_bytes(folder: Path) -> int:
    """What the finished chunks occupy on disk."""
    return sum(path.stat().st_size for path in chunk_files(folder))


def write_chunk(folder: Path, answers: list[Answer], shard: int = 0) -> Path:
    """Append a chunk; shards are written by different processes and number their chunks apart.

    It appears under its name only when complete, so a kill leaves at worst a *.partial file behind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(folder.glob(f"chunk-*-{shard}.safetensors"))
    number = int(files[-1].stem.split("-")[1]) + 1 if files else 0
    path = folder / f"chunk-{number:05d}-{shard}.safetensors"
    tensors = {
        "index": torch.tensor([a.index for a in answers], dtype=torch.int32),
        "length": torch.tensor([len(a.tokens) for a in answers], dtype=torch.int32),
        "prompt_length": torch.tensor([a.prompt_length for a in answers], dtype=torch.int32),
        "tokens": torch.cat([a.tokens.int() for a in answers]),
        "features": torch.cat([a.features for a in answers]),
        "hidden": torch.cat([a.hidden for a in answers]),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    os.replace(partial, path)
    return path


def answered(folder: Path) -> dict[int, int]:
    """Prompt index -> answer tokens, of everything in the folder; reads no features."""
    out: dict[int, int] = {}
    for path in chunk_files(folder):
        with safe_open(path, "pt") as f:
            counts = f.get_tensor("length") - f.get_tensor("prompt_length")
            out.update(zip(f.get_tensor("index").tolist(), counts.tolist(), strict=True))
    return out


_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "I32": torch.int32}


def _map_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file as views of a memory map: a pass over more data than there is memory still works."""
    with path.open("rb") as f:
        size = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(size))
    data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    out = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            out[name] = data[begin:end].view(_DTYPES[entry["dtype"]]).view(entry["shape"])
    return out


def read_chunk(path: Path) -> list[Answer]:
    """All answers of a chunk; features and states are read when they are used."""
    tensors = _map_tensors(path)
    answers = []
    token = row = state = 0
    triples = zip(tensors["index"].tolist(), tensors["length"].tolist(), tensors["prompt_length"].tolist(), strict=True)
    for index, n, p in triples:
        answers.append(
            Answer(
                index,
                tensors["tokens"][token : token + n],
                p,
                tensors["features"][row : row + n - 1],
                tensors["hidden"][state : state + n - 1 - p],
            )
        )
        token, row, state = token + n, row + n - 1, state + n - 1 - p
    return answers


def read_answers(files: list[Path]) -> Iterator[Answer]:
    """All answers of several chunks."""
    for path in files:
        yield from read_chunk(path)
