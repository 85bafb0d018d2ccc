"""Nothing is kept of requests that are gone."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptivespec.config import SpeculativeConfig
from adaptivespec.integrations.sglang.requests import Requests, living
from adaptivespec.method.policy import Adaptive
from bed_models import KNOWN, UNKNOWN
from servers import Server


def series(server: Server, name: str) -> float:
    """The sum of a Prometheus series over its labels; 0 when it was never written."""
    values = re.findall(rf"^adaptivespec:{name}(?:{{.*}})? (\S+)$", server.get("/metrics"), re.MULTILINE)
    return sum(map(float, values))


def eventually(true: Callable[[], bool]) -> bool:
    """Whether it becomes true, with a minute's patience: a server answers before it writes its books."""
    for _ in range(120):
        if true():
            return True
        time.sleep(0.5)
    return False


def test_two_hundred_short_requests_eight_at_a_time(rotating: Server) -> None:
    names = ("drafted_tokens_total", "accepted_tokens_total", "promoted_tokens_total", "verify_steps_total")
    before = {name: series(rotating, name) for name in names}
    prompts = [(KNOWN + UNKNOWN)[i % 12] for i in range(200)]
    wishes = [{"max_new_tokens": 3 + i % 14, "custom_params": {"adaptivespec": {"margin": 0.1}} if i % 2 else None} for i in range(200)]
    answers = rotating.generate_all(prompts, wishes)
    assert all(len(answer["output_ids"]) == wish["max_new_tokens"] for answer, wish in zip(answers, wishes, strict=True))
    said = [answer["meta_info"]["adaptivespec"] for answer in answers]
    assert {s["rule"] for s in said} == {"strict", "margin"}
    assert eventually(lambda: series(rotating, "requests") == 0)
    assert series(rotating, "verify_steps_total") > 0
    grown = {name: series(rotating, name) - before[name] for name in names}
    for name, key in zip(names, ("drafted", "accepted", "promoted", "verify_steps"), strict=True):
        assert grown[name] == sum(s[key] for s in said)


def fake_request(rid: str, **params: Any) -> SimpleNamespace:
    """What the plug-in reads of SGLang's Req."""
    sampling = {"top_k": 1, "temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "n": 1, "sampling_seed": None}
    sampling |= {"custom_params": None, "stop_token_ids": None} | params
    return SimpleNamespace(
        rid=rid, sampling_params=SimpleNamespace(**sampling), origin_input_ids=[1, 2, 3], eos_token_ids={0}, tokenizer=None
    )


@pytest.mark.parametrize("order", ["first in, first out", "last in, first out"])
def test_ten_thousand_requests(order: str) -> None:
    """Batches of eight, a request leaving and one joining at every step."""
    gc.collect()
    before = living()
    store = Requests(SpeculativeConfig(), Adaptive())
    running = [fake_request(f"r{i}") for i in range(8)]
    most = 0
    for i in range(8, 10_000):
        batch = store.batch(running, torch.device("cpu"))
        assert len(batch.states) == 8
        running.pop(0 if order.startswith("first") else -1)
        wish = {"adaptivespec": {"margin": 0.1 + i % 50 / 100}} if i % 3 else None
        running.append(fake_request(f"r{i}", custom_params=wish, stop_token_ids=[i % 100]))
        most = max(most, living() - before)
    assert most <= 10
    running.clear()
    del batch
    store.batch([fake_request("last")], torch.device("cpu"))
    gc.collect()
    assert living() - before <= 1
    del store
    gc.collect()
    assert living() == before


def test_state_survives_a_change_of_company() -> None:
    store = Requests(SpeculativeConfig(), Adaptive())
    a, b = fake_request("a"), fake_request("b")
    first = store.batch([a, b], torch.device("cpu"))
    first.spent += torch.tensor([1.0, 2.0], dtype=torch.float64)
    alone = store.batch([b], torch.device("cpu"))
    assert alone.spent.tolist() == [2.0]
    together = store.batch([b, a], torch.device("cpu"))
    assert together.spent.tolist() == [2.0, 1.0]
