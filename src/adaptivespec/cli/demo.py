"""`adaptivespec demo`: a real model answers three prompts three ways."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from ..config import SamplingParams
from ..evaluation.arms import parse_arms
from . import options as o
from .render import PROMOTED, comparison_table, draw_tree

ARMS = "ar; static:3,4,4; adaptivespec"
PROMPTS = (
    "Why is the sky blue?",
    "A farmer has 12 hens. Each lays 2 eggs a day. How many eggs are there after a week? Please reason step by step.",
    "Write a Python function that returns the largest number of a list.",
)


def demo(model: o.Model = "smollm2-135m", drafter: o.Drafter = None, max_tokens: o.MaxTokens = 96, dtype: o.Dtype = "auto") -> None:
    """Answer three prompts with plain decoding, static EAGLE-3 and AdaptiveSpec, and compare.

    Examples:

        adaptivespec demo

        adaptivespec demo -m qwen3-8b    # on a GPU machine
    """
    arms = parse_arms(ARMS)
    params = SamplingParams(max_tokens=max_tokens)
    console = Console(highlight=False)
    console.print(f"loading {model} ...", style="dim")
    from ..engine.llm import LLM
    from ..evaluation.bench import describe, run_bench
    from .bench import as_prompts

    llm = LLM(
        model,
        drafter=drafter,
        speculative=arms[-1].speculative[0],
        shapes_for=[arm.speculative[0] for arm in arms],
        dtype=dtype,
        max_running_requests=1,
    )
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    results = {}
    drawn = None
    with console.status("answering", spinner="dots"):
        for result in run_bench(llm, arms, as_prompts(llm, messages), params):
            results[result.arm.label] = result
    for prompt, question in zip(as_prompts(llm, messages), PROMPTS, strict=True):
        answer = Text()
        for chunk in llm.stream(prompt, params):
            for piece, promoted in zip(chunk.pieces, chunk.promoted, strict=True):
                answer.append(piece, PROMOTED if promoted else None)
            if chunk.output is not None:
                # The most telling step: promotions first, then branching, then length.
                best = max(
                    chunk.output.records,
                    key=lambda r: (r.num_promoted > 0, len(set(r.parents)) < len(r.parents), r.num_accepted),
                    default=None,
                )
                if best is not None and (drawn is None or best.num_promoted > drawn.num_promoted):
                    drawn = best
        console.print(question, style="bold")
        console.print(Panel(answer))
    console.print(Text.assemble("tokens in ", ("this colour", PROMOTED), " were promoted by the margin rule"), style="dim")
    baseline = results[arms[0].label]
    console.print(comparison_table({label: describe(r, baseline) for label, r in results.items()}))
    if drawn is not None:
        console.print(f"one draft tree (shape {drawn.shape}; [green]accepted[/], [bold yellow]promoted[/], [dim]rejected[/]):")
        console.print(draw_tree(drawn, lambda token: str(llm.tokenizer.decode([token]))))
    typer.echo('next: adaptivespec generate "your question"; adaptivespec bench --help')
