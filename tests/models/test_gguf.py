"""GGUF files: configuration, tensors and refusals."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.errors import UserError
from adaptivespec.models.gguf_config import config_from_gguf
from adaptivespec.models.gguf_file import GGUFFile
from adaptivespec.models.gguf_weights import GGUFWeights
from adaptivespec.models.hf_config import config_from_folder
from adaptivespec.models.loading import open_checkpoint
from adaptivespec.models.rotary import inverse_frequencies
from adaptivespec.models.weights import SafetensorsWeights
from tiny_models import FAMILIES, write_gguf


@pytest.mark.parametrize("family", FAMILIES)
def test_same_configuration_as_the_folder(family: str, tiny_folders: dict[str, Path], tiny_ggufs: dict[str, Path]) -> None:
    wanted, got = config_from_folder(tiny_folders[family]), config_from_gguf(GGUFFile(tiny_ggufs[family]))
    torch.testing.assert_close(inverse_frequencies(got), inverse_frequencies(wanted))
    same = set(wanted.__dataclass_fields__) - {"rope_scaling", "rope_factors", "rms_norm_eps"}
    assert {name: getattr(got, name) for name in same} == {name: getattr(wanted, name) for name in same}
    assert got.rms_norm_eps == pytest.approx(wanted.rms_norm_eps)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 200, 1 << 21])
def test_same_tensors_as_the_folder(
    family: str, chunk: int, tiny_folders: dict[str, Path], tiny_ggufs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adaptivespec.models.gguf_weights.CHUNK_ELEMENTS", chunk)
    wanted, got = SafetensorsWeights(tiny_folders[family]), GGUFWeights(tiny_ggufs[family])
    assert got.names() == wanted.names()
    for name in wanted.names():
        assert got.shape(name) == wanted.shape(name)
        assert torch.equal(got.load(name, torch.float32), wanted.load(name, torch.float32))
        assert torch.equal(got.load(name, torch.bfloat16), wanted.load(name, torch.bfloat16))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_quantised_tensors(kind: str, tmp_path: Path) -> None:
    """Dequantised in chunks as the gguf package does in one go; llama's query rows are put back in order."""
    quant = gguf.GGMLQuantizationType[kind]
    stored = gguf.quantize(np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32), quant)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_head_count(4)
    writer.add_embedding_length(64)
    for name in ("blk.0.attn_q.weight", "blk.0.ffn_up.weight"):
        writer.add_tensor(name, stored, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = GGUFWeights(tmp_path / "q.gguf")
    wanted = torch.from_numpy(gguf.dequantize(stored, quant).copy())
    assert torch.equal(weights.load("model.layers.0.mlp.up_proj.weight", torch.float32), wanted)
    query = weights.load("model.layers.0.self_attn.q_proj.weight", torch.float32)
    assert torch.equal(query.view(4, 2, 8, 96).transpose(1, 2).reshape(64, 96), wanted)


def test_transient_memory_is_bounded(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest table arrives in pieces of at most CHUNK_ELEMENTS."""
    from adaptivespec.models import gguf_weights

    sizes = []
    dequantise = gguf_weights._dequantise

    def recording(raw: torch.Tensor, kind: str) -> torch.Tensor:
        values = dequantise(raw, kind)
        sizes.append(values.numel())
        return values

    monkeypatch.setattr(gguf_weights, "_dequantise", recording)
    table = GGUFWeights(smollm2_gguf).load("model.embed_tokens.weight", torch.bfloat16)
    assert sum(sizes) == table.numel()
    assert max(sizes) <= gguf_weights.CHUNK_ELEMENTS


def test_stop_tokens(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    texts = ["<eos>", "x", "<|im_end|>", "<|endoftext|>", "y"]
    extra = {"tokenizer.ggml.eot_token_id": 4, "tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": [3, 1, 3, 1, 1]}
    file = write_gguf(tiny_folders["qwen2"], tmp_path / "m.gguf", extra)
    assert config_from_gguf(GGUFFile(file)).eos_token_ids == (0, 4, 2)  # an ordinary token that reads <|endoftext|> is none


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.attention.sliding_window": 128}, r"sliding-window attention \(window 128\)"),
        ({"llama.rope.scaling.type": "yarn"}, "rotary scaling of type 'yarn'"),
        ({"llama.rope.scaling.type": "linear"}, "rotary scaling of type 'linear'"),
        ({"llama.rope.scale_linear": 4.0}, "linear rotary scaling"),
    ],
)
def test_unsupported_features(extra: dict[str, Any], message: str, tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    file = write_gguf(tiny_folders["llama"], tmp_path / "m.gguf", extra)
    with pytest.raises(UserError, match=f"m.gguf: .*{message}.* not supported"):
        open_checkpoint(file)


def test_window_as_long_as_the_context_is_none(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    open_checkpoint(write_gguf(tiny_folders["llama"], tmp_path / "m.gguf", {"llama.attention.sliding_window": 512}))


@pytest.mark.parametrize("name", ["blk.0.attn_output.bias", "blk.0.ffn_gate_inp.weight", "rope_factors_long.weight"])
def test_unknown_tensor(name: str, tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    file = write_gguf(tiny_folders["llama"], tmp_path / "m.gguf", tensors={name: np.zeros(8, np.float32)})
    with pytest.raises(UserError, match=f"has the tensor {name}, which no supported architecture"):
        open_checkpoint(file)


def small_gguf(path: Path, arch: str = "llama", fields: dict[str, int] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (fields or {}).items():
        writer.add_uint32(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_unknown_architecture(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="architecture 'gemma3'; supported: llama, qwen2, qwen3"):
        open_checkpoint(small_gguf(tmp_path / "m.gguf", "gemma3"))


def test_missing_metadata_and_tensors(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lacks the metadata llama.context_length"):
        open_checkpoint(small_gguf(tmp_path / "m.gguf"))
    with pytest.raises(UserError, match=r"tensor lm_head.weight is missing from"):
        GGUFWeights(small_gguf(tmp_path / "n.gguf", "qwen2")).load("lm_head.weight", torch.float32)


def test_layers_that_differ_and_wrong_types(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    for value, message in (([64, 128], "a list"), (0, "0"), (1.5, "1.5")):
        file = write_gguf(tiny_folders["llama"], tmp_path / "m.gguf", {"llama.attention.head_count_kv": value})
        with pytest.raises(UserError, match=rf"has {message}.* for llama.attention.head_count_kv; one positive whole number"):
            open_checkpoint(file)


def test_partial_rotary_embedding(tmp_path: Path) -> None:
    fields = {f"llama.{k}": v for k, v in {"context_length": 64, "embedding_length": 8, "feed_forward_length": 8}.items()}
    fields |= {"llama.attention.head_count": 1, "llama.rope.dimension_count": 4}
    with pytest.raises(UserError, match=r"partial rotary embedding \(4 of 8 dimensions\)"):
        config_from_gguf(GGUFFile(small_gguf(tmp_path / "m.gguf", fields=fields)))


def test_cut_in_half(tiny_ggufs: dict[str, Path], tmp_path: Path) -> None:
    whole = tiny_ggufs["llama"].read_bytes()
    half = tmp_path / "half.gguf"
    half.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"half.gguf is cut short: tensor .* ends at byte \d+, the file has \d+"):
        GGUFFile(half)


@given(data=st.data())
def test_any_cut_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    file = small_gguf(tmp_path_factory.mktemp("cut") / "m.gguf", fields={"llama.context_length": 64})
    whole = file.read_bytes()[: GGUFFile(file).tensors["token_embd.weight"].offset + 128]  # without the padding at the end
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(UserError, match=r"cut short|not a GGUF file"):
        GGUFFile(file)


@given(data=st.data())
def test_damage_never_escapes_as_another_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    file = small_gguf(tmp_path_factory.mktemp("damage") / "m.gguf", fields={"llama.context_length": 64})
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    with contextlib.suppress(UserError):
        config_from_gguf(GGUFFile(file))


def test_not_a_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(UserError, match="is not a GGUF file"):
        GGUFFile(tmp_path / "m.gguf")
    with pytest.raises(UserError, match="cannot read"):
        GGUFFile(tmp_path / "absent.gguf")
