"""Tiny models for SGLang's tests, made on the fly: a target with real attention, and drafters that it often agrees with.

>>> bed = make_models(tmp_path)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from adaptivespec import LLM, SamplingParams, SpeculativeConfig
from adaptivespec.models.loading import load_model
from engine.overfit_head import overfit_head
from tiny_models import DRAFT_NOISE, add_tokenizer, make_tiny_model

LAYERS = 8  # fewer, and two of the three layers that SGLang takes features from would be the same one
POSITIONS = 512
KNOWN = ["Tell me why.", "the sea", "0123456789", "def f(x):", "A", "What is seven times eight?", "(a, b)", "zzzzz"]
"""Prompts whose answers the EAGLE-3 head knows by heart, so that drafts are accepted several levels deep."""
UNKNOWN = ["Once upon", "return None", "42 is", "Q: who?"]
"""Prompts that it never saw: here it drafts plausible tokens at best."""
LEARNT = 48  # tokens of each answer that the head was trained on


@dataclass(frozen=True)
class BedModels:
    """Folders of a target and its drafters.

    Attributes:
        target: a Llama of one token per ASCII character.
        eagle3: a head trained on the target's answers to KNOWN.
        standalone: the target with a little noise on its weights, as a draft model.
    """

    target: Path
    eagle3: Path
    standalone: Path


def make_models(folder: Path) -> BedModels:
    """Make and train everything; seconds."""
    shape: dict[str, Any] = {"num_hidden_layers": LAYERS, "max_position_embeddings": POSITIONS, "rope_parameters": None}
    target = make_tiny_model("llama", folder / "target", **shape)
    standalone = make_tiny_model("llama", folder / "standalone", noise=DRAFT_NOISE, **shape)
    model = load_model(target, "fp32")
    llm = LLM(model, max_running_requests=len(KNOWN))
    answers = llm.generate(
        KNOWN, SamplingParams(max_tokens=LEARNT, ignore_eos=True), speculative=SpeculativeConfig(policy="off", margin=None)
    )
    texts = [[*answer.prompt_token_ids, *answer.token_ids] for answer in answers]
    eagle3 = overfit_head(folder / "eagle3", model.decoder, texts)
    settings = json.loads((eagle3 / "config.json").read_text())
    (eagle3 / "config.json").write_text(json.dumps({**settings, "torch_dtype": "float32"}))
    return BedModels(target, eagle3, standalone)


def make_eagle_head(folder: Path, target: Path) -> Path:
    """A head of EAGLE's first generation for the target, with random weights: it accepts next to nothing and runs the same code."""
    settings = json.loads((target / "config.json").read_text())
    hidden, inner, heads = settings["hidden_size"], settings["intermediate_size"], settings["num_attention_heads"]
    keys = hidden // heads * settings["num_key_value_heads"]
    generator = torch.Generator().manual_seed(0)
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {f"layers.0.{name}.weight": 0.15 * torch.randn(*size, generator=generator) for name, size in sizes.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    tensors["fc.weight"] = 0.15 * torch.randn(hidden, 2 * hidden, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**settings, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}))
    add_tokenizer(folder)
    return folder
