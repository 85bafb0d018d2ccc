"""`adaptivespec generate`: answer one prompt, streaming, promoted tokens coloured."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.style import Style

from ..config import SamplingParams
from ..errors import UserError
from . import options as o
from .render import PROMOTED


def generate(
    prompt: Annotated[str, typer.Argument(help="The question; `-` reads it from standard input.")],
    model: o.Model = "smollm2-135m",
    drafter: o.Drafter = None,
    max_tokens: o.MaxTokens = 256,
    temperature: o.Temperature = 0.0,
    seed: o.Seed = None,
    policy: o.Policy = None,
    margin: o.Margin = None,
    guards: o.Guards = None,
    budget: o.Budget = None,
    speculative_algorithm: o.Algorithm = None,
    num_steps: o.NumSteps = None,
    topk: o.Topk = None,
    num_draft_tokens: o.NumDraftTokens = None,
    speculative_config: o.SpeculativeJson = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    context_length: o.ContextLength = None,
    aux_layers: o.AuxLayers = "input",
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the chat template.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")] = False,
) -> None:
    """Answer one prompt; promoted tokens (not the target's own choice) are coloured.

    Examples:

        adaptivespec generate "Why is the sky blue?"

        adaptivespec generate "Why is the sky blue?" --margin off     # lossless

        adaptivespec generate "Hi" -m ./my-model --drafter ./my-eagle3-head --speculative-num-steps 5 \\
            --speculative-eagle-topk 4 --speculative-num-draft-tokens 8
    """
    config = o.speculative_config(
        speculative_algorithm, num_steps, topk, num_draft_tokens, speculative_config, policy, margin, guards, budget
    )
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise UserError("the prompt is empty")
    from ..engine.llm import LLM
    from ..telemetry.stats import summarise

    llm = LLM(
        model,
        drafter=drafter,
        speculative=config,
        dtype=dtype,
        device=device,
        context_length=context_length,
        aux_layers=aux_layers,
        max_running_requests=1,
    )
    messages = text if raw or not llm.tokenizer.chat_template else [{"role": "user", "content": text}]
    console = Console()
    output = None
    for chunk in llm.stream(messages, params):
        if not json:
            for piece, promoted in zip(chunk.pieces, chunk.promoted, strict=True):
                show(console, piece, promoted)
        output = chunk.output
    assert output is not None
    summary = summarise(output.records)
    if json:
        typer.echo(
            o.to_json(
                {
                    "text": output.text,
                    "token_ids": output.token_ids,
                    "finish_reason": output.finish_reason,
                    "promoted": [i for i, flag in enumerate(output.promoted) if flag],
                    "speculative": output.speculative.model_dump(),
                    "accept_length": summary.accept_length,
                    "acceptance_rate": summary.acceptance_rate,
                    "drafted": summary.drafted,
                    "accepted": summary.accepted,
                    "spent_nats": summary.spent,
                }
            )
        )
        return
    typer.echo()
    decode = summary.seconds_draft + summary.seconds_verify + summary.seconds_rest
    rate = (len(output.token_ids) - 1) / decode if decode else 0.0
    Console(stderr=True).print(
        f"{len(output.token_ids)} tokens, {rate:.1f} tok/s after the prompt, accept length {summary.accept_length:.2f}, "
        f"{sum(output.promoted)} promoted, finished by {output.finish_reason}",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )


def show(console: Console, piece: str, promoted: bool) -> None:
    """Write a piece of the answer as it is: rich would expand tabs and replace emoji names. On a terminal, without its control codes."""
    if console.is_terminal:
        piece = piece.replace("\x1b", "")
        if promoted and console.color_system is not None:
            piece = Style.parse(PROMOTED).render(piece)
    console.file.write(piece)
    console.file.flush()
