"""The decoder against transformers: every family, from safetensors and from GGUF, prefill and one-token steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adaptivespec.models.decoder import Decoder
from adaptivespec.models.kv_cache import Block
from adaptivespec.models.loading import load_model
from tiny_models import FAMILIES, VOCAB


def logits(decoder: Decoder, ids: torch.Tensor, prefill: int) -> torch.Tensor:
    """Logits [len(ids), V]: the first `prefill` rows in one forward, the others one by one."""
    cache = decoder.new_cache(1, len(ids))
    causal = torch.ones(1, prefill, prefill, dtype=torch.bool).tril()
    block = Block([0], [0], [0], [prefill], causal)
    rows = [decoder.forward(ids[:prefill], torch.arange(prefill), cache, block)[0]]
    for i in range(prefill, len(ids)):
        block = Block([0], [i], [i], [1], None)
        rows.append(decoder.forward(ids[i : i + 1], torch.tensor([i]), cache, block)[0])
    return decoder.logits(torch.cat(rows))


@torch.inference_mode()
def reference(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """transformers' logits [len(ids), V] in fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids[None]).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_tiny_model_equals_transformers(family: str, form: str, tiny_folders: dict[str, Path], tiny_ggufs: dict[str, Path]) -> None:
    ids = torch.randint(VOCAB, (200,))  # beyond the original context of the llama3 scaling
    source = tiny_folders[family] if form == "safetensors" else tiny_ggufs[family]
    got = logits(load_model(source, "float32").decoder, ids, prefill=190)
    wanted = reference(tiny_folders[family], ids)
    assert wanted.std() > 0.5  # decided logits, or the comparison says nothing
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
    assert torch.equal(got.argmax(-1), wanted.argmax(-1))
