"""Fixtures for the recipe: a tiny random target, and a run whose prompts are already answered."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # recipes/ is not part of the installed package

from recipes.eagle3_head.answers import answer_file
from recipes.eagle3_head.config import Run
from tiny_target import ANSWERS, EOS, TARGET, RandomWeights

from adaptivespec.models.decoder import Decoder


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    return Decoder(TARGET, RandomWeights(TARGET), torch.float32)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 96, (int(n),), generator=generator).tolist() for n in torch.randint(2, 12, (40,), generator=generator)]


@pytest.fixture(scope="session")
def answered_run(tmp_path_factory: pytest.TempPathFactory, decoder: Decoder, prompts: list[list[int]]) -> Path:
    """A run's folder with answers to all prompts and, as held-out set, to the first eight."""
    run = Run.create(tmp_path_factory.mktemp("run"))
    answer_file(decoder, {EOS}, prompts, run.answers, ANSWERS, max_prompt=12)
    answer_file(decoder, {EOS}, prompts[:8], run.heldout_answers, ANSWERS, max_prompt=12)
    run.heldout.write_text("".join(json.dumps({"kind": "general", "prompt": "x"}) + "\n" for _ in range(8)))
    return run.folder
