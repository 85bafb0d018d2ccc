"""Settings of the plug-in: from the environment, and what one request may change."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptivespec.config import SpeculativeConfig
from adaptivespec.errors import UserError
from adaptivespec.integrations.sglang.settings import SGLangConfig, load_settings, request_config


def test_settings_are_the_ones_of_every_engine_and_sglangs_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ADAPTIVESPEC", '{"kappa": 0.3, "aggregate": "min", "confidence": "lagged"}')
    settings = load_settings()
    assert settings.speculative == SpeculativeConfig(margin=0.3)
    assert (settings.policy, settings.aggregate, settings.confidence) == ("adaptive", "min", "lagged")
    file = tmp_path / "settings.json"
    file.write_text('{"margin": 0.3}')
    assert load_settings(str(file)).speculative == settings.speculative


def test_defaults_of_a_policy_stay_its_own() -> None:
    assert load_settings('{"policy": "accept_ema"}').speculative.alpha == 0.2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"margn": 0.2}', "unknown setting 'margn'; did you mean 'margin'?"),
        ('{"agregate": "min"}', "unknown setting 'agregate'; did you mean 'aggregate'?"),
        ('{"aggregate": "median"}', "unknown aggregate 'median'"),
        ('{"margin": 2}', "margin: Input should be less than or equal to 1"),
        ("{", "not valid JSON"),
        ("/no/such/file", "neither a JSON object nor a readable file"),
        ('{"policy": "off"}', "policy off drafts nothing: unset ADAPTIVESPEC"),
        ('{"policy": "talon"}', "policy talon decides while the tree is drafted"),
        ('{"policy": "confidence"}', "policy confidence decides while the tree is drafted"),
        ('{"policy": "goodput"}', "policy goodput decides while the tree is drafted"),
        ('{"policy": "goodput_shapes"}', "policy goodput_shapes learns from draft probabilities"),
        ('{"rule": "rejection"}', "rule rejection needs a drafter that samples"),
        ('{"low": [3, 1, 9]}', "shape 3,1,9: topk 1 is a chain"),
        ('{"policy": "static", "confidence": "lagged"}', "confidence has no effect with policy static; leave it out"),
        ('{"policy": "static", "low": [2, 2, 4]}', "low has no effect with policy static"),
    ],
)
def test_what_cannot_be_served_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load_settings(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


DEFAULTS = SpeculativeConfig(margin=0.2, budget=3)


@pytest.mark.parametrize("wish", [None, {}, {"thinking_budget": 5}, {"adaptivespec": None}, {"adaptivespec": True}, {"adaptivespec": {}}])
def test_a_request_without_a_wish_takes_the_servers_settings(wish: object) -> None:
    assert request_config(DEFAULTS, wish, 0.0).model_dump() == DEFAULTS.model_dump()


def test_a_request_changes_rule_and_guards() -> None:
    assert request_config(DEFAULTS, {"adaptivespec": {"kappa": 0.5}}, 0.0).kappa == 0.5
    assert request_config(DEFAULTS, {"adaptivespec": {"kappa": 0.5}}, 0.0).budget == 3
    assert request_config(DEFAULTS, {"adaptivespec": {"guards": "none"}}, 0.0).budget is None
    for strict in (False, {"rule": "strict"}, {"margin": 1}, {"margin": "off"}):
        assert request_config(DEFAULTS, {"adaptivespec": strict}, 0.7).effective_rule == "strict"


@pytest.mark.parametrize(
    ("wish", "temperature", "message"),
    [
        ({"margn": 0.1}, 0.0, "unknown setting 'margn'; did you mean 'margin'?"),
        ({"margin": 0}, 0.0, "margin: Input should be greater than 0"),
        (0.1, 0.0, "adaptivespec: expected settings, true or false, not float"),
        ({"policy": "static"}, 0.0, "policy: one tree shape serves a whole batch"),
        ({"speculative_num_steps": 9}, 0.0, "speculative_num_steps: one tree shape serves a whole batch"),
        ({"aggregate": "min"}, 0.0, "aggregate: one tree shape serves a whole batch"),
        ({"rule": "threshold"}, 0.0, "rule threshold samples: it needs a temperature above 0, not 0"),
        ({"rule": "relaxed_topk"}, 0.8, "rule relaxed_topk is defined at temperature 0 only, not 0.8"),
        ({"rule": "rejection"}, 0.8, "rule rejection needs a drafter that samples"),
        ({"rule": "window"}, 0.0, "rule window needs chains"),
    ],
)
def test_a_wish_that_cannot_be_served_is_refused(wish: object, temperature: float, message: str) -> None:
    with pytest.raises(UserError) as error:
        request_config(DEFAULTS, {"adaptivespec": wish}, temperature)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_only_a_shape_in_the_settings_is_fixed() -> None:
    assert SGLangConfig(policy="static", topk=1).fixed_shape
    assert not SGLangConfig(policy="static").fixed_shape
    assert not SGLangConfig(low=(2, 2, 4)).fixed_shape
