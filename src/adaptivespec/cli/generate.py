"""`adaptivespec generate`: answer one prompt, streaming, promoted tokens coloured."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..config import SamplingParams
from ..errors import UserError
from . import options as o
from .files import input_lines
from .render import aside, show

if TYPE_CHECKING:
    from ..engine.inputs import Prompt
    from ..engine.llm import LLM
    from ..engine.request import RequestOutput


def generate(
    prompt: Annotated[str, typer.Argument(help="The question; `-` reads it from standard input.")],
    engine: o.EngineFlags,
    sampling: o.SamplingFlags,
    speculation: o.SpeculativeFlags,
    max_tokens: o.MaxTokens = 256,
    seed: o.Seed = None,
    n: Annotated[int, typer.Option(help="Answers; more than one need a temperature, and come one after another.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: each token's log-probability, and so many of the most probable tokens.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the chat template.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of streaming text; with --n a list of them.")] = False,
) -> None:
    """Answer one prompt; promoted tokens (not the target's own choice) are coloured.

    Examples:

        adaptivespec generate "Why is the sky blue?"

        adaptivespec generate "Why is the sky blue?" --margin off     # lossless

        adaptivespec generate "Name a colour." --temperature 0.8 --top-p 0.9 --n 3

        adaptivespec generate "Repeat: one two three" --drafter ngram     # prompt lookup, no draft model

        adaptivespec generate "Hi" -m ./my-model --drafter ./my-eagle3-head --speculative-num-steps 5 \\
            --speculative-eagle-topk 4 --speculative-num-draft-tokens 8
    """
    config = speculation.config(engine.is_plain)
    params = sampling.params(seed=seed, max_tokens=max_tokens, n=n, logprobs=logprobs)
    if logprobs is not None and not json:
        raise UserError("--logprobs needs --json")
    text = "".join(input_lines()) if prompt == "-" else prompt
    if not text.strip():
        raise UserError("the prompt is empty")
    llm = engine.build(config, max_running_requests=min(n, 8))
    messages: Prompt = text if raw or not llm.tokenizer.chat_template else [{"role": "user", "content": text}]
    began = time.perf_counter()
    if json:
        outputs = llm.generate([messages], params)
        seconds = time.perf_counter() - began
        rows = [as_json(output, seconds) for output in outputs]
        typer.echo(o.to_json(rows if n > 1 else rows[0]))
        return
    console = Console()
    outputs = []
    for output, pieces in finished(llm, messages, params, console):
        if n > 1:
            console.print(f"answer {output.index + 1} of {n}:", style="bold", highlight=False)
            for piece, promoted in zip(pieces, output.promoted, strict=True):
                show(console, piece, promoted)
        typer.echo()
        outputs.append(output)
    aside(summary_line(outputs, time.perf_counter() - began))


def finished(llm: LLM, prompt: Prompt, params: SamplingParams, console: Console) -> Iterator[tuple[RequestOutput, Sequence[str]]]:
    """Each answer with its text in one piece per token, in order; a single one is shown as it comes."""
    if params.n == 1:
        for chunk in llm.stream(prompt, params):
            for piece, promoted in zip(chunk.pieces, chunk.promoted, strict=True):
                show(console, piece, promoted)
            if chunk.output is not None:
                yield chunk.output, []
        return
    requests = llm.submit(prompt, params)
    try:
        for request in requests:
            while request.finish_reason is None:
                llm.step()
            output = llm.output(request)  # before its pieces are read: it decides the last one
            yield output, request.detokenizer.pieces if request.detokenizer is not None else [""] * len(output.token_ids)
    finally:
        for request in requests:
            llm.abort(request)


def summary_line(outputs: Sequence[RequestOutput], seconds: float) -> str:
    """One line on what was generated: speed, accept length, promotions, why it ended."""
    from ..telemetry.stats import summarise

    total = summarise(record for output in outputs for record in output.records)
    tokens = sum(len(output.token_ids) for output in outputs)
    prefill = sum(output.seconds_prefill for output in outputs)
    decoded = tokens - len(outputs)  # the prompt gives each answer's first token
    rate = decoded / (seconds - prefill) if decoded else 0.0
    return (
        f"{tokens} tokens, {rate:.1f} tok/s after the prompt, accept length {total.accept_length:.2f}, "
        f"{sum(sum(output.promoted) for output in outputs)} promoted, "
        f"finished by {', '.join(dict.fromkeys(output.finish_reason for output in outputs))}"
    )


def as_json(output: RequestOutput, seconds: float) -> dict[str, Any]:
    """Everything that an answer knows; `seconds` is the time of the whole call, all its answers together."""
    from ..telemetry.stats import summarise

    summary = summarise(output.records)
    row: dict[str, Any] = {
        "index": output.index,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "promoted": [i for i, flag in enumerate(output.promoted) if flag],
        "params": output.params.model_dump(),
        "seed": output.seed,
        "speculative": output.speculative.model_dump(),
        "metrics": output.metrics,
        "timings": {
            "prompt_tokens": len(output.prompt_token_ids),
            "seconds_prefill": output.seconds_prefill,
            "seconds_draft": summary.seconds_draft,
            "seconds_verify": summary.seconds_verify,
            "seconds_rest": summary.seconds_rest,
            "seconds": seconds,
        },
    }
    if output.logprobs is not None:
        row["logprobs"] = [asdict(logprob) for logprob in output.logprobs]
    return row
