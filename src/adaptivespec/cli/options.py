"""Options that several commands share, with SGLang's and vLLM's names where users know them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import SamplingParams, SpeculativeConfig
from .files import check_writable

if TYPE_CHECKING:
    from ..engine.llm import LLM
    from ..method.costs import CostTable
    from ..models.loading import LoadedModel

MODEL, SAMPLING, SPECULATION = "Model", "Sampling", "Speculation"
"""Panels of the help."""


def _flag(*names: str, panel: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel)


Model = Annotated[
    str, _flag("--model", "--model-path", "-m", panel=MODEL, help="Short name (see `adaptivespec models`), .gguf file, folder or hub id.")
]
Drafter = Annotated[
    str | None,
    _flag(
        "--drafter",
        "--speculative-draft-model-path",
        panel=MODEL,
        help="EAGLE-3 head (folder or hub id), a smaller model, `ngram` (prompt lookup, no model), or `none` for plain decoding; "
        "default: the short name's own head.",
    ),
]
Dtype = Annotated[str, _flag(panel=MODEL, help="auto (bf16 where the hardware has it), bf16, fp16 or fp32.")]
MaxTokens = Annotated[int, _flag("--max-tokens", "--max-new-tokens", panel=SAMPLING, help="Most tokens to generate per answer.")]
Seed = Annotated[int | None, _flag(panel=SAMPLING, help="Seed of the sampling noise; the same seed gives the same answer.")]


@dataclass(frozen=True)
class EngineFlags:
    """Which models, and how the engine runs them."""

    model: Model = "smollm2-135m"
    drafter: Drafter = None
    speculative_algorithm: Annotated[
        str | None,
        _flag(panel=MODEL, help="What the drafter must be: EAGLE3, STANDALONE (a smaller model), NGRAM, or none for plain decoding."),
    ] = None
    prompt_lookup_max: Annotated[int | None, _flag(panel=MODEL, help="Longest n-gram that ngram looks up; default 4.")] = None
    prompt_lookup_min: Annotated[int | None, _flag(panel=MODEL, help="Shortest n-gram that ngram looks up; default 1.")] = None
    dtype: Dtype = "auto"
    device: Annotated[str, _flag(panel=MODEL, help="auto, cpu or cuda.")] = "auto"
    context_length: Annotated[
        int | None, _flag(panel=MODEL, help="Longest prompt plus answer in tokens; default: the model's, at most 4096.")
    ] = None
    aux_layers: Annotated[
        str, _flag(panel=MODEL, help="How to read explicit feature layer ids of a head: input (vLLM) or output (SGLang).")
    ] = "input"
    trace: Annotated[
        Path | None, _flag(panel=MODEL, help="Write every step of every request to this file as JSON lines, see docs/trace.md.")
    ] = None

    @property
    def is_plain(self) -> bool:
        """Whether the algorithm asks for plain decoding."""
        return self.speculative_algorithm is not None and self.speculative_algorithm.upper() == "NONE"

    def build(
        self,
        speculative: SpeculativeConfig | None,
        *,
        max_running_requests: int = 1,
        shapes_for: list[SpeculativeConfig] | None = None,
        loaded: LoadedModel | None = None,
        trace: Path | None = None,
        costs: CostTable | None = None,
    ) -> LLM:
        """The engine; a model that another engine has loaded is taken from it. `trace` replaces the flag's file, `costs` the machine's own.

        Raises:
            UserError: what does not fit, before weights are read.
        """
        trace = trace or self.trace
        if trace is not None:
            check_writable(trace)
        lookup = {"prompt_lookup_max": self.prompt_lookup_max, "prompt_lookup_min": self.prompt_lookup_min}
        given = {name: value for name, value in lookup.items() if value is not None}
        from ..engine.llm import LLM

        return LLM(
            loaded or self.model,
            drafter=self.drafter,
            speculative=speculative,
            shapes_for=shapes_for or (),
            costs=costs,
            max_running_requests=max_running_requests,
            speculative_algorithm=self.speculative_algorithm,
            dtype=self.dtype,
            device=self.device,
            context_length=self.context_length,
            aux_layers=self.aux_layers,
            trace=trace,
            **given,
        )


@dataclass(frozen=True)
class SamplingFlags:
    """How tokens are chosen and when an answer ends."""

    temperature: Annotated[float, _flag(panel=SAMPLING, help="0 is greedy.")] = 0.0
    top_k: Annotated[int, _flag(panel=SAMPLING, help="Only the so many most probable tokens; 0 is off.")] = 0
    top_p: Annotated[float, _flag(panel=SAMPLING, help="Only the most probable tokens that hold this much probability; 1 is off.")] = 1.0
    min_p: Annotated[float, _flag(panel=SAMPLING, help="Only tokens at least this probable relative to the best; 0 is off.")] = 0.0
    repetition_penalty: Annotated[float, _flag(panel=SAMPLING, help="Divides the logits of tokens in prompt and answer; 1 is off.")] = 1.0
    presence_penalty: Annotated[float, _flag(panel=SAMPLING, help="Subtracted from logits of tokens in the answer.")] = 0.0
    frequency_penalty: Annotated[float, _flag(panel=SAMPLING, help="Subtracted once per occurrence in the answer.")] = 0.0
    stop: Annotated[list[str] | None, _flag(panel=SAMPLING, help="A string that ends the answer; may be repeated.")] = None
    min_tokens: Annotated[int, _flag(panel=SAMPLING, help="No stop token or stop string before this many tokens.")] = 0
    ignore_eos: Annotated[bool, _flag("--ignore-eos", panel=SAMPLING, help="Go on after end-of-sequence.")] = False

    def params(self, **more: Any) -> SamplingParams:
        """Sampling settings from these flags and `more`. Raises UserError."""
        return SamplingParams(**vars(self), **more)


@dataclass(frozen=True)
class SpeculativeFlags:
    """How to speculate: the settings users change most, and all of them as JSON."""

    policy: Annotated[str | None, _flag(panel=SPECULATION, help="adaptive, static, goodput, off, or a baseline; see docs/settings.md.")] = (
        None
    )
    margin: Annotated[
        str | None,
        _flag(
            "--margin",
            "--kappa",
            panel=SPECULATION,
            help="Promote a mismatch when p / p_top1 exceeds this, 0.5 by default; 1 and `off` are lossless.",
        ),
    ] = None
    guards: Annotated[str | None, _flag(panel=SPECULATION, help="protected (default) or none, the paper's rule.")] = None
    budget: Annotated[float | None, _flag(panel=SPECULATION, help="Most nats one answer may spend on promotions.")] = None
    num_steps: Annotated[int | None, _flag("--speculative-num-steps", panel=SPECULATION, help="Depth of a static tree.")] = None
    topk: Annotated[int | None, _flag("--speculative-eagle-topk", panel=SPECULATION, help="Branching of a static tree.")] = None
    num_draft_tokens: Annotated[
        int | None, _flag("--speculative-num-draft-tokens", panel=SPECULATION, help="Nodes of a static tree, the root included.")
    ] = None
    speculative_config: Annotated[
        str | None, _flag(panel=SPECULATION, help='All settings as JSON or a file: \'{"margin": 0.2, "policy": "adaptive"}\'.')
    ] = None

    def config(self, plain: bool = False) -> SpeculativeConfig | None:
        """Settings from flags, None when no flag was given. Single flags win over the JSON; `plain` makes the policy off.

        Raises:
            UserError: settings that do not exist, do not fit or have no effect.
        """
        values: dict[str, Any] = {}
        if self.speculative_config is not None:
            values |= SpeculativeConfig.parse(self.speculative_config).model_dump(exclude_unset=True)
        flags = {name: value for name, value in vars(self).items() if value is not None and name != "speculative_config"}
        if flags.keys() & {"num_steps", "topk", "num_draft_tokens"} and self.policy is None:
            values["policy"] = "static"  # SGLang's shape flags describe a static tree
        values |= flags
        if plain:
            values.setdefault("policy", "off")
        return SpeculativeConfig(**values) if values else None


def to_json(value: Any) -> str:
    """Indented JSON with plain characters."""
    return json.dumps(value, indent=2, ensure_ascii=False)
