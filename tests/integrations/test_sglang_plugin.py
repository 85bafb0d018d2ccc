"""The hooks around a step and around SGLang's flags, with look-alikes of the few modules that they call."""

from __future__ import annotations

import contextlib
import gc
import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptivespec.errors import UserError
from adaptivespec.integrations.sglang import server_args
from adaptivespec.integrations.sglang.plugin import Plugin
from adaptivespec.integrations.sglang.requests import Requests, living
from adaptivespec.integrations.sglang.settings import SGLangConfig, served_policy
from adaptivespec.integrations.sglang.shapes import Shapes
from adaptivespec.method.tree import TreeShape
from integrations.sglang_fakes import make_req, walk
from method.fakes import Nodes, make_tree

VOCAB = 16


class Spec:
    """SGLang's bag of speculative settings, with its scoped override."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def override(self, **values: Any) -> Iterator[None]:
        self.seen.append(values)
        yield


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Look-alikes of sglang.srt.runtime_context and sglang.srt.arg_groups.overrides."""
    spec, declared = Spec(), {}
    context: Any = types.ModuleType("sglang.srt.runtime_context")
    context.get_parallel = lambda: SimpleNamespace(tp_group=SimpleNamespace(world_size=1))
    context.get_spec = lambda: spec
    overrides: Any = types.ModuleType("sglang.srt.arg_groups.overrides")
    overrides.declare_resolution = lambda args, source, **fields: args.__dict__.update(fields)
    overrides.resolved_view = lambda args: args
    for name in ("sglang", "sglang.srt", "sglang.srt.arg_groups"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.overrides", overrides)
    return SimpleNamespace(spec=spec, declared=declared)


# Flags


def flags(**values: Any) -> Any:
    given = {
        "speculative_algorithm": "EAGLE3",
        "speculative_num_steps": None,
        "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None,
        "speculative_adaptive": False,
        "speculative_accept_threshold_single": 1.0,
        "pp_size": 1,
        "disaggregation_mode": "null",
        "device": "cuda",
        **values,
    }
    return SimpleNamespace(**given)


def shape_of(args: Any) -> tuple[int, int, int]:
    return args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (7, 4, 8)),
        ({"policy": "accept_ema"}, (7, 1, 8)),
        ({"policy": "static", "num_steps": 5, "topk": 1, "num_draft_tokens": 6}, (5, 1, 6)),
        ({"policy": "static"}, (None, None, None)),
    ],
)
def test_memory_is_reserved_for_the_largest_shape(sglang: Any, settings: dict[str, Any], expected: tuple[int, int, int]) -> None:
    args = flags()
    seen: list[tuple[int, int, int]] = []
    server_args.resolve(SGLangConfig(**settings), args, lambda a: seen.append(shape_of(a)))
    assert seen == [expected]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"speculative_algorithm": None},
            "ADAPTIVESPEC is set, but --speculative-algorithm is missing; it serves EAGLE3, EAGLE, STANDALONE",
        ),
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm is NGRAM"),
        (
            {"speculative_num_steps": 3},
            "--speculative-num-steps 3 contradicts ADAPTIVESPEC, whose largest shape is 7,4,8 (so 7); leave it out",
        ),
        ({"speculative_adaptive": True}, "--speculative-adaptive True does not go with ADAPTIVESPEC: the plug-in's tree policy"),
        ({"speculative_accept_threshold_single": 0.8}, "--speculative-accept-threshold-single 0.8 does not go with ADAPTIVESPEC"),
        ({"skip_tokenizer_init": True}, "--skip-tokenizer-init True does not go with ADAPTIVESPEC: guards protect"),
        ({"pp_size": 2}, "--pp-size 2 does not go with ADAPTIVESPEC"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode does not go with ADAPTIVESPEC"),
        ({"device": "xpu"}, "--device xpu does not go with ADAPTIVESPEC"),
    ],
)
def test_flags_that_do_not_fit_are_refused(sglang: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        server_args.resolve(SGLangConfig(), flags(**values), lambda _: None)
    assert message in str(error.value)
    with pytest.raises(SystemExit, match=r"^adaptivespec: "):
        Plugin(SGLangConfig()).resolve_server_args(flags(**values), lambda _: None)


def test_sglangs_own_refusal_is_one_line(sglang: Any) -> None:
    def refuse(_: Any) -> None:
        raise ValueError("topk > 1 with page_size > 1\nis only supported on flashinfer")

    with pytest.raises(
        UserError, match=r"^SGLang refuses its speculative flags, with 7,4,8 as the largest shape: topk > 1 with page_size > 1 is"
    ):
        server_args.resolve(SGLangConfig(), flags(), refuse)


def test_a_matching_flag_is_no_contradiction(sglang: Any) -> None:
    server_args.resolve(SGLangConfig(), flags(speculative_num_steps=7, speculative_eagle_topk=4), lambda _: None)


# Steps


def make_plugin(**settings: Any) -> Plugin:
    plugin = Plugin(SGLangConfig(**settings))
    plugin.policy = served_policy(plugin.settings)
    plugin.shapes = Shapes(plugin.policy, plugin.settings.aggregate)
    plugin.requests = Requests(plugin.defaults, plugin.policy)
    return plugin


class Switch:
    """Notes which shapes were put in place."""

    def __init__(self) -> None:
        self.used: list[TreeShape] = []

    @contextlib.contextmanager
    def at(self, shape: TreeShape) -> Iterator[None]:
        self.used.append(shape)
        yield


def batch_of(reqs: list[Any], topk_p: torch.Tensor, overlap: bool = False) -> Any:
    mode = SimpleNamespace(is_idle=lambda: False, is_extend=lambda: False)
    return SimpleNamespace(
        reqs=reqs,
        seq_lens=torch.tensor([len(r.origin_input_ids) for r in reqs]),
        forward_mode=mode,
        is_extend_in_batch=False,
        enable_overlap=overlap,
        spec_info=SimpleNamespace(topk_p=topk_p, topk_index=torch.arange(4).repeat(len(reqs), 1)),
    )


def stock_step(plugin: Plugin, drafted: int, hit: bool, confidence: float, widths: list[int]) -> Callable[..., Any]:
    """SGLang's step: a chain of `drafted` tokens per request, all of them the target's choice or none; then the next roots."""

    def forward(worker: Any, batch: Any) -> Any:
        widths.append(batch.spec_info.topk_p.shape[1])
        n = len(batch.reqs)
        tree = make_tree([Nodes(list(range(1, drafted + 2)), list(range(-1, drafted)), [0.0] * (drafted + 1))] * n)
        logits = torch.zeros(n * (drafted + 1), VOCAB)
        following = torch.arange(2, drafted + 3).repeat(n) if hit else torch.full((len(logits),), 15)
        logits[torch.arange(len(logits)), following] = 5.0
        links = tree.to_sglang()

        def verify(**kwargs: Any) -> Any:
            rows = zip(tree.tokens.tolist(), links[0].tolist(), links[1].tolist(), kwargs["target_predict"].tolist(), strict=True)
            return [walk(*row, tree.levels) for row in rows]

        def sample(verify_input: Any, batch: Any, logits_output: Any) -> Any:
            assert plugin.walk_greedily(lambda **_: False, is_all_greedy=False)
            return plugin.rewrite_prediction(
                verify,
                target_predict=logits.argmax(-1).view_as(tree.tokens),
                candidates=tree.tokens,
                retrieve_next_token=links[0],
                retrieve_next_sibling=links[1],
            )

        walked = plugin.see_logits(sample, None, batch, SimpleNamespace(next_token_logits=logits))
        roots = SimpleNamespace(topk_p=torch.full((n, 4), confidence), topk_index=torch.zeros(n, 4, dtype=torch.int64))
        return SimpleNamespace(next_draft_input=roots, walked=walked)

    return forward


def finish(plugin: Plugin, result: Any, batch: Any) -> None:
    processor = SimpleNamespace(metrics_reporter=SimpleNamespace(current_scheduler_metrics_enabled=False))
    assert plugin.count_step(lambda *_: "tokens", processor, result, batch) == "tokens"


def test_a_step_is_drafted_decided_and_counted(sglang: Any) -> None:
    plugin, widths = make_plugin(), []
    plugin.switch = switch = Switch()  # type: ignore[assignment]
    reqs = [make_req("a"), make_req("b")]
    batch = batch_of(reqs, torch.full((2, 4), 0.9))
    result = plugin.run_step(stock_step(plugin, 3, True, 0.9, widths), None, batch)
    assert switch.used == [TreeShape(7, 1, 8)]  # 0.9 * 0.5 / 0.5
    assert widths == [1]
    assert [accepted for accepted, _ in result.walked] == [[1, 2, 3]] * 2
    finish(plugin, result, batch)
    state = plugin.requests.state_of(reqs[0])  # type: ignore[union-attr]
    assert (state.totals.steps, state.totals.drafted, state.totals.accepted) == (1, 7, 3)
    assert state.signal == pytest.approx(1.0)
    assert plugin.step is None


def test_current_reads_the_roots_and_lagged_the_step_before(sglang: Any) -> None:
    for confidence, overlap, expected in [("current", False, 7), ("lagged", False, 3), ("lagged", True, 7)]:
        plugin = make_plugin(confidence=confidence)
        plugin.switch = switch = Switch()  # type: ignore[assignment]
        reqs = [make_req("a")]
        state = plugin.requests.state_of(reqs[0])  # type: ignore[union-attr]
        state.signal, state.signal_before = 1.0, 0.0
        plugin.run_step(stock_step(plugin, 3, True, 0.9, []), None, batch_of(reqs, torch.full((1, 4), 0.99), overlap))
        assert switch.used[0].num_steps == expected


def test_five_misses_force_the_low_shape(sglang: Any) -> None:
    plugin = make_plugin()
    plugin.switch = switch = Switch()  # type: ignore[assignment]
    reqs = [make_req("a")]
    for _ in range(6):
        batch = batch_of(reqs, torch.full((1, 4), 0.99))
        finish(plugin, plugin.run_step(stock_step(plugin, 3, False, 0.99, []), None, batch), batch)
    assert switch.used[0] == TreeShape(7, 1, 8)
    assert switch.used[5] == TreeShape(3, 4, 4)


def test_requests_that_ended_or_were_retracted_are_not_counted(sglang: Any) -> None:
    plugin = make_plugin()
    plugin.switch = Switch()  # type: ignore[assignment]
    reqs = [make_req("a"), make_req("b"), make_req("c")]
    batch = batch_of(reqs, torch.full((3, 4), 0.5))
    result = plugin.run_step(stock_step(plugin, 3, True, 0.5, []), None, batch)
    reqs[0].done, reqs[1].is_retracted = True, True
    result.adaptivespec.values[:, 2] = 0.5  # nats that the step spent
    plugin.requests.batch(reqs, torch.device("cpu")).spent += 0.75  # type: ignore[union-attr]
    finish(plugin, result, batch)
    assert [plugin.requests.state_of(req).totals.steps for req in reqs] == [0, 0, 1]  # type: ignore[union-attr]
    # what the dropped tokens of the retracted request had spent is given back, once
    for _ in range(2):
        assert plugin.requests.batch(reqs, torch.device("cpu")).spent.tolist() == [0.25, 0.25, 0.75]  # type: ignore[union-attr]


def test_the_report_goes_out_once_and_takes_the_state_with_it(sglang: Any) -> None:
    plugin = make_plugin()
    plugin.switch = Switch()  # type: ignore[assignment]
    gc.collect()
    before = living()
    reqs = [make_req("a"), make_req("b")]
    batch = batch_of(reqs, torch.full((2, 4), 0.5))
    finish(plugin, plugin.run_step(stock_step(plugin, 3, True, 0.5, []), None, batch), batch)
    assert plugin.send_report(lambda *_: {"other": [1, 2]}, None, reqs) == {"other": [1, 2], "adaptivespec": [[], []]}
    for req in reqs:
        req.done = True
    sent = plugin.send_report(lambda *_: {}, None, reqs)["adaptivespec"]
    assert [report["verify_steps"] for (report,) in sent] == [1, 1]
    gc.collect()
    assert living() == before
    middle = {"spec_accept_rate": 0.1, "spec_num_proposed_drafts": 99, "spec_accept_length": 2.0}
    plugin.correct_rate(lambda *_: None, None, middle, None, 0)
    assert middle == {"spec_accept_length": 2.0}
    meta: dict[str, Any] = {"spec_accept_rate": 0.1, "spec_num_proposed_drafts": 99}
    others: list[Any] = []
    plugin.receive_report(lambda *args: others.append(args[3]), None, meta, None, {"x": [[1]], "adaptivespec": sent}, 1, None)
    assert others == [{"x": [[1]]}]
    plugin.correct_rate(lambda *_: None, None, meta, None, 0)
    assert meta["adaptivespec"]["drafted"] == meta["spec_num_proposed_drafts"]
    assert meta["spec_accept_rate"] == meta["adaptivespec"]["acceptance_rate"]


def test_a_step_past_the_rule_stops_the_server(sglang: Any) -> None:
    plugin = make_plugin()
    plugin.switch = Switch()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="past the acceptance rule"):
        plugin.run_step(lambda *_: SimpleNamespace(), None, batch_of([make_req()], torch.full((1, 4), 0.5)))
    with pytest.raises(RuntimeError, match="has not prepared"):
        Plugin(SGLangConfig()).run_step(lambda *_: None, None, batch_of([make_req()], torch.full((1, 4), 0.5)))


def test_sglangs_acceptance_rate_divides_by_what_was_drafted(sglang: Any) -> None:
    plugin = make_plugin()
    plugin.drafted, plugin.verified = 30, 6
    reporter = SimpleNamespace(spec_num_forward_ct=6)

    def report(reporter: Any) -> None:
        reporter.spec_num_forward_ct = 0

    plugin.report_drafted(report, reporter)
    assert sglang.spec.seen == [{"speculative_num_draft_tokens": 6.0}]
    assert (plugin.drafted, plugin.verified) == (0, 0)


def test_a_request_is_refused_where_it_comes_in() -> None:
    plugin = Plugin(SGLangConfig())
    with pytest.raises(ValueError, match="unknown setting 'margn'"):
        plugin.verify_request(lambda *_: None, make_req(wish={"margn": 1}).sampling_params, 100)


def test_roots_are_handed_over_wide(sglang: Any) -> None:
    plugin = make_plugin(low=(2, 1, 3), high=(4, 1, 5))
    drafter = SimpleNamespace(topk=1)
    assert plugin.extend_wide(lambda d: d.topk, drafter) == 1  # one shape: as stock
    plugin.switch = Switch()  # type: ignore[assignment]
    assert plugin.extend_wide(lambda d: d.topk, drafter) == 2
    assert drafter.topk == 1
