"""A plug-in of the test bed: SGLang keeps its CPU attention backend on any processor, and single things can be bent on request."""

from __future__ import annotations

import itertools
import os
import pkgutil

MISSING = "CPU_BED_MISSING"
"""Environment variable: dotted path of an attribute to rename before other plug-ins look at it, as a new release of SGLang might."""

SHAPES = "CPU_BED_SHAPES"
"""Environment variable: tree shapes (3,4,8;2,1,3) that the adaptive policy hands out in turn, another one at every step."""


def register() -> None:
    """Called by SGLang in each of its processes, before the plug-ins whose packages come later on the path."""
    from sglang.srt.runtime_context import get_platform

    # the choice of attention asks this fact; layers asked the processor itself when they were imported, and run in plain torch
    get_platform()._install(has_amx=True)
    if target := os.environ.get(MISSING):
        rename(target)
    if shapes := os.environ.get(SHAPES):
        take_turns(shapes)


def rename(target: str) -> None:
    """Move the attribute at a dotted path to another name."""
    owner_path, name = target.rsplit(".", 1)
    owner = pkgutil.resolve_name(owner_path)
    setattr(owner, name + "_renamed", getattr(owner, name))
    delattr(owner, name)


def take_turns(shapes: str) -> None:
    """Have AdaptiveSpec's adaptive policy reach exactly these shapes, in turn."""
    import torch

    from adaptivespec.method.policy import Adaptive
    from adaptivespec.method.tree import TreeShape

    ladder = [TreeShape(*map(int, shape.split(","))) for shape in shapes.split(";")]
    turns = itertools.count()

    def next_index(self: Adaptive, s: torch.Tensor) -> torch.Tensor:
        return torch.full(s.shape, next(turns) % len(ladder), dtype=torch.int64, device=s.device)

    Adaptive.reachable = lambda self: ladder  # type: ignore[method-assign]
    Adaptive.shape_index = next_index  # type: ignore[method-assign]
