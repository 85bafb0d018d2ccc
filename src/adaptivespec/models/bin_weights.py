"""Tensors of `pytorch_model.bin` files. They are pickles, and only those that hold nothing but tensors are read: no code runs."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import torch

from ..errors import UserError
from .weights import listed_shards

_SINGLE, _INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


class BinWeights:
    """The `pytorch_model.bin` of a folder, or the shards that its index lists; an implementation of `Weights`.

    Raises UserError for a folder without one, a damaged file, and a pickle that asks for more than tensors.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._tensors: dict[str, torch.Tensor] = {}
        for file in _files(self.folder):
            self._tensors.update(_read(file))

    @staticmethod
    def exist_in(folder: Path) -> bool:
        """Whether the folder holds such files."""
        return (folder / _SINGLE).is_file() or (folder / _INDEX).is_file()

    def names(self) -> frozenset[str]:
        """All tensor names."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        return tuple(self._tensor(name).shape)

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor converted to `dtype`, in a tensor of its own."""
        return self._tensor(name).detach().to(dtype, copy=True, memory_format=torch.contiguous_format)

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise UserError(f"tensor {name} is missing from {self.folder}")
        return self._tensors[name]


def _files(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        return listed_shards(folder / _INDEX)
    if not (folder / _SINGLE).is_file():
        raise UserError(f"no {_SINGLE} in {folder}")
    return [folder / _SINGLE]


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        # Mapped where the format allows it: names and shapes then cost no reading.
        values = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError:
        what = "something else than plain tensors, which could run code, so it was not read"
        raise UserError(f"{file} holds {what}: convert it to safetensors") from None
    except Exception as error:  # torch, zip and pickle errors of many kinds
        raise UserError(f"{file} is no checkpoint or is cut short ({type(error).__name__})") from None
    if not isinstance(values, dict) or not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in values.items()):
        raise UserError(f"{file} is not a plain dictionary of named tensors")
    return values
