"""AdaptiveSpec: speculative decoding that decides at every step what to accept (margin rule) and how to draft (adaptive tree).

>>> from adaptivespec import LLM, SamplingParams
>>> llm = LLM("smollm2-135m")  # doctest: +SKIP
>>> llm.generate(["What is a draft tree?"], SamplingParams(max_tokens=64))  # doctest: +SKIP

Importing the package is quick: torch is imported when one of the names below is first used.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adaptivespec.config import EngineConfig, SamplingParams, SpeculativeConfig
    from adaptivespec.engine.llm import LLM

__all__ = ["LLM", "EngineConfig", "SamplingParams", "SpeculativeConfig"]

try:
    __version__ = importlib.metadata.version("adaptivespec")
except importlib.metadata.PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

_HOMES = {
    "LLM": "adaptivespec.engine.llm",
    "EngineConfig": "adaptivespec.config",
    "SamplingParams": "adaptivespec.config",
    "SpeculativeConfig": "adaptivespec.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
