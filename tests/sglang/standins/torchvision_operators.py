"""torchvision without its compiled operators.

Its wheel on PyPI is linked against CUDA: under the CPU build of torch the library doesn't load, and the import fails where a fake
kernel is registered for operators that nobody defined. SGLang imports it for image models, transformers when it is there.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any

_keep: list[Any] = []  # a torch.library.Library takes its definitions with it


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; defines the operators when torchvision is first looked for."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torchvision" and not _keep:
            import torch

            library = torch.library.Library("torchvision", "DEF")
            _keep.append(library)
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def define_when_needed() -> None:
    """From now on torchvision can be imported; costs nothing until it is."""
    if not any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorchvision())
