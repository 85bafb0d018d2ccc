"""The header of a GGUF file: metadata and where each tensor lies.

A reader of our own for two reasons: the gguf package's keeps a memory map and several numpy arrays per vocabulary entry
(seconds, and hundreds of megabytes for a large vocabulary), and it fails on a truncated file with an index error.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from ..errors import UserError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # GGUF value type -> struct code
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: shape in torch's order (rows first), ggml type, and its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str  # "F32", "Q4_1", ...
    offset: int  # from the start of the file
    num_bytes: int


@dataclass(frozen=True)
class _Array:
    """An array in the metadata, read when asked for: vocabularies are large and most loads need them late or never."""

    item_type: int
    length: int
    offset: int


class GGUFFile:
    """Metadata and tensor table of one little-endian GGUF file (version 2 or 3).

    Raises UserError at once when the file is no GGUF, is damaged, or is shorter than its tensors need.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._size = self.path.stat().st_size
            with self.path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise UserError(f"{self.path} is not a GGUF file")
                self._fields, self.tensors = self._parse(file)
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from None
        except (EOFError, struct.error):
            raise UserError(
                f"{self.path} is cut short: it ends inside its header ({self._size} bytes); copy or download it again"
            ) from None
        except (UnicodeDecodeError, OverflowError, MemoryError, RecursionError):
            raise UserError(f"{self.path} is damaged: its header cannot be read") from None
        for tensor in self.tensors.values():
            if tensor.offset + tensor.num_bytes > self._size:
                raise UserError(
                    f"{self.path} is cut short: tensor {tensor.name} ends at byte {tensor.offset + tensor.num_bytes}, "
                    f"the file has {self._size}; copy or download it again"
                )

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value (number, bool, string, or list) or `default`."""
        value = self._fields.get(key, default)
        return self._read_array(value) if isinstance(value, _Array) else value

    def require(self, key: str) -> Any:
        """A metadata value. Raises UserError naming the key when the file lacks it."""
        if key not in self._fields:
            raise UserError(f"{self.path} lacks the metadata {key}")
        return self.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        """A metadata value that must be a positive whole number. Raises UserError when it is not, or absent without a default."""
        value = self.require(key) if default is None else self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            shown = "a list (layers that differ)" if isinstance(value, list) else repr(value)
            raise UserError(f"{self.path} has {shown} for {key}; one positive whole number is supported")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A metadata value that must be a number. Raises UserError when it is not, or absent without a default."""
        value = self.require(key) if default is None else self.get(key, default)
        if not isinstance(value, int | float):
            raise UserError(f"{self.path} has {value!r} for {key}; a number was expected")
        return float(value)

    def _parse(self, file: BufferedReader) -> tuple[dict[str, Any], Mapping[str, GGUFTensor]]:
        version = _unpack(file, "I")
        if version not in (2, 3):
            raise UserError(f"{self.path} is GGUF version {version}; versions 2 and 3 (little-endian) are supported")
        num_tensors, num_fields = _unpack(file, "Q"), _unpack(file, "Q")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string(file)
            fields[key] = self._value(file, _unpack(file, "I"))
        rows = [self._tensor_info(file) for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise UserError(f"{self.path} is damaged: its alignment is {alignment}")
        start = -(-file.tell() // alignment) * alignment
        return fields, {name: self._tensor(name, dims, kind, start + offset) for name, dims, kind, offset in rows}

    def _string(self, file: BufferedReader) -> str:
        return self._take(file, _unpack(file, "Q")).decode("utf-8")

    def _take(self, file: BufferedReader, count: int) -> bytes:
        data = file.read(count) if count <= self._size else b""  # a damaged length must not ask for that much memory
        if len(data) < count:
            raise EOFError
        return data

    def _value(self, file: BufferedReader, kind: int) -> Any:
        if kind in _SCALARS:
            return _unpack(file, _SCALARS[kind])
        if kind == _STRING:
            return self._string(file)
        if kind != _ARRAY:
            raise UserError(f"{self.path} is damaged: unknown metadata type {kind}")
        array = _Array(_unpack(file, "I"), _unpack(file, "Q"), file.tell())
        if array.length > self._size:
            raise EOFError
        if array.item_type in _SCALARS:
            file.seek(array.length * struct.calcsize("<" + _SCALARS[array.item_type]), 1)
        elif array.item_type == _STRING:
            for _ in range(array.length):
                file.seek(min(_unpack(file, "Q"), self._size), 1)
        else:
            raise UserError(f"{self.path} has metadata of an unknown array type {array.item_type}")
        return array

    def _read_array(self, array: _Array) -> list[Any]:
        with self.path.open("rb") as file:
            file.seek(array.offset)
            if array.item_type == _STRING:
                # Vocabularies may hold bytes that are no UTF-8 by themselves; byte-level ones never do.
                return [self._take(file, _unpack(file, "Q")).decode("utf-8", errors="replace") for _ in range(array.length)]
            code = f"<{array.length}{_SCALARS[array.item_type]}"
            return list(struct.unpack(code, self._take(file, struct.calcsize(code))))

    def _tensor_info(self, file: BufferedReader) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._string(file), _unpack(file, "I")
        if num_dims > _MAX_DIMS:
            raise UserError(f"{self.path} is damaged: tensor {name} has {num_dims} dimensions")
        dims = tuple(_unpack(file, "Q") for _ in range(num_dims))
        return name, dims[::-1], _unpack(file, "I"), _unpack(file, "Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            ggml_type = GGMLQuantizationType(kind)
        except ValueError:
            raise UserError(f"tensor {name} in {self.path} has the unknown type {kind}; a newer gguf package may know it") from None
        block, block_bytes = GGML_QUANT_SIZES[ggml_type]
        if shape and shape[-1] % block:
            raise UserError(f"{self.path} is damaged: the rows of tensor {name} are no whole {ggml_type.name} blocks")
        return GGUFTensor(name, shape, ggml_type.name, offset, math.prod(shape) // block * block_bytes)


def _unpack(file: BufferedReader, code: str) -> Any:
    size = struct.calcsize("<" + code)
    return struct.unpack("<" + code, file.read(size))[0]
