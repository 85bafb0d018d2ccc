"""`adaptivespec eval`: arms answer questions whose answers can be checked; every answer is judged and kept, and a rerun goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UserError
from ..evaluation.arms import DEFAULT_ARMS, parse_arms
from . import options as o
from .bench import as_prompts
from .eval_run import carry_out
from .eval_server import TIMEOUT, evaluate_server
from .eval_setup import (
    DEFAULT_TASKS,
    Wanted,
    check_mixes,
    check_tools,
    described,
    load_questions,
    parse_counts,
    parse_data,
    parse_names,
    prepare,
    prompt_texts,
    run_settings,
    session,
    task_params,
)
from .files import check_writable

if TYPE_CHECKING:
    from ..engine.llm import LLM
    from ..evaluation.runs import Asked
    from ..evaluation.tasks import Question


def evaluate(
    engine: o.EngineFlags,
    sampling: o.SamplingFlags,
    out: Annotated[Path, typer.Option(help="Folder of the run; one that holds an unfinished run of the same settings is taken up again.")],
    tasks: Annotated[str, typer.Option(help="Tasks separated by commas: gsm8k, math500, humaneval.")] = DEFAULT_TASKS,
    arms: Annotated[str, typer.Option(help="Arms separated by `;`, as in bench.")] = DEFAULT_ARMS,
    data: Annotated[
        list[str] | None, typer.Option(help="TASK=FILE: a JSON-lines file instead of the hub's data set; may be repeated.")
    ] = None,
    limit: Annotated[
        str | None, typer.Option(help="Only so many questions (after --skip), of each task or as gsm8k=200,math500=100; default: all.")
    ] = None,
    skip: Annotated[
        str | None, typer.Option(help="Leave the first so many out, as for --limit: such as those that a setting was chosen on.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Requests decoded together: one joins when another leaves.")] = 16,
    max_tokens: Annotated[
        str | None,
        typer.Option(
            "--max-tokens", "--max-new-tokens", help="Most tokens per answer, for all tasks or as gsm8k=512,...; default 512, math500 1024."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Seed of sampling (question i uses seed + i) and of the bootstrap.")] = 0,
    interleave: Annotated[
        bool,
        typer.Option(
            "--interleave", help="With --batch 1: arms take turns at every question, judged in between, so that speeds can be compared."
        ),
    ] = False,
    replaced: Annotated[
        bool, typer.Option("--replaced", help="Also note what each promoted token replaced; temperature 0 only, and a little slower.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the run that the folder holds, after asking, and begin anew.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask before --fresh deletes answers.")] = False,
    remote: Annotated[
        str | None,
        typer.Option("--engine", help="openai=URL: ask a running OpenAI-compatible server (SGLang, vLLM, ...) instead of this engine."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=1, help=f"With --engine: seconds for one answer, retries included; default {TIMEOUT:g}.")
    ] = None,
) -> None:
    """Measure what a lossy rule does to accuracy: every arm answers the same questions, and each answer is checked.

    An interrupted run goes on where it stopped when the same command comes again. See docs/evaluation.md.

    Examples:

        adaptivespec eval --out runs/first --limit 100

        adaptivespec eval --out runs/gsm8k --tasks gsm8k --data gsm8k=gsm8k_test.jsonl --arms 'static:3,4,4; margin; margin:margin=0.2'

        adaptivespec eval --out runs/long --tasks math500 --max-tokens 2048 --batch 32 -m qwen3-8b    # on a GPU machine

        adaptivespec eval --out runs/speed --batch 1 --interleave --limit 14 --max-tokens 160     # tokens/s, resumable

        adaptivespec eval --out runs/served --engine openai=http://localhost:30000/v1 --arms server:strict-eagle3

        adaptivespec report runs/first
    """
    names = parse_names(tasks)
    params = task_params(sampling, names, max_tokens, seed, replaced)
    limits = parse_counts("--limit", limit, names)
    skips = parse_counts("--skip", skip, names)
    wanted = Wanted(names, params, parse_data(data or [], names), limits, skips, batch, replaced, seed, out, fresh, yes, interleave)
    if interleave and batch != 1:
        raise UserError(f"--interleave is for --batch 1, not {batch}: requests of several arms in one batch would share its time")
    if remote is not None:
        evaluate_server(remote, engine, arms, wanted, TIMEOUT if timeout is None else timeout)
        return
    if timeout is not None:
        raise UserError("--timeout has no effect without --engine")
    if any(part.strip().startswith("server:") for part in arms.split(";")):
        raise UserError("an arm server:LABEL needs --engine openai=URL")
    chosen = parse_arms(arms)
    questions = load_questions(names, wanted.files, limits, skips)
    check_tools(names)
    check_mixes(described(chosen), questions)
    flags = {name: value for name, value in vars(engine).items() if name != "trace"}
    settings = run_settings(flags, described(chosen), questions, wanted)
    earlier = prepare(out, settings, fresh, yes)
    if engine.trace is not None:
        check_writable(engine.trace)
    needed = [one for arm in chosen for one in arm.speculative]
    # one that drafts first, so that a missing drafter is noticed before weights are read
    llm = engine.build(max(needed, key=lambda one: one.policy != "off"), shapes_for=needed, max_running_requests=batch)
    asked = encode(llm, questions, wanted)
    from ..evaluation.runs import LocalAnswerer

    def decode(token: int) -> str:
        return llm.tokenizer.decode([token])  # type: ignore[no-any-return]

    decoder = llm.model.decoder
    dtype = str(decoder.dtype).removeprefix("torch.")
    carry_out(
        wanted,
        LocalAnswerer(llm, chosen, decode),
        [arm.label for arm in chosen],
        asked,
        settings,
        earlier,
        prompt_texts(llm.tokenizer.chat_template, questions),
        session(decoder.device, str(llm.model.source.path), dtype, llm.context_length, names, seed, decoder.lm_head.kernel),
    )


def encode(llm: LLM, questions: Mapping[str, Sequence[Question]], wanted: Wanted) -> dict[str, Asked]:
    """Prompts as token ids. Raises UserError for one that does not fit the context; the message names the question."""
    from ..evaluation.runs import Asked

    asked = {}
    for name, own in questions.items():
        prompts = [llm.encode(prompt) for prompt in as_prompts(llm, [question.messages for question in own])]
        for question, ids in zip(own, prompts, strict=True):
            try:
                llm.check_prompt(ids)
            except UserError as error:
                raise UserError(f"{question.id}: {error}") from None
        asked[name] = Asked(own, prompts, wanted.params[name], wanted.skips.get(name, 0))
    return asked
