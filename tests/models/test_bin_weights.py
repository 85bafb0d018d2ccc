"""pytorch_model.bin: the same tensors as safetensors, and never any code."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adaptivespec.errors import UserError
from adaptivespec.models.bin_weights import BinWeights
from adaptivespec.models.weights import SafetensorsWeights
from tiny_models import make_tiny_model

FILE = "pytorch_model.bin"


class Evil:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("zipped", [True, False])
def test_the_tensors_are_those_of_safetensors(tmp_path: Path, zipped: bool) -> None:
    folder = make_tiny_model("llama", tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / FILE, _use_new_zipfile_serialization=zipped)
    ours, theirs = BinWeights(folder), SafetensorsWeights(folder)
    assert ours.names() == theirs.names()
    for name in theirs.names():
        assert ours.shape(name) == theirs.shape(name)
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(ours.load(name, dtype), theirs.load(name, dtype))
    name = "model.norm.weight"
    ours.load(name, torch.float32).zero_()  # the caller owns what it gets
    assert torch.equal(ours.load(name, torch.float32), theirs.load(name, torch.float32))


def test_views_and_parameters_become_plain_tensors(tmp_path: Path) -> None:
    torch.save({"a": torch.nn.Parameter(torch.arange(6.0).view(2, 3)), "b": torch.arange(6.0).view(2, 3).T}, tmp_path / FILE)
    weights = BinWeights(tmp_path)
    for name, shape in (("a", (2, 3)), ("b", (3, 2))):
        tensor = weights.load(name, torch.float32)
        assert tensor.shape == weights.shape(name) == shape
        assert tensor.is_contiguous()
        assert not tensor.requires_grad


def test_shards(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-1.bin")
    torch.save({"b": torch.zeros(3)}, tmp_path / "pytorch_model-2.bin")
    index = {"weight_map": {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}}
    (tmp_path / f"{FILE}.index.json").write_text(json.dumps(index))
    assert BinWeights.exist_in(tmp_path)
    assert BinWeights(tmp_path).names() == {"a", "b"}
    (tmp_path / "pytorch_model-2.bin").unlink()
    with pytest.raises(UserError, match=r"lists pytorch_model-2\.bin, which is not in the folder"):
        BinWeights(tmp_path)
    (tmp_path / f"{FILE}.index.json").write_text("[]")
    with pytest.raises(UserError, match="is not an index of weights"):
        BinWeights(tmp_path)


@pytest.mark.parametrize("form", ["zip", "old", "bare pickle"])
def test_code_is_refused_and_not_run(tmp_path: Path, form: str) -> None:
    trace = tmp_path / "ran"
    content = {"a": torch.zeros(2), "b": Evil(trace)}
    if form == "bare pickle":
        (tmp_path / FILE).write_bytes(pickle.dumps({"b": Evil(trace)}, protocol=2))
    else:
        torch.save(content, tmp_path / FILE, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(UserError, match="which could run code, so it was not read: convert it to safetensors") as error:
        BinWeights(tmp_path)
    assert "\n" not in str(error.value)
    assert not trace.exists()


@pytest.mark.parametrize("content", [b"", b"hello world" * 50, None])
def test_damaged_files_are_refused(tmp_path: Path, content: bytes | None) -> None:
    torch.save({"a": torch.zeros(500)}, tmp_path / FILE)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:900] if content is None else content)
    with pytest.raises(UserError, match="is no checkpoint or is cut short") as error:
        BinWeights(tmp_path)
    assert "\n" not in str(error.value)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    assert not BinWeights.exist_in(tmp_path)
    with pytest.raises(UserError, match=r"no pytorch_model\.bin in"):
        BinWeights(tmp_path)
    torch.save({"a": 1}, tmp_path / FILE)
    with pytest.raises(UserError, match="is not a plain dictionary of named tensors"):
        BinWeights(tmp_path)
    torch.save({"a": torch.zeros(1)}, tmp_path / FILE)
    with pytest.raises(UserError, match="tensor b is missing from"):
        BinWeights(tmp_path).load("b", torch.float32)
