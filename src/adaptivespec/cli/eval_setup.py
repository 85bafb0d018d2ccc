"""What `adaptivespec eval` checks and settles before a model is loaded: flags, questions, the folder, the run's settings and provenance."""

from __future__ import annotations

import datetime
import importlib.util
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..config import SamplingParams
from ..errors import UserError, nearest
from ..evaluation.arms import Arm
from ..evaluation.folder import ANSWERS, OWN_FILES, RUN, check_unused, contradiction, read_answers, read_run
from ..evaluation.sandbox import protections
from ..evaluation.tasks import TASKS, Question, load_task
from .machine import machine, versions
from .render import aside

if TYPE_CHECKING:
    from . import options as o

DEFAULT_TASKS = "gsm8k,math500,humaneval"


@dataclass(frozen=True)
class Wanted:
    """What the flags of `eval` ask for, whoever answers: tasks, what is asked how, and where answers go."""

    names: list[str]
    params: dict[str, SamplingParams]
    files: dict[str, Path]
    limits: dict[str, int]
    skips: dict[str, int]
    batch: int
    replaced: bool
    seed: int
    out: Path
    fresh: bool
    yes: bool
    interleave: bool = False


def parse_names(text: str) -> list[str]:
    """Task names separated by commas. Raises UserError for none, an unknown one or the same twice."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UserError(f"no tasks given; for example {DEFAULT_TASKS}")
    for name in names:
        if name not in TASKS:
            raise UserError(f"unknown task {name!r}{nearest(name, TASKS)}")
    if len(set(names)) < len(names):
        raise UserError(f"--tasks: the same task is given twice in {text!r}")
    return names


def by_task(flag: str, texts: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """TASK=VALUE texts as a mapping. Raises UserError for another form, a task that is not in this run, or one given twice."""
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not value:
            raise UserError(f"{flag}: expected TASK=VALUE, such as {names[0]}=..., not {text!r}")
        if name not in names:
            raise UserError(f"{flag}: {name!r} is not among the tasks of this run{nearest(name, names)}")
        if name in values:
            raise UserError(f"{flag}: {name} is given twice")
        values[name] = value
    return values


def parse_data(texts: Sequence[str], names: Sequence[str]) -> dict[str, Path]:
    """Files by task. Raises UserError."""
    return {name: Path(value) for name, value in by_task("--data", texts, names).items()}


def task_params(
    sampling: o.SamplingFlags, names: Sequence[str], max_tokens: str | None, seed: int, replaced: bool
) -> dict[str, SamplingParams]:
    """Sampling settings of each task. Raises UserError for what does not fit."""
    from ..evaluation.runs import MAX_TOKENS

    most = {**{name: MAX_TOKENS[name] for name in names}, **parse_counts("--max-tokens", max_tokens, names)}
    params = {name: sampling.params(seed=seed, max_tokens=number, **({"logprobs": 1} if replaced else {})) for name, number in most.items()}
    one = params[names[0]]
    if replaced and (one.temperature > 0 or one.penalises or one.min_tokens):
        raise UserError("--replaced: what a promoted token replaced is known at temperature 0 without penalties and --min-tokens only")
    return params


def parse_counts(flag: str, text: str | None, names: Sequence[str]) -> dict[str, int]:
    """A number for all tasks, or one each as `gsm8k=512,math500=1024`: by task, without those that are not named. Raises UserError."""
    if text is None:
        return {}
    texts = [part.strip() for part in text.split(",")]
    given = dict.fromkeys(names, texts[0]) if len(texts) == 1 and "=" not in texts[0] else by_task(flag, texts, names)
    for value in given.values():
        if not (value.isascii() and value.isdigit() and len(value) < 10 and int(value) > 0):
            raise UserError(f"{flag}: expected a number from 1, or several as gsm8k=200,math500=100, not {text!r}")
    return {name: int(value) for name, value in given.items()}


def load_questions(
    names: Sequence[str], files: Mapping[str, Path], limits: Mapping[str, int], skips: Mapping[str, int]
) -> dict[str, list[Question]]:
    """The questions of each task, as many as its limit says after those to skip, with ids that tell them apart. Raises UserError."""
    from ..evaluation.runs import check_ids

    questions = {name: load_task(name, files.get(name), limits.get(name), skips.get(name, 0)) for name in names}
    for own in questions.values():
        check_ids(own)
    return questions


def check_tools(names: Sequence[str]) -> None:
    """Refuse, before any work, what judging or the table would miss. Raises UserError."""
    from ..evaluation.statistics import require_scipy

    require_scipy()
    if "math500" in names and importlib.util.find_spec("math_verify") is None:
        raise UserError("comparing LaTeX answers needs the library math-verify: pip install 'adaptivespec[eval]'")
    if "humaneval" in names and "network namespace" not in protections():
        aside("warning: this system gives the sandbox no namespaces; generated code is held back by limits and a guard only", "yellow")


def check_mixes(arms: Mapping[str, Mapping[str, Any]], questions: Mapping[str, Sequence[Question]]) -> None:
    """Refuse a mixed arm (see `described`) of which some part would never be asked. Raises UserError."""
    for label, arm in arms.items():
        for name, own in questions.items():
            if len(arm["kinds"]) > len(own):
                raise UserError(f"arm {label!r} mixes {len(arm['kinds'])} settings, and {name} has {len(own)} questions")


def described(arms: Sequence[Arm]) -> dict[str, dict[str, Any]]:
    """What run.json says of arms, by label."""
    from ..evaluation.runs import arm_kind

    return {
        arm.label: {
            "kinds": [arm_kind(one) for one in arm.speculative],
            "settings": [one.model_dump(mode="json") for one in arm.speculative],
        }
        for arm in arms
    }


def run_settings(
    engine: Mapping[str, Any],
    arms: Mapping[str, Mapping[str, Any]],
    questions: Mapping[str, Sequence[Question]],
    wanted: Wanted,
) -> dict[str, Any]:
    """What a run is made with: everything that a rerun must agree with, as JSON values."""
    from ..evaluation.runs import digest

    first = wanted.params[wanted.names[0]]
    return {
        **engine,
        "batch": wanted.batch,
        "replaced": wanted.replaced,
        "interleave": wanted.interleave,
        "sampling": {name: value for name, value in first.model_dump(mode="json").items() if name not in ("max_tokens", "logprobs", "n")},
        "arms": dict(arms),
        "tasks": {
            name: {
                "max_tokens": wanted.params[name].max_tokens,
                "data": str(wanted.files[name]) if name in wanted.files else None,
                "arms": list(arms),
                "questions": {question.id: digest(question) for question in own},
            }
            for name, own in questions.items()
        },
    }


def prepare(out: Path, settings: Mapping[str, Any], fresh: bool, yes: bool) -> dict[str, Any] | None:
    """The run that a folder holds and that this one takes up, None for a new one. With `fresh` it asks, but deletes nothing yet.

    Raises:
        UserError: a folder that can't be written, holds other files, or a run with other settings.
    """
    check_folder(out)
    if not out.exists() or not any(out.iterdir()):
        return None
    check_unused(out)
    if not (out / RUN).exists():  # what a start leaves that was stopped at once holds nothing
        if any(path.name not in OWN_FILES or (path.name == ANSWERS and path.stat().st_size) for path in out.iterdir()):
            raise UserError(f"{out} is not empty and holds no evaluation; choose another --out")
        return None
    earlier = read_run(out)  # also before anything is deleted: another program's run.json stays
    if fresh:
        count = len((out / ANSWERS).read_bytes().splitlines()) if (out / ANSWERS).exists() else 0
        if not yes:
            if not sys.stdin.isatty():
                raise UserError(f"--fresh would delete {count} answers in {out}: add --yes, or choose another --out")
            if not typer.confirm(f"Delete {count} answers in {out}?"):
                raise UserError("nothing was deleted")
        return None
    read_answers(out)
    if said := contradiction(earlier["settings"], settings):
        raise UserError(f"the run in {out} was made with {said}; give the same flags, another --out, or --fresh")
    return earlier


def delete_run(out: Path) -> None:
    """Delete a run's own files from its folder; a report stays, and so does everything else."""
    for name in OWN_FILES:
        (out / name).unlink(missing_ok=True)


def check_folder(out: Path) -> None:
    """Refuse a folder that could not be written, before any work."""
    if out.exists() and not out.is_dir():
        raise UserError(f"cannot write {out}: it is a file, and a folder is needed")
    above = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(dir=above):
            pass
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None


def prompt_texts(chat_template: str | None, questions: Mapping[str, Sequence[Question]]) -> dict[str, Any]:
    """The model's chat template (None where a server keeps it), solved examples before a question, and the first question of each task."""
    return {"chat_template": chat_template, "few_shot": 0, "examples": {name: own[0].messages for name, own in questions.items()}}


def session(
    device: object, model: str, dtype: str | None, context_length: int | None, names: Sequence[str], seed: int, kernels: str | None = None
) -> dict[str, Any]:
    """What this start of the run works with, and when; None for what a server does not say."""
    return {
        "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["adaptivespec", *sys.argv[1:]]),
        "git_revision": git_revision(),
        "versions": versions(),
        "machine": machine(device),
        "kernels": kernels,
        "model": model,
        "dtype": dtype,
        "context_length": context_length,
        "seed": seed,
        "sandbox": list(protections()) if "humaneval" in names else None,
    }


def git_revision() -> str | None:
    """The commit of the checkout that this package runs from, with `-dirty` where files were changed; None outside of one."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "main.py") is None:  # installed inside somebody else's repository
        return None
    revision, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    return None if revision is None else revision + ("-dirty" if changes else "")
