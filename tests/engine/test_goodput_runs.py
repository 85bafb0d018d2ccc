"""Goodput in the engine and in the synthetic world: resting drafters, costs, and regret against the best static shape in hindsight."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from adaptivespec import LLM, SamplingParams, SpeculativeConfig
from adaptivespec.cost_files import cache_path, from_json, load, load_cached, save, to_json
from adaptivespec.engine import calibrate as calibration
from adaptivespec.engine.calibrate import BRIEF_NODES, calibrate, fit, identity, num_steps, sweep
from adaptivespec.engine.request import Request, RequestOutput
from adaptivespec.engine.synthetic import Costs, Process, World, bursty, drifting, simulate, stationary
from adaptivespec.errors import UserError
from adaptivespec.method.costs import CostTable, Curve
from adaptivespec.method.policy import Static
from adaptivespec.method.records import StepRecord, StepTotals
from adaptivespec.method.tree import TreeShape
from adaptivespec.models.loading import LoadedModel
from tiny_heads import make_tiny_head

# --- regret in long-run tokens per second -------------------------------------------------------------------------------------------

STATIC = [(1, 1, 2), (3, 1, 4), (3, 4, 8), (5, 4, 8), (7, 1, 8)]
FLAT = Costs(0.4e-3, 6e-3, 0.005e-3)  # as on a GPU
STEEP = Costs(2e-3, 20e-3, 2e-3)  # a verify of 11 rows costs twice that of one


def rate(world: World, costs: Costs | CostTable, **settings: object) -> float:
    return simulate(SpeculativeConfig(**settings), world, costs, requests=1, max_tokens=200).tokens_per_second


def step_up(low: float, high: float, at: int) -> Process:
    """`low` before a position, `high` from it on."""
    return lambda seeds, positions: torch.where(positions < at, low, high)


@pytest.mark.parametrize(
    ("world", "costs", "rule", "least"),
    [
        (World(stationary(0.7)), STEEP, "strict", 0.95),
        (World(stationary(0.7)), FLAT, "strict", 1.2),
        # Exact siblings take paths that promotions would have gone on with; what they cost further down is not known.
        (World(stationary(0.7)), STEEP, "margin", 0.82),
        (World(drifting(0.2, 0.95, 120)), STEEP, "strict", 1.1),
        (World(bursty(0.2, 0.95, 40)), STEEP, "strict", 1.1),
        # The drafter is wrong about itself: sure where it fails, doubtful where it is right.
        (World(drifting(0.1, 0.9, 80), claims=drifting(0.9, 0.1, 80)), STEEP, "strict", 0.8),
        (World(stationary(0.3), claims=stationary(0.9)), STEEP, "strict", 0.9),
        (World(stationary(0.02)), STEEP, "strict", 0.96),
    ],
    ids=["stationary", "stationary-flat", "stationary-margin", "drifting", "bursty", "inverted", "overconfident", "hopeless"],
)
def test_regret(world: World, costs: Costs, rule: str, least: float) -> None:
    """Of the best static shape's tokens per modelled second in hindsight: more than all of it where acceptance varies and shows."""
    shapes = [dict(zip(("num_steps", "topk", "num_draft_tokens"), shape, strict=True)) for shape in STATIC]
    plain = rate(world, costs, policy="off")
    best = max(plain, *(rate(world, costs, policy="static", rule=rule, **shape) for shape in shapes))
    assert rate(world, costs, policy="goodput", rule=rule) >= max(least * best, 0.95 * plain)


def test_zero_drafting_and_return() -> None:
    """A drafter that fails for 200 tokens is left alone but for probes, and asked again when it has become good."""
    costs = Costs(4e-3, 20e-3, 1e-3)
    plain = rate(World(stationary(0.5)), costs, policy="off")
    returning, config = World(step_up(0.01, 0.9, 200)), SpeculativeConfig(policy="goodput", rule="strict")
    failing, whole = (simulate(config, returning, costs, requests=1, max_tokens=tokens) for tokens in (200, 450))
    assert failing.tokens_per_second > 0.96 * plain
    assert whole.tokens_per_second > 1.2 * plain


def test_a_large_batch_drafts_less() -> None:
    """Rows that are free for one request are dear for 16: drafting shrinks, and never loses to plain decoding."""
    table = CostTable(Curve((1, 16), (1e-3, 2e-3)), Curve((1, 64), (1e-3, 3e-3)), {1: Curve((1, 16, 128), (20e-3, 22e-3, 160e-3))}, 1e-3)
    world, drafted = World(stationary(0.6)), []
    for batch in (1, 4, 16):
        goodput, plain = (
            simulate(SpeculativeConfig(policy=policy, rule="strict"), world, table, requests=batch, max_tokens=100, together=True)
            for policy in ("goodput", "off")
        )
        assert goodput.tokens_per_second > (1.5 if batch == 1 else 0.97) * plain.tokens_per_second
        drafted.append(goodput.drafted / goodput.steps)
    assert drafted[2] < drafted[1] < drafted[0]
    assert drafted[2] < 0.4 * drafted[0]


def test_shapes_come_near_the_best_of_them() -> None:
    """Deciding before drafting, among a few shapes, in a world where the best shape changes."""
    world = World(bursty(0.1, 0.95, 40))
    shapes = ((1, 1, 2), (3, 4, 8), (7, 1, 8))
    each = [
        rate(world, STEEP, policy="static", rule="strict", num_steps=steps, topk=topk, num_draft_tokens=nodes)
        for steps, topk, nodes in shapes
    ]
    assert rate(world, STEEP, policy="goodput_shapes", rule="strict", shapes=shapes) >= max(each)


# --- in the engine ------------------------------------------------------------------------------------------------------------------

PROMPTS = [[5, 9, 33], [77], [12, 100, 101, 3]]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


class Napper(Static):
    """A static policy that asks the drafter at every third step."""

    def __init__(self, shape: TreeShape, step: int) -> None:
        super().__init__(shape)
        self.step = step

    def asks(self, requests: int) -> int:
        return 0 if self.step % 3 else requests

    def observe(self, step: StepTotals) -> None:
        assert step.asked == self.asks(step.own_requests)
        self.step += 1


def test_a_rested_drafter_drafts_what_it_would_have(model: LoadedModel, tmp_path: Path) -> None:
    """What it was not told of meanwhile is made up for: at the same place of the same text it grows the same tree."""
    head = make_tiny_head(tmp_path)
    config = SpeculativeConfig(policy="static", margin=None)
    llm = LLM(model, drafter=head, speculative=config, max_running_requests=3)
    steady = llm.generate(PROMPTS, PARAMS)
    requests = [request for prompt in PROMPTS for request in llm.submit(prompt, PARAMS)]
    for i, request in enumerate(requests):
        request.policy = Napper(TreeShape(3, 4, 4), i)  # they rest at different steps
    while any(request.finish_reason is None for request in requests):
        llm.step()
    assert_same_trees(requests, steady)


def assert_same_trees(requests: list[Request], steady: list[RequestOutput]) -> None:
    both = 0
    for request, alone in zip(requests, steady, strict=True):
        assert request.token_ids == alone.token_ids
        assert {len(record.tokens) > 1 for record in request.records} == {True, False}
        trees = []
        for records in (request.records, alone.records):
            place, grown = 1, {}
            for record in records:
                grown[place] = record.tokens
                place += len(record.path) + 1
            trees.append(grown)
        shared = [place for place in trees[0].keys() & trees[1].keys() if len(trees[0][place]) > 1]
        both += len(shared)
        assert all(trees[0][place] == trees[1][place] for place in shared)
    assert both > 5


class Prober(Napper):
    """A static policy that asks the drafter for none, for one, for all of its requests in turn."""

    def asks(self, requests: int) -> int:
        return (0, min(1, requests), requests)[self.step % 3]


@pytest.mark.parametrize("most", [512, 3])
def test_a_probe_asks_for_one_request_and_the_others_catch_up_later(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr("adaptivespec.engine.runner.MOST_UNTOLD", most)
    config = SpeculativeConfig(policy="static", margin=None)
    llm = LLM(model, drafter=make_tiny_head(tmp_path), speculative=config, max_running_requests=2)  # the third joins while it rests
    steady = llm.generate(PROMPTS, PARAMS)
    requests = [request for prompt in PROMPTS for request in llm.submit(prompt, PARAMS)]
    policy = Prober(TreeShape(3, 4, 4), 0)
    for request in requests:
        request.policy = policy
    while any(request.finish_reason is None for request in requests):
        llm.step()
        owed = [len(tokens) for tokens, _ in llm.runner._untold.values()]
        assert all(count <= most for count in owed)
    asked = {len(record.draft_rows) and record.draft_rows[0] for record in requests[1].records}
    assert asked == {0, 1, 2}
    assert_same_trees(requests, steady)


def test_while_a_policy_rests_prompts_do_not_reach_the_drafter(model: LoadedModel, tmp_path: Path) -> None:
    llm = LLM(model, drafter=make_tiny_head(tmp_path), speculative=SpeculativeConfig(policy="static", margin=None), max_running_requests=1)
    policy = Napper(TreeShape(3, 4, 4), 1)
    policy.asks = lambda requests: 0  # type: ignore[method-assign]
    for prompt, told in ((PROMPTS[0], len(PROMPTS[0])), (PROMPTS[2], 0)):  # before its first step nobody knows that it rests
        (request,) = llm.submit(prompt, PARAMS)
        request.policy = policy
        while request.finish_reason is None:
            llm.step()
            assert llm.drafter.committed[request.slot] == told


def test_records_tell_rows(model: LoadedModel, tmp_path: Path) -> None:
    llm = LLM(model, drafter=make_tiny_head(tmp_path), speculative=SpeculativeConfig(policy="static", margin=None), max_running_requests=2)
    outputs = llm.generate(PROMPTS[:2], PARAMS, speculative=[None, False])
    for step, (drafting, plain) in enumerate(zip(outputs[0].records, outputs[1].records, strict=False)):
        assert (drafting.rows, drafting.draft_rows) == (5, [1, 4, 4]), step
        assert (plain.rows, plain.draft_rows) == (5, [1, 4, 4])
    assert all(record.draft_rows == [] and record.rows == 1 for record in outputs[1].records[len(outputs[0].records) :])


def record(batch: int, rows: int, draft_rows: list[int], seconds: tuple[float, float, float]) -> StepRecord:
    shape = TreeShape(len(draft_rows), 1, len(draft_rows) + 1) if draft_rows else TreeShape.off()
    return StepRecord(shape, [0], [-1], [], [], [], 0, None, 0.5, 0.0, batch, *seconds, rows, draft_rows)


def test_fit_finds_the_table_behind_the_steps() -> None:
    table = CostTable(
        Curve((1, 2), (0.3, 0.4)), Curve((1, 4, 8), (0.2, 0.35, 0.3)), {1: Curve((1, 4), (1.0, 1.5)), 2: Curve((2, 8), (1.1, 2.0))}, 0.25
    )
    steps = [(b, rows, draft) for b in (1, 2) for rows in (b, 4 * b) for draft in ([b], [b, b, b], [b, 4 * b, 4 * b])]
    outlier = record(1, 1, [1, 1, 1], (99.0, 99.0, 99.0))  # a process that froze
    fitted = fit([*(record(b, rows, draft, table.step(draft, rows, b)) for b, rows, draft in steps * 3), outlier], "here")
    assert fitted.label == "here"
    for b, rows, draft in steps:
        assert fitted.step(draft, rows, b) == pytest.approx(table.step(draft, rows, b))


def test_calibrating_an_engine(model: LoadedModel, tmp_path: Path) -> None:
    llm = LLM(model, drafter=make_tiny_head(tmp_path), max_running_requests=2, context_length=96)  # too short: prompts begin anew
    seen = [0]

    def count() -> None:
        seen[0] += 1

    table = calibrate(llm, (1, 2), nodes=(4, 8), widths=(1, 4), rounds=2, on_step=count)
    assert seen[0] == num_steps((1, 2), (4, 8), (1, 4), 2)
    assert table.verify[1].rows == (1, 2, 4, 5, 6, 8)
    assert table.verify[2].rows == (2, 4, 8, 10, 12, 16)
    assert (table.level.rows, table.start.rows) == ((1, 2, 4, 8), (1, 2))
    assert not llm.scheduler.running
    assert sorted(llm.scheduler.free) == [0, 1]
    assert max(shape.num_draft_tokens for shape in sweep(8)) * 8 <= 72


def test_prompt_lookup_can_be_calibrated(model: LoadedModel) -> None:
    llm = LLM(model, drafter="ngram")
    assert calibrate(llm, (1,), nodes=(4,), widths=(1,), rounds=1).start.rows == (1,)


def test_contexts_too_short_to_calibrate(model: LoadedModel, tmp_path: Path) -> None:
    llm = LLM(model, drafter=make_tiny_head(tmp_path / "a"), context_length=2)
    with pytest.raises(UserError, match="a context of 2 tokens leaves no room to measure what a step costs"):
        calibrate(llm, (1,), rounds=1)
    assert not llm.scheduler.running
    deep = {"policy": "static", "num_steps": 30, "topk": 1, "num_draft_tokens": 31}
    short = LLM(model, drafter=make_tiny_head(tmp_path / "b", max_positions=40), shapes_for=[deep])
    table = calibrate(short, (1,), nodes=(4,), widths=(1,), rounds=1)  # prompts as short as the head wants them
    assert table.level.rows == (1, 4)  # levels were drafted and measured, however busy the machine is


def test_a_calibration_of_few_requests_does_not_serve_many(model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    table = CostTable(Curve((1,), (0.1,)), Curve((1,), (0.1,)), {1: Curve((1, 9), (1.0, 2.0))}, 0.1, "of one request")
    head, goodput = make_tiny_head(tmp_path / "head"), SpeculativeConfig(policy="goodput", margin=None)
    about = identity(model.decoder, LLM(model, drafter=head).drafter)
    save(cache_path(about), table, about)
    monkeypatch.setattr("adaptivespec.engine.llm.calibrate", lambda *_, **__: dataclasses.replace(table, label="measured now"))
    labels = [LLM(model, drafter=head, speculative=goodput, max_running_requests=slots).costs.known.label for slots in (4, 5)]
    assert labels == ["of one request", "measured now"]


def test_goodput_calibrates_once_or_reads_the_cache(model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    table = CostTable(Curve((1,), (0.1,)), Curve((1,), (0.1,)), {1: Curve((1, 9), (1.0, 2.0))}, 0.1, "measured here")
    head, calls = make_tiny_head(tmp_path / "head"), []

    def measured(llm: LLM, sizes: object, **settings: object) -> CostTable:
        calls.append((sizes, settings["nodes"]))
        return table

    monkeypatch.setattr("adaptivespec.engine.llm.calibrate", measured)
    llm = LLM(model, drafter=head, speculative=SpeculativeConfig(policy="goodput", margin=None), max_running_requests=2)
    assert calls == [((1, 2), BRIEF_NODES)]
    before = (llm.costs.draft, llm.costs.memory, llm.costs.rest)
    llm.generate([PROMPTS[0]], PARAMS)
    assert (llm.costs.draft, llm.costs.memory, llm.costs.rest) != before  # follows what steps really take
    late = LLM(model, drafter=head, max_running_requests=2)
    assert late.costs.table is None
    running = late.submit(PROMPTS[1], PARAMS)
    with pytest.raises(UserError, match="goodput needs to know what a step costs here, and others are running"):
        late.generate([PROMPTS[0]], PARAMS, speculative={"policy": "goodput"})
    late.abort(running[0])
    late.generate([PROMPTS[0]], SamplingParams(max_tokens=3), speculative={"policy": "goodput"})
    assert len(calls) == 2
    about = identity(model.decoder, llm.drafter)
    save(cache_path(about), table, about)
    assert load_cached(about) == table
    again = LLM(model, drafter=head, speculative=SpeculativeConfig(policy="goodput"), max_running_requests=2)
    assert again.costs.table == table
    assert len(calls) == 2
    assert load_cached({**about, "threads": -1}) is None
    cache_path(about).write_text("{")
    assert load_cached(about) is None
    assert [path.name for path in cache_path(about).parent.iterdir()] == [cache_path(about).name]  # no half files
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_path(about).is_relative_to(tmp_path / ".cache")
    given = LLM(model, drafter=head, speculative=SpeculativeConfig(policy="goodput"), costs=table)
    given.generate([PROMPTS[0]], SamplingParams(max_tokens=5))
    assert (given.costs.draft, given.costs.memory, given.costs.arithmetic, given.costs.rest) == (1, 1, 1, 1)  # a given table stays
    assert calibration.PROMPT > 0


def test_rules_do_not_share_what_they_taught(model: LoadedModel, tmp_path: Path) -> None:
    table = CostTable(Curve((1,), (0.1,)), Curve((1,), (0.1,)), {1: Curve((1, 9), (1.0, 2.0))}, 0.1)
    llm = LLM(model, drafter=make_tiny_head(tmp_path), costs=table)
    wishes = [{"policy": "goodput", "margin": margin} for margin in (None, 0.2, 0.05)] + [
        {"policy": "static", "margin": m} for m in (None, 0.2)
    ]
    policies = [llm.submit(PROMPTS[0], PARAMS, speculative=wish)[0].policy for wish in wishes]
    assert len({id(policy) for policy in policies[:3]}) == 3
    assert policies[3] is policies[4]
    for n in range(100):  # requests may bring settings of their own without end
        [request] = llm.submit(PROMPTS[0], PARAMS, speculative={"policy": "goodput", "margin": 0.1 + n / 1000})
        llm.abort(request)
    assert len(llm._policies) <= 64


def test_files(tmp_path: Path) -> None:
    shipped = load("h100-8b")
    assert "modelled" in shipped.label
    assert shipped.verify_at(1, 64) < 1.1 * shipped.verify_at(1, 1)  # nearly flat
    assert from_json(to_json(shipped)) == shipped
    good = to_json(shipped)
    for change, message in [
        ({"schema": "x"}, "schema 'x' is not"),
        ({"levels": 1}, "unknown entry 'levels'"),
        ({"verify": []}, "needs a verify curve"),
        ({"verify": [1]}, "verify: expected a list"),
        ({"fixed": None}, "fixed: expected seconds"),
        ({"label": 3}, "label: expected text"),
        ({"level": {"rows": [1], "seconds": ["a"]}}, "level: seconds are numbers"),
        ({"level": {"rows": [1.5], "seconds": [1]}}, "level: rows are whole numbers"),
        ({"start": {"rows": [2, 1], "seconds": [1, 1]}}, "start: the rows of a cost curve ascend"),
        ({"start": None}, "start: expected an object"),
        ({"fixed": 10**400}, "fixed: expected seconds"),
        ({"level": {"rows": [10**400], "seconds": [1]}}, "level: rows are whole numbers"),
        ({"verify": [{"batch": True, "rows": [1], "seconds": [1]}]}, "verify: expected a list"),
        ({"verify": [{"batch": 1, "rows": [1], "seconds": [1]}] * 2}, "verify: a batch is there twice"),
    ]:
        with pytest.raises(ValueError, match=message):
            from_json(good | change)
    with pytest.raises(UserError, match="Is a directory"):
        load(tmp_path)
