"""Stage 5: the public EAGLE-3 layout. `python -m recipes.eagle3_head.export --to src/adaptivespec/heads/smollm2-135m`

Writes model.safetensors and config.json of the averaged weights of the checkpoint. `fc` sees raw features in every engine, so the
feature scale is folded into it; `embed_tokens` is left out because engines take the target's.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from adaptivespec.models.architecture import ModelConfig

from .config import Run, command, write_atomic


def public_tensors(
    weights: dict[str, torch.Tensor], feature_scale: torch.Tensor, vocabulary: torch.Tensor, vocab_size: int
) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors: bf16 weights, d2t int64 offsets (target id = i + d2t[i]), t2d bool over the target's vocabulary."""
    tensors = dict(weights)
    tensors["fc.weight"] = tensors["fc.weight"] / feature_scale
    tensors = {name: value.to(torch.bfloat16).contiguous().cpu() for name, value in tensors.items()}
    tensors["d2t"] = vocabulary - torch.arange(len(vocabulary))
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool)
    tensors["t2d"][vocabulary] = True
    return tensors


def public_config(target: ModelConfig, intermediate_size: int, draft_vocab_size: int) -> dict[str, Any]:
    """config.json. No explicit feature layers: engines disagree on what the ids mean, and the defaults are what was trained on."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": round(target.rms_norm_eps, 12),
        "rope_theta": target.rope_theta,
        "max_position_embeddings": target.max_position_embeddings,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_ids[0] if target.eos_token_ids else None,
    }
    if target.rope_scaling:
        config["rope_scaling"] = {"rope_type": "llama3", **asdict(target.rope_scaling)}
    return config


def check_exportable(target: ModelConfig) -> None:
    """Refuse, before hours of training, a target whose rotary embedding a head's config can't describe."""
    if target.rope_factors:
        raise SystemExit("this GGUF file scales rotary frequencies by a table that a head's config can't hold; use the safetensors weights")


def export(checkpoint: Path, target: ModelConfig, folder: Path) -> Path:
    """Write the head; a reader of the folder sees the old file or the new one. Returns the weights' path."""
    state = torch.load(checkpoint, weights_only=True)
    vocabulary = state["vocabulary"]
    tensors = public_tensors(state["average"], state["head"]["feature_scale"], vocabulary, target.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(
        folder / "config.json",
        json.dumps(public_config(target, state["head_config"]["intermediate_size"], len(vocabulary)), indent=2) + "\n",
    )
    path = folder / "model.safetensors"
    partial = folder / "model.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    os.chmod(partial, 0o644)
    os.replace(partial, path)
    return path


@command
def main() -> None:
    """Export a run's checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/eagle3-smollm2-135m"), help="the run")
    parser.add_argument("--to", type=Path, required=True, help="folder of the exported head")
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    from adaptivespec.models.catalogue import resolve_model
    from adaptivespec.models.loading import open_checkpoint

    target, _ = open_checkpoint(resolve_model(args.model).path)
    path = export(Run(args.out).checkpoint, target, args.to)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
