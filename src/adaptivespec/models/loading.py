"""From a name to a decoder with its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import UserError, nearest
from .architecture import ModelConfig
from .catalogue import ModelSource, resolve_model
from .decoder import Decoder
from .expected import check_tensors
from .gguf_config import config_from_gguf
from .gguf_file import GGUFFile
from .gguf_weights import GGUFWeights
from .hf_config import config_from_folder
from .weights import SafetensorsWeights, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


@dataclass
class LoadedModel:
    """A decoder ready to run, and where it came from."""

    config: ModelConfig
    decoder: Decoder
    source: ModelSource
    _tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, loaded on first use (transformers takes seconds to import). Raises UserError without one."""
        if self._tokenizer is None:
            from .tokenizer import load_tokenizer

            self._tokenizer = load_tokenizer(self.source.path)
        return self._tokenizer


def load_model(
    name_or_path: str | Path | ModelSource, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu"
) -> LoadedModel:
    """Load a decoder.

    Args:
        name_or_path: a short name, a .gguf file, a folder, or a hub id; or where one of these led.
        dtype: "auto" (see `choose_dtype`), a name in `DTYPES`, or a torch dtype.
        device: "cpu" or a CUDA device.

    Raises:
        UserError: unknown model or dtype, damaged files, or a model that AdaptiveSpec does not support.
    """
    dtype = choose_dtype(dtype, torch.device(device))
    source = name_or_path if isinstance(name_or_path, ModelSource) else resolve_model(name_or_path)
    config, weights = open_checkpoint(source.path)
    return LoadedModel(config, Decoder(config, weights, dtype, torch.device(device)), source)


def open_checkpoint(path: Path) -> tuple[ModelConfig, Weights]:
    """Configuration and weights of a .gguf file or a safetensors folder; reads headers only. Raises UserError."""
    weights: Weights
    if path.is_file():
        file = GGUFFile(path)
        config, weights = config_from_gguf(file), GGUFWeights(file)
    else:
        config, weights = config_from_folder(path), SafetensorsWeights(path)
    check_tensors(config, weights, str(path))
    return config, weights


def choose_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype to compute in; "auto" is bf16 on CUDA and on CPUs with bf16 units, else fp32. Raises UserError for other names."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" or _cpu_has_bf16() else torch.float32
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}{nearest(dtype, [*DTYPES, 'auto'])}")
    return DTYPES[dtype]


def _cpu_has_bf16() -> bool:
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_arm_bf16_supported")
    return any(hasattr(torch.cpu, probe) and getattr(torch.cpu, probe)() for probe in probes)
