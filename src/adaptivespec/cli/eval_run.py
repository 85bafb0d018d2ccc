"""The part of `adaptivespec eval` that is the same whoever answers: the folder, progress, Ctrl-C, the tables at the end."""

from __future__ import annotations

import errno
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import Progress, TaskID

from ..errors import UserError
from ..evaluation.folder import RUN, SCHEMA, AnswerLog, merged
from .eval_setup import Wanted, delete_run
from .files import write
from .render import aside, progress_bars

if TYPE_CHECKING:
    from ..evaluation.runs import Answerer, Asked


def carry_out(
    wanted: Wanted,
    answerer: Answerer,
    labels: Sequence[str],
    asked: Mapping[str, Asked],
    settings: dict[str, Any],
    earlier: Mapping[str, Any] | None,
    prompts: dict[str, Any],
    session: dict[str, Any],
) -> None:
    """Write run.json, ask what is missing, show the tables.

    Args:
        wanted: what the flags say.
        answerer: who answers.
        labels: the arms of this start.
        asked: what to ask, by task.
        settings: from `run_settings`.
        earlier: what run.json said before, from `prepare`; None for a new run.
        prompts: from `prompt_texts`.
        session: what this start works with.

    Raises:
        UserError: a folder that can't be written, or a question that can't be answered.
        typer.Exit: 130 after Ctrl-C.
        OSError: the disk is full.
    """
    out = wanted.out
    try:
        out.mkdir(parents=True, exist_ok=True)
        if wanted.fresh:
            delete_run(out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None
    sessions = [session]
    if earlier is not None:
        settings = merged(earlier["settings"], settings)
        prompts = {**prompts, "examples": {**earlier["prompts"]["examples"], **prompts["examples"]}}
        sessions = [*earlier["sessions"], session]
    run = {"schema": SCHEMA, "settings": settings, "prompts": prompts, "sessions": sessions}
    complete = answer(answerer, labels, asked, out, run, wanted.interleave)
    from .report import show

    show(out, wanted.seed)
    if not complete:
        raise typer.Exit(130)


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


def answer(
    answerer: Answerer, labels: Sequence[str], asked: Mapping[str, Asked], out: Path, run: dict[str, Any], interleave: bool = False
) -> bool:
    """Answer what is missing; whether all is answered in the end, False after Ctrl-C."""
    from ..evaluation.interleaved import ask_in_turns
    from ..evaluation.runs import ask_all

    total = sum(len(task.questions) for task in asked.values())
    wanted = {(task, question.id) for task, own in asked.items() for question in own.questions}

    def told(call: dict[str, Any]) -> None:
        if progress.disable:
            aside(f"{call['task']} {call['arm']}: {call['answers']} answers, {call['tokens'] / call['seconds']:.1f} tok/s")

    with AnswerLog(out) as log, progress_bars() as progress:
        write(out / RUN, json.dumps(run, indent=2, ensure_ascii=False))
        bars = Bars(progress, {label: progress.add_task(label, total=total) for label in labels}, Counter(), Counter())
        for row in log.answers:
            if row["arm"] in bars.bars and (row["task"], row["id"]) in wanted:
                bars.update(row["arm"], row["correct"])
        try:
            (ask_in_turns if interleave else ask_all)(answerer, labels, asked, log, bars.update, told)
        except KeyboardInterrupt:
            aside(f"interrupted: {bars.done.total()} of {total * len(labels)} answers are in {out}; the same command goes on", "red")
            return False
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(error.errno, f"{error.strerror}; the same command goes on once there is room", str(out)) from None
    return True
