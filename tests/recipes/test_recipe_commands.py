"""The stages as commands on a tiny model: each in turn, and training killed (not asked to stop) at random moments."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from recipes.eagle3_head import answers, describe, evaluate, export, plot, prompts, train
from recipes.eagle3_head.plot import read_log
from safetensors.torch import load_file

from tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
STEPS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("tiny") / "model")


def command(stage: str, model: Path | None, run: Path, *flags: str) -> list[str]:
    named = [] if model is None else ["--model", str(model)]
    return [sys.executable, "-m", f"recipes.eagle3_head.{stage}", "--out", str(run), *named, *flags]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def do(stage: str, model: Path | None, run: Path, *flags: str) -> str:
    done = subprocess.run(command(stage, model, run, *flags), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def train_flags(**more: int) -> list[str]:
    sizes = {
        "steps": STEPS,
        "decay_steps": 20,
        "intermediate_size": 32,
        "draft_vocab_size": 64,
        "checkpoint_steps": 5,
        "evaluate_steps": 30,
    }
    return [flag for name, value in (sizes | more).items() for flag in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def answered(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("commands") / "run"
    run.mkdir()
    texts = [f"What is {n} and {n + 1}?" for n in range(24)]
    for name, kept in (("prompts", texts), ("heldout", texts[:4])):
        rows = [{"kind": "maths", "prompt": text} for text in kept]
        (run / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    do("answers", model, run, "--dtype", "fp32", "--batch-size", "8")
    return run


def test_killed_three_times_and_resumed_ends_the_same(model: Path, answered: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    shutil.copytree(answered, whole)
    shutil.copytree(answered, killed)
    do("train", model, whole, *train_flags(), "--dtype", "fp32")
    rng, kills = random.Random(0), 0
    while kills < 3:
        child = subprocess.Popen(
            command("train", model, killed, *train_flags(), "--dtype", "fp32"),
            cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        log = killed / "train_log.jsonl"
        before = log.stat().st_size if log.exists() else 0
        while child.poll() is None and (not log.exists() or log.stat().st_size == before):
            time.sleep(0.01)  # until it has logged something new: then it is in the middle of training
        time.sleep(rng.random() * 0.1)
        child.send_signal(signal.SIGKILL)
        if child.wait() == 0:
            break  # it was done first
        kills += 1
        torch.load(killed / "checkpoint.pt", weights_only=True)  # a whole one, whenever the kill came
    assert kills >= 1
    do("train", model, killed, *train_flags(), "--dtype", "fp32")
    ends = [torch.load(run / "checkpoint.pt", weights_only=True) for run in (whole, killed)]
    assert ends[0]["counters"] == ends[1]["counters"]
    for name, value in ends[0]["average"].items():
        assert torch.equal(value, ends[1]["average"][name]), name
    losses = [read_log(run / "train_log.jsonl")[0] for run in (whole, killed)]
    assert [row["step"] for row in losses[0]] == [row["step"] for row in losses[1]] == [20, 40, 60]


def test_from_a_trained_run_to_a_head_and_a_picture(model: Path, answered: Path, tmp_path: Path) -> None:
    run, head = tmp_path / "run", tmp_path / "head"
    shutil.copytree(answered, run)
    do("train", model, run, *train_flags(steps=20, decay_steps=10, evaluate_steps=10), "--dtype", "fp32")
    assert do("plot", None, run).strip() == str(run / "training.png")
    assert (run / "training.png").read_bytes().startswith(b"\x89PNG")
    said = json.loads(do("describe", model, run))
    assert said["answer_tokens"] == sum(said["answer_tokens_by_kind"].values()) > 0
    assert (sum(said["answers_by_temperature"].values()), said["steps"]) == (said["answers"], 20)
    assert sum(said["ends"].values()) == pytest.approx(1.0, abs=0.01)
    assert 0 < said["coverage"]["maths"] <= 1
    do("export", model, run, "--to", str(head))
    assert len(load_file(head / "model.safetensors")["d2t"]) == 64
    assert "maths (4)" in do("evaluate", model, run, "--head", str(head), "--dtype", "fp32")
    result = json.loads((run / "evaluation.json").read_text())
    logged = read_log(run / "train_log.jsonl")[1][-1]["heldout"]["maths"]
    assert result["maths"]["accuracy"] == pytest.approx(logged["accuracy"], abs=0.02)  # bf16 rounding of the weights


@pytest.mark.parametrize(
    ("main", "flags", "message"),
    [
        (prompts.main, ["--gsm8k", "absent.jsonl"], "error: absent.jsonl is not there"),
        (answers.main, ["--model", "smolm2-135m"], "error: no model 'smolm2-135m'.*did you mean 'smollm2-135m'"),
        (train.main, ["--model", "smolm2-135m"], "error: no model 'smolm2-135m'"),
        (plot.main, [], "error: .*train_log.jsonl is not there"),
        (describe.main, [], "error: .*prompts.jsonl is not there"),
        (export.main, ["--to", "head"], "error: .*checkpoint.pt is not there"),
        (evaluate.main, ["--head", "absent"], "error: absent/config.json is not there"),
    ],
)
def test_what_a_user_can_mend_is_one_line(
    main: Callable[[], None], flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["stage", "--out", "run", *flags])
    with pytest.raises(SystemExit, match=message):
        main()


def test_shares_are_shares(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["prompts", "--gsm8k", "x", "--general-share", "0.8", "--maths-share", "0.5"])
    with pytest.raises(SystemExit):
        prompts.main()
    assert "together at most 1" in capsys.readouterr().err
