"""Prompt lookup: roots and trees equal a naive scan of the token list, however the tokens came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.drafters.ngram import SCAN, NGram
from adaptivespec.errors import UserError
from adaptivespec.method.policy import Adaptive, Root, Static
from adaptivespec.method.tree import DraftTree, TreeShape

CPU = torch.device("cpu")
SHAPES = [TreeShape(3, 4, 4), TreeShape(5, 4, 8), TreeShape(7, 10, 60), TreeShape(8, 1, 9), TreeShape(2, 4, 21), TreeShape(4, 16, 60)]
TOKENS = st.integers(1, 6).flatmap(lambda v: st.lists(st.integers(0, v - 1), min_size=1, max_size=60))  # few ids: many repeats
SIZES = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(lambda pair: (max(pair), min(pair)))


def scan(tokens: list[int], path: Sequence[int], width: int, longest: int = 4, shortest: int = 1) -> list[int]:
    """What followed the last tokens of `tokens + path` within `tokens`, by looking everywhere."""
    text, found, left = [*tokens, *path], [], SCAN
    for n in range(longest, shortest - 1, -1):
        for after in range(len(tokens) - 1, n - 1, -1):
            if len(text) >= n and tokens[after - n : after] == text[-n:] and left and len(found) < width:
                left -= 1
                found += [tokens[after]] if tokens[after] not in found else []
    return found


def rank_log_probs(hit_rate: float, count: int) -> list[float]:
    h = min(max(hit_rate, 0.02), 0.98)
    return [math.log(h * (1 - h) ** rank) for rank in range(count)]


def feed(drafter: NGram, slot: int, tokens: list[int], prompt: int | None = None, pieces: Sequence[int] = ()) -> None:
    """`tokens`, of which the first `prompt` are the prompt, committed in pieces as prefill and decoding do."""
    drafter.start(slot, tokens[: prompt or len(tokens)])
    start = 1
    for size in [*pieces, len(tokens)]:
        drafter.commit([slot], [tokens[start : start + size]], None)
        start += size


def make(texts: Sequence[list[int]], longest: int = 4, shortest: int = 1) -> NGram:
    drafter = NGram(6, CPU, longest, shortest)
    drafter.allocate(len(texts), 100, SHAPES)
    for slot, text in enumerate(texts):
        feed(drafter, slot, text)
    return drafter


def candidates(root: Root, row: int = 0) -> list[int]:
    """The tokens above -inf, after checking the form of the row."""
    assert root.tokens.dtype == torch.int64
    assert root.log_probs.dtype == torch.float32
    count = int((root.log_probs[row] > -math.inf).sum())
    assert (root.log_probs[row, :count].diff() < 0).all()
    assert (root.log_probs[row, count:] == -math.inf).all()
    return root.tokens[row, :count].tolist()


def grow(drafter: NGram, texts: Sequence[list[int]], slots: list[int], shapes: Sequence[TreeShape], policy: Any = None) -> DraftTree:
    policy = policy or Static(shapes[0])
    root = drafter.begin(slots, max(s.topk for s in SHAPES))
    return drafter.draft(slots, torch.tensor([texts[slot][-1] for slot in slots]), root, shapes, policy, policy.initial(len(slots)))


def paths(tree: DraftTree, row: int = 0) -> dict[tuple[int, ...], float]:
    """Paths of drafted tokens and their cumulative log-probabilities; no path twice, so siblings are distinct."""
    found: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, int(tree.size[row])):
        parent = int(tree.parents[row, node])
        assert 0 <= parent < node
        found[node] = (*found[parent], int(tree.tokens[row, node]))
        assert tree.depth[row, node] == len(found[node])
    assert len(set(found.values())) == len(found)
    assert (tree.parents[row, len(found) :] == -1).all()
    return {path: float(tree.log_probs[row, node]) for node, path in found.items() if node}


def check(tree: DraftTree, row: int, tokens: list[int], shape: TreeShape, hit_rate: float = 0.5) -> None:
    """Every node is a continuation of its path at the log-probability of its rank; the tree is as large as it can be."""
    nodes = paths(tree, row)
    assert tree.tokens[row, 0] == tokens[-1]
    assert len(nodes) < shape.num_draft_tokens
    for path, log_prob in nodes.items():
        assert len(path) <= shape.num_steps
        found = scan(tokens, path[:-1], shape.topk)
        above = nodes[path[:-1]] if len(path) > 1 else 0.0
        assert log_prob == pytest.approx(above + rank_log_probs(hit_rate, len(found))[found.index(path[-1])], abs=1e-4)
    frontier: list[tuple[int, ...]] = [()]
    everything: set[tuple[int, ...]] = set()
    for _ in range(shape.num_steps):
        frontier = [(*path, token) for path in frontier for token in scan(tokens, path, shape.topk)]
        everything |= set(frontier)
        if len(frontier) > shape.topk:  # from here on a beam
            break
    else:
        if len(everything) < shape.num_draft_tokens:
            assert set(nodes) == everything
    assert len(nodes) >= min(len(everything), shape.num_draft_tokens - 1)


@given(TOKENS, st.integers(1, 8), SIZES)
def test_the_root_equals_a_naive_scan(tokens: list[int], width: int, sizes: tuple[int, int]) -> None:
    root = make([tokens], *sizes).begin([0], width)
    found = candidates(root)
    assert root.tokens.shape == root.log_probs.shape == (1, width)
    assert found == scan(tokens, [], width, *sizes)
    assert root.log_probs[0, : len(found)].tolist() == pytest.approx(rank_log_probs(0.5, len(found)))
    assert root.confidence.item() == (0.5 if found else 0)


@given(TOKENS, st.sampled_from(SHAPES), st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0]))
def test_trees_equal_a_naive_scan(tokens: list[int], shape: TreeShape, hit_rate: float) -> None:
    drafter = make([tokens])
    drafter._contexts[0].hit_rate = hit_rate
    check(grow(drafter, [tokens], [0], [shape]), 0, tokens, shape, hit_rate)


@given(TOKENS, st.integers(1, 60), st.lists(st.integers(1, 9), max_size=12))
def test_it_does_not_matter_how_the_tokens_came(tokens: list[int], prompt: int, pieces: list[int]) -> None:
    drafter = make([tokens, tokens])
    feed(drafter, 1, tokens, min(prompt, len(tokens)), pieces)
    assert vars(drafter._contexts[0]) == vars(drafter._contexts[1])
    assert drafter._contexts[1].tokens == tokens


@given(st.lists(st.tuples(TOKENS, st.sampled_from(SHAPES)), min_size=1, max_size=4))
def test_ragged_batches_equal_single_requests(requests: list[tuple[list[int], TreeShape]]) -> None:
    texts, shapes = [text for text, _ in requests], [shape for _, shape in requests]
    slots = list(reversed(range(len(texts))))
    drafter = make(texts)
    tree = grow(drafter, texts, slots, [shapes[slot] for slot in slots])
    for row, slot in enumerate(slots):
        check(tree, row, texts[slot], shapes[slot])
        assert paths(tree, row) == paths(grow(drafter, texts, [slot], [shapes[slot]]))


def test_a_loop_is_drafted_on_and_on() -> None:
    tokens = [0, 1, 2, 3] * 3
    assert list(paths(grow(make([tokens]), [tokens], [0], [TreeShape(8, 1, 9)])))[-1] == (0, 1, 2, 3, 0, 1, 2, 3)


def test_the_longest_then_the_latest_match_comes_first() -> None:
    tokens = [1, 2, 3, 0, 2, 4, 0, 2, 5, 1, 2]
    assert candidates(make([tokens]).begin([0], 4)) == [3, 5, 4]
    assert candidates(make([tokens]).begin([0], 2)) == [3, 5]
    assert candidates(make([tokens], 1).begin([0], 4)) == [5, 4, 3]
    assert candidates(make([tokens], 4, 2).begin([0], 4)) == [3]


def test_old_occurrences_are_not_read() -> None:
    assert candidates(make([[0, 1, *[0, 2] * (SCAN - 1), 0]], 1).begin([0], 4)) == [2, 1]
    assert candidates(make([[0, 1, *[0, 2] * SCAN, 0]], 1).begin([0], 4)) == [2]


@pytest.mark.parametrize("tokens", [[3], [0, 1, 2, 3, 4, 5]])
def test_without_a_match_the_tree_is_its_root(tokens: list[int]) -> None:
    repeating = [1, 2] * 4
    texts = [tokens, repeating]
    drafter = make(texts)
    alone = grow(drafter, texts, [0], [TreeShape(5, 4, 8)], Adaptive())
    assert alone.tokens.tolist() == [[tokens[-1]]]
    both = grow(drafter, texts, [0, 1], [TreeShape(5, 4, 8), TreeShape(8, 1, 9)])
    assert both.size.tolist() == [1, 9]
    assert drafter.begin([0], 3).confidence.item() == 0


def test_the_hit_rate_counts_the_first_candidate() -> None:
    tokens = [1, 2, 3, 1, 2, 4, 1, 2]
    drafter = make([tokens])
    context = drafter._contexts[0]
    assert context.hit_rate == 0.5  # prefill had no candidates to settle
    drafter.begin([0], 4)
    drafter.commit([0], [[4, 1]], None)
    assert context.hit_rate == pytest.approx(0.55)
    drafter.commit([0], [[2]], None)  # nothing was proposed
    assert context.hit_rate == pytest.approx(0.55)
    assert candidates(drafter.begin([0], 4)) == [4, 3]
    drafter.commit([0], [[3, 4]], None)  # the second candidate is a miss, and so is the first in second place
    assert context.hit_rate == pytest.approx(0.495)
    assert drafter.begin([0], 1).confidence.item() == pytest.approx(0.495)
    drafter.commit([0], [[5]], None)
    before = context.hit_rate
    assert candidates(drafter.begin([0], 1)) == []
    drafter.commit([0], [[0]], None)
    assert context.hit_rate == before


@pytest.mark.parametrize(("right", "limit"), [(True, 0.98), (False, 0.02)])
def test_the_confidence_stays_off_0_and_1(right: bool, limit: float) -> None:
    drafter = make([[0, 1] * 4])
    for _ in range(100):
        guess = candidates(drafter.begin([0], 1))[0]
        drafter.commit([0], [[guess if right else 1 - guess]], None)
    root = drafter.begin([0], 2)
    assert root.confidence.item() == pytest.approx(limit)
    candidates(root)


@given(TOKENS, TOKENS)
def test_a_slot_forgets_its_last_request(old: list[int], new: list[int]) -> None:
    drafter, fresh = make([old]), make([new])
    drafter.begin([0], 4)
    drafter.commit([0], [[0, 1]], None)
    drafter.begin([0], 4)
    feed(drafter, 0, new)
    assert vars(drafter._contexts[0]) == vars(fresh._contexts[0])


@pytest.mark.parametrize(("longest", "shortest"), [(4, 0), (2, 3), (0, 0)])
def test_impossible_sizes_are_refused(longest: int, shortest: int) -> None:
    with pytest.raises(UserError, match="min_ngram"):
        NGram(6, CPU, longest, shortest)


def test_one_drafter_serves_one_engine() -> None:
    drafter = make([[1, 2]])
    with pytest.raises(UserError, match="another LLM"):
        drafter.allocate(1, 10, SHAPES)
