"""Whole generations with a fake target and fake drafters: what must hold over many steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptivespec.method.acceptance import Margin, Strict
from adaptivespec.method.policy import Adaptive, Static, TreePolicy
from adaptivespec.method.tree import TreeShape
from method.fakes import ALWAYS, NEVER, DraftsTrees, FakeDrafter, FakeTarget, PrescribedPolicy, RandomDrafter, Request, layout, run

PROMPTS = [[1, 2, 3], [4], [5, 6]]
TEMPERATURES = [0.0, 0.7, 1.0]
SEEDS = [0, 7, 2**63 - 1]
SHAPES = [TreeShape(*numbers) for numbers in [(3, 4, 4), (3, 1, 4), (5, 4, 8), (6, 8, 16), (1, 1, 2)]]
TARGET = FakeTarget()


def _check_equal_to_plain(target: FakeTarget, requests: list[Request], temperatures: list[float], seeds: list[int]) -> None:
    for request, temperature, seed in zip(requests, temperatures, seeds, strict=True):
        assert request.emitted == target.generate(request.prompt, len(request.emitted), temperature, seed)


# --- strict is plain decoding ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [*(Static(shape) for shape in SHAPES), Adaptive()], ids=lambda p: str(getattr(p, "shape", p.name)))
@pytest.mark.parametrize("accept", [ALWAYS, NEVER, [2, 0, 1, 5, 3]], ids=["always", "never", "prescribed"])
def test_strict_equals_plain_decoding(policy: TreePolicy, accept: int | list[int]) -> None:
    requests = run(TARGET, FakeDrafter(TARGET, accept), Strict(), policy, PROMPTS, 20, temperatures=TEMPERATURES, seeds=SEEDS)
    _check_equal_to_plain(TARGET, requests, TEMPERATURES, SEEDS)


@given(st.integers(0, 2**32), st.integers(2, 20), st.sampled_from([None, 1.0]))
@settings(max_examples=12)
def test_strict_equals_plain_decoding_on_random_trees(seed: int, vocab_size: int, step: float | None) -> None:
    target = FakeTarget(vocab_size, seed, step=step)
    prompts = [[token % vocab_size for token in prompt] for prompt in PROMPTS]
    for rule, kappa in ((Strict(), 0.2), (Margin(), 1.0)):
        drafter = RandomDrafter(target, seed)
        requests = run(target, drafter, rule, Static(SHAPES[0]), prompts, 15, temperatures=TEMPERATURES, seeds=SEEDS, kappa=kappa)
        _check_equal_to_plain(target, requests, TEMPERATURES, SEEDS)
        assert not any(any(record.promoted) for request in requests for record in request.records)


def test_random_trees_do_accept_something() -> None:
    requests = run(TARGET, RandomDrafter(TARGET), Strict(), Static(SHAPES[0]), PROMPTS, 60, temperatures=TEMPERATURES, seeds=SEEDS)
    for request in requests:
        assert {1, 2, 3} <= set(request.block_sizes)


def test_a_request_is_the_same_in_any_batch() -> None:
    def generations(prompts: list[list[int]], temperatures: list[float], seeds: list[int]) -> list[list[int]]:
        drafter = FakeDrafter(TARGET, 1)
        requests = run(TARGET, drafter, Margin(), Adaptive(), prompts, 30, temperatures=temperatures, seeds=seeds, budget_per_100=3.0)
        return [request.emitted[:30] for request in requests]

    together = generations(PROMPTS, TEMPERATURES, SEEDS)
    alone = [generations([p], [t], [s])[0] for p, t, s in zip(PROMPTS, TEMPERATURES, SEEDS, strict=True)]
    assert together == alone
    assert generations(PROMPTS[::-1], TEMPERATURES[::-1], SEEDS[::-1]) == together[::-1]


# --- the fakes do what they say -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prescribed_acceptance(shape: TreeShape) -> None:
    parents = layout(shape)
    deepest = min(shape.num_steps, shape.num_draft_tokens - 1)
    assert len(parents) == shape.num_draft_tokens
    assert max(parents.count(node) for node in range(len(parents))) <= shape.topk
    for accept, wanted in ((ALWAYS, [deepest]), (NEVER, [0]), ([1, 0, 2], [1, 0, min(2, deepest)])):
        for temperature in (0.0, 1.0):
            [request] = run(TARGET, FakeDrafter(TARGET, accept), Strict(), Static(shape), [[3]], 12, temperatures=[temperature], seeds=[5])
            steps = len(request.block_sizes)
            assert request.block_sizes == [count + 1 for count in (wanted * steps)[:steps]]
            assert all(record.num_drafted == shape.num_draft_tokens - 1 for record in request.records)


def test_a_policy_that_drafts_nothing_is_plain_decoding() -> None:
    requests = run(TARGET, FakeDrafter(TARGET), Margin(), Static(TreeShape.off()), PROMPTS, 8, temperatures=TEMPERATURES, seeds=SEEDS)
    assert all(request.block_sizes == [1] * 8 for request in requests)
    _check_equal_to_plain(TARGET, requests, TEMPERATURES, SEEDS)


# --- promotions and budgets -----------------------------------------------------------------------------------------------------


def _check_promotions(
    target: FakeTarget,
    request: Request,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    kappa: float = 0.2,
    budget: float = math.inf,
    budget_per_100: float = math.inf,
    max_promotions: int = 1 << 30,
    protected: tuple[int, ...] = (),
) -> int:
    """Follow the emitted path token by token and check every promise; returns how many tokens were promoted."""
    context, spent, count = list(request.prompt), 0.0, 0
    for record in request.records:
        assert sum(record.promoted) <= max_promotions
        for node, promoted, log_margin in zip(record.path, record.promoted, record.log_margins, strict=True):
            token, choice = record.tokens[node], target.choose(context, temperature, seed)
            assert promoted == (token != choice)
            if promoted:
                scores = target.scores(context, temperature, seed).tolist()
                assert log_margin == scores[token] - max(scores)
                assert log_margin > math.log(kappa)
                assert token not in protected
                assert choice not in protected
                spent += -log_margin
                assert spent <= budget
                emitted = len(context) - len(request.prompt)
                assert spent <= budget_per_100 * (emitted + 100) / 100
                count += 1
            else:
                assert log_margin == 0
            context.append(token)
        assert record.bonus == target.choose(context, temperature, seed)
        context.append(record.bonus)
        assert record.spent == spent
    assert context == request.prompt + request.emitted
    return count


DRAFTERS = {
    "never": lambda: FakeDrafter(TARGET, NEVER),
    "prescribed": lambda: FakeDrafter(TARGET, [1, 0, 3, 2]),
    "random": lambda: RandomDrafter(TARGET),
}
LIMITS: list[dict[str, float]] = [
    {},
    {"budget": 4.0},
    {"budget": 0.0},
    {"budget_per_100": 2.5},
    {"max_promotions": 1},
    {"max_promotions": 0},
    {"budget": 4.5, "budget_per_100": 4.0, "max_promotions": 2},
]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_promises_over_a_generation(drafter: str, limits: dict[str, float]) -> None:
    make: DraftsTrees = DRAFTERS[drafter]()
    requests = run(TARGET, make, Margin(), Static(TreeShape(5, 4, 8)), PROMPTS, 50, temperatures=TEMPERATURES, seeds=SEEDS, **limits)
    promoted = [
        _check_promotions(TARGET, request, temperature=t, seed=s, **limits)
        for request, t, s in zip(requests, TEMPERATURES, SEEDS, strict=True)
    ]
    if 0 in limits.values():
        assert promoted == [0, 0, 0]
        _check_equal_to_plain(TARGET, requests, TEMPERATURES, SEEDS)
    elif not limits:
        # unlimited generations go beyond every limit above, so those are really tested
        assert min(request.spent for request in requests) > 4.5
        assert max(sum(record.promoted) for request in requests for record in request.records) > 2


def test_nothing_is_promoted_when_everything_is_exact() -> None:
    drafter = FakeDrafter(TARGET, ALWAYS)
    requests = run(TARGET, drafter, Margin(), Static(SHAPES[2]), PROMPTS, 30, temperatures=TEMPERATURES, seeds=SEEDS, budget=0.0)
    _check_equal_to_plain(TARGET, requests, TEMPERATURES, SEEDS)
    assert all(size == 6 for request in requests for size in request.block_sizes)


def test_a_spent_budget_leaves_plain_decoding() -> None:
    [request] = run(TARGET, FakeDrafter(TARGET, NEVER), Margin(), Static(SHAPES[0]), [[1]], 80, budget=3.0)
    promotions = [step for step, record in enumerate(request.records) if any(record.promoted)]
    assert promotions
    assert promotions[-1] < 40
    tail = request.block_sizes[promotions[-1] + 1 :]
    assert tail == [1] * len(tail)
    assert request.emitted[-20:] == TARGET.generate(request.prompt + request.emitted[:-20], 20)


def test_a_budget_per_100_keeps_growing() -> None:
    [request] = run(TARGET, FakeDrafter(TARGET, NEVER), Margin(), Static(SHAPES[0]), [[1]], 300, budget_per_100=3.0)
    _check_promotions(TARGET, request, budget_per_100=3.0)
    late = [record for record in request.records[-100:] if any(record.promoted)]
    assert late
    assert request.spent > 6  # more than the first 100 tokens' worth


@given(st.integers(0, 2**32), st.sets(st.integers(0, 15), max_size=5))
@settings(max_examples=10)
def test_protected_tokens_over_a_generation(seed: int, protected: set[int]) -> None:
    target = FakeTarget(seed=seed)
    requests = run(
        target, RandomDrafter(target, seed), Margin(), Static(SHAPES[0]), PROMPTS, 30, temperatures=TEMPERATURES, seeds=SEEDS,
        protected=protected, protect=True, kappa=0.05,
    )  # fmt: skip
    for request, temperature, seed in zip(requests, TEMPERATURES, SEEDS, strict=True):
        _check_promotions(target, request, temperature=temperature, seed=seed, kappa=0.05, protected=tuple(protected))


def test_protected_end_of_sequence_is_not_skipped() -> None:
    """Where plain decoding would emit the token, so does a guarded generation; unguarded, the margin rule can step over it."""

    def skipped(protect: bool) -> int:
        [request] = run(
            TARGET, FakeDrafter(TARGET, NEVER), Margin(), Static(SHAPES[0]), [[1]], 200, protected=[0], protect=protect, kappa=0.05
        )
        context = [*request.prompt, *request.emitted]
        return sum(TARGET.choose(context[:i]) == 0 != context[i] for i in range(1, len(context)))

    assert skipped(protect=True) == 0
    assert skipped(protect=False) > 0


def test_settings_are_per_request() -> None:
    alone = {"kappa": [1.0, 0.05, 0.2], "budget": [math.inf, 2.0, math.inf], "max_promotions": [9, 9, 1], "protect": [False, True, True]}
    together = run(TARGET, FakeDrafter(TARGET, 0), Margin(), Static(SHAPES[2]), [[1]] * 3, 40, protected=[0], **alone)
    for b, request in enumerate(together):
        [single] = run(
            TARGET, FakeDrafter(TARGET, 0), Margin(), Static(SHAPES[2]), [[1]], 40, protected=[0],
            **{name: values[b] for name, values in alone.items()},
        )  # fmt: skip
        assert request.emitted[:40] == single.emitted[:40]
    assert len({tuple(request.emitted[:40]) for request in together}) == 3


# --- policy in the loop ---------------------------------------------------------------------------------------------------------


def _shapes(requests: list[Request]) -> list[list[str]]:
    return [[str(record.shape) for record in request.records] for request in requests]


def test_a_good_drafter_climbs_to_the_deepest_tree() -> None:
    [shapes] = _shapes(run(TARGET, FakeDrafter(TARGET, ALWAYS, confidence=0.9), Strict(), Adaptive(), [[1]], 80))
    assert shapes[0] == "7,1,8"  # s = 0.9 * 0.5 / 0.5
    [shapes] = _shapes(run(TARGET, FakeDrafter(TARGET, ALWAYS, confidence=0.55), Strict(), Adaptive(), [[1]], 80))
    assert shapes[0] == "5,2,6"
    assert shapes[-1] == "7,1,8"


def test_a_confident_and_wrong_drafter_is_sent_to_the_smallest_tree() -> None:
    [request] = run(TARGET, FakeDrafter(TARGET, NEVER, confidence=1.0), Strict(), Adaptive(), [[1]], 13)
    [shapes] = _shapes([request])
    assert shapes[0] == "7,1,8"
    # steps 6 and 12 follow five misses each; both start from RAR 0.5
    assert [record.rar for record in request.records][5::5] == [0.5, 0.5]
    assert shapes[5] == shapes[10] == "3,4,4"
    assert "3,4,4" not in shapes[:5] + shapes[6:10]


def test_records_follow_the_tree_that_was_drafted() -> None:
    shapes = [TreeShape.off(), TreeShape(3, 1, 4), TreeShape(6, 4, 9)]
    [request] = run(TARGET, FakeDrafter(TARGET, [0, 2, 1]), Strict(), PrescribedPolicy(shapes), [[1]], 6)
    assert [record.shape for record in request.records[:3]] == shapes
    assert [record.num_drafted for record in request.records[:3]] == [0, 3, 8]
    assert [record.num_accepted for record in request.records[:3]] == [0, 2, 1]
    assert [record.confidence is None for record in request.records[:3]] == [True, False, False]
