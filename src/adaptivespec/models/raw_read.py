"""Plain, chunked file reads into tensors: the transient memory is one chunk, whatever the tensor's size."""

from __future__ import annotations

from io import FileIO

import torch

CHUNK_ELEMENTS = 1 << 21  # 8 MiB in fp32


def read_bytes(file: FileIO, buffer: torch.Tensor) -> None:
    """Fill a contiguous uint8 tensor from the file's position. Raises EOFError when the file ends first."""
    view = buffer.numpy().data
    while len(view):
        count = file.readinto(view)
        if not count:
            raise EOFError("the file ends early")
        view = view[count:]


def read_elements(file: FileIO, offset: int, stored: torch.dtype, out: torch.Tensor) -> None:
    """Read `out.numel()` elements stored as `stored` at byte `offset` into the contiguous tensor `out`, converting to its dtype."""
    file.seek(offset)
    flat = out.view(-1)
    if stored == out.dtype:
        read_bytes(file, flat.view(torch.uint8))
        return
    buffer = torch.empty(min(CHUNK_ELEMENTS, flat.numel()) * stored.itemsize, dtype=torch.uint8)
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        piece = flat[start : start + CHUNK_ELEMENTS]
        raw = buffer[: piece.numel() * stored.itemsize]
        read_bytes(file, raw)
        piece.copy_(raw.view(stored))
