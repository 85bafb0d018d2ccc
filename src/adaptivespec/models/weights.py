"""Checkpoint tensors by their Hugging Face names, one at a time, so that a decoder can convert and free as it goes."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..errors import UserError
from .raw_read import read_elements

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_INDEX = "model.safetensors.index.json"


class Weights(Protocol):
    """Where a decoder finds its tensors."""

    def names(self) -> frozenset[str]:
        """All tensor names, e.g. `model.layers.0.self_attn.q_proj.weight`."""
        ...

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A fresh contiguous CPU tensor that the caller owns. Raises UserError when there is no such tensor."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape `load` will return, without reading the tensor. Raises UserError when there is no such tensor."""
        ...


@dataclass(frozen=True)
class _Entry:
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # from the start of the file


class SafetensorsWeights:
    """The safetensors of a folder: one file, shards listed by an index, or shards without one.

    Reads with plain file reads instead of a memory map: mapped pages would count as this process's memory beside the copies.
    Raises UserError for a folder without safetensors and for files that are cut short or no safetensors.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._entries: dict[str, _Entry] = {}
        for file in _files(self.folder):
            self._entries.update(_header(file))

    def names(self) -> frozenset[str]:
        """All tensor names of all shards."""
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        return self._entry(name).shape

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor converted to `dtype`, in a tensor of its own."""
        entry = self._entry(name)
        out = torch.empty(entry.shape, dtype=dtype)
        try:
            with entry.file.open("rb", buffering=0) as file:
                read_elements(file, entry.offset, entry.dtype, out)
        except (OSError, EOFError) as error:
            raise UserError(f"cannot read tensor {name} from {entry.file}: {error}") from None
        return out

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise UserError(f"tensor {name} is missing from {self.folder}")
        return self._entries[name]


def listed_shards(index: Path) -> list[Path]:
    """The files that an index of weights lists, all in its folder. Raises UserError for another kind of file and for absent shards."""
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{index} is not an index of weights (no weight_map)") from None
    files = [index.parent / str(shard) for shard in shards]
    if absent := [file for file in files if not file.is_file()]:
        raise UserError(f"{index} lists {absent[0].name}, which is not in the folder: the checkpoint is incomplete")
    return files


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        return listed_shards(index)
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"no *.safetensors in {folder}: AdaptiveSpec reads safetensors folders and .gguf files")
    return files


def _header(file: Path) -> dict[str, _Entry]:
    """The tensors a file declares, checked against its size before anything is loaded."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size - 8:
                raise UserError(f"{file} is cut short or is no safetensors file: its header does not fit in its {size} bytes")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        return {name: _parse_entry(file, name, info, 8 + length, size) for name, info in header.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file} is no safetensors file: its header cannot be read") from None


def _parse_entry(file: Path, name: str, info: dict[str, Any], start: int, size: int) -> _Entry:
    if info["dtype"] not in _DTYPES:
        raise UserError(f"tensor {name} in {file} has type {info['dtype']}; supported: {', '.join(_DTYPES)}")
    dtype, shape = _DTYPES[info["dtype"]], tuple(int(n) for n in info["shape"])
    begin, end = (int(n) for n in info["data_offsets"])
    if end - begin != math.prod(shape) * dtype.itemsize or begin < 0:
        raise UserError(f"tensor {name} in {file} does not have the size of its shape {list(shape)}: the file is damaged")
    if start + end > size:
        raise UserError(f"{file} is cut short: tensor {name} ends at byte {start + end}, the file has {size}")
    return _Entry(file, dtype, shape, start + begin)
