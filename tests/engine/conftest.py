"""Tiny models with an engine around them."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptivespec.models.loading import LoadedModel, load_model
from tiny_models import make_tiny_model


@pytest.fixture(scope="session", params=["llama", "qwen2", "qwen3"])
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """One tiny target of each family, fp32."""
    return load_model(make_tiny_model(request.param, tmp_path_factory.mktemp(request.param)), "fp32")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def model(model_folder: Path) -> LoadedModel:
    """A tiny Llama, fp32."""
    return load_model(model_folder, "fp32")
