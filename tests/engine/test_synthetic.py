"""The synthetic pair: calibrated, deterministic, and pinned for strict and margin with static and adaptive trees."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from adaptivespec import SpeculativeConfig
from adaptivespec.config import POLICIES, RULES
from adaptivespec.engine.synthetic import Costs, Process, SyntheticResult, World, bursty, drifting, simulate, stationary
from adaptivespec.errors import UserError

PROCESSES: dict[str, Process] = {"stationary": stationary(0.7), "drifting": drifting(0.2, 0.95, 120), "bursty": bursty(0.2, 0.95, 40)}
ARMS: dict[str, dict[str, Any]] = {
    "static strict": {"policy": "static", "rule": "strict"},
    "static margin": {"policy": "static", "margin": 0.2},
    "adaptive strict": {"rule": "strict"},
    "adaptive margin": {"margin": 0.2},
}
CHAIN = {"policy": "static", "num_steps": 15, "topk": 1, "num_draft_tokens": 16}


def run(process: Process, max_tokens: int = 300, temperature: float = 0.0, **settings: Any) -> SyntheticResult:
    return simulate(SpeculativeConfig(**settings), World(process), Costs(), max_tokens=max_tokens, temperature=temperature)


PINNED = {
    ("stationary", "static strict"): (471, 1413, 730, 0),  # accept length 2.55
    ("stationary", "static margin"): (395, 1185, 809, 126),  # accept length 3.05
    ("stationary", "adaptive strict"): (383, 2140, 820, 0),  # accept length 3.14
    ("stationary", "adaptive margin"): (266, 1662, 943, 138),  # accept length 4.55
    ("drifting", "static strict"): (554, 1662, 656, 0),  # accept length 2.18
    ("drifting", "static margin"): (483, 1449, 721, 121),  # accept length 2.49
    ("drifting", "adaptive strict"): (482, 2315, 733, 0),  # accept length 2.52
    ("drifting", "adaptive margin"): (377, 1950, 834, 147),  # accept length 3.21
    ("bursty", "static strict"): (503, 1509, 701, 0),  # accept length 2.39
    ("bursty", "static margin"): (440, 1320, 763, 101),  # accept length 2.73
    ("bursty", "adaptive strict"): (405, 1895, 798, 0),  # accept length 2.97
    ("bursty", "adaptive margin"): (324, 1633, 887, 123),  # accept length 3.74
}


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("process", PROCESSES)
def test_pinned(process: str, arm: str) -> None:
    """Steps, drafted, accepted and promoted tokens: exact, since nothing here is left to chance."""
    result = run(PROCESSES[process], **ARMS[arm])
    assert (result.steps, result.drafted, result.accepted, result.promoted) == PINNED[process, arm]
    assert result.accept_length == 1 + result.accepted / result.steps
    assert result.acceptance_rate == result.accepted / result.drafted


def test_adaptive_beats_the_same_static_tree_where_acceptance_varies() -> None:
    for rule in ("strict", "margin"):
        for process in ("bursty", "drifting"):
            static = run(PROCESSES[process], policy="static", rule=rule)
            adaptive = run(PROCESSES[process], rule=rule)
            assert adaptive.accept_length > 1.1 * static.accept_length
    assert (
        run(PROCESSES["bursty"], rule="strict").tokens_per_second
        > 1.05 * run(PROCESSES["bursty"], policy="static", rule="strict").tokens_per_second
    )


@pytest.mark.parametrize("chance", [0.3, 0.8])
def test_the_drafter_is_calibrated(chance: float) -> None:
    """A single child is right with the chance of the process, three of them with 1 - (1 - a)^3, and a margin is exceeded as told."""
    one = run(stationary(chance), 1000, policy="static", rule="strict", num_steps=1, topk=1, num_draft_tokens=2)
    assert one.acceptance_rate == pytest.approx(chance, abs=3.5 * math.sqrt(0.25 / one.steps))
    three = run(stationary(chance), 1000, policy="static", rule="strict", num_steps=1, topk=3, num_draft_tokens=4)
    assert three.accepted / three.steps == pytest.approx(1 - (1 - chance) ** 3, abs=3.5 * math.sqrt(0.25 / three.steps))
    lossy = run(stationary(chance), 1000, policy="static", margin=0.2, num_steps=1, topk=1, num_draft_tokens=2)
    wanted = (1 - chance) * (1 - 0.2 ** (1 / 3.0))
    assert lossy.promoted / lossy.steps == pytest.approx(wanted, abs=3.5 * math.sqrt(0.25 / lossy.steps))


def test_processes() -> None:
    seeds, positions = torch.arange(50)[:, None].expand(50, 200), torch.arange(200).expand(50, 200)
    assert set(stationary(0.5)(seeds, positions).flatten().tolist()) == {0.5}
    drift = drifting(0.2, 0.8, 100)(seeds, positions)[0]
    assert [drift[i].item() for i in (0, 25, 50, 75, 100)] == pytest.approx([0.2, 0.5, 0.8, 0.5, 0.2], abs=1e-5)
    burst = bursty(0.2, 0.8, 20)(seeds, positions).view(50, 10, 20)
    assert (burst == burst[:, :, :1]).all()
    assert burst.mean().item() == pytest.approx(0.5, abs=0.05)


def test_plain_decoding_and_costs() -> None:
    plain = simulate(SpeculativeConfig(policy="off"), World(stationary(0.5)), Costs(0.0, 0.02, 0.0), requests=2, max_tokens=10)
    assert (plain.steps, plain.drafted, plain.accepted) == (20, 0, 0)
    assert (plain.accept_length, plain.acceptance_rate) == (1, 0)
    assert plain.tokens_per_second == pytest.approx(50)
    assert Costs(1.0, 10.0, 0.1).step(levels=3, rows=5) == pytest.approx(13.4)
    # three levels and four rows at every step
    static = run(stationary(0.5), policy="static")
    assert static.seconds == pytest.approx(static.steps * Costs().step(3, 4))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_runs(policy: str) -> None:
    results = [run(PROCESSES["bursty"], 60, policy=policy, rule="strict") for _ in range(2)]
    assert results[0] == results[1]
    assert (results[0].drafted > 0) == (policy != "off")


@pytest.mark.parametrize("rule", sorted(set(RULES) - {"rejection"}))
def test_every_rule_runs(rule: str) -> None:
    result = run(PROCESSES["bursty"], 60, 1.0 if rule == "threshold" else 0.0, **CHAIN, rule=rule)
    assert result.accepted > 0
    assert (result.promoted > 0) == (rule not in ("strict", "threshold"))


def test_what_the_engine_refuses_is_refused() -> None:
    with pytest.raises(UserError, match="rule threshold samples"):
        run(stationary(0.5), rule="threshold")
    with pytest.raises(UserError, match="rule rejection needs a drafter that samples"):
        run(stationary(0.5), rule="rejection")
