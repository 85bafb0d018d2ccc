"""`adaptivespec eval --engine openai=URL` against a fake server: runs, reruns, what the server says and what it refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaptivespec.cli.main import run
from adaptivespec.evaluation import server_answers
from adaptivespec.evaluation.folder import ANSWERS, CALLS, RUN
from fake_server import FakeServer

QUESTIONS = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1 if n != 3 else 0}"} for n in range(6)]
Flags = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def quick_and_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.02)


@pytest.fixture
def flags(tmp_path: Path) -> Flags:
    data = tmp_path / "gsm8k.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))

    def flags(server: FakeServer | str, *more: str, arms: str = "server:strict-eagle3") -> list[str]:
        url = server if isinstance(server, str) else server.url
        common = ["--tasks", "gsm8k", "--data", f"gsm8k={data}", "--out", str(tmp_path / "run"), "--arms", arms]
        return ["eval", "--engine", f"openai={url}", *common, *more]

    return flags


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_servers_one_after_the_other_build_up_the_arms(flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    for dialect, arm in (
        ("silent", "server:ar"),
        ("sglang", "server:strict-eagle3"),
        ("ours", "server:adaptivespec"),
        ("vllm", "server:x"),
    ):
        with FakeServer(dialect) as server:
            assert run(flags(server, "--batch", "2", arms=arm)) == 0
            assert all("speculative" not in body for body in server.bodies)
            assert all(("return_spec_tokens_details" in body) == (dialect == "sglang") for body in server.bodies)
    rows = lines(out / ANSWERS)
    assert len({(row["arm"], row["id"]) for row in rows}) == len(rows) == 4 * 6
    assert all(row["correct"] == (row["id"] != "gsm8k/3") for row in rows)
    assert all((row["tokens"], row["prompt_tokens"], row["finish_reason"], row["promoted"]) == (6, 7, "stop", None) for row in rows)
    for call in lines(out / CALLS):
        shares = sum(row["seconds"] for row in rows if row["arm"] == call["arm"])
        assert 0 < shares <= call["seconds"]
    said = json.loads((out / RUN).read_text())
    assert (said["settings"]["engine"], said["settings"]["model"], len(said["sessions"])) == ("openai", "tiny", 4)
    assert said["sessions"][1]["server"] == {
        "url": said["sessions"][1]["server"]["url"], "owned_by": "sglang", "version": "1.2", "speculative_algorithm": "EAGLE3"
    }  # fmt: skip
    capsys.readouterr()
    assert run(["report", str(out), "--json"]) == 0
    analysis = json.loads(capsys.readouterr().out)
    assert (analysis["engine"], analysis["plain"], analysis["reference"]) == ("openai", "server:ar", "server:strict-eagle3")
    cells = {cell["arm"]: cell for cell in analysis["cells"]}
    silent, sglang, ours, vllm = (cells[arm] for arm in ("server:ar", "server:strict-eagle3", "server:adaptivespec", "server:x"))
    names = ("accept_length", "drafted_only", "acceptance_rate", "promoted_per_1k", "spent_per_1k")
    assert [silent[name] for name in names] == [None] * 5
    assert [sglang[name] for name in names] == [vllm[name] for name in names] == [2.5, 1.5, 0.5, None, None]
    assert [ours[name] for name in names] == [2.5, 1.5, 0.5, pytest.approx(1000 / 6), pytest.approx(500 / 6)]
    assert sglang["histogram"] == [6, 0, 0, 6]
    assert silent["latency"] > 0
    assert run(["report", str(out)]) == 0
    assert "2 requests in flight: all tokens / wall time" in capsys.readouterr().out
    page = (out / "report.html").read_text()
    assert "speculative_algorithm: EAGLE3" in page
    assert "median latency" in page


def test_settings_travel_with_requests_that_echo_them(flags: Flags, tmp_path: Path) -> None:
    arms = "ar; static:3,4,4; adaptivespec:margin=0.5; ar+tree"
    with FakeServer("ours", obeys=True) as server:
        assert run(flags(server, arms=arms)) == 0
    wishes = [body["speculative"] for body in server.bodies if body["max_tokens"] > 1]
    assert wishes.count(False) == 6 + 3
    assert sum(wish is not False and wish["policy"] == "static" for wish in wishes) == 6
    assert sum(wish is not False and wish["margin"] == 0.5 for wish in wishes) == 6
    kinds = json.loads((tmp_path / "run" / RUN).read_text())["settings"]["arms"]
    assert kinds["adaptivespec:margin=0.5"]["kinds"] == [{"policy": "adaptive", "rule": "margin", "kappa": 0.5}]


def test_requests_run_side_by_side(flags: Flags, tmp_path: Path) -> None:
    with FakeServer(seconds=0.2) as server:
        assert run(flags(server, "--batch", "3")) == 0
    assert server.busiest == 3
    rows, [call] = lines(tmp_path / "run" / ANSWERS), lines(tmp_path / "run" / CALLS)
    assert all(row["latency"] >= 0.2 for row in rows)
    assert sum(row["latency"] for row in rows) >= 1.2
    assert 0.4 <= sum(row["seconds"] for row in rows) <= call["seconds"]


def test_sampling_goes_under_openai_names(flags: Flags, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    sampling = ("--temperature", "0.7", "--top-p", "0.9", "--top-k", "5", "--min-p", "0.1", "--presence-penalty", "0.5", "--stop", "X")
    with FakeServer() as server:
        assert run(flags(server, *sampling, "--seed", "3", "--max-tokens", "9", "--batch", "1", "--repetition-penalty", "1.1")) == 0
    body = server.bodies[2]  # after the probe and the first question
    assert {name: value for name, value in body.items() if name not in ("messages", "model")} == {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.5, "stop": ["X"], "seed": 4, "max_tokens": 9,
        "repetition_penalty": 1.1,
    }  # fmt: skip
    assert server.keys == {"Bearer sesame"}
    with FakeServer() as server:
        assert run(flags(server, "--fresh", "--yes", "--limit", "1")) == 0
    assert server.bodies[1].keys() == {"messages", "model", "temperature", "max_tokens"}


def test_trouble_that_passes_is_retried(flags: Flags, tmp_path: Path) -> None:
    with FakeServer() as server:
        server.fail.extend([200, 429, 503, 0, 500])
        assert run(flags(server, "--limit", "2", "--batch", "1")) == 0
    assert len(server.bodies) == 1 + 4 + 2
    assert len(lines(tmp_path / "run" / ANSWERS)) == 2


def test_a_server_that_goes_away_and_comes_back(flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    with FakeServer() as server:
        server.fail.extend([200, 200, 200, *[503] * 7])
        assert run(flags(server, "--batch", "1")) == 2
    error = capsys.readouterr().err.splitlines()
    assert error == [f"error: gsm8k/2: {server.url}/v1: status 503: fake trouble 503"]
    before = (out / ANSWERS).read_text()
    assert [row["id"] for row in lines(out / ANSWERS)] == ["gsm8k/0", "gsm8k/1"]
    [call] = lines(out / CALLS)
    assert (call["answers"], call["complete"]) == (2, False)
    with FakeServer() as server:
        assert run(flags(server, "--batch", "1")) == 0
    assert len(server.bodies) == 1 + 4
    assert (out / ANSWERS).read_text().startswith(before)
    assert len(lines(out / ANSWERS)) == 6


def test_ctrl_c_keeps_answers_and_drops_requests(
    flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, steps = server_answers.ServerAnswerer.step, [0]

    def interrupted(self: server_answers.ServerAnswerer) -> None:
        step(self)
        steps[0] += 1
        if steps[0] == 2:
            raise KeyboardInterrupt

    threads = threading.active_count()
    with FakeServer(seconds=0.1) as server:
        with monkeypatch.context() as patch:
            patch.setattr(server_answers.ServerAnswerer, "step", interrupted)
            assert run(flags(server, "--batch", "1")) == 130
        assert "interrupted: 2 of 6 answers are in" in capsys.readouterr().err
        assert run(flags(server, "--batch", "1")) == 0
    assert len(lines(tmp_path / "run" / ANSWERS)) == 6
    assert threading.active_count() <= threads


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("models", "more", "message"),
    [
        ((), (), "serves nothing: choose one with --model"),
        (("a", "b"), (), "serves a, b: choose one with --model"),
        (("tiny", "b"), ("-m", "tiy"), "does not serve 'tiy'; did you mean 'tiny'?; it serves tiny, b"),
    ],
)
def test_models_are_listed(
    flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str], models: tuple[str, ...], more: tuple[str, ...], message: str
) -> None:
    with FakeServer(models=models) as server:
        assert message in refused(flags(server, *more), capsys)
    assert not server.bodies
    assert not (tmp_path / "run").exists()


def test_a_model_is_chosen(flags: Flags) -> None:
    with FakeServer(models=("tiny", "b")) as server:
        assert run(flags(server, "-m", "b", "--limit", "1")) == 0
    assert {body["model"] for body in server.bodies} == {"b"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vllm"], "--engine: expected openai=URL, such as openai=http://localhost:30000/v1, not 'vllm'"),
        (["--engine", "openai=localhost:1"], "--engine: expected openai=URL"),
        (["--engine", "openai=http://a:b"], "--engine: expected openai=URL"),
        (["--engine", "openai=http://a,http://b"], "one server a run"),
        (["--engine", "openai=http://me:secret@a"], "no credentials in the URL"),
        (["--arms", "server:"], "arm 'server:': expected server:LABEL"),
        (["--arms", "server:margin:margn=0.5"], "unknown setting 'margn'; did you mean 'margin'?"),
        (["--arms", "tre"], "unknown arm 'tre'; did you mean 'tree'?"),
        (["--arms", "server:a; server:b"], "give one server:LABEL a run"),
        (["--arms", "ar; ar"], "arm 'ar' is given twice"),
        (["--arms", ";"], "no arms given"),
        (["--drafter", "ngram"], "--drafter has no effect with --engine"),
        (["--replaced"], "--replaced has no effect with --engine"),
        (["--batch", "2000"], "--batch: at most 1000 requests at a time"),
        ([], "cannot ask http://127.0.0.1:9/v1 for its models: no connection"),
    ],
)
def test_one_line_before_any_work(
    flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in refused([*flags("http://127.0.0.1:9"), *arguments], capsys)
    assert not (tmp_path / "run").exists()


def test_what_only_servers_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    local = ["eval", "--out", str(tmp_path / "run")]
    assert "--timeout has no effect without --engine" in refused([*local, "--timeout", "5"], capsys)
    assert "an arm server:LABEL needs --engine openai=URL" in refused([*local, "--arms", "ar; server:strict"], capsys)


@pytest.mark.parametrize(
    ("change", "arms", "message"),
    [
        ({}, "ar", "arm 'ar': the server does not obey a request's settings (the answer has no 'speculative'"),
        ({"speculative": {"policy": "adaptive"}}, "ar", "it speculated with {'policy': 'adaptive'}"),
        ({"speculative": {"margin": 0.2}}, "margin:margin=0.5", "margin was 0.2, not 0.5"),
        ({"speculative": False}, "margin", "in effect was False"),
        ({"usage": None}, "server:x", "the server's answer lacks choices, their finish_reason, or usage.completion_tokens"),
        ({"choices": []}, "server:x", "the server's answer lacks choices"),
        ({"choices": [{"message": {"content": ""}, "finish_reason": "abort"}]}, "server:x", "ended the answer with finish_reason 'abort'"),
    ],
)
def test_answers_that_mean_something_else(
    flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], arms: str, message: str
) -> None:
    with FakeServer(change=change) as server:
        assert message in refused(flags(server, arms=arms), capsys)
    assert not (tmp_path / "run").exists()


def test_what_the_server_refuses_is_said_at_once(flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        server.fail.append(400)
        assert f"gsm8k/0: {server.url}/v1: status 400: fake trouble 400" in refused(flags(server), capsys)
    assert len(server.bodies) == 1
    assert not (tmp_path / "run").exists()


def test_a_silent_server_is_given_up(flags: Flags, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(seconds=3) as server:
        assert "gsm8k/0: no answer within 1 seconds; see --timeout" in refused(flags(server, "--timeout", "1"), capsys)


def test_another_model_or_load_contradicts(flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        assert run(flags(server, "--limit", "1")) == 0
        capsys.readouterr()
        assert "was made with batch 16, not 4" in refused(flags(server, "--batch", "4"), capsys)
    with FakeServer(models=("other",)) as server:
        assert "was made with model 'tiny', not 'other'" in refused(flags(server), capsys)
    assert not server.bodies


def test_the_client_library_is_asked_for(flags: Flags, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "openai" else find(name))
    assert "the library openai: pip install 'adaptivespec[eval]'" in refused(flags("http://127.0.0.1:9"), capsys)
