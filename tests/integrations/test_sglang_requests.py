"""The state of requests: made at first sight, kept across retraction, freed with SGLang's own request."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from adaptivespec.config import SpeculativeConfig
from adaptivespec.integrations.sglang.requests import Requests, living
from adaptivespec.method.noise import gumbel
from adaptivespec.method.policy import Adaptive
from adaptivespec.method.tree import TreeShape
from integrations.sglang_fakes import make_req

CPU = torch.device("cpu")


def make_requests(**settings: object) -> Requests:
    return Requests(SpeculativeConfig(**settings), Adaptive())


def test_state_hangs_on_the_request_and_dies_with_it() -> None:
    requests = make_requests()
    gc.collect()
    before = living()
    for i in range(100):
        batch = [make_req(f"{i}-{j}") for j in range(4)]
        requests.batch(batch, CPU)
    del batch
    gc.collect()
    assert living() == before


def test_totals_and_policy_survive_retraction() -> None:
    requests = make_requests()
    a, b = make_req("a"), make_req("b")
    both = requests.batch([a, b], CPU)
    both.spent = torch.tensor([1.5, 0.25], dtype=torch.float64)
    both.policy.rar.copy_(torch.tensor([0.9, 0.1]))
    requests.batch([b], CPU)  # a is retracted
    again = requests.batch([b, a], CPU)
    assert again.spent.tolist() == [0.25, 1.5]
    assert again.policy.rar.tolist() == pytest.approx([0.1, 0.9])


def test_a_batch_that_stays_together_keeps_its_tensors() -> None:
    requests = make_requests()
    a, b = make_req("a"), make_req("b")
    assert requests.batch([a, b], CPU) is requests.batch([a, b], CPU)
    assert requests.batch([b, a], CPU) is not requests.batch([a, b], CPU)


def test_an_id_used_twice_is_two_requests() -> None:
    requests = make_requests()
    first, second = make_req("same"), make_req("same")
    assert requests.state_of(first) is not requests.state_of(second)


def test_seeds() -> None:
    requests = make_requests()

    def seed(**params: object) -> int:
        return requests.state_of(make_req(**params)).seed

    assert seed(temperature=1.0, sampling_seed=5) == 5
    assert seed(rid="a", temperature=1.0) == seed(rid="a", temperature=1.0)  # every rank draws the same
    assert seed(rid="a", temperature=1.0) != seed(rid="b", temperature=1.0)
    assert seed(rid="a", temperature=1.0, sampling_seed=5, n=2) != seed(rid="b", temperature=1.0, sampling_seed=5, n=2)
    assert -(2**63) <= seed(rid="x", temperature=1.0) < 2**63


def test_sglangs_greedy_is_temperature_0() -> None:
    requests = make_requests()
    assert requests.state_of(make_req()).temperature == 0
    assert requests.state_of(make_req(temperature=0.7)).temperature == 0.7
    assert not requests.batch([make_req()], CPU).sampling.samples


def test_special_tokens_of_the_tokenizer_are_protected() -> None:
    added = {7: SimpleNamespace(special=True), 8: SimpleNamespace(special=False)}
    req = make_req(stop_token_ids=[3])
    req.tokenizer = SimpleNamespace(all_special_ids=[1], added_tokens_decoder=added, eos_token_id=2, additional_stop_token_ids=None)
    requests = make_requests()
    assert requests.state_of(req).protected == {0, 1, 2, 3, 7}
    assert requests.state_of(make_req()).protected == {0}


def test_rules_are_shared_and_strict_joins_margin() -> None:
    requests = make_requests()
    wishes = [{"margin": 0.1}, {"margin": 0.5, "budget": 2}, False, {"rule": "typical"}]
    batch = requests.batch([make_req(str(i), wish=wish) for i, wish in enumerate(wishes)], CPU)
    assert sorted(batch.by_rule.values()) == [[0, 1, 2], [3]]


def test_a_wish_that_slipped_past_is_served_strictly(caplog: pytest.LogCaptureFixture) -> None:
    state = make_requests().state_of(make_req("odd", wish={"margn": 1}))
    assert state.config.effective_rule == "strict"
    assert "request odd is served strictly: unknown setting 'margn'" in caplog.text


def test_the_report_counts_what_was_drafted() -> None:
    state = make_requests(margin=0.3, budget=9).state_of(make_req())
    state.totals.add(TreeShape(3, 4, 4), accepted=2, promoted=1, spent=0.5)
    state.totals.add(TreeShape(7, 1, 8), accepted=0, promoted=0, spent=0.5)
    report = state.report()
    assert report["drafted"] == 3 + 7
    assert report["accept_length"] == (2 + 2) / 2
    assert report["acceptance_rate"] == 2 / 10
    assert report["shapes"] == {"3,4,4": 1, "7,1,8": 1}
    assert report["accepted_histogram"] == [1, 0, 1]
    assert (report["promoted"], report["spent_budget"], report["rule"], report["margin"], report["budget"]) == (1, 0.5, "margin", 0.3, 9)


def test_first_tokens_are_drawn_with_the_noise_of_their_position() -> None:
    requests = make_requests()
    logits, positions = torch.randn(3, 50), torch.tensor([4, 9, 9])
    reqs = [make_req("a", temperature=0.6, sampling_seed=1), make_req("b", temperature=1.4, sampling_seed=2), make_req("c")]
    heat = torch.tensor([0.6, 1.4, 1.0])[:, None]
    drawn = requests.batch(reqs, CPU).draw((logits / heat).softmax(-1), positions)
    noise = gumbel(torch.tensor([1, 2, 0]), positions, 50) * torch.tensor([0.6, 1.4, 0.0])[:, None]
    assert drawn.tolist() == (logits + noise).argmax(-1).tolist()
    assert drawn.dtype == torch.int32
