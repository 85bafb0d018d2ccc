"""The commands on a tiny model: what they print and write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adaptivespec import __version__
from adaptivespec.cli.main import run
from adaptivespec.cli.render import draw_tree
from adaptivespec.evaluation.prompts import load_prompts
from adaptivespec.method.records import StepRecord
from adaptivespec.method.tree import TreeShape
from tiny_heads import make_tiny_head
from tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("cli")
    model = make_tiny_model("llama", folder / "model")
    return ["-m", str(model), "--drafter", str(make_tiny_head(folder / "head")), "--dtype", "fp32"]


def test_bench_writes_every_number_that_it_promises(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arms = "ar; static:3,4,4; margin; tree; adaptivespec; margin:5,4,8,margin=0.05,guards=none"
    assert run(["bench", *files, "--arms", arms, "--limit", "2", "--max-tokens", "12", "--repeats", "2", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["rss_after_imports_bytes"] < report["peak_rss_bytes"]
    assert {"machine", "versions", "command", "model", "dtype", "weights_bytes", "kv_cache_bytes"} <= report.keys()
    labels = [arm.replace(" ", "") for arm in arms.split("; ")]
    assert list(report["arms"]) == labels
    for label, arm in report["arms"].items():
        assert arm["tokens"] == sum(arm["answer_tokens"])
        assert arm["tokens_per_second"] == pytest.approx(arm["tokens"] / arm["seconds"])
        parts = sum(arm[f"seconds_{part}"] for part in ("prefill", "draft", "verify", "rest"))
        assert parts == pytest.approx(arm["seconds"])
        assert arm["seconds_rest"] > 0
        assert arm["speedup_vs_ar"]["low"] <= arm["speedup_vs_ar"]["ratio"] <= arm["speedup_vs_ar"]["high"]
        assert arm["accept_length"] == pytest.approx((arm["accepted"] + arm["steps"]) / arm["steps"])
        assert arm["acceptance_rate"] == (arm["accepted"] / arm["drafted"] if arm["drafted"] else 0)
        assert (arm["drafted"] == 0) == (label == "ar")
        assert len(arm["answer_tokens"]) == 4
    strict = [report["arms"][label]["answer_tokens"] for label in ("ar", "static:3,4,4", "tree")]
    assert strict[0] == strict[1] == strict[2]
    printed = capsys.readouterr().out
    assert all(label in printed for label in labels[:5])


def test_generate_streams_what_json_reports(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "hello", *files, "--max-tokens", "20"]
    assert run([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert run(arguments) == 0
    streamed = capsys.readouterr()
    assert streamed.out.removesuffix("\n") == result["text"]
    assert "accept length" in streamed.err
    assert len(result["token_ids"]) == 20
    assert result["speculative"]["policy"] == "adaptive"


def test_shape_flags_mean_a_static_tree(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--speculative-num-steps", "2", "--speculative-eagle-topk", "3", "--speculative-num-draft-tokens", "5", "--margin", "off"]
    assert run(["generate", "hello", *files, "--max-tokens", "20", "--json", *shape]) == 0
    speculative = json.loads(capsys.readouterr().out)["speculative"]
    assert (speculative["policy"], speculative["num_steps"], speculative["topk"], speculative["num_draft_tokens"]) == ("static", 2, 3, 5)
    assert speculative["margin"] is None


def test_plain_decoding_by_flags(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "hello", *files, "--max-tokens", "9", "--json", "--speculative-algorithm", "none"]) == 0
    assert json.loads(capsys.readouterr().out)["drafted"] == 0
    assert run(["generate", "hello", "--drafter", "none", *files[:2], "--dtype", "fp32", "--max-tokens", "9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["drafted"] == 0


def test_models_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "--json"]) == 0
    assert "smollm2-135m" in [row["name"] for row in json.loads(capsys.readouterr().out)]
    assert run(["models"]) == 0
    assert "qwen3-8b" in capsys.readouterr().out
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize("command", ["generate", "bench", "models", "demo"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


def test_the_packaged_prompts_are_a_mixed_set() -> None:
    assert len(load_prompts()) >= 20


def test_a_drawn_tree_names_every_node() -> None:
    record = StepRecord(TreeShape(2, 2, 4), [1, 2, 3, 4], [-1, 0, 0, 1], [1, 3], [False, True], [0.0, -0.7], 9, 0.5, 0.5, 0.7, 0, 0, 0)
    from rich.console import Console

    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(draw_tree(record, lambda token: f"t{token}"))
    lines = console.export_text().splitlines()
    assert "'t1' (last token)" in lines[0]
    assert any("'t4' promoted, p / p_top1 = 0.50" in line for line in lines)
    assert any("'t9' (target)" in line for line in lines)
    assert len(lines) == 5


def test_an_answer_is_written_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from adaptivespec.cli.generate import show

    show(Console(), "a\tb :smile: [red]\r\n", False)
    assert capsys.readouterr().out == "a\tb :smile: [red]\r\n"
