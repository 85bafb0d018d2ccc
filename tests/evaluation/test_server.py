"""Arms of a server, its dialects of speculative metrics, shares of time, and a report of what a server does not say."""

from __future__ import annotations

from typing import Any

import pytest
from fake_run import fake_answer, fake_run

from adaptivespec.config import SpeculativeConfig
from adaptivespec.errors import UserError
from adaptivespec.evaluation import server_answers
from adaptivespec.evaluation.analysis import analyse
from adaptivespec.evaluation.arms import parse_arm
from adaptivespec.evaluation.figures import LIGHT, figures, png
from adaptivespec.evaluation.report import page
from adaptivespec.evaluation.server import parse_engine
from adaptivespec.evaluation.server_answers import SharedClock
from adaptivespec.evaluation.server_arms import not_obeyed, parse_server_arm, wish_of
from adaptivespec.evaluation.server_metrics import speculative_metrics
from fake_server import SGLANG, VLLM

ARMS = [
    "ar", "static:5,4,8", "margin:margin=0.5,budget=3", "tree", "adaptivespec:guards=none,low=3/4/8,high=7/4/16", "window", "talon",
    "accept_ema", "typical",
]  # fmt: skip


@pytest.mark.parametrize("text", ARMS)
@pytest.mark.parametrize("default", ["adaptivespec", "ar", "static:6,8,16", "window", "margin:budget=9"])
def test_a_wish_means_the_same_whatever_the_defaults(text: str, default: str) -> None:
    [config], [defaults] = parse_arm(text).speculative, parse_arm(default).speculative
    wish = wish_of(config)
    effective: SpeculativeConfig = defaults.for_request(wish)
    names = ("policy", "effective_rule", "kappa") if wish is False else ("policy", "effective_rule", "kappa", *wish)
    assert [getattr(effective, name) for name in names] == [getattr(config, name) for name in names]
    assert not_obeyed(wish, wish) is None
    if isinstance(wish, dict):  # silence about a setting is no obedience
        assert all("it does not say" in (not_obeyed(wish, {n: v for n, v in wish.items() if n != left_out}) or "") for left_out in wish)
    assert parse_server_arm(text).wish(3) == wish


def test_labels_say_what_they_can() -> None:
    assert parse_server_arm("server:static:3,4,4").kinds == parse_server_arm("static:3,4,4").kinds
    assert parse_server_arm("server:static:3,4,4").settings == parse_server_arm("static:3,4,4").settings
    strict = parse_server_arm("server: strict-eagle3")
    assert (strict.label, strict.wish(0), strict.settings) == ("server:strict-eagle3", None, ({},))
    assert [parse_server_arm(f"server:{label}").kinds[0]["rule"] for label in ("strict-eagle3", "ar-fp8", "mine")] == [
        "strict", "strict", "server"
    ]  # fmt: skip
    with pytest.raises(UserError, match="expected server:LABEL"):
        parse_server_arm("server:ar+tree")


def test_engines_are_urls() -> None:
    assert parse_engine("openai=http://localhost:30000") == parse_engine("openai=http://localhost:30000/v1/") == "http://localhost:30000/v1"
    assert parse_engine("openai=https://host/path") == "https://host/path"


@pytest.mark.parametrize(
    ("answer", "steps", "accepted"),
    [
        ({"metrics": {"speculative_decoding": VLLM}}, 2, 3),
        ({"sglext": {"spec_tokens_details": SGLANG}, "choices": [{}]}, 2, 3),
        ({"choices": [{"meta_info": {"spec_verify_ct": 2, "spec_accept_token_num": 4, "spec_draft_token_num": 6}}]}, 2, 4),
        ({"choices": [{"meta_info": {"spec_verify_ct": 2, "spec_accept_length": 3.0}}]}, 2, 3),  # 1 from the prompt, 2 bonus tokens
    ],
    ids=["vllm", "sglang", "sglang 0.5.9", "sglang of 2025"],
)
def test_dialects(answer: dict[str, Any], steps: int, accepted: int) -> None:
    said = speculative_metrics(answer, 6)
    assert said is not None
    assert (said["num_spec_steps"], said["num_accepted_draft_tokens"]) == (steps, accepted)
    assert not {name for name in said if name.startswith("spec_")}


@pytest.mark.parametrize(
    "answer",
    [{}, {"metrics": None, "sglext": None}, {"metrics": {"speculative_decoding": None}}, {"metrics": 3, "choices": [{"meta_info": []}]},
     {"choices": [{"meta_info": {"spec_verify_ct": 0}}]}],
)  # fmt: skip
def test_silence_is_none(answer: dict[str, Any]) -> None:
    assert speculative_metrics(answer, 6) is None


def test_time_is_shared_by_those_who_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(server_answers.time, "perf_counter", lambda: now[0])
    clock = SharedClock()
    first = clock.enter()
    now[0] += 1  # alone
    second = clock.enter()
    now[0] += 2  # two
    shares = [clock.leave(first)]
    now[0] += 3  # alone again
    shares.append(clock.leave(second))
    now[0] += 10  # nobody
    third = clock.enter()
    now[0] += 1
    shares.append(clock.leave(third))
    assert shares == pytest.approx([2, 4, 1])


def test_a_report_of_what_a_server_does_not_say() -> None:
    run = fake_run("ar; static:3,4,4; margin; tree; adaptivespec", {"gsm8k": 8})
    run["settings"] |= {"engine": "openai", "arms": {f"server:{label}": arm for label, arm in run["settings"]["arms"].items()}}
    run["settings"]["arms"]["server:x"] = {"kinds": [{"policy": "server", "rule": "server", "kappa": None}], "settings": [{}]}
    run["prompts"]["chat_template"] = None
    silent = {"metrics": {}, "promoted": None, "steps": None, "spent": None, "latency": 2.0}
    rows = [fake_answer(arm, "gsm8k", i, True, **silent) for arm in run["settings"]["arms"] for i in range(8)]
    analysis = analyse(run, rows)
    [square] = analysis.squares
    assert square.accept_length is None
    arms = run["settings"]["arms"]
    arms["static:3,4,4"] = arms.pop("server:static:3,4,4")  # requests' settings on one server, a label of another
    assert not analyse(run, [{**row, "arm": row["arm"].replace("server:static", "static")} for row in rows]).squares
    arms["server:static:3,4,4"] = arms.pop("static:3,4,4")
    assert "server:x" not in analysis.kappas
    assert (analysis.plain, analysis.reference) == ("server:ar", "server:static:3,4,4")
    assert all(cell.accept_length is cell.acceptance_rate is cell.promoted_per_1k is cell.spent_per_1k is None for cell in analysis.cells)
    assert all(cell.latency == 2.0 for cell in analysis.cells)
    drawn = figures(analysis)
    assert "accept-length" not in drawn
    image = png(drawn["accuracy-and-speed"], LIGHT)
    text = page(run, analysis, {"accuracy-and-speed": (image, image)})
    assert "unknown in accept length" in text
    assert "16 requests in flight" in text
    assert "the server applies its own" in text
