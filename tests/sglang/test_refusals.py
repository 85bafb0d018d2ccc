"""A server that cannot run as its settings ask doesn't start, and says why in one line; without settings nothing is hooked."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bed_models import BedModels
from servers import START_LIMIT, child_environment, server_command

HOOKED = "sglang.srt.speculative.eagle_utils.eagle_sample"


@dataclass(frozen=True)
class Refusal:
    """A start and what its one line must hold.

    Attributes:
        settings: value of ADAPTIVESPEC.
        says: pieces of the line.
        flags: further flags of the server; None takes one away.
        missing: an attribute of SGLang that isn't there.
    """

    settings: str
    says: tuple[str, ...]
    flags: tuple[tuple[str, Any], ...] = ()
    missing: str = ""


REFUSALS = {
    "bad JSON": Refusal('{"margin": ', ("JSON",)),
    "no object": Refusal("[1, 2]", ("adaptivespec",)),
    "no such file": Refusal("no/such/settings.json", ("no/such/settings.json",)),
    "unknown setting": Refusal('{"margn": 0.2}', ("margn", "did you mean 'margin'")),
    "unknown policy": Refusal('{"policy": "adaptiv"}', ("adaptiv",)),
    "kappa out of range": Refusal('{"margin": 3}', ("margin", "3")),
    "impossible chain": Refusal('{"policy": "static", "num_steps": 2, "topk": 1, "num_draft_tokens": 9}', ("2,1,9", "chain")),
    "impossible tree": Refusal('{"policy": "static", "num_steps": 1, "topk": 2, "num_draft_tokens": 9}', ("1,2,9", "at most")),
    "impossible ladder": Refusal('{"low": [2, 1, 3], "high": [3, 4, 20]}', ("adaptive policy", "2,1,3", "3,4,20")),
    "a policy that needs more": Refusal('{"policy": "talon"}', ("talon", "level")),
    "a rule that needs more": Refusal('{"rule": "rejection"}', ("rejection",)),
    "no effect": Refusal('{"policy": "static", "aggregate": "min"}', ("aggregate", "no effect")),
    "contradicting flag": Refusal("{}", ("--speculative-num-steps 2 contradicts",), (("speculative_num_steps", 2),)),
    "no algorithm": Refusal(
        "{}", ("--speculative-algorithm is missing",), (("speculative_algorithm", None), ("speculative_draft_model_path", None))
    ),
    "another algorithm": Refusal("{}", ("NGRAM",), (("speculative_algorithm", "NGRAM"), ("speculative_draft_model_path", None))),
    "trees with pages": Refusal("{}", ("page_size", "7,4,8"), (("page_size", 16),)),
    "hook renamed": Refusal("{}", (HOOKED,), missing=HOOKED),
    "method renamed": Refusal(
        "{}", ("forward_batch_generation",), missing="sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.forward_batch_generation"
    ),
}


@pytest.fixture(scope="module")
def outcomes(bed: BedModels, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Exit code and words of every start, by name."""
    cases = {}
    for name, refusal in REFUSALS.items():
        flags = {"model_path": bed.target, "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": bed.eagle3}
        argv = server_command(1, **{**flags, **dict(refusal.flags)})[3:]
        variables = {"ADAPTIVESPEC": refusal.settings} | ({"CPU_BED_MISSING": refusal.missing} if refusal.missing else {})
        cases[name] = {"program": "server", "argv": argv, "variables": variables}
    cases["check"] = {"program": "adaptivespec", "argv": ["check", "sglang", "--json"]}
    cases["check, renamed"] = {**cases["check"], "variables": {"CPU_BED_MISSING": HOOKED}}
    cases["hooks without settings"] = {"program": "hooks", "argv": []}
    cases["hooks with settings"] = {"program": "hooks", "argv": [], "variables": {"ADAPTIVESPEC": "{}"}}
    cases["hooks, left out"] = {"program": "hooks", "argv": [], "variables": {"ADAPTIVESPEC": "{}", "SGLANG_PLUGINS": "cpu_bed"}}
    command = [sys.executable, str(Path(__file__).with_name("starts_child.py")), json.dumps(list(cases.values()))]
    folder = tmp_path_factory.mktemp("starts")
    done = subprocess.run(
        command, env=child_environment(), cwd=folder, capture_output=True, text=True, timeout=START_LIMIT, start_new_session=True
    )
    results = [json.loads(line.removeprefix("case:")) for line in done.stdout.splitlines() if line.startswith("case:")]
    assert len(results) == len(cases), done.stderr[-4000:]
    return dict(zip(cases, results, strict=True))


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_in_one_line(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    outcome = outcomes[name]
    assert outcome["code"] not in (0, None), outcome["said"]
    lines = [line for line in outcome["said"].splitlines() if line.startswith("adaptivespec:")]
    assert len(lines) == 1, outcome["said"]
    for piece in REFUSALS[name].says:
        assert piece in lines[0]
    assert "Traceback" not in outcome["said"]


def test_check_verifies_every_hook(outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes["check"]
    assert outcome["code"] == 0, outcome["said"]
    said = json.loads(outcome["said"][outcome["said"].index("{") :])
    assert said["ok"]
    assert said["tested"]
    assert len(said["hooks"]) > 15
    assert all(row["ok"] for row in said["hooks"])


def test_check_names_what_is_missing(outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes["check, renamed"]
    assert outcome["code"] == 1
    said = json.loads(outcome["said"][outcome["said"].index("{") :])
    assert [row["target"] for row in said["hooks"] if not row["ok"]] == [HOOKED]


def test_hooks_only_with_settings(outcomes: dict[str, dict[str, Any]]) -> None:
    def hooked(name: str) -> list[str]:
        [line] = [line for line in outcomes[name]["said"].splitlines() if line.startswith("hooked:")]
        found: list[str] = json.loads(line.removeprefix("hooked:"))
        return found

    assert hooked("hooks without settings") == []
    assert hooked("hooks, left out") == []
    assert HOOKED in hooked("hooks with settings")
