"""Options that several commands share, with SGLang's and vLLM's names where users know them."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ..config import SpeculativeConfig
from ..errors import UserError

Model = Annotated[
    str, typer.Option("--model", "--model-path", "-m", help="Short name (see `adaptivespec models`), .gguf file, folder or hub id.")
]
Drafter = Annotated[
    str | None,
    typer.Option("--drafter", "--speculative-draft-model-path", help="EAGLE-3 head: a folder or hub id; `none` for plain decoding."),
]
Dtype = Annotated[str, typer.Option(help="auto (bf16 where the hardware has it), bf16, fp16 or fp32.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
ContextLength = Annotated[int | None, typer.Option(help="Longest prompt plus answer in tokens; default: the model's, at most 4096.")]
AuxLayers = Annotated[str, typer.Option(help="How to read explicit feature layer ids of a head: input (vLLM) or output (SGLang).")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "--max-new-tokens", help="Most tokens to generate per answer.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampling noise; the same seed gives the same answer.")]

Algorithm = Annotated[str | None, typer.Option("--speculative-algorithm", help="EAGLE3, or none for plain decoding.")]
NumSteps = Annotated[int | None, typer.Option("--speculative-num-steps", help="Depth of a static tree.")]
Topk = Annotated[int | None, typer.Option("--speculative-eagle-topk", help="Branching of a static tree.")]
NumDraftTokens = Annotated[int | None, typer.Option("--speculative-num-draft-tokens", help="Nodes of a static tree, the root included.")]
SpeculativeJson = Annotated[
    str | None, typer.Option("--speculative-config", help='All settings as JSON or a file: \'{"margin": 0.2, "policy": "adaptive"}\'.')
]
Policy = Annotated[str | None, typer.Option(help="adaptive, static or off.")]
Margin = Annotated[
    str | None, typer.Option("--margin", "--kappa", help="Promote a mismatch when p / p_top1 exceeds this, in (0, 1]; `off` is lossless.")
]
Guards = Annotated[str | None, typer.Option(help="protected (default) or none, the paper's rule.")]
Budget = Annotated[float | None, typer.Option(help="Most nats one answer may spend on promotions.")]


def speculative_config(
    algorithm: str | None,
    num_steps: int | None,
    topk: int | None,
    num_draft_tokens: int | None,
    text: str | None,
    policy: str | None,
    margin: str | None,
    guards: str | None,
    budget: float | None,
) -> SpeculativeConfig | None:
    """Settings from flags; None when no flag was given. Single flags win over the JSON. Raises UserError."""
    values: dict[str, Any] = {}
    if text is not None:
        values |= SpeculativeConfig.parse(text).model_dump(exclude_unset=True)
    shape = {"num_steps": num_steps, "topk": topk, "num_draft_tokens": num_draft_tokens}
    given = {name: value for name, value in shape.items() if value is not None}
    if given and policy is None:
        values["policy"] = "static"  # SGLang's shape flags describe a static tree
    flags = {**given, "policy": policy, "margin": margin, "guards": guards, "budget": budget}
    values |= {name: value for name, value in flags.items() if value is not None}
    if algorithm is not None:
        if algorithm.upper() not in ("EAGLE3", "NONE"):
            raise UserError(f"--speculative-algorithm {algorithm} is not supported; this engine has EAGLE3 and none")
        if algorithm.upper() == "NONE":
            values["policy"] = "off"
    return SpeculativeConfig(**values) if values else None


def to_json(value: Any) -> str:
    """Indented JSON with plain characters."""
    return json.dumps(value, indent=2, ensure_ascii=False)
