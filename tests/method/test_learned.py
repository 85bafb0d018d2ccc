"""Acceptance learned from draft probabilities: never rising along a path, and close to the truth after enough edges."""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_left

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptivespec.method.acceptance import Acceptance
from adaptivespec.method.learned import BINS, DEEPEST, ENDS, HostTree, Learned, Outcome, falling, power_of
from adaptivespec.method.tree import DraftTree
from method.fakes import Nodes, make_tree
from method.tree_cases import trees

WEIGHTS = st.lists(st.floats(0.1, 50), min_size=BINS, max_size=BINS)
MEANS = st.lists(st.floats(0.001, 0.999), min_size=BINS, max_size=BINS)


def pool_adjacent(means: list[float], weights: list[float]) -> list[float]:
    """Isotonic regression by the textbook: neighbours that rise are pooled until none do."""
    blocks: list[list[float]] = []
    for mean, weight in zip(means, weights, strict=True):
        blocks.append([mean, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            (a, wa, na), (b, wb, nb) = blocks[-2:]
            blocks[-2:] = [[(a * wa + b * wb) / (wa + wb), wa + wb, na + nb]]
    return [mean for mean, _, size in blocks for _ in range(int(size))]


@given(MEANS, WEIGHTS)
@settings(max_examples=60)
def test_falling_is_isotonic_regression(means: list[float], weights: list[float]) -> None:
    got = falling(torch.tensor(means), torch.tensor(weights)).tolist()
    assert got == pytest.approx(pool_adjacent(means, weights), abs=1e-4)
    assert all(a >= b for a, b in itertools.pairwise(got))


def test_bins_hold_everything_and_rise() -> None:
    got = [bisect_left(ENDS, nats) for nats in (-1e-7, 0.0, 0.01, 0.5, 3.0, DEEPEST + 1, 1e9, math.inf)]
    assert got[:2] == [0, 0]
    assert got == sorted(got)
    assert got[-3:] == [BINS - 1, BINS - 1, BINS]


@given(trees(max_batch=3), st.lists(st.floats(0.2, 4), min_size=3, max_size=3))
@settings(max_examples=40)
def test_no_child_is_likelier_than_its_parent(tree: DraftTree, powers: list[float]) -> None:
    learned = Learned()
    generator = random.Random(int(tree.size.sum()))
    learned.tried = [20 * generator.random() for _ in range(BINS + 1)]
    learned.hits = [generator.random() * tried for tried in learned.tried]
    learned.refit()
    for own, power in zip(HostTree.of(tree), powers, strict=False):
        chances = learned.chances(own, power)
        assert chances[0] == 1
        for chance, parent in itertools.islice(zip(chances, own.parents, strict=True), 1, None):
            assert 0 < chance <= chances[parent] if parent >= 0 else chance == 0


def test_a_path_is_the_product_of_its_edges() -> None:
    learned = Learned()
    tree = make_tree([Nodes([0] * 4, [-1, 0, 1, 1], [0.0, math.log(0.5), math.log(0.2), math.log(0.1)])])
    (own,) = HostTree.of(tree)
    got = learned.chances(own, 1.0)
    assert got == pytest.approx([1, 0.5, 0.2, 0.1], abs=0.03)
    assert learned.chances(own, 2.0) == pytest.approx([value**2 for value in got], rel=1e-4)


def accepted(paths: list[list[int]], promoted: list[list[bool]] | None = None) -> Acceptance:
    """Paths of node indices, padded with -1; nothing promoted unless told."""
    path = torch.tensor(paths, dtype=torch.int64)
    lossy = torch.zeros_like(path, dtype=torch.bool) if promoted is None else torch.tensor(promoted)
    return Acceptance(path, (path >= 0).sum(1), torch.zeros(len(path), dtype=torch.int64), lossy, lossy.double())


Evidence = list[tuple[float, float]]


def teach(learned: Learned, tree: DraftTree, acceptance: Acceptance, evidence: Evidence | None = None) -> Evidence:
    """Learn a step; the new evidence."""
    trees = HostTree.of(tree)
    paths, promoted = acceptance.path.tolist(), acceptance.promoted.tolist()
    evidence = evidence or [(0.0, 0.0)] * len(trees)
    outcomes = [Outcome(*own) for own in zip(trees, paths, promoted, [1.0] * len(trees), evidence, strict=True)]
    return [own for own, _ in learned.learn(outcomes)]


def places(tree: DraftTree) -> list[int]:
    """The bins of a request's nodes behind the root."""
    (own,) = HostTree.of(tree)
    return [bisect_left(ENDS, own.log_probs[parent] - own.log_probs[node]) for node, parent in enumerate(own.parents) if node]


def test_only_tried_edges_count() -> None:
    """Those under the root and under accepted nodes."""
    learned = Learned()
    tree = make_tree([Nodes([0] * 5, [-1, 0, 0, 1, 2], [0.0, -0.3, -2.0, -0.6, -6.0])])
    evidence = teach(learned, tree, accepted([[1, -1]]))
    assert (sum(learned.tried), sum(learned.hits)) == (3, 1)
    assert learned.tried[places(tree)[3]] == 0
    assert evidence[0][1] > 0
    nothing = DraftTree.root_only(torch.tensor([1]))
    assert teach(learned, nothing, accepted([[]]), evidence) == evidence


@pytest.mark.parametrize("power", [0.4, 1.0, 2.0])
def test_the_table_finds_the_truth_and_guesses_where_it_has_seen_nothing(power: float) -> None:
    """Only sure edges were verified; the table tells of unsure ones all the same."""
    learned, count = Learned(), 3000
    log_probs = torch.linspace(-1.2, -0.05, count)
    hit = torch.rand(count, generator=torch.Generator().manual_seed(0)) < (power * log_probs).exp()
    tree = make_tree([Nodes([0, 0], [-1, 0], [0.0, value]) for value in log_probs.tolist()])
    teach(learned, tree, accepted([[1 if each else -1] for each in hit.tolist()]))
    learned.refit()
    for p in (0.9, 0.5, 0.2):
        assert math.exp(learned.table[bisect_left(ENDS, -math.log(p))]) == pytest.approx(p**power, abs=0.13)


def test_a_request_departs_from_the_others_by_what_it_shows() -> None:
    learned = Learned()
    tree = make_tree([Nodes([0] * 3, [-1, 0, 1], [0.0, -0.5, -1.0])] * 2)
    evidence = [(0.0, 0.0)] * 2
    assert [power_of(own) for own in evidence] == [1, 1]
    for _ in range(30):
        evidence = teach(learned, tree, accepted([[1, 2], [-1, -1]]), evidence)
    easy, hard = (power_of(own) for own in evidence)
    assert easy < 0.8
    assert hard > 1.2


def test_what_a_lesser_sibling_adds_is_what_the_best_would_have_missed() -> None:
    """Of four mismatches two were promoted: half of an exact lesser sibling's hit is its best sibling's."""
    learned = Learned()
    tree = make_tree([Nodes([0] * 4, [-1, 0, 0, 2], [0.0, -0.3, -3.0, -3.9])])

    def hits(path: list[int], promoted: list[bool]) -> list[float]:
        before = learned.hits.copy()
        teach(learned, tree, accepted([path], [promoted]))
        return [learned.hits[place] - 0.998 * before[place] for place in places(tree)]

    assert hits([2, -1], [False, False]) == pytest.approx([0, 1, 0], abs=1e-6)  # nothing was ever promoted
    learned.mismatches = (4.0, 2.0)
    assert hits([2, -1], [False, False]) == pytest.approx([0.5, 0.5, 0], abs=1e-6)
    assert hits([1, -1], [False, False]) == pytest.approx([1, 0, 0], abs=1e-6)
    assert hits([1, -1], [True, False]) == pytest.approx([1, 0, 0], abs=1e-6)
    assert hits([2, -1], [True, False]) == pytest.approx([0, 1, 0], abs=1e-6)


def test_mismatches_are_nodes_whose_children_were_all_wrong() -> None:
    learned = Learned()
    tree = make_tree([Nodes([0] * 4, [-1, 0, 0, 1], [0.0, -0.3, -3.0, -0.6])])
    for path, promoted in (
        ([1, 3], [False, False]),
        ([1, 3], [True, False]),
        ([1, 3], [False, True]),
        ([1, -1], [True, False]),
        ([-1, -1], [False] * 2),
    ):
        learned.mismatches = (1.0, 0.0)
        teach(learned, tree, accepted([path], [promoted]))
        wrong = sum(promoted) + (3 not in path)  # a walk that stops at a node with children stops at a mismatch
        assert learned.mismatches == pytest.approx([0.998 + wrong, sum(promoted)])


def test_what_lesser_siblings_bring_is_learned_by_rank() -> None:
    """Node 1 has two siblings, nodes 2 and 5, and two children, nodes 3 and 4."""
    learned = Learned()
    tree = make_tree([Nodes([0] * 6, [-1, 0, 0, 1, 1, 0], [0.0, -0.3, -2.0, -0.6, -1.6, -2.5])])
    assert learned.brood(0.6, 4) == pytest.approx([0.6, 0.2, 0.1, 0.05])
    assert learned.brood(0.6, 1) == pytest.approx([0.6])
    for path in [[5, -1], [-1, -1], [-1, -1], [2, -1], [1, 4], [1, 3]] * 200:
        teach(learned, tree, accepted([path]))
    learned.refit()
    tried, hits = learned.spare_tried, learned.spare_hits
    assert not any(tried[2:-1])
    assert hits[0] / tried[0] == pytest.approx(2 / 5, abs=0.01)  # nodes 2 and 4: the best missed five times in six, twice they hit
    assert hits[1] / tried[1] == pytest.approx(1 / 3, abs=0.01)  # node 5: both others missed three times in six, once it hit
    children = learned.brood(0.4, 20)
    assert children[:3] == pytest.approx([0.4, 0.6 * 2 / 5, 0.6 * 3 / 5 / 3], abs=0.01)
    assert not any(children[9:])
    assert len(children) == 20
    assert sum(children) <= 1


def test_the_running_chance_is_that_of_best_children_that_were_reached() -> None:
    tree = make_tree([Nodes([0] * 5, [-1, 0, 0, 1, 2], [0.0, math.log(0.5), math.log(0.25), math.log(0.45), math.log(0.01)])])

    def mean(path: list[int], power: float = 1.0) -> float:
        (own,) = HostTree.of(tree)
        return Learned().learn([Outcome(own, path, [False] * len(path), power, (0.0, 0.0))])[0][1]

    assert mean([-1, -1]) == pytest.approx(0.5, abs=0.03)
    assert mean([1, -1]) == pytest.approx((0.5 + 0.9) / 2, abs=0.03)
    assert mean([2, -1]) == pytest.approx((0.5 + 0.04) / 2, abs=0.03)
    assert mean([-1, -1], power=2.0) == pytest.approx(mean([-1, -1]) ** 2, rel=1e-4)
