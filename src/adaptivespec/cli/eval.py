"""`adaptivespec eval`: arms answer questions whose answers can be checked; every answer is judged and kept, and a rerun goes on."""

from __future__ import annotations

import errno
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ..errors import UserError
from ..evaluation.arms import DEFAULT_ARMS, Arm, parse_arms
from ..evaluation.folder import RUN, SCHEMA, AnswerLog, merged
from . import options as o
from .bench import as_prompts
from .eval_setup import (
    DEFAULT_TASKS,
    check_mixes,
    check_tools,
    delete_run,
    load_questions,
    parse_data,
    parse_names,
    prepare,
    prompt_texts,
    run_settings,
    session,
    task_params,
)
from .files import check_writable, write
from .render import aside

if TYPE_CHECKING:
    from ..config import SamplingParams
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
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many questions of each task.")] = None,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Requests decoded together: one joins when another leaves.")] = 16,
    max_tokens: Annotated[
        str | None,
        typer.Option(
            "--max-tokens", "--max-new-tokens", help="Most tokens per answer, for all tasks or as gsm8k=512,...; default 512, math500 1024."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Seed of sampling (question i uses seed + i) and of the bootstrap.")] = 0,
    replaced: Annotated[
        bool, typer.Option("--replaced", help="Also note what each promoted token replaced; temperature 0 only, and a little slower.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the run that the folder holds, after asking, and begin anew.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask before --fresh deletes answers.")] = False,
) -> None:
    """Measure what a lossy rule does to accuracy: every arm answers the same questions, and each answer is checked.

    An interrupted run goes on where it stopped when the same command comes again. See docs/evaluation.md.

    Examples:

        adaptivespec eval --out runs/first --limit 100

        adaptivespec eval --out runs/gsm8k --tasks gsm8k --data gsm8k=gsm8k_test.jsonl --arms 'static:3,4,4; margin; margin:margin=0.5'

        adaptivespec eval --out runs/long --tasks math500 --max-tokens 2048 --batch 32 -m qwen3-8b    # on a GPU machine

        adaptivespec report runs/first
    """
    chosen = parse_arms(arms)
    names = parse_names(tasks)
    params = task_params(sampling, names, max_tokens, seed, replaced)
    files = parse_data(data or [], names)
    questions = load_questions(names, files, limit)
    check_tools(names)
    check_mixes(chosen, questions)
    settings = run_settings(engine, chosen, questions, params, batch, replaced, files)
    earlier = prepare(out, settings, fresh, yes)
    if engine.trace is not None:
        check_writable(engine.trace)
    needed = [one for arm in chosen for one in arm.speculative]
    # one that drafts first, so that a missing drafter is noticed before weights are read
    llm = engine.build(max(needed, key=lambda one: one.policy != "off"), shapes_for=needed, max_running_requests=batch)
    asked = encode(llm, questions, params)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if fresh:
            delete_run(out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None
    prompts, sessions = prompt_texts(llm, questions), [session(llm, names, seed)]
    if earlier is not None:
        settings = merged(earlier["settings"], settings)
        prompts["examples"] = {**earlier["prompts"]["examples"], **prompts["examples"]}
        sessions = [*earlier["sessions"], *sessions]
    run = {"schema": SCHEMA, "settings": settings, "prompts": prompts, "sessions": sessions}
    complete = answer(llm, chosen, asked, out, run)
    from .report import show

    show(out, seed)
    if not complete:
        raise typer.Exit(130)


def encode(llm: LLM, questions: Mapping[str, Sequence[Question]], params: Mapping[str, SamplingParams]) -> dict[str, Asked]:
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
        asked[name] = Asked(own, prompts, params[name])
    return asked


@dataclass
class Bars:
    """A progress bar per arm, with the accuracy so far."""

    progress: Progress
    bars: dict[str, TaskID]
    right: Counter[str]
    done: Counter[str]

    def update(self, arm: str, correct: bool, advance: int = 1) -> None:
        """Count one answer."""
        self.right[arm] += correct
        self.done[arm] += 1
        share = f"{self.right[arm] / self.done[arm]:.1%} right"
        self.progress.update(self.bars[arm], advance=advance, description=f"{arm}  {share}")


def answer(llm: LLM, arms: Sequence[Arm], asked: Mapping[str, Asked], out: Path, run: dict[str, Any]) -> bool:
    """Answer what is missing; whether all is answered in the end, False after Ctrl-C."""
    from ..evaluation.runs import run_eval

    def decode(token: int) -> str:
        return llm.tokenizer.decode([token])  # type: ignore[no-any-return]

    total = sum(len(task.questions) for task in asked.values())
    wanted = {(task, question.id) for task, own in asked.items() for question in own.questions}
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())

    def told(call: dict[str, Any]) -> None:
        if not console.is_terminal:
            aside(f"{call['task']} {call['arm']}: {call['answers']} answers, {call['tokens'] / call['seconds']:.1f} tok/s")

    with AnswerLog(out) as log, Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        write(out / RUN, json.dumps(run, indent=2, ensure_ascii=False))
        bars = Bars(progress, {arm.label: progress.add_task(arm.label, total=total) for arm in arms}, Counter(), Counter())
        for row in log.answers:
            if row["arm"] in bars.bars and (row["task"], row["id"]) in wanted:
                bars.update(row["arm"], row["correct"])
        try:
            run_eval(llm, arms, asked, log, decode, bars.update, told)
        except KeyboardInterrupt:
            aside(f"interrupted: {bars.done.total()} of {total * len(arms)} answers are in {out}; the same command goes on", "red")
            return False
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(error.errno, f"{error.strerror}; the same command goes on once there is room", str(out)) from None
    return True
