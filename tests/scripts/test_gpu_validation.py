"""The validation script without SGLang: its plan, its comparisons, and a fake server that does and does not behave."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from gpu_validation.__main__ import main, results_so_far
from gpu_validation.answers import Question, agreement, counts_of, first_difference, series
from gpu_validation.inputs import load_questions, prepared_head
from gpu_validation.measure import Checks, Options, run_cell
from gpu_validation.plan import Cell, make_plan, wanted
from gpu_validation.report import markdown
from gpu_validation.server import Failed, command_of, environment_of, last_words

from tiny_models import make_tiny_model

SCRIPTS = Path(__file__).parents[2] / "scripts"
OPTIONS = Options(tokens=8, requests=20, concurrency=4, tie=0.1, slack=0.1, scored=2, limit=5)
QUESTIONS = [Question([i, i + 1]) for i in range(6)]
SHAPES = {"3,4,4": 2, "4,4,5": 1}


class FakeServer:
    """Answers like SGLang with the plug-in: token i of an answer is (sum of the prompt + i) modulo 50. `faults` names what goes wrong."""

    def __init__(self, log: Path, plug_in: bool = True, faults: tuple[str, ...] = ()) -> None:
        self.log, self.plug_in, self.faults = log, plug_in, faults
        self.seconds_to_start = 1.0
        self.drafted = self.accepted = 0

    def __enter__(self) -> FakeServer:
        if "refuses" in self.faults:
            raise Failed("the server ended with exit code 1: adaptivespec: --tokenizer-worker-num 2 does not go with ADAPTIVESPEC: why")
        self.log.write_text("Traceback\n" if "traceback" in self.faults else "fine\n")
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def words(self) -> str:
        return self.log.read_text()

    def metrics(self) -> str:
        held = 1.0 if "leak" in self.faults else 0.0
        return (
            f'sglang:num_running_reqs{{a="b"}} 0.0\nadaptivespec:requests{{a="b"}} {held}\n'
            f'adaptivespec:drafted_tokens_total{{a="b"}} {self.drafted}\nadaptivespec:accepted_tokens_total{{a="b"}} {self.accepted}\n'
        )

    def ask(self, ids: list[int], stop_after: float = 0, **body: Any) -> dict[str, Any]:
        params = body["sampling_params"]
        count, wish = params["max_new_tokens"], params.get("custom_params", {}).get("adaptivespec")
        if "errors" in self.faults and count == 3:
            raise Failed("HTTP 500")
        tokens = [(sum(ids) + i) % 50 for i in range(count)]
        info: dict[str, Any] = {}
        if body.get("return_logprob"):
            best, lowest = (sum(ids[:2]) + len(ids) - 2) % 50, -0.05 if "near" in self.faults else -2.0
            info["output_top_logprobs"] = [[[-0.1, best, None], [-0.1 + lowest, 49, None]]]
            scored = ids[body.get("logprob_start_len", 0) :]
            info["input_token_logprobs"] = [[-5.0 if "unlikely" in self.faults else -1.0, token, None] for token in scored]
            info["input_top_logprobs"] = [[[-0.2, 0, None]] for _ in scored]
        elif wish is None and count == OPTIONS.tokens and ("parts" in self.faults or "near" in self.faults):
            tokens[2] = 49
        if self.plug_in:
            self.drafted, self.accepted = self.drafted + 10, self.accepted + (0 if "counters" in self.faults else 4)
            info["adaptivespec"] = {
                "verify_steps": 3,
                "drafted": 10,
                "accepted": 4,
                "promoted": 1 if "promotes" in self.faults else 0,
                "spent_budget": 9.0 if "overspends" in self.faults else 1.0,
                "shapes": SHAPES,
                **({"budget": wish["budget"]} if isinstance(wish, dict) and "budget" in wish else {}),
            }
        else:
            info |= {"spec_verify_ct": 4, "spec_num_correct_drafts": 4, "spec_num_proposed_drafts": 12}
        return {"output_ids": tokens, "meta_info": info}


STOCK = Cell("stock/base", "stock")
STRICT = Cell("strict/base", "strict", {}, {"margin": None}, "stock/base")
MARGIN = Cell("margin/base", "margin", {}, {"margin": 0.2})
REFUSED = Cell("refused/tokenizer-workers", "refused", {}, {}, says="--tokenizer-worker-num 2 does not go with ADAPTIVESPEC")


@pytest.fixture
def stock(tmp_path: Path) -> dict[str, Any]:
    return run_cell(STOCK, FakeServer(tmp_path / "log", plug_in=False), QUESTIONS, OPTIONS, {})  # type: ignore[arg-type]


def failed(cell: Cell, server: FakeServer, stock: dict[str, Any]) -> list[str]:
    result = run_cell(cell, server, QUESTIONS, OPTIONS, {"stock/base": stock})  # type: ignore[arg-type]
    assert json.loads(json.dumps(result))["checks"]
    return [check["check"] for check in result["checks"] if not check["ok"]]


@pytest.mark.parametrize(
    ("cell", "faults", "expected"),
    [
        (STRICT, (), []),
        (STRICT, ("near",), []),
        (STRICT, ("parts",), ["alone: the text of stock/base", "4 at once: the text of stock/base"]),
        (STRICT, ("promotes",), ["strict promotes nothing"]),
        (MARGIN, ("promotes",), []),
        (MARGIN, (), ["margin promotes something"]),
        (MARGIN, ("promotes", "unlikely"), ["no token below kappa"]),
        (MARGIN, ("promotes", "overspends"), ["load: no budget is overspent"]),
        (STRICT, ("errors",), ["load: 20 requests, 4 at once, no errors", "load: every answer has its length"]),
        (STRICT, ("traceback",), ["no traceback and no leak in the log since it was ready"]),
        (STRICT, ("counters",), ["the counters have all that answers report"]),
        (replace(STRICT, shapes=("3,4,4",)), (), ["only the prepared shapes"]),
        (replace(STRICT, reference="stock/tp-2"), (), ["its reference was measured"]),
        (REFUSED, ("refuses",), []),
        (REFUSED, (), ["refused at start"]),
        (STRICT, ("refuses",), ["measured"]),
    ],
)
def test_what_fails(tmp_path: Path, stock: dict[str, Any], cell: Cell, faults: tuple[str, ...], expected: list[str]) -> None:
    found = failed(cell, FakeServer(tmp_path / "log", faults=faults), stock)
    if "errors" in faults:
        found = [name for name in found if "counters" not in name]  # answers that did not come report nothing
    assert found == expected


def test_a_leak_is_seen(tmp_path: Path, stock: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_validation.measure.wait_for", lambda done, seconds: done())
    assert failed(STRICT, FakeServer(tmp_path / "log", faults=("leak",)), stock) == ["no request's state is left"]


def test_plan() -> None:
    plan = make_plan(2, False, 0.2)
    names = [cell.name for cell in plan]
    assert len(set(names)) == len(names)
    for variant in ("base", "no-overlap", "no-graphs", "page-64", "tp-2"):
        assert {f"stock/{variant}", f"strict/{variant}", f"margin/{variant}"} <= set(names)
    for number, cell in enumerate(plan):
        assert not cell.reference or cell.reference in names[:number]
    assert not [name for name in (cell.name for cell in make_plan(1, False, 0.2)) if "tp-2" in name]
    assert [cell.name for cell in wanted(plan, "^strict/page-64$")] == ["stock/page-64", "strict/page-64"]
    assert {cell.name.partition("/")[2] for cell in make_plan(0, True, 0.2)} == {"", "base", "tokenizer-workers"}


def test_agreement() -> None:
    def gaps(text: list[int], tokens: list[int]) -> list[float]:
        return [0.0, 0.01] if text[-1] == 5 else [0.0, 3.0]

    questions = [Question([0])] * 4
    expected = [[5, 6], [4, 6], [7, 8], [7, 8]]
    found = agreement(questions, [[5, 9], [4, 9], [7, 8], [7]], expected, gaps, 0.1)
    assert (found.identical, found.ties, len(found.parted)) == (1, 1, 2)
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_counts() -> None:
    report = {"verify_steps": 4, "drafted": 20, "accepted": 6, "promoted": 2, "spent_budget": 1.5, "shapes": SHAPES}
    total = counts_of([{"meta_info": {"adaptivespec": report}}, {}, {"meta_info": {"adaptivespec": report}}])
    assert (total["accept_length"], total["promoted"], total["shapes"]["3,4,4"], total["reports"]) == (2.5, 4, 4, 2)
    assert counts_of([{"meta_info": {}}])["accept_length"] is None
    assert series('x:a{l="1"} 2.0\nx:a{l="2"} 3.5\nx:ab 9\n', "x:a") == 5.5


def test_only_the_same_cells_are_not_measured_again(tmp_path: Path) -> None:
    for cell, good in ((STOCK, True), (STRICT, False)):
        checks = Checks()
        checks.add("anything", good)
        (tmp_path / f"{cell.name.replace('/', '.')}.json").write_text(json.dumps({"cell": asdict(cell), "checks": checks}))
    assert [name for name, _ in results_so_far(tmp_path, [STOCK, STRICT, MARGIN], [])] == ["stock/base", "strict/base"]
    assert [name for name, _ in results_so_far(tmp_path, [STOCK, STRICT], ["stock/base", "strict/base"])] == ["stock/base"]
    assert not list(results_so_far(tmp_path, [replace(STOCK, flags={"tp-size": 2})], []))


def test_heads_say_what_they_are(tmp_path: Path) -> None:
    public = tmp_path / "public"
    public.mkdir()
    (public / "model.safetensors").write_bytes(b"weights")
    (public / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 3}))
    copy = Path(prepared_head(str(public), tmp_path / "head"))
    assert json.loads((copy / "config.json").read_text()) == {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 3}
    assert (copy / "model.safetensors").read_bytes() == b"weights"
    assert prepared_head(str(copy), tmp_path / "again") == str(copy)


def test_questions(tmp_path: Path) -> None:
    model = str(make_tiny_model("llama", tmp_path / "model"))
    (tmp_path / "own.jsonl").write_text('{"prompt": "abc"}\n{"prompt": "de"}\n')
    own = load_questions(model, 9, tmp_path / "own.jsonl")
    packaged = load_questions(model, 2, None)
    assert len(own) == len(packaged) == 2
    assert len(packaged[0].ids) > len(own[0].ids) > len(own[1].ids)


def test_commands() -> None:
    command = command_of(STRICT, {"dtype": "bfloat16", "enable-metrics": True, "cuda-graph-bs-decode": "1 2 4"}, "target", "head")
    words = " ".join(command)
    assert "--model-path target" in words
    assert "--speculative-algorithm EAGLE3 --speculative-draft-model-path head" in words
    assert "--enable-metrics --cuda-graph-bs-decode 1 2 4" in words
    assert "speculative" not in " ".join(command_of(Cell("plain", "plain"), {}, "target", "head"))


def test_settings_outside_count_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTIVESPEC", '{"margin": 0.5}')
    assert "ADAPTIVESPEC" not in environment_of(STOCK, cpu=False)
    assert environment_of(MARGIN, cpu=False)["ADAPTIVESPEC"] == '{"margin": 0.2}'


def test_last_words(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a\nValueError: topk > 1 with pages\nadaptivespec: why\nbye\n")
    assert last_words(tmp_path / "log") == "adaptivespec: why"
    (tmp_path / "log").write_text("a\nValueError: topk > 1 with pages\nbye\n")
    assert last_words(tmp_path / "log") == "ValueError: topk > 1 with pages"


def test_report(tmp_path: Path, stock: dict[str, Any]) -> None:
    strict = run_cell(STRICT, FakeServer(tmp_path / "log", faults=("parts",)), QUESTIONS, OPTIONS, {"stock/base": stock})  # type: ignore[arg-type]
    about = {"gpus": [], "versions": {"sglang": "0.5.23"}}
    hooks = {"places": 27, "wrong": [], "version": "0.5.23"}
    text = markdown(
        {
            "command": "x",
            "model": "m",
            "head": "h",
            "questions": 6,
            "tokens": 8,
            "machine": about,
            "hooks": hooks,
            "plan": ["stock/base", "strict/base", "plain"],
            "cells": {"stock/base": stock, "strict/base": strict},
        }
    )
    assert "2 of 3 servers measured; 2 checks failed; to do: plain" in text
    assert "- `strict/base`: alone: the text of stock/base:" in text
    assert "| `stock/base` |" in text


def test_dry_run_needs_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--preset", "llama-3.1-8b-instruct", "--dry-run", "--gpus", "2", "--out", str(tmp_path / "none")]) == 0
    said = capsys.readouterr().out
    assert said.count("sglang.launch_server") == len(make_plan(2, False, 0.2))
    assert "--speculative-draft-model-path yuhuili/EAGLE3-LLaMA3.1-Instruct-8B" in said
    assert not (tmp_path / "none").exists()


def test_the_command_itself() -> None:
    command = ["bash", str(SCRIPTS / "gpu_validation.sh"), "--preset", "qwen3-8b", "--dry-run", "--gpus", "1", "--only", "plain"]
    done = subprocess.run(
        command, env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True
    )
    assert "--model-path Qwen/Qwen3-8B" in done.stdout, done.stderr
