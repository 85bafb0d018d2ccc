"""`adaptivespec simulate`: the same numbers every time, bad input in one line."""

from __future__ import annotations

import json

import pytest
import torch

from adaptivespec import SpeculativeConfig
from adaptivespec.cli.main import run
from adaptivespec.engine.synthetic import Costs, World, bursty, simulate, stationary

FEW = ["--requests", "2", "--max-tokens", "60"]


def test_numbers_are_those_of_the_synthetic_pair(capsys: pytest.CaptureFixture[str]) -> None:
    arms, worlds = "ar; static:5,1,6; adaptivespec:margin=0.4", "bursty:low=0.1, high=0.9,length=10; stationary"
    command = ["simulate", "--arms", arms, "--worlds", worlds, "--mean-margin", "2", "--costs", "level=1,row=0.1", "--seed", "5", *FEW]
    threads = torch.get_num_threads()
    assert run([*command, "--json"]) == 0
    first = capsys.readouterr().out
    assert run([*command, "--json"]) == 0
    assert capsys.readouterr().out == first  # to the last digit
    assert torch.get_num_threads() == threads
    said = json.loads(first)
    assert said["costs"] == {"draft_level": 0.001, "verify": 0.02, "verify_row": 0.0001}
    assert list(said["worlds"]) == ["bursty:low=0.1,high=0.9,length=10", "stationary"]
    processes = (bursty(0.1, 0.9, 10), stationary(0.7))
    settings = {
        "ar": {"policy": "off"},
        "static:5,1,6": {"policy": "static", "num_steps": 5, "topk": 1, "num_draft_tokens": 6, "margin": None},
    }
    settings["adaptivespec:margin=0.4"] = {"margin": 0.4}
    for process, world in zip(processes, said["worlds"].values(), strict=True):
        for label, row in world["arms"].items():
            wanted = simulate(
                SpeculativeConfig(**settings[label]),
                World(process, mean_margin=2, seed=5),
                Costs(1e-3, 20e-3, 1e-4),
                requests=2,
                max_tokens=60,
            )
            assert (row["steps"], row["drafted"], row["accepted"], row["promoted"]) == (
                wanted.steps, wanted.drafted, wanted.accepted, wanted.promoted
            )  # fmt: skip
            assert row["accept_length"] == wanted.accept_length
            assert row["speedup_vs_ar"] == pytest.approx(wanted.tokens_per_second * 0.02)
        assert world["arms"]["ar"]["speedup_vs_ar"] == pytest.approx(1)


def test_the_table_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--worlds", "drifting; bursty", *FEW]) == 0
    printed = capsys.readouterr()
    assert all(word in printed.out for word in ("drifting", "bursty", "static:3,4,4", "adaptivespec", "x plain"))
    assert max(map(len, printed.out.splitlines())) <= 80
    assert printed.err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--worlds", "burst"], "unknown world 'burst'; did you mean 'bursty'?"),
        (["--worlds", " ;"], "no worlds given; for example 'stationary; drifting; bursty'"),
        (["--worlds", "bursty; bursty"], "world 'bursty' is given twice"),
        (["--worlds", "bursty:low=2"], "world 'bursty:low=2': low is a chance between 0 and 1, not 2"),
        (["--worlds", "bursty:low=nan"], "low is a chance between 0 and 1, not nan"),
        (["--worlds", "drifting:period=1.5"], "period is a whole number of tokens, at least 1, not 1.5"),
        (["--worlds", "bursty:length=inf"], "length is a whole number of tokens, at least 1, not inf"),
        (["--worlds", "bursty:low"], "expected low=NUMBER, not 'low'"),
        (["--worlds", "bursty:chance=0.5"], "no parameter 'chance'; it has low, high, length"),
        (["--worlds", "bursty:low=0.1,low=0.2"], "low is given twice"),
        (["--costs", "level=x"], "--costs: expected level=NUMBER, not 'level=x'"),
        (["--costs", "verify=0"], "--costs: milliseconds can't be negative, and a verify takes some, not 'verify=0'"),
        (["--mean-margin", "0"], "--mean-margin must be above 0, not 0"),
        (["--arms", "ar+tree"], "arm 'ar+tree': mixtures need an engine, see bench"),
        (["--arms", "hf"], "hf is another engine"),
        (["--arms", "threshold"], "rule threshold samples"),
    ],
)
def test_one_line_and_exit_code_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", *arguments, *FEW]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)
