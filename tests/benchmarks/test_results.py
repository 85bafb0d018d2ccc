"""The runs behind docs/results.md: what they are, on a tiny model, and that they go on."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from adaptivespec.evaluation.arms import parse_arms
from tiny_heads import make_tiny_head
from tiny_models import make_tiny_model


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "results.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["results.py"])
    return module


def flag(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_the_plan_is_what_was_asked_for(results: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    sys.argv = ["results.py", "--plan", "--data", "gsm8k=a b.jsonl"]
    assert results.main() == 0
    plan = capsys.readouterr().out.splitlines()
    assert plan[-1] == "adaptivespec report runs/results/answers --speed runs/results/speed"
    assert "'gsm8k=a b.jsonl'" in plan[0]
    args = results.argparse.Namespace(out="runs", model="m", drafter=None, data=[], limit=None)
    arms: dict[str, dict[str, Any]] = {name: {} for name in results.TASKS}
    timed = []
    for command in results.commands(args):
        own = parse_arms(flag(command, "--arms"))
        if "--interleave" in command:
            timed = [arm.label for arm in own]
            continue
        assert flag(command, "--batch") == "16"
        for name in flag(command, "--tasks").split(","):
            arms[name] |= {arm.label: arm.speculative[0] for arm in own}
    for name, chosen in arms.items():
        settings = list(chosen.values())
        assert [one.policy for one in settings[:4]] == ["static", "static", "adaptive", "adaptive"]  # the square, strict first
        assert [one.kappa for one in settings[:4]] == [1, 0.2, 1, 0.2]
        kappas = {one.kappa for one in settings if one.policy == "adaptive" and one.guards == "protected"}
        assert kappas == ({1, 0.9, 0.8, 0.5, 0.3, 0.2, 0.1} if name == "gsm8k" else {1, 0.8, 0.5, 0.2})
        assert any(one.policy == "off" for one in settings)
        assert set(chosen) <= set(timed)
    assert any(one.guards == "none" and one.kappa == 0.2 for one in arms["gsm8k"].values())
    assert (results.QUESTIONS["humaneval"], sum(results.TIMED.values())) == (164, 40)


def test_a_folder_that_cannot_be_made_is_one_line(results: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    sys.argv = ["results.py", "--out", str(tmp_path / "file" / "runs")]
    with pytest.raises(SystemExit) as left:
        results.main()
    assert left.value.code == 2
    assert "runs: Not a directory" in capsys.readouterr().err


def test_on_a_tiny_model(results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny_model("llama", tmp_path / "model")
    make_tiny_head(tmp_path / "head")
    files = {
        "gsm8k": {"question": "1?", "answer": "#### 1"},
        "math500": {"problem": "1?", "answer": "1"},
        "humaneval": {
            "task_id": "h/0",
            "prompt": "def f():\n",
            "entry_point": "f",
            "canonical_solution": " pass",
            "test": "def check(f): pass",
        },
    }
    data = []
    for name, row in files.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        data += ["--data", f"{name}={tmp_path / name}.jsonl"]
    monkeypatch.setattr(results, "MAX_TOKENS", dict.fromkeys(results.TASKS, 6))
    monkeypatch.setattr(results, "TIMED_TOKENS", 4)
    out, page = tmp_path / "out", tmp_path / "page.md"
    command = ["results.py", "--out", str(out), "--markdown", str(page), "-m", str(tmp_path / "model"), "--limit", "1", *data]
    sys.argv = [*command, "--drafter", str(tmp_path / "nothing")]
    assert results.main() == 2
    assert not page.exists()
    capsys.readouterr()
    for _ in range(2):
        sys.argv = [*command, "--drafter", str(tmp_path / "head")]
        assert results.main() == 0
    assert capsys.readouterr().err.count("$ adaptivespec eval") == 6  # nothing is done twice
    run = json.loads((out / "answers" / "run.json").read_text())
    assert all(session["command"].startswith("adaptivespec eval ") for session in run["sessions"])
    text = page.read_text()
    assert "answers are missing" not in text
    assert str(tmp_path) not in text
    assert "![accuracy and speed](page/accuracy-and-speed.png)" in text
