"""`adaptivespec eval` on a tiny model: runs, reruns, what is refused before any work."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaptivespec.cli import eval_setup
from adaptivespec.cli.main import run
from adaptivespec.evaluation.folder import ANSWERS, CALLS, RUN, AnswerLog
from tiny_heads import make_tiny_head
from tiny_models import make_tiny_model

GSM8K = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(4)]
MATH = [{"problem": f"What is {n} / 2?", "answer": f"\\frac{{{n}}}{{2}}", "solution": "", "unique_id": f"m/{n}"} for n in (1, 3)]
HUMANEVAL = [
    {
        "task_id": "HumanEval/0",
        "prompt": "def f(x):\n",
        "entry_point": "f",
        "canonical_solution": "    return x\n",
        "test": "def check(candidate):\n    assert candidate(1) == 1\n",
    }
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    make_tiny_model("llama", folder / "model")
    make_tiny_head(folder / "head")
    for name, rows in (("gsm8k", GSM8K), ("math500", MATH), ("humaneval", HUMANEVAL)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def flags(folder: Path, tmp_path: Path) -> Callable[..., list[str]]:
    def flags(*more: str, tasks: str = "gsm8k", out: Path | None = None) -> list[str]:
        data = [part for task in tasks.split(",") for part in ("--data", f"{task}={folder / task}.jsonl")]
        model = ["-m", str(folder / "model"), "--drafter", str(folder / "head"), "--dtype", "fp32"]
        return ["eval", *model, "--tasks", tasks, *data, "--out", str(out or tmp_path / "run"), "--max-tokens", "12", *more]

    return flags


Flags = Callable[..., list[str]]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_from_questions_to_a_page(flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    arms = "ar; static:3,4,4; margin:margin=0.05,guards=none"
    assert run(flags("--arms", arms, "--batch", "3", "--replaced", tasks="gsm8k,math500,humaneval")) == 0
    rows = lines(out / ANSWERS)
    labels = [arm.replace(" ", "") for arm in arms.split(";")]
    ids = {"gsm8k/0", "gsm8k/1", "gsm8k/2", "gsm8k/3", "m/1", "m/3", "HumanEval/0"}
    assert sorted((row["arm"], row["id"]) for row in rows) == sorted((label, each) for label in labels for each in ids)
    texts = {label: {row["id"]: row["text"] for row in rows if row["arm"] == label} for label in labels}
    assert texts["ar"] == texts["static:3,4,4"] != texts[labels[2]]  # strict is lossless
    promoted = [entry for row in rows if row["arm"] == labels[2] for entry in row["promoted"]]
    assert promoted
    assert all(entry["replaced"] is not None and entry["replaced_id"] != entry["token_id"] for entry in promoted)
    assert all(entry["log_margin"] <= 0 for entry in promoted)
    assert all(row["seconds"] > 0 and row["metrics"]["speculative_decoding"] for row in rows)
    calls = lines(out / CALLS)
    assert [(call["task"], call["arm"]) for call in calls] == [
        (task, label) for task in ("gsm8k", "math500", "humaneval") for label in labels
    ]
    for call in calls:
        own = [row for row in rows if (row["task"], row["arm"]) == (call["task"], call["arm"])]
        assert call["tokens"] == sum(row["tokens"] for row in own)
        assert sum(row["seconds"] for row in own) <= call["seconds"]
    settings = json.loads((out / RUN).read_text())
    [session] = settings["sessions"]
    assert {"command", "versions", "machine", "git_revision", "began", "seed"} <= session.keys()
    assert session["sandbox"]
    assert settings["prompts"]["examples"]["gsm8k"][0]["content"].startswith("What is 0 + 1?")
    assert settings["prompts"]["chat_template"]
    assert settings["settings"]["tasks"]["math500"]["max_tokens"] == 12
    printed = capsys.readouterr()
    assert "recovery" in printed.out
    assert "gsm8k ar: 4 answers" in printed.err
    assert run(["report", str(out)]) == 0
    assert (out / "report.html").exists()


def test_a_rerun_asks_what_is_missing(
    flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, append, written = tmp_path / "run", AnswerLog.append, [0]

    def interrupted(self: AnswerLog, row: dict[str, Any]) -> None:
        append(self, row)
        written[0] += 1
        if written[0] == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(AnswerLog, "append", interrupted)
        assert run(flags("--arms", "ar; tree", "--batch", "1")) == 130
    before = (out / ANSWERS).read_text()
    assert 3 <= before.count("\n") < 8
    printed = capsys.readouterr()
    assert "of 8 answers are in" in printed.err
    assert "not finished" in printed.err
    with (out / ANSWERS).open("a") as file:
        file.write('{"arm": "tr')
    assert run(flags("--arms", "ar; tree", "--batch", "1")) == 0
    assert (out / ANSWERS).read_text().startswith(before)
    assert len({(row["arm"], row["id"]) for row in lines(out / ANSWERS)}) == len(lines(out / ANSWERS)) == 8
    assert len(json.loads((out / RUN).read_text())["sessions"]) == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails(flags: Flags, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int) -> None:
    def fail(self: AnswerLog, row: dict[str, Any]) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(AnswerLog, "append", fail)
    assert run(flags("--arms", "ar")) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {os.strerror(number)}")
    assert ("the same command goes on once there is room" in error) == (number == errno.ENOSPC)


def test_a_run_grows_by_arms_tasks_and_questions(flags: Flags, tmp_path: Path) -> None:
    assert run(flags("--arms", "ar", "--limit", "2")) == 0
    assert run(flags("--arms", "tree", "--limit", "3")) == 0
    assert run(flags("--arms", "ar", "--limit", "1", tasks="math500")) == 0
    settings = json.loads((tmp_path / "run" / RUN).read_text())["settings"]
    assert json.loads((tmp_path / "run" / RUN).read_text())["prompts"]["examples"].keys() == {"gsm8k", "math500"}
    assert list(settings["arms"]) == ["ar", "tree"]
    assert {name: len(task["questions"]) for name, task in settings["tasks"].items()} == {"gsm8k": 3, "math500": 1}
    assert len(lines(tmp_path / "run" / ANSWERS)) == 2 + 3 + 1


def test_tasks_have_limits_and_arms_of_their_own(flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = {"tasks": "gsm8k,math500"}
    assert run(flags("--arms", "ar; tree", "--limit", "gsm8k=3,math500=1", **both)) == 0
    assert run(flags("--arms", "static", "--limit", "gsm8k=2")) == 0
    settings = json.loads((tmp_path / "run" / RUN).read_text())["settings"]
    assert {name: task["arms"] for name, task in settings["tasks"].items()} == {
        "gsm8k": ["ar", "tree", "static"],
        "math500": ["ar", "tree"],
    }
    rows = lines(tmp_path / "run" / ANSWERS)
    assert len(rows) == 2 * 4 + 2
    assert rows[-1]["shapes"] == {"seen": [[3, 4, 4]], "steps": [0] * rows[-1]["steps"]}
    capsys.readouterr()
    assert run(["report", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"] == 1  # gsm8k/2 of static, of which two were asked for
    for text in ("gsm8k=0", "x", "gsm8k=1,math500", "1,2"):
        assert run(flags("--arms", "ar", "--limit", text, **both)) == 2
        assert "--limit: expected" in capsys.readouterr().err


def test_questions_skipped_at_first_join_later(flags: Flags, tmp_path: Path) -> None:
    mixed = ("--arms", "ar+static:3,4,4", "--temperature", "1", "--seed", "5")
    assert run(flags(*mixed, "--skip", "1", "--limit", "gsm8k=2")) == 0
    rows = lines(tmp_path / "run" / ANSWERS)
    assert sorted(row["id"] for row in rows) == ["gsm8k/1", "gsm8k/2"]
    assert run(flags(*mixed)) == 0
    again = lines(tmp_path / "run" / ANSWERS)
    assert again[:2] == rows
    # seeds and the settings of a mixed arm go by the question, whatever it is asked with
    drafts = {row["id"]: row["shapes"]["seen"] != [] and row["shapes"]["seen"] != [[0, 1, 1]] for row in again}
    assert {row["id"]: row["seed"] for row in again} == {f"gsm8k/{i}": 5 + i for i in range(4)}
    assert drafts == {f"gsm8k/{i}": i % 2 == 1 for i in range(4)}


def test_arms_take_turns(flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    wanted = flags("--arms", "ar; static:3,4,4", "--batch", "1", "--interleave")
    assert run([*wanted, "--limit", "2"]) == 0
    assert run(wanted) == 0
    rows = lines(out / ANSWERS)
    assert [row["id"] for row in rows] == [f"gsm8k/{i}" for i in range(4) for _ in range(2)]
    assert len({row["text"] for row in rows if row["id"] == "gsm8k/1"}) == 1
    assert sum(call["answers"] for call in lines(out / CALLS)) == 8
    assert run(["report", str(out)]) == 0
    assert "Arms took turns at every question" in (out / "report.html").read_text()
    capsys.readouterr()
    assert run(flags("--arms", "ar", "--batch", "1")) == 2
    assert "was made with interleave True, not False" in capsys.readouterr().err
    assert run(flags("--arms", "ar", "--interleave")) == 2
    assert "--interleave is for --batch 1, not 16" in capsys.readouterr().err


def test_sampled_answers_do_not_depend_on_interruptions(flags: Flags, tmp_path: Path) -> None:
    common = ("--arms", "ar", "--temperature", "0.8", "--seed", "3", "--batch", "2")
    assert run(flags(*common)) == 0
    again = tmp_path / "again"
    assert run(flags(*common, "--limit", "1", out=again)) == 0
    assert run(flags(*common, out=again)) == 0
    texts = [{row["id"]: (row["seed"], row["text"]) for row in lines(path / ANSWERS)} for path in (tmp_path / "run", again)]
    assert texts[0] == texts[1]
    assert len({text for _, text in texts[0].values()}) == 4


def test_fresh_begins_anew_when_told_twice(
    flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(flags("--arms", "ar", "--fresh")) == 0  # an empty folder needs no question
    (out / "notes.txt").write_text("mine")
    capsys.readouterr()
    different = flags("--arms", "ar", "--batch", "2")
    assert run(different) == 2
    assert capsys.readouterr().err == (
        f"error: the run in {out} was made with batch 16, not 2; give the same flags, another --out, or --fresh\n"
    )
    assert run([*different, "--fresh"]) == 2
    assert "--fresh would delete 4 answers" in capsys.readouterr().err
    monkeypatch.setattr(eval_setup.sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(eval_setup.typer, "confirm", lambda *_: False)
    assert run([*different, "--fresh"]) == 2
    assert "nothing was deleted" in capsys.readouterr().err
    assert len(lines(out / ANSWERS)) == 4
    assert run([*different, "--fresh", "--yes", "--limit", "1"]) == 0
    assert len(lines(out / ANSWERS)) == 1
    assert (out / "notes.txt").read_text() == "mine"


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("adaptivespec.models.loading.Decoder", lambda *_: pytest.fail("the weights were read"))
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "gsm9k"], "unknown task 'gsm9k'; did you mean 'gsm8k'?"),
        (["--tasks", ","], "no tasks given; for example gsm8k,math500,humaneval"),
        (["--tasks", "gsm8k,gsm8k"], "--tasks: the same task is given twice"),
        (["--tasks", "gsm8k", "--data", "/no/such.jsonl"], "--data: expected TASK=VALUE, such as gsm8k=..., not '/no/such.jsonl'"),
        (["--tasks", "gsm8k", "--data", "gsm8k=/no/such.jsonl"], "cannot read questions from /no/such.jsonl: No such file or directory"),
        (["--tasks", "gsm8k", "--data", "math500=x.jsonl"], "--data: 'math500' is not among the tasks of this run"),
        (["--tasks", "gsm8k", "--data", "gsm8k=a", "--data", "gsm8k=b"], "--data: gsm8k is given twice"),
        (["--max-tokens", "many"], "--max-tokens: expected a number from 1, or several as gsm8k=200,math500=100, not 'many'"),
        (["--limit", "9" * 5000], "--limit: expected a number from 1"),
        (["--max-tokens", "0"], "--max-tokens: expected a number from 1, or several as gsm8k=200,math500=100, not '0'"),
        (["--max-tokens", "gsm8k=5,math501=6"], "--max-tokens: 'math501' is not among the tasks of this run; did you mean 'math500'?"),
        (["--arms", "ar; tre"], "unknown arm 'tre'; did you mean 'tree'?"),
        (["--temperature", "-1"], "temperature: Input should be greater than or equal to 0"),
        (["--replaced", "--temperature", "1"], "--replaced: what a promoted token replaced is known at temperature 0"),
        (["--limit", "0"], "--limit"),
        (["--skip", "gsm8k=-1"], "--skip: expected a number from 1"),
        (["--batch", "0"], "--batch"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)  # fmt: skip
def test_one_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    assert message in refused(["eval", "--out", str(out), *arguments], capsys, monkeypatch)
    assert not out.exists()


def test_folders_that_cannot_hold_a_run(
    flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_text("")
    other.mkdir()
    (other / "thesis.tex").write_text("")
    places = [
        (file, "it is a file"),
        (file / "below", "Not a directory"),
        (other, "is not empty and holds no evaluation; choose another --out"),
    ]
    if Path("/proc/self").exists():  # a folder that lets nobody in, root neither
        places.append((Path("/proc/none"), "cannot write /proc/none"))
    for out, message in places:
        for more in ((), ("--fresh", "--yes")):
            assert message in refused(flags(*more, out=out), capsys, monkeypatch)
    broken = tmp_path / "broken"
    broken.mkdir()
    for text, message in (("{", "run.json: not JSON"), ('{"name": "mine"}', "run.json: expected the schema adaptivespec-eval-1, not None")):
        (broken / RUN).write_text(text)
        for more in ((), ("--fresh", "--yes")):
            assert message in refused(flags(*more, out=broken), capsys, monkeypatch)
        assert (broken / RUN).read_text() == text
    assert (other / "thesis.tex").exists()


def test_a_run_in_progress_is_left_alone(
    flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    assert run(flags("--arms", "ar")) == 0
    capsys.readouterr()
    with AnswerLog(out):
        for more in ((), ("--fresh", "--yes")):
            assert "another process is writing to" in refused(flags("--arms", "ar", *more), capsys, monkeypatch)


def test_missing_libraries_are_named_first(flags: Flags, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "scipy: pip install 'adaptivespec[eval]'" in refused(flags(), capsys, monkeypatch)


def test_a_question_that_does_not_fit_is_named(flags: Flags, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps(GSM8K[0]) + "\n" + json.dumps({"question": "x" * 600, "answer": "#### 1"}) + "\n")
    arguments = flags("--arms", "ar")
    arguments[arguments.index("--data") + 1] = f"gsm8k={long}"
    assert run(arguments) == 2
    assert "gsm8k/1: the prompt has" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_same_question_twice_and_too_few_for_a_mix(
    flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = tmp_path / "twice.jsonl"
    twice.write_text((json.dumps(HUMANEVAL[0]) + "\n") * 2)
    arguments = ["eval", "--out", str(tmp_path / "run"), "--tasks", "humaneval", "--data", f"humaneval={twice}"]
    assert "humaneval: two questions have the id HumanEval/0" in refused(arguments, capsys, monkeypatch)
    mixed = "arm 'ar+tree' mixes 2 settings, and gsm8k has 1 questions"
    assert mixed in refused(flags("--arms", "ar+tree", "--limit", "1"), capsys, monkeypatch)


@pytest.mark.parametrize("command", ["eval", "report"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    printed = capsys.readouterr().out
    assert "Examples:" in printed
    assert printed.count(f"adaptivespec {command}") > 1


def test_no_revision_outside_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_setup, "__file__", str(tmp_path / "eval_setup.py"))
    assert eval_setup.git_revision() is None
