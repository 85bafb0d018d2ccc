"""Tests of the SGLang plug-in: collected where SGLang is installed, and by `make test-sglang`, which insists that it is."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

STANDINS = Path(__file__).with_name("standins")


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if _installed("sglang"):
    sys.path.insert(0, str(STANDINS))
    import torchvision_operators

    torchvision_operators.define_when_needed()
elif os.environ.get("ADAPTIVESPEC_TEST_SGLANG"):
    raise pytest.UsageError("sglang is not installed here; make venv-sglang installs it into .venv-sglang")
else:
    collect_ignore_glob = ["*"]

if _installed("sglang"):  # they need torch and transformers as SGLang has them
    from bed_models import BedModels, make_models
    from reference import Reference
    from servers import ROTATION, Server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test comes first waits for servers to start, on machines that may be busy."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def bed(tmp_path_factory: pytest.TempPathFactory) -> BedModels:
    """Tiny models."""
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where servers write what they say."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def plain(bed: BedModels, logs: Path) -> Iterator[Reference]:
    """Stock SGLang without speculation: what everything lossless must equal."""
    with Server(logs / "plain.log", model_path=bed.target, constrained_json_disable_any_whitespace=True) as server:
        yield Reference(server, bed)


@pytest.fixture(scope="session")
def rotating(bed: BedModels, logs: Path) -> Iterator[Server]:
    """EAGLE-3 with the plug-in, strict unless a request says otherwise, and another tree shape at every decoding step."""
    with Server(
        logs / "rotating.log",
        {"margin": None},
        {"CPU_BED_SHAPES": ROTATION},
        model_path=bed.target,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=bed.eagle3,
        constrained_json_disable_any_whitespace=True,
        enable_metrics=True,
    ) as server:
        yield server
