"""Compiles the kernels once per machine with its own C compiler, and does without where there is none."""

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

from ...user_cache import user_cache

FOLDER = Path(__file__).parent
UNITS = ("linear.c", "rows.c", "attention.c", "layers.c")
FLAGS = ("-O3", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-fopenmp", "-fPIC")
SWITCH = "ADAPTIVESPEC_COMPILE"
"""Environment variable: 0 compiles nothing."""

_POINTER, _LONG, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
_SIGNATURES = {
    "linear": [_POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _INT],
    "rms_norm": [_POINTER, _LONG, _POINTER, _FLOAT, _POINTER, _LONG, _LONG, _INT],
    "run_attention": [_POINTER, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _LONG, _POINTER],
    "run_mlp": [_POINTER, _LONG, _POINTER, _POINTER, _POINTER, _POINTER, _INT],
    "run_layers": [_POINTER, _LONG, _POINTER, _POINTER, _POINTER, _POINTER, _LONG, _POINTER],
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None: no x86 with AVX512-BF16, AMX (where oneDNN is better at many rows), no compiler, or told not to."""

    def cpu_has(feature: str) -> bool:
        return bool(getattr(torch.cpu, f"_is_{feature}_supported", lambda: False)())  # names of one torch may be missing in another

    if os.environ.get(SWITCH) == "0" or cpu_has("amx_tile") or not cpu_has("avx512_bf16"):
        return None
    try:
        loaded = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError):
        return None
    for name, arguments in _SIGNATURES.items():
        kernel = getattr(loaded, name)
        kernel.argtypes, kernel.restype = arguments, None
    loaded.attention_scratch.argtypes, loaded.attention_scratch.restype = [_LONG, _LONG, _LONG, _INT], _LONG
    return loaded if loaded.supported() else None


def _compiled() -> Path:
    """The shared library, compiled if the cache doesn't have it; it appears there whole, whoever else compiles at the same time.

    Raises:
        OSError, subprocess.SubprocessError: no compiler, or none that can.
    """
    sources = [FOLDER / name for name in (*UNITS, "common.h")]
    key = hashlib.sha256(b"".join(source.read_bytes() for source in sources) + " ".join(FLAGS).encode()).hexdigest()[:16]
    folder = user_cache() / "kernels"
    path = folder / f"kernels-{key}.so"
    if not path.exists():
        compiler = shutil.which(os.environ.get("CC") or "cc")
        if compiler is None:
            raise OSError("no C compiler")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built, linked = [Path(scratch) / f"{name}.o" for name in UNITS], Path(scratch) / "kernels.so"
            # Linked without an OpenMP of its own: torch's is loaded already, and two pools of threads would fight for the cores.
            commands = [(*FLAGS, "-c", str(FOLDER / name), "-o", str(to)) for name, to in zip(UNITS, built, strict=True)]
            for command in (*commands, ("-shared", *map(str, built), "-o", str(linked))):
                subprocess.run([compiler, *command], check=True, capture_output=True, timeout=120)
            os.replace(linked, path)
    return path
