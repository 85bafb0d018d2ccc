"""Weights from safetensors folders: whole, sharded, damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from adaptivespec.errors import UserError
from adaptivespec.models.loading import open_checkpoint
from adaptivespec.models.weights import SafetensorsWeights
from tiny_models import make_tiny_model

TENSORS = {
    "a.weight": torch.randn(5, 7),
    "b.weight": torch.randn(3).bfloat16(),
    "c": torch.arange(6).view(2, 3),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(2.5).half(),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_names_shapes_and_values(folder: Path) -> None:
    weights = SafetensorsWeights(folder)
    assert weights.names() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert weights.shape(name) == tensor.shape
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(weights.load(name, dtype), tensor.to(dtype))


def test_loaded_tensors_are_the_callers_own(folder: Path) -> None:
    weights = SafetensorsWeights(folder)
    weights.load("a.weight", torch.float32).zero_()
    assert torch.equal(weights.load("a.weight", torch.float32), TENSORS["a.weight"])


def test_conversion_in_chunks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaptivespec.models.raw_read.CHUNK_ELEMENTS", 4)
    assert torch.equal(SafetensorsWeights(folder).load("a.weight", torch.bfloat16), TENSORS["a.weight"].bfloat16())


@pytest.mark.parametrize("index", [True, False])
def test_sharded(index: bool, tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path, sharded=True)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    if not index:
        (tmp_path / "model.safetensors.index.json").unlink()
    whole, sharded = SafetensorsWeights(tiny_folders["llama"]), SafetensorsWeights(tmp_path)
    assert whole.names() == sharded.names()
    for name in whole.names():
        assert torch.equal(whole.load(name, torch.float32), sharded.load(name, torch.float32))


def test_missing_shard(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path, sharded=True)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(UserError, match=f"lists {shard.name}, which is not in the folder"):
        SafetensorsWeights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UserError, match="is not an index of weights"):
        SafetensorsWeights(tmp_path)


def test_missing_tensor_names_tensor_and_place(folder: Path) -> None:
    with pytest.raises(UserError, match=f"tensor lm_head.weight is missing from {folder}"):
        SafetensorsWeights(folder).load("lm_head.weight", torch.float32)


def test_folder_without_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"no \*.safetensors in"):
        SafetensorsWeights(tmp_path)


@given(data=st.data())
def test_any_cut_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("cut")
    file = folder / "model.safetensors"
    save_file(TENSORS, file)
    whole = file.read_bytes()
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(UserError, match=r"cut short|no safetensors"):
        SafetensorsWeights(folder)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{nonsense", "header cannot be read"),
        (b"[1, 2]", "header cannot be read"),
        (b'{"a": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}', "tensor a in .* has type F8_E4M3"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "does not have the size of its shape"),
        (b'{"a": {"dtype": "F32", "shape": [1]}}', "header cannot be read"),
    ],
)
def test_damaged_header(header: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(UserError, match=message):
        SafetensorsWeights(tmp_path)


def test_tensors_are_compared_with_the_configuration(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """A missing, a misshapen and a superfluous tensor: all before any weight is read."""
    from safetensors.torch import load_file

    (tmp_path / "config.json").write_text((tiny_folders["qwen2"] / "config.json").read_text())
    good = load_file(tiny_folders["qwen2"] / "model.safetensors")

    def refused(tensors: dict[str, torch.Tensor], message: str) -> None:
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=message):
            open_checkpoint(tmp_path)

    name = "model.layers.3.self_attn.k_proj.bias"
    refused({k: v for k, v in good.items() if k != name}, f"tensor {name} is missing from {tmp_path}")
    refused({**good, name: torch.zeros(7)}, rf"tensor {name} in .* has shape \[7\]; the configuration asks for \[32\]")
    refused({**good, "model.layers.0.mlp.gate.weight": torch.zeros(1)}, "has the tensor model.layers.0.mlp.gate.weight, which no qwen2")
    save_file({**good, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}, tmp_path / "model.safetensors")
    open_checkpoint(tmp_path)  # old Llama checkpoints hold these
