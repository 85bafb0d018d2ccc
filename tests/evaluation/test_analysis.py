"""Statistics against published values, SciPy and brute force; the analysis of a run against slow loops."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
from fake_run import FOUR, fake_answer, fake_answers, fake_run
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from adaptivespec.errors import UserError
from adaptivespec.evaluation.analysis import analyse, pareto
from adaptivespec.evaluation.findings import ALL, Analysis, Cell
from adaptivespec.evaluation.statistics import detectable_difference, mcnemar, paired_bootstrap, tango, wilson


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_as_published(right: int, count: int, low: float, high: float) -> None:
    """Newcombe, Statistics in Medicine 17 (1998), table I, method 3."""
    assert wilson(right, count) == pytest.approx((low, high), abs=6e-5)


def test_wilson_of_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


@given(st.integers(0, 30), st.integers(0, 30))
def test_mcnemar_against_the_sum_of_a_fair_coin(first: int, second: int) -> None:
    count = first + second
    chances = [math.comb(count, k) / 2**count for k in range(count + 1)]
    assert mcnemar(first, second) == pytest.approx(sum(c for c in chances if c <= chances[first] * (1 + 1e-9)))


@pytest.mark.parametrize(("first", "second", "count"), [(13, 17, 200), (0, 3, 100), (4, 0, 20), (30, 10, 40), (1, 1, 500)])
def test_tango_against_the_likelihood(first: int, second: int, count: int) -> None:
    """At each bound the score, with the other share at the best of a fine grid, is 1.96 standard errors away."""
    for bound, sign in zip(tango(first, second, count), (1, -1), strict=True):
        fewer = np.linspace(0, 1, 2_000_001)[1:-1]
        fewer = fewer[(fewer + bound > 0) & (2 * fewer + bound < 1)]
        likelihood = (count - first - second) * np.log(1 - 2 * fewer - bound)
        likelihood = likelihood + (first * np.log(fewer + bound) if first else 0) + (second * np.log(fewer) if second else 0)
        best = fewer[likelihood.argmax()]
        deviation = math.sqrt((2 * best + bound - bound**2) / count)
        assert ((first - second) / count - bound) / deviation == pytest.approx(sign * 1.95996, rel=2e-3)


@pytest.mark.parametrize(("better", "worse", "count"), [(0.05, 0.08, 200), (0.0, 0.005, 200), (0.2, 0.3, 50)])
def test_tango_covers_as_often_as_it_says(better: float, worse: float, count: int) -> None:
    tables = np.random.default_rng(0).multinomial(count, [better, worse, 1 - better - worse], 3000)
    interval = functools.cache(tango)
    bounds = [interval(int(one), int(other), count) for one, other, _ in tables]
    assert np.mean([low <= better - worse <= high for low, high in bounds]) >= 0.93


def test_tango_at_the_edges() -> None:
    low, high = tango(0, 0, 200)
    assert (low, high) == pytest.approx((-0.01885, 0.01885), abs=1e-5)  # z^2 / (n + z^2)
    assert tango(10, 0, 10)[1] == 1.0
    assert tango(0, 10, 10)[0] == -1.0
    assert tango(5, 5, 10) == pytest.approx([-bound for bound in tango(5, 5, 10)[::-1]])
    assert tango(7, 2, 40) == pytest.approx([-bound for bound in tango(2, 7, 40)[::-1]])


@pytest.mark.parametrize(("count", "discordant"), [(200, 30), (1319, 60), (500, 250), (164, 0), (50, 1), (1319, 1319)])
def test_a_detectable_difference_is_found_in_four_samples_of_five(count: int, discordant: int) -> None:
    """Sampled: how often the exact test finds it; being exact it is a little conservative."""
    difference = detectable_difference(count, discordant)
    assert difference is not None
    share = max(discordant / count, difference)
    better, worse = (share + difference) / 2, (share - difference) / 2
    tables = np.random.default_rng(0).multinomial(count, [better, max(0.0, worse), 1 - share], 3000)
    test = functools.cache(mcnemar)
    assert np.mean([test(int(one), int(other)) < 0.05 for one, other, _ in tables]) == pytest.approx(0.78, abs=0.04)


def test_detectable_differences_at_the_edges() -> None:
    assert detectable_difference(5, 1) is None
    assert detectable_difference(6, 1) is not None
    assert detectable_difference(0, 0) is None
    sizes = [detectable_difference(n, n // 10) for n in (40, 160, 640, 2560)]
    assert all(one / other == pytest.approx(2, rel=0.2) for one, other in itertools.pairwise(sizes[1:]))  # type: ignore[operator]
    assert detectable_difference(100, 0) == pytest.approx(detectable_difference(100, 1))  # too few to matter


def test_the_bootstrap_is_scipys() -> None:
    rng = np.random.default_rng(1)
    columns = rng.uniform(1, 2, (2, 60))
    ours = paired_bootstrap(columns, [0] * 60, lambda totals: totals[0] / totals[1])
    theirs = stats.bootstrap(
        tuple(columns), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True, vectorized=True, method="percentile", n_resamples=20_000
    ).confidence_interval
    assert ours == pytest.approx(tuple(theirs), abs=0.012)  # 2,000 resamples have noise of their own


def test_a_ratio_without_a_bound_has_no_interval() -> None:
    right = np.zeros((2, 100))
    right[0, :4] = right[1, :3] = 1
    assert paired_bootstrap(right, [0] * 100, lambda totals: totals[0] / totals[1]) is None  # 5 % of the resamples have nothing below
    right[1, :8] = 1
    assert paired_bootstrap(right, [0] * 100, lambda totals: totals[0] / totals[1]) is not None


def test_strata_keep_their_sizes() -> None:
    columns = np.array([[0.0] * 10 + [1.0] * 10])
    strata = [0] * 10 + [1] * 10
    assert paired_bootstrap(columns, strata, lambda totals: totals[0] / 20) == (0.5, 0.5)
    low, high = paired_bootstrap(columns, [0] * 20, lambda totals: totals[0] / 20) or (0.0, 0.0)
    assert low < 0.35 < 0.65 < high


def test_no_interval_without_sense() -> None:
    assert paired_bootstrap(np.ones((1, 1)), [0], lambda totals: totals[0]) is None
    columns = np.array([[1.0, 0, 0, 0], [0, 0, 0, 1.0]])
    assert paired_bootstrap(columns, [0] * 4, lambda totals: totals[0] / totals[1]) is None  # 0 / 0 in a third of the resamples


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    return fake_run(FOUR, {"gsm8k": 40, "math500": 25})


@pytest.fixture(scope="module")
def answers(run: dict[str, Any]) -> list[dict[str, Any]]:
    return fake_answers(run)


@pytest.fixture(scope="module")
def analysis(run: dict[str, Any], answers: list[dict[str, Any]]) -> Analysis:
    return analyse(run, answers)


def cell(analysis: Analysis, task: str, arm: str) -> Cell:
    [found] = [each for each in analysis.cells if (each.task, each.arm) == (task, arm)]
    return found


@pytest.mark.parametrize("task", [ALL, "gsm8k", "math500"])
@pytest.mark.parametrize("arm", ["ar", "margin", "adaptivespec"])
def test_cells_against_loops(analysis: Analysis, answers: list[dict[str, Any]], task: str, arm: str) -> None:
    own = {(row["task"], row["id"]): row for row in answers if row["arm"] == arm and task in (ALL, row["task"])}
    other = {(row["task"], row["id"]): row for row in answers if row["arm"] == "static:3,4,4" and task in (ALL, row["task"])}
    plain = {(row["task"], row["id"]): row for row in answers if row["arm"] == "ar" and task in (ALL, row["task"])}
    found, count = cell(analysis, task, arm), len(own)
    right, other_right = sum(row["correct"] for row in own.values()), sum(row["correct"] for row in other.values())
    assert (found.answers, found.missing, found.right, found.accuracy.value) == (count, 0, right, right / count)
    versus = found.versus
    assert versus is not None
    assert versus.recovery is not None
    only = [
        sum(own[each]["correct"] and not other[each]["correct"] for each in own),
        sum(other[each]["correct"] and not own[each]["correct"] for each in own),
    ]
    assert [versus.only_this, versus.only_reference] == only
    assert (versus.same, versus.reference) == (sum(own[each]["text"] == other[each]["text"] for each in own), other_right / count)
    assert versus.length.value == pytest.approx(sum(row["tokens"] for row in own.values()) / sum(other[each]["tokens"] for each in own))
    assert found.tokens_right == sum(row["tokens"] for row in own.values() if row["correct"])
    assert versus.p == pytest.approx(stats.binomtest(only[0], sum(only)).pvalue if sum(only) else 1.0)
    assert versus.difference.value == pytest.approx((right - other_right) / count)
    assert versus.recovery.value == pytest.approx(right / other_right)
    for interval in (found.accuracy, versus.difference, versus.recovery):
        assert interval.low is not None
        assert interval.high is not None
        assert interval.low <= interval.value <= interval.high
    tokens = sum(row["tokens"] for row in own.values())
    promoted = sum(len(row["promoted"]) for row in own.values())
    assert found.mean_tokens == pytest.approx(tokens / count)
    assert found.truncated == sum(row["finish_reason"] == "length" for row in own.values()) / count
    assert found.promoted_per_1k == pytest.approx(1000 * promoted / tokens)
    assert (promoted > 0) == (arm != "ar")
    assert found.tokens_per_second == pytest.approx(tokens / sum(row["seconds"] for row in own.values()))
    assert (found.accept_length, found.drafted_only, found.acceptance_rate) == ((1.0, 0.0, 0.0) if arm == "ar" else (2.0, 1.0, 1 / 3))
    assert found.histogram == ([] if arm == "ar" else [count, count, count])
    if arm != "ar":
        assert found.times_plain is not None
        plain_rate = sum(row["tokens"] for row in plain.values()) / sum(row["seconds"] for row in plain.values())
        assert found.times_plain.value == pytest.approx(found.tokens_per_second / plain_rate)


def test_the_reference_and_plain_decoding(analysis: Analysis) -> None:
    assert (analysis.reference, analysis.plain) == ("static:3,4,4", "ar")
    assert cell(analysis, ALL, "static:3,4,4").versus is None
    assert cell(analysis, ALL, "ar").times_plain is None
    assert analysis.kappas == {"ar": 1.0, "static:3,4,4": 1.0, "margin": 0.5, "tree": 1.0, "adaptivespec": 0.5}
    assert analysis.groups == [ALL, "gsm8k", "math500"]


@pytest.mark.parametrize(
    ("arms", "reference"),
    [("margin; ar", "ar"), ("margin; adaptivespec", None), ("ar; margin; tree; static", "tree"),
     ("margin:margin=1; static", "margin:margin=1"),
     ("ar+tree; tree+static; tree", "tree+static")],
)  # fmt: skip
def test_which_arm_is_the_reference(arms: str, reference: str | None) -> None:
    run = fake_run(arms, {"gsm8k": 3})
    analysis = analyse(run, fake_answers(run))
    assert analysis.reference == reference
    assert all((each.versus is None) == (reference in (None, each.arm)) for each in analysis.cells)


def test_another_reference() -> None:
    run = fake_run(FOUR, {"gsm8k": 20})
    analysis = analyse(run, fake_answers(run), reference="tree")
    assert (analysis.reference, cell(analysis, "gsm8k", "tree").versus) == ("tree", None)
    versus = cell(analysis, "gsm8k", "static:3,4,4").versus
    assert versus is not None
    accuracies = [cell(analysis, "gsm8k", arm).accuracy.value for arm in ("static:3,4,4", "tree")]
    assert versus.difference.value == pytest.approx(accuracies[0] - accuracies[1])
    with pytest.raises(UserError, match="no arm 'tre' in this run; did you mean 'tree'"):
        analyse(run, [], reference="tre")


def test_plain_decoding_comes_first() -> None:
    run = fake_run("static; ar; tree", {"gsm8k": 2})
    assert analyse(run, fake_answers(run)).arms == ["ar", "static", "tree"]


def test_an_unfinished_run_compares_what_both_answered() -> None:
    run = fake_run("ar; static; margin", {"gsm8k": 10, "math500": 4})
    answers = [fake_answer("static", "gsm8k", i, i % 2 == 0) for i in range(6)]
    answers += [fake_answer("margin", "gsm8k", i, i % 3 == 0) for i in range(3, 10)]
    answers += [fake_answer("tree", "gsm8k", 0, True), fake_answer("margin", "gsm8k", 99, True)]  # of another arm and another limit
    analysis = analyse(run, answers)
    margin = cell(analysis, "gsm8k", "margin")
    assert (margin.answers, margin.missing, analysis.missing) == (7, 3, 3 * 14 - 13)
    assert margin.versus is not None
    assert (margin.versus.questions, margin.versus.only_this, margin.versus.only_reference) == (3, 1, 1)  # 3 and 4; both miss 5
    assert margin.times_plain is None
    nothing = cell(analysis, "math500", "margin")
    assert (nothing.answers, nothing.versus, nothing.accuracy.low, nothing.accuracy.high) == (0, None, 0.0, 1.0)
    assert analyse(run, []).missing == 42


def test_a_reference_without_a_right_answer_has_no_recovery() -> None:
    run = fake_run("static; margin", {"gsm8k": 4})
    analysis = analyse(run, [fake_answer(arm, "gsm8k", i, arm == "margin") for arm in ("static", "margin") for i in range(4)])
    versus = cell(analysis, "gsm8k", "margin").versus
    assert versus is not None
    assert versus.recovery is None
    assert versus.difference.value == 1.0


def test_the_interaction_is_what_speeds_say() -> None:
    run = fake_run(FOUR, {"gsm8k": 8})
    seconds = {"ar": 9.0, "static:3,4,4": 4.0, "margin": 3.0, "tree": 2.0, "adaptivespec": 1.0}
    [square] = analyse(run, [fake_answer(arm, "gsm8k", i, True, seconds=s) for arm, s in seconds.items() for i in range(8)]).squares
    assert (square.static, square.margin, square.tree, square.both, square.questions) == (
        "static:3,4,4", "margin", "tree", "adaptivespec", 8
    )  # fmt: skip
    assert square.speed.value == pytest.approx(math.log(1 / 1) - math.log(1 / 2) - math.log(1 / 3) + math.log(1 / 4))
    assert square.speed.low == pytest.approx(square.speed.value)
    assert square.accept_length.value == pytest.approx(0)


@pytest.mark.parametrize(
    ("arms", "squares"),
    [
        (FOUR, 1),
        ("static; margin; tree", 0),
        ("static; margin; tree; adaptivespec:margin=0.4", 0),
        ("static; margin; tree; adaptivespec; margin:margin=0.4; adaptivespec:margin=0.4", 2),
        ("static; margin:5,4,8; tree; adaptivespec", 0),
        ("static; static:5,4,8; margin; margin:5,4,8; tree; adaptivespec", 2),
        ("static; margin; tree; adaptivespec:high=7/1/8", 1),
        ("static; margin; tree; adaptivespec:high=5/1/6", 0),
        ("static; margin; tree; adaptivespec:guards=none", 0),
    ],
)
def test_squares_are_arms_that_agree_in_all_else(arms: str, squares: int) -> None:
    run = fake_run(arms, {"gsm8k": 3})
    assert len(analyse(run, fake_answers(run)).squares) == squares


def test_every_task_has_its_square_and_all_too() -> None:
    run = fake_run(FOUR, {"gsm8k": 6, "math500": 4})
    analysis = analyse(run, fake_answers(run))
    assert [(square.task, square.questions) for square in analysis.squares] == [("all", 10), ("gsm8k", 6), ("math500", 4)]


def test_arms_may_be_put_to_some_tasks_only() -> None:
    run = fake_run(f"{FOUR}; adaptivespec:margin=0.4", {"gsm8k": 6, "math500": 4})
    everything = fake_answers(run)
    run["settings"]["tasks"]["math500"]["arms"] = FOUR.replace(" ", "").split(";")
    extra = "adaptivespec:margin=0.4"
    wanted = [row for row in everything if (row["task"], row["arm"]) != ("math500", extra)]
    analysis = analyse(run, wanted)
    assert analysis.missing == 0
    assert [cell.task for cell in analysis.cells if cell.arm == extra] == ["gsm8k"]  # not `all`, where it would be compared with others
    assert analysis.arms == list(run["settings"]["arms"])
    assert analysis.common == ALL
    assert analysis == analyse(run, everything)  # what was not asked does not count
    assert analyse(run, wanted[1:]).missing == 1


def test_tasks_that_share_no_arm_are_not_pooled() -> None:
    run = fake_run("ar; tree", {"gsm8k": 2, "math500": 2})
    run["settings"]["tasks"]["gsm8k"]["arms"], run["settings"]["tasks"]["math500"]["arms"] = ["ar"], ["tree"]
    assert analyse(run, fake_answers(run)).groups == ["gsm8k", "math500"]


@pytest.mark.parametrize(
    ("arms", "sweeps"),
    [
        (FOUR, []),
        ("tree; adaptivespec:margin=0.5; adaptivespec:margin=0.9", [["tree", "adaptivespec:margin=0.9", "adaptivespec:margin=0.5"]]),
        ("margin; margin:margin=0.8; adaptivespec:guards=none; adaptivespec", [["margin:margin=0.8", "margin"]]),
        ("static; static:5,4,8; margin:5,4,8; margin:5,4,8,margin=0.8", [["static:5,4,8", "margin:5,4,8,margin=0.8", "margin:5,4,8"]]),
        ("ar; margin; ar+margin:margin=0.5", []),
    ],
)  # fmt: skip
def test_sweeps_are_arms_that_differ_in_kappa_alone(arms: str, sweeps: list[list[str]]) -> None:
    assert analyse(fake_run(arms, {"gsm8k": 3}), []).sweeps == sweeps


def test_shapes_over_time_by_hand() -> None:
    run = fake_run("static; tree", {"gsm8k": 2})
    deep, low = [7, 1, 8], [3, 4, 4]
    answers = [
        fake_answer("static", "gsm8k", 0, True, shapes={"seen": [low], "steps": [0] * 9}),
        fake_answer("tree", "gsm8k", 0, True, shapes={"seen": [deep, low], "steps": [0, 1, 1, 1, 1, 0]}),
        fake_answer("tree", "gsm8k", 1, True, shapes={"seen": [low], "steps": [0, 0, 0]}),
    ]
    [shown] = analyse(run, answers).shapes
    assert (shown.arm, shown.shapes, shown.steps) == ("tree", ["3,4,4", "7,1,8"], [0, 5])
    assert shown.shares == [[7 / 8, 1 / 8], [0, 1]]
    assert analyse(run, [fake_answer("tree", "gsm8k", 0, True, shapes=None)]).shapes == []
    run = fake_run("static; tree", {"gsm8k": 2, "math500": 1})
    run["settings"]["tasks"]["math500"]["arms"] = ["tree"]
    more = [*answers, fake_answer("tree", "math500", 0, True, shapes={"seen": [deep], "steps": [0] * 9})]
    assert analyse(run, more).shapes == [shown]  # not what only some arms were asked


def test_promoted_tokens_are_counted_by_verdict() -> None:
    def entry(token: str, replaced: str | None = None) -> dict[str, Any]:
        return {"position": 1, "token_id": 1, "token": token, "log_margin": -0.1, "replaced_id": None, "replaced": replaced}

    run = fake_run("static; margin", {"gsm8k": 2})
    answers = [
        fake_answer("margin", "gsm8k", 0, True, promoted=[entry("a", "b"), entry("a", "b"), entry("c")]),
        fake_answer("margin", "gsm8k", 1, False, promoted=[entry("a", "d")]),
    ]
    assert [(t.arm, t.token, t.right, t.wrong, t.replaced) for t in analyse(run, answers).promoted] == [
        ("margin", "a", 2, 1, [("b", 2), ("d", 1)]), ("margin", "c", 1, 0, [])
    ]  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8))
def test_pareto_against_all_pairs(values: list[tuple[int, int]]) -> None:
    points = {str(i): (float(x), float(y)) for i, (x, y) in enumerate(values)}
    front = pareto(points)
    kept = {points[label] for label in front}
    unbeaten = {
        p for p in points.values() if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points.values())
    }  # fmt: skip
    assert kept == unbeaten
    assert [points[label][0] for label in front] == sorted(points[label][0] for label in front)
