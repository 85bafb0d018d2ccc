"""load_model: dtypes, sources, the lazily loaded tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adaptivespec.errors import UserError
from adaptivespec.models import loading
from adaptivespec.models.loading import choose_dtype, load_model

CPU = torch.device("cpu")


def test_load_model(tiny_folders: dict[str, Path]) -> None:
    model = load_model(tiny_folders["qwen3"], torch.float32)
    assert model.decoder.dtype == torch.float32
    assert (model.config.architecture, model.source.path, model.source.preset) == ("qwen3", tiny_folders["qwen3"], None)
    assert model.load_tokenizer() is model.load_tokenizer()


def test_choose_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_dtype("bf16", CPU) == choose_dtype("bfloat16", CPU) == choose_dtype(torch.bfloat16, CPU) == torch.bfloat16
    assert choose_dtype("auto", torch.device("cuda")) == torch.bfloat16
    monkeypatch.setattr(loading, "_cpu_has_bf16", lambda: False)
    assert choose_dtype("auto", CPU) == torch.float32
    monkeypatch.setattr(loading, "_cpu_has_bf16", lambda: True)
    assert choose_dtype("auto", CPU) == torch.bfloat16
    with pytest.raises(UserError, match="unknown dtype 'bfloat61'; did you mean 'bfloat16'"):
        choose_dtype("bfloat61", CPU)


def test_bf16_probe_runs_on_this_machine() -> None:
    assert isinstance(loading._cpu_has_bf16(), bool)
