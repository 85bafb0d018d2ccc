"""Compiles the kernels once per machine with its own C compiler, and does without where there is none."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
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
        path = _path()
        if not path.exists():
            _compile(path)
        return _load(path)
    except (OSError, RuntimeError, subprocess.SubprocessError):  # RuntimeError: no home, so no cache
        return None


def _load(path: Path) -> ctypes.CDLL | None:
    """The kernels in a file with their signatures; None if they are not in it, or not for this CPU."""
    try:
        loaded = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            kernel = getattr(loaded, name)
            kernel.argtypes, kernel.restype = arguments, None
        loaded.attention_scratch.argtypes, loaded.attention_scratch.restype = [*4 * [_LONG], _INT], _LONG
        return loaded if loaded.supported() else None
    except (OSError, AttributeError):
        return None


def _path() -> Path:
    """Where the library of these sources and this compiler is kept. Raises RuntimeError: the user has no home."""
    content = b"".join((FOLDER / name).read_bytes() for name in (*UNITS, "common.h"))
    key = hashlib.sha256(content + " ".join((*FLAGS, *_compiler())).encode()).hexdigest()[:16]
    return user_cache() / "kernels" / f"kernels-{key}.so"


def _compiler() -> list[str]:
    """The compiler's command, `CC` or cc; it may have arguments."""
    return shlex.split(os.environ.get("CC") or "cc")


def _compile(path: Path) -> None:
    """Write the library, whole or not at all, whoever else compiles at the same time.

    Raises:
        OSError, subprocess.SubprocessError: no compiler, none that can, or a place that cannot be written.
    """
    compiler = _compiler()
    if shutil.which(compiler[0]) is None:
        raise OSError("no C compiler")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built, linked = [Path(scratch) / f"{name}.o" for name in UNITS], Path(scratch) / "kernels.so"
        # Linked without an OpenMP of its own: torch's is loaded already, and two pools of threads would fight for the cores.
        commands = [(*FLAGS, "-c", str(FOLDER / name), "-o", str(to)) for name, to in zip(UNITS, built, strict=True)]
        for command in (*commands, ("-shared", *map(str, built), "-o", str(linked))):
            subprocess.run([*compiler, *command], check=True, capture_output=True, timeout=120)
        with linked.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(linked, path)
