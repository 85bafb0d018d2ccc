"""The linear kernel of stream.c: compiled once per machine by its own C compiler, and left alone where there is none."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("stream.c")
FLAGS = ("-O3", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-fopenmp", "-fPIC")
SWITCH = "ADAPTIVESPEC_COMPILE"
"""Environment variable: 0 compiles nothing."""

PANEL = 64  # outputs side by side, as in stream.c


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] -> [ceil(out / 64), in / 2, 64, 2], the order in which the kernel reads."""
    out, inner = weight.shape
    if out % PANEL:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, -out % PANEL))
    return weight.reshape(-1, PANEL, inner // 2, 2).transpose(1, 2).contiguous()


def unpack(packed: torch.Tensor, out: int) -> torch.Tensor:
    """The inverse of `pack`: a copy [out, in]."""
    return packed.transpose(1, 2).flatten(2).flatten(0, 1)[:out]


def fits(weight: torch.Tensor) -> bool:
    """Whether the kernel can take this weight: bf16 on the CPU, pairs along the inner dimension, and a kernel."""
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.shape[1] % 2 == 0 and library() is not None


def linear(x: torch.Tensor, packed: torch.Tensor, out: int, bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
    """x [M, in] (rows may have gaps), packed weight, bias [out], residual [M, out] -> [M, out]; one rounding, at the end.

    Raises:
        ValueError: x or residual of another type or shape.
    """
    kernel = library()
    assert kernel is not None
    for tensor, width in ((x, 2 * packed.shape[1]), (residual, out)):  # the kernel reads memory as it is told
        if tensor is not None and (tensor.dtype != torch.bfloat16 or tensor.shape != (len(x), width)):
            raise ValueError(f"expected bf16 [{len(x)}, {width}], not {tensor.dtype} {list(tensor.shape)}")
    if x.stride(1) != 1:
        x = x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    y = x.new_empty(len(x), out)
    kernel(
        x.data_ptr(),
        x.stride(0),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        y.data_ptr(),
        len(x),
        out,
        x.shape[1],
        torch.get_num_threads(),
    )
    return y


@functools.cache
def library() -> ctypes._NamedFuncPointer | None:
    """The compiled function, or None: no x86 with AVX512-BF16, AMX (where oneDNN is better at many rows), no compiler, or told not to."""

    def cpu_has(feature: str) -> bool:
        return bool(getattr(torch.cpu, f"_is_{feature}_supported", lambda: False)())  # names of one torch may be missing in another

    if os.environ.get(SWITCH) == "0" or cpu_has("amx_tile") or not cpu_has("avx512_bf16"):
        return None
    try:
        loaded = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError):
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_long
    kernel = loaded.linear
    kernel.argtypes = [pointer, number, pointer, pointer, pointer, number, pointer, number, number, number, ctypes.c_int]
    kernel.restype = None
    return kernel if loaded.supported() else None


def _compiled() -> Path:
    """The shared library, compiled if the cache doesn't have it; it appears there whole, whoever else compiles at the same time.

    Raises:
        OSError, subprocess.SubprocessError: no compiler, or none that can.
    """
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "adaptivespec" / "kernels"
    path = folder / f"stream-{key}.so"
    if not path.exists():
        compiler = shutil.which(os.environ.get("CC") or "cc")
        if compiler is None:
            raise OSError("no C compiler")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built, linked = Path(scratch) / "stream.o", Path(scratch) / "stream.so"
            # Linked without an OpenMP of its own: torch's is loaded already, and two pools of threads would fight for the cores.
            for command in ((*FLAGS, "-c", str(SOURCE), "-o", str(built)), ("-shared", str(built), "-o", str(linked))):
                subprocess.run([compiler, *command], check=True, capture_output=True, timeout=120)
            os.replace(linked, path)
    return path
