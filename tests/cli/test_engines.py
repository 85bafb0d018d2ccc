"""`adaptivespec serve` and `check` without the engine: bad input is one line, and what is started is the engine's own command."""

from __future__ import annotations

import importlib.metadata
import json
import os
from types import SimpleNamespace

import pytest

from adaptivespec.cli.main import run
from adaptivespec.errors import UserError
from adaptivespec.integrations.sglang import hooks
from adaptivespec.integrations.sglang.hooks import TABLE, Finding


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "installed_version", lambda: "0.5.23")
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [SimpleNamespace(name="adaptivespec")] if "sglang" in group else []
    )
    monkeypatch.delenv("ADAPTIVESPEC", raising=False)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "sgl"], "no plug-in for engine 'sgl'; did you mean 'sglang'?"),
        (["serve", "--engine", "vllm", "--", "x"], "no plug-in for engine 'vllm'; known: sglang"),
        (["serve"], "the engine's own flags are missing"),
        (["serve", "--speculative-config", '{"margn": 1}', "--", "--model-path", "x"], "unknown setting 'margn'; did you mean 'margin'?"),
        (
            ["serve", "--speculative-config", '{"policy": "talon"}', "--", "--model-path", "x"],
            "policy talon decides while the tree is drafted",
        ),
    ],
)
def test_bad_input_is_one_line(installed: None, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert error.startswith("error: ")
    assert message in error


def test_without_the_engine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> str:
        raise UserError("SGLang is not installed here: pip install sglang")

    monkeypatch.setattr(hooks, "installed_version", missing)
    assert run(["check", "sglang"]) == 2
    assert run(["serve", "--", "--model-path", "x"]) == 2
    assert capsys.readouterr().err.count("SGLang is not installed here") == 2


def test_serve_becomes_the_stock_server(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, list[str], str]] = []
    monkeypatch.setattr(os, "execve", lambda path, command, env: started.append((path, command, env["ADAPTIVESPEC"])))
    assert run(["serve", "--engine", "sglang", "--speculative-config", '{"margin": 0.1}', "--", "--model-path", "m", "--tp", "2"]) == 0
    ((path, command, settings),) = started
    assert command[0] == path
    assert command[-4:] == ["--model-path", "m", "--tp", "2"]
    assert json.loads(settings) == {"margin": 0.1}


def test_serve_takes_the_environments_settings(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(os, "execve", lambda path, command, env: started.append(env["ADAPTIVESPEC"]))
    monkeypatch.setenv("ADAPTIVESPEC", '{"margin": 0.4}')
    assert run(["serve", "--", "--model-path", "m"]) == 0
    monkeypatch.delenv("ADAPTIVESPEC")
    assert run(["serve", "--", "--model-path", "m"]) == 0
    assert started == ['{"margin": 0.4}', "{}"]


def test_serve_refuses_an_engine_that_would_not_find_the_plugin(
    installed: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    assert run(["serve", "--", "--model-path", "m"]) == 2
    assert run(["check", "sglang"]) == 2
    assert capsys.readouterr().err.count("SGLang would not find the plug-in") == 2


def test_serve_refuses_a_list_of_plugins_without_it(
    installed: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert run(["serve", "--", "--model-path", "m"]) == 2
    assert "SGLANG_PLUGINS leaves adaptivespec out" in capsys.readouterr().err


@pytest.mark.parametrize("broken", [False, True])
def test_check_lists_every_place(
    installed: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: bool
) -> None:
    findings = [Finding(touch, "no attribute x" if broken and i == 3 else "") for i, touch in enumerate(TABLE)]
    monkeypatch.setattr(hooks, "inspect_all", lambda: findings)
    assert run(["check", "sglang", "--json"]) == int(broken)
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["version"], len(report["hooks"])) == (not broken, "0.5.23", len(TABLE))
    assert [hook["target"] for hook in report["hooks"] if not hook["ok"]] == ([TABLE[3].target] if broken else [])
    assert run(["check", "sglang"]) == int(broken)
    assert f"{len(TABLE) - broken} of {len(TABLE)} places verified" in " ".join(capsys.readouterr().out.split())


def test_check_looks_at_the_settings_too(installed: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ADAPTIVESPEC", '{"margin": 7}')
    assert run(["check", "sglang"]) == 2
    assert "margin: Input should be less than or equal to 1" in capsys.readouterr().err
