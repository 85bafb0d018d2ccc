from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptivespec.method.policy import Adaptive, PolicyState
from adaptivespec.method.tree import DraftTree, TreeShape, keep_best, merge_rows, select_rows
from method.fakes import Nodes, layout, make_tree
from method.slow_oracles import slow_ancestors, slow_sglang_links
from method.tree_cases import trees

# Every static shape of the method's tables, plain decoding, and the adaptive corners.
STATIC_SHAPES = [
    (0, 1, 1), (3, 4, 4), (3, 1, 4), (5, 4, 8), (6, 8, 16), (7, 10, 60), (15, 1, 16), (7, 1, 8), (3, 4, 8), (7, 4, 16),
]  # fmt: skip


@pytest.mark.parametrize("numbers", STATIC_SHAPES, ids=str)
def test_shapes_of_the_method_are_valid(numbers: tuple[int, int, int]) -> None:
    shape = TreeShape(*numbers)
    assert str(shape) == ",".join(map(str, numbers))
    assert (shape.num_steps, shape.topk, shape.num_draft_tokens) == numbers


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((3, 1, 5), r"shape 3,1,5: topk 1 is a chain, so num_draft_tokens must be num_steps \+ 1 = 4"),
        ((3, 1, 3), r"shape 3,1,3: topk 1 is a chain, so num_draft_tokens must be num_steps \+ 1 = 4"),
        ((1, 4, 6), r"shape 1,4,6: 1 levels of topk 4 have at most 4 drafted nodes, so 5 with the root"),
        ((2, 2, 8), r"shape 2,2,8: 2 levels of topk 2 have at most 6 drafted nodes, so 7 with the root"),
        ((0, 1, 2), r"shape 0,1,2: num_steps 0 drafts nothing and must be 0,1,1"),
        ((0, 4, 1), r"shape 0,4,1: num_steps 0 drafts nothing and must be 0,1,1"),
        ((3, 4, 1), r"shape 3,4,1: .*num_draft_tokens \(the root included\) at least 2"),
        ((3, 0, 4), r"shape 3,0,4: num_steps and topk must be at least 1"),
        ((-1, 2, 4), r"shape -1,2,4: num_steps and topk must be at least 1"),
    ],
    ids=str,
)
def test_impossible_shapes_name_the_broken_rule(numbers: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeShape(*numbers)


@pytest.mark.parametrize("numbers", [(1, 4, 5), (2, 2, 7), (1, 1, 2)], ids=str)
def test_the_largest_possible_shapes_are_valid(numbers: tuple[int, int, int]) -> None:
    assert len(layout(TreeShape(*numbers))) == numbers[2]


def test_off_drafts_nothing() -> None:
    assert TreeShape.off() == TreeShape(0, 1, 1)


@given(trees())
@settings(max_examples=60)
def test_ancestor_mask(tree: DraftTree) -> None:
    mask = tree.ancestor_mask()
    assert mask.shape == (*tree.tokens.shape, tree.tokens.shape[1])
    for b, parents in enumerate(tree.parents.tolist()):
        for node in range(len(parents)):
            # padding sees itself alone, so that no softmax row is empty
            assert set(mask[b, node].nonzero().flatten().tolist()) == slow_ancestors(parents, node)


@given(trees())
@settings(max_examples=60)
def test_sglang_links(tree: DraftTree) -> None:
    next_token, next_sibling = tree.to_sglang()
    for b, (parents, size) in enumerate(zip(tree.parents.tolist(), tree.size.tolist(), strict=True)):
        assert (next_token[b].tolist(), next_sibling[b].tolist()) == slow_sglang_links(parents, size)


@given(trees())
@settings(max_examples=60)
def test_sglang_round_trip(tree: DraftTree) -> None:
    back = DraftTree.from_sglang(tree.tokens, *tree.to_sglang(), tree.log_probs, tree.levels)
    for name in ("tokens", "parents", "depth", "log_probs", "size"):
        assert torch.equal(getattr(back, name), getattr(tree, name)), name
    assert back.levels == tree.levels


def test_sglang_long_sibling_lists() -> None:
    for count in (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 33):
        tree = make_tree([Nodes(list(range(count + 1)), [-1] + [0] * count, [0.0] * (count + 1)), Nodes([5], [-1], [0.0])])
        back = DraftTree.from_sglang(tree.tokens, *tree.to_sglang(), tree.log_probs, tree.levels)
        assert torch.equal(back.parents, tree.parents)
        assert torch.equal(back.depth, tree.depth)


def test_from_sglang_cleans_padding() -> None:
    none = torch.full((1, 4), -1)
    tokens, next_token = torch.tensor([[7, 8, 99, 98]]), torch.tensor([[1, -1, -1, -1]])
    tree = DraftTree.from_sglang(tokens, next_token, none, torch.tensor([[0.0, -1.0, -2.0, math.nan]]), 3)
    assert tree.tokens.tolist() == [[7, 8, 0, 0]]
    assert tree.parents.tolist() == [[-1, 0, -1, -1]]
    assert tree.log_probs.tolist() == [[0.0, -1.0, -math.inf, -math.inf]]
    assert tree.size.tolist() == [2]


def test_root_only() -> None:
    tree = DraftTree.root_only(torch.tensor([4, 9]))
    assert tree.tokens.tolist() == [[4], [9]]
    assert tree.parents.tolist() == [[-1], [-1]]
    assert tree.depth.tolist() == [[0], [0]]
    assert tree.log_probs.tolist() == [[0.0], [0.0]]
    assert (tree.size.tolist(), tree.levels) == ([1, 1], 0)
    assert tree.log_probs.dtype == torch.float32
    assert not tree.drafted.any()
    assert tree.ancestor_mask().tolist() == [[[True]], [[True]]]


@given(st.integers(1, 4), st.integers(1, 8), st.data())
@settings(max_examples=40)
def test_chain(batch: int, nodes: int, data: st.DataObject) -> None:
    tokens = torch.randint(1, 50, (batch, nodes))
    log_probs = -torch.arange(nodes).float().expand(batch, nodes)
    ragged = data.draw(st.booleans())
    sizes = data.draw(st.lists(st.integers(1, nodes), min_size=batch, max_size=batch)) if ragged else [nodes] * batch
    tree = DraftTree.chain(tokens, log_probs, torch.tensor(sizes) if ragged else None)
    assert tree.levels == nodes - 1
    rows = [Nodes(tokens[b, :size].tolist(), list(range(-1, size - 1)), log_probs[b, :size].tolist()) for b, size in enumerate(sizes)]
    wanted = make_tree(rows, nodes - max(sizes))
    for name in ("tokens", "parents", "depth", "log_probs", "size"):
        assert torch.equal(getattr(tree, name), getattr(wanted, name)), name


@given(trees(), st.lists(st.integers(0, 14), min_size=4, max_size=4))
@settings(max_examples=100)
def test_keep_best(tree: DraftTree, counts: list[int]) -> None:
    counts = counts[: len(tree.size)]
    keep = keep_best(tree.log_probs[:, 1:], torch.tensor(counts))
    for b, (log_probs, parents, size, count) in enumerate(
        zip(tree.log_probs.tolist(), tree.parents.tolist(), tree.size.tolist(), counts, strict=True)
    ):
        candidates = sorted(range(1, size), key=lambda node: (-log_probs[node], node))
        kept = {i + 1 for i, wanted in enumerate(keep[b].tolist()) if wanted}
        assert kept == set(candidates[:count])
        assert all(parents[node] == 0 or parents[node] in kept for node in kept)


def test_keep_best_ties_keep_parents() -> None:
    # a chain of certain tokens: every cumulative log-probability is 0, or -0.0
    keep = keep_best(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), torch.tensor([2]))
    assert keep.tolist() == [[True, True, False, False]]


def test_keep_best_of_fewer_candidates_than_wanted() -> None:
    keep = keep_best(torch.tensor([[-1.0, -math.inf, -2.0], [-math.inf] * 3]), torch.tensor([9, 2]))
    assert keep.tolist() == [[True, False, True], [False, False, False]]


def test_keep_best_of_none() -> None:
    assert keep_best(torch.empty(2, 0), torch.tensor([3, 0])).shape == (2, 0)


@given(trees(), st.data())
@settings(max_examples=20)
def test_select_rows(tree: DraftTree, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(tree.size) - 1), max_size=5))
    picked = select_rows(tree, rows)
    assert picked.levels == tree.levels
    for name in ("tokens", "parents", "depth", "log_probs", "size"):
        whole = getattr(tree, name)
        assert getattr(picked, name).tolist() == [whole[row].tolist() for row in rows]


def test_select_rows_of_a_policy_state() -> None:
    rar = torch.tensor([0.1, 0.2, 0.3])
    whole = PolicyState(rar, torch.tensor([1, 2, 3]), torch.tensor([True, False, True]), rar + 1, rar + 2, torch.zeros(3, 2), rar)
    state = select_rows(whole, [2, 0])
    assert state.rar.tolist() == pytest.approx([0.3, 0.1])
    assert (state.misses.tolist(), state.tripped.tolist()) == ([3, 1], [True, True])
    assert select_rows(Adaptive().initial(2), []).rar.shape == (0,)


@given(trees(max_batch=4), st.randoms())
@settings(max_examples=20)
def test_merge_rows_undoes_select_rows(tree: DraftTree, rng: random.Random) -> None:
    rows = rng.sample(range(len(tree.size)), len(tree.size))
    cut = rng.randrange(len(rows)) if len(rows) > 1 else 0
    groups = [group for group in (rows[:cut], rows[cut:]) if group]
    merged = merge_rows([select_rows(tree, group) for group in groups], groups)
    assert merged.levels == tree.levels
    for name in ("tokens", "parents", "depth", "log_probs", "size"):
        assert torch.equal(getattr(merged, name), getattr(tree, name))
