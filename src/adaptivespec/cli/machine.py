"""What a measurement ran on: the machine, the versions, the memory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any


def machine(device: object) -> dict[str, Any]:
    """Platform, processor, cores, threads and device, for a report."""
    import torch

    return {
        "platform": platform.platform(),
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }


def versions() -> dict[str, str]:
    """Versions of this package, Python and the libraries that results depend on."""
    from .. import __version__

    libraries = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")}
    return {"adaptivespec": __version__, "python": platform.python_version(), **libraries}


def rss_bytes() -> int:
    """Resident memory now; the peak where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_rss_bytes()


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far (kibibytes on Linux, bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _processor_name() -> str:
    """The CPU's own name where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
