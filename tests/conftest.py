"""Settings every test shares: one thread, a fixed seed, hypothesis without deadlines (machines are noisy)."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("dev", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

torch.set_num_threads(1)  # tiny tensors: a second thread only waits


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
