"""Short names, paths, hub ids, and one clear line when none of them leads anywhere. The hub is a fake."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from adaptivespec.errors import UserError
from adaptivespec.models import catalogue
from adaptivespec.models.catalogue import PRESETS, resolve_drafter, resolve_model


class FakeHub:
    """snapshot_download over repositories that are lists of file names."""

    def __init__(self, root: Path, repos: dict[str, list[str]]) -> None:
        self.root, self.repos = root, repos
        self.calls: list[str] = []

    def snapshot_download(self, repo_id: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        self.calls.append(repo_id)
        folder = self.root / repo_id.replace("/", "--")
        folder.mkdir(exist_ok=True)
        for name in self.repos[repo_id]:
            if any(fnmatch(name, p) for p in allow_patterns) and not any(fnmatch(name, p) for p in ignore_patterns):
                (folder / name).touch()
        return str(folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    whole = [
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "model.safetensors",
        "pytorch_model.bin",
        "original/model.safetensors",
    ]
    repos = {preset.repo_id: whole for preset in PRESETS.values()} | {
        preset.drafter: ["config.json", "pytorch_model.bin"] for preset in PRESETS.values()
    }
    monkeypatch.setenv("ADAPTIVESPEC_MODELS", str(tmp_path / "no-models"))
    fake = FakeHub(
        tmp_path,
        {
            **repos,
            PRESETS["qwen2.5-coder-0.5b"].repo_id: ["README.md", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "other-q8_0.gguf"],
            "me/mine": whole,
            "me/pickled": ["config.json", "pytorch_model.bin"],
            "me/head": ["config.json", "model.safetensors", "pytorch_model.bin"],
        },
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def names(folder: Path | None) -> set[str]:
    assert folder is not None
    return {file.name for file in folder.iterdir()}


def test_presets_are_the_papers_targets_and_the_small_one() -> None:
    assert {preset.name: (preset.repo_id, preset.drafter) for preset in PRESETS.values()} == {
        "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M-Instruct", "heads/smollm2-135m"),
        "qwen2.5-coder-0.5b": ("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "heads/qwen2.5-coder-0.5b"),
        "llama-3.1-8b-instruct": ("meta-llama/Llama-3.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
        "deepseek-r1-distill-llama-8b": ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B"),
        "qwen3-8b": ("Qwen/Qwen3-8B", "AngelSlim/Qwen3-8B_eagle3"),
    }
    assert all(name == preset.name for name, preset in PRESETS.items())


def test_packaged_weights_come_first(smollm2_gguf: Path, hub: FakeHub) -> None:
    source = resolve_model("SmolLM2-135M")
    assert (source.path, source.preset, source.is_gguf) == (smollm2_gguf, PRESETS["smollm2-135m"], True)
    assert not hub.calls


def test_hub_when_the_package_is_absent(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue.importlib.util, "find_spec", lambda name: None)
    source = resolve_model("smollm2-135m")
    assert hub.calls == ["HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert not source.is_gguf


def test_gguf_of_a_short_name(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    source = resolve_model("qwen2.5-coder-0.5b")
    assert (source.path.name, source.is_gguf) == (name, True)
    assert names(source.path.parent) == {name}
    monkeypatch.setenv("ADAPTIVESPEC_MODELS", str(tmp_path))
    (tmp_path / name).touch()
    assert resolve_model("Qwen2.5-Coder-0.5B").path == tmp_path / name  # before the hub
    assert len(hub.calls) == 1


def test_heads_of_the_repository(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "__file__", str(tmp_path / "src" / "adaptivespec" / "models" / "catalogue.py"))
    preset = PRESETS["qwen2.5-coder-0.5b"]
    head = tmp_path / preset.drafter
    with pytest.raises(UserError, match="name its folder in a checkout of the repository"):
        resolve_drafter(None, preset)
    head.mkdir(parents=True)
    assert resolve_drafter(None, preset) == head


def test_only_what_is_needed_is_downloaded(hub: FakeHub) -> None:
    source = resolve_model("qwen3-8b")
    assert names(source.path) == {"config.json", "tokenizer.json", "generation_config.json", "model.safetensors"}
    assert source.preset == PRESETS["qwen3-8b"]
    assert resolve_model("me/mine").preset is None


def test_pickled_weights_only_for_drafters(hub: FakeHub) -> None:
    with pytest.raises(UserError, match=r"me/pickled has no \*.safetensors files"):
        resolve_model("me/pickled")
    assert names(resolve_drafter(None, PRESETS["qwen3-8b"])) == {"config.json", "pytorch_model.bin"}
    assert names(resolve_drafter("me/head", None)) == {"config.json", "model.safetensors"}


def test_local_paths(tmp_path: Path) -> None:
    assert resolve_model(tmp_path).path == tmp_path
    file = tmp_path / "m.gguf"
    file.touch()
    assert resolve_model(str(file)).path == file
    assert resolve_model(tmp_path).path == file  # a folder that holds one GGUF
    (tmp_path / "n.gguf").touch()
    with pytest.raises(UserError, match="holds 2 GGUF files; name one"):
        resolve_model(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert resolve_model(tmp_path).path == tmp_path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2-135m", "did you mean 'smollm2-135m'"),
        ("qwen3", "did you mean 'qwen3-8b'"),
        ("gpt-4", "known: deepseek-r1-distill-llama-8b, llama-3.1-8b-instruct"),
        ("./no/such/folder", "no model './no/such/folder'"),
        ("absent.gguf", "no model 'absent.gguf'"),
        ("folder/absent.gguf", "no model 'folder/absent.gguf'"),
    ],
)
def test_unknown_names(name: str, message: str, hub: FakeHub) -> None:
    with pytest.raises(UserError, match=message):
        resolve_model(name)
    assert not hub.calls


def test_drafters(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    small = PRESETS["smollm2-135m"]
    assert resolve_drafter(None, None) is None
    assert resolve_drafter("none", small) is None
    assert resolve_drafter(tmp_path, small) == tmp_path
    (tmp_path / "models").mkdir()
    monkeypatch.setattr(catalogue, "__file__", str(tmp_path / "models" / "catalogue.py"))
    with pytest.raises(UserError, match="heads/smollm2-135m is not part of this installation"):
        resolve_drafter(None, small)
    (tmp_path / "heads" / "smollm2-135m").mkdir(parents=True)
    assert resolve_drafter(None, small) == tmp_path / "heads" / "smollm2-135m"
    with pytest.raises(UserError, match="no drafter 'eagle'"):
        resolve_drafter("eagle", small)
    with pytest.raises(UserError, match=r"no drafter 'smolm2-135m': .*; did you mean 'smollm2-135m'"):
        resolve_drafter("smolm2-135m", small)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match="is a file; name the folder"):
        resolve_drafter(tmp_path / "model.safetensors", small)


def test_draft_models(tmp_path: Path, hub: FakeHub, smollm2_gguf: Path) -> None:
    file = tmp_path / "small.gguf"
    file.touch()
    assert resolve_drafter(file, None) == file
    assert resolve_drafter(str(tmp_path), None) == file  # a folder that holds one GGUF
    assert resolve_drafter("SmolLM2-135M", None) == smollm2_gguf
    assert names(resolve_drafter("me/mine", None)) == {"config.json", "tokenizer.json", "generation_config.json", "model.safetensors"}


def hub_error(kind: Any) -> Exception:
    """An error of the hub client, whose constructors want a response that this test has not got."""
    error: Exception = kind.__new__(kind)
    error.args = ("first line\nsecond line",)
    return error


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.GatedRepoError, "is gated: accept its licence on the hub and run `hf auth login`"),
        (errors.RepositoryNotFoundError, "is no local path and not on the hub"),
        (errors.HFValidationError, "is no hub id"),
        (errors.LocalEntryNotFoundError, r"cannot download me/mine from the hub \(LocalEntryNotFoundError\); check the connection"),
        (ConnectionError, r"cannot download .* \(ConnectionError\)"),
    ],
)
def test_hub_failures(kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise hub_error(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=message) as caught:
        resolve_model("me/mine")
    assert "give a local folder or .gguf file instead" in str(caught.value)
    assert "\n" not in str(caught.value)
