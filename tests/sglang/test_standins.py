"""The stand-in kernels against brute force: plain Python over small random cases."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import pytest
import sgl_kernel
import torch
from hypothesis import given
from hypothesis import strategies as st

seeds = st.integers(0, 2**32)


@dataclass
class Draft:
    """A request's draft as one would draw it: which candidates there are, whose children, which are kept.

    Attributes:
        topk, steps: of the draft.
        parent: candidate -> the candidate it is a child of, -1 for the root.
        kept: candidates in the tree, ascending.
        rows: for every row of topk candidates, whose children they are; -1 for the root's.
    """

    topk: int
    steps: int
    parent: dict[int, int]
    kept: list[int]
    rows: list[int]

    @classmethod
    def random(cls, rng: random.Random, topk: int, steps: int, nodes: int, orphans: bool = False) -> Draft:
        rows, parent, frontier = [-1], dict.fromkeys(range(topk), -1), list(range(topk))
        for _ in range(steps - 1):
            new = []
            for candidate in frontier:
                first = len(rows) * topk
                rows.append(candidate)
                children = list(range(first, first + topk))
                parent |= dict.fromkeys(children, candidate)
                new += children
            frontier = sorted(rng.sample(new, topk))
        kept: set[int] = set()
        while len(kept) < nodes - 1:
            kept.add(rng.choice([c for c in parent if c not in kept and (orphans or parent[c] in kept | {-1})]))
        return cls(topk, steps, parent, sorted(kept), rows)

    def node(self, candidate: int) -> int:
        return 0 if candidate < 0 else self.kept.index(candidate) + 1

    def ancestors(self, candidate: int) -> list[int]:
        """Itself and its ancestors, as far as they are kept."""
        line = []
        while candidate in self.kept:
            line.append(candidate)
            candidate = self.parent[candidate]
        return line

    def children(self, candidate: int) -> list[int]:
        return [c for c in self.kept if self.parent[c] == candidate]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    steps, topk = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    most = topk + (steps - 1) * topk**2
    return steps, topk, 1 + draw(st.integers(1, most))


def build(drafts: list[Draft], lengths: list[int], nodes: int) -> dict[str, torch.Tensor]:
    """Run the stand-in as SGLang calls it."""
    batch, first = len(drafts), drafts[0]
    links = torch.full((3, batch, nodes), -1)
    out = {"mask": torch.ones(batch * nodes * nodes, dtype=torch.bool), "positions": torch.empty(batch * nodes, dtype=torch.int64)}
    out |= dict(zip(("index", "next", "sibling"), links, strict=True))
    # SGLang drops the rows of the last level, which have no children in the tree
    rows = torch.tensor([d.rows for d in drafts]) if first.steps > 1 else torch.empty(batch, 0, dtype=torch.int64)
    kept = torch.tensor([d.kept for d in drafts])
    sgl_kernel.build_tree_kernel_efficient_cpu(
        rows, kept, torch.tensor(lengths), out["mask"], out["positions"], *links, first.topk, first.steps, nodes, 1
    )
    return out


@given(shape=shapes(), batch=st.integers(1, 3), orphans=st.booleans(), seed=seeds)
def test_build_tree(shape: tuple[int, int, int], batch: int, orphans: bool, seed: int) -> None:
    steps, topk, nodes = shape
    rng = random.Random(seed)
    drafts = [Draft.random(rng, topk, steps, nodes, orphans) for _ in range(batch)]
    lengths = [rng.randrange(1, 50) for _ in drafts]
    out = build(drafts, lengths, nodes)
    for b, draft in enumerate(drafts):
        assert out["index"][b].tolist() == [b * nodes + i for i in range(nodes)]
        for candidate in [-1, *draft.kept]:
            node, line, children = draft.node(candidate), draft.ancestors(candidate), draft.children(candidate)
            seen = {i for i in range(nodes) if out["mask"].view(batch, nodes, nodes)[b, node, i]}
            assert seen == {0} | {draft.node(c) for c in line}
            assert out["positions"].view(batch, nodes)[b, node] == lengths[b] + len(line)
            linked, child = [], int(out["next"][b, node])
            while child >= 0:
                linked.append(child)
                child = int(out["sibling"][b, child])
            assert linked == [draft.node(c) for c in children]


def test_build_tree_refuses_other_masks() -> None:
    none = torch.zeros(0)
    with pytest.raises(NotImplementedError, match="mode 0"):
        sgl_kernel.build_tree_kernel_efficient_cpu(none, none, none, none, none, none, none, none, 1, 1, 1, 0)


@given(shape=shapes(), batch=st.integers(1, 3), seed=seeds)
def test_verify_tree_greedy(shape: tuple[int, int, int], batch: int, seed: int) -> None:
    steps, topk, nodes = shape
    rng = random.Random(seed)
    drafts = [Draft.random(rng, topk, steps, nodes) for _ in range(batch)]
    links = build(drafts, [3] * batch, nodes)
    tokens = torch.randint(0, 9, (batch, nodes))
    for b, draft in enumerate(drafts):
        for candidate in [-1, *draft.kept]:  # siblings are distinct, as in a draft
            for child, token in zip(draft.children(candidate), rng.sample(range(9), topk), strict=False):
                tokens[b, draft.node(child)] = token
    wanted = torch.randint(0, 9, (batch, nodes))
    for b, draft in enumerate(drafts):
        for candidate in [-1, *draft.kept]:  # often what was drafted, or every walk would end at once
            if (children := draft.children(candidate)) and rng.random() < 0.7:
                wanted[b, draft.node(candidate)] = tokens[b, draft.node(rng.choice(children))]
    predicts = torch.full((batch * nodes,), -7, dtype=torch.int32)
    accepted, count = torch.full((batch, steps + 1), -1, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    sgl_kernel.verify_tree_greedy_cpu(
        predicts=predicts, accept_index=accepted, accept_token_num=count, candidates=tokens, retrive_index=links["index"],
        retrive_next_token=links["next"], retrive_next_sibling=links["sibling"], target_predict=wanted,
    )  # fmt: skip
    for b, draft in enumerate(drafts):
        lines = [[0, *(draft.node(c) for c in reversed(draft.ancestors(leaf)))] for leaf in draft.kept] + [[0]]
        right = [line for line in lines if all(wanted[b, p] == tokens[b, c] for p, c in itertools.pairwise(line))]
        best = max(right, key=len)
        assert count[b] == len(best) - 1
        assert accepted[b].tolist() == [b * nodes + node for node in best] + [-1] * (steps + 1 - len(best))
        told = predicts.view(batch, nodes)[b].tolist()
        assert told == [int(wanted[b, node]) if node in best else -7 for node in range(nodes)]


@given(batch=st.integers(1, 4), stride=st.integers(1, 5), seed=seeds)
def test_bonus_tokens(batch: int, stride: int, seed: int) -> None:
    rng = random.Random(seed)
    tokens = [[rng.randrange(99) for _ in range(stride)] for _ in range(batch)]
    lengths = [rng.randint(1, stride) for _ in range(batch)]
    bonus = torch.zeros(batch, dtype=torch.int32)
    sgl_kernel.fill_bonus_tokens_cpu(torch.tensor(tokens, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), bonus, stride)
    assert bonus.tolist() == [row[n - 1] for row, n in zip(tokens, lengths, strict=True)]


@given(batch=st.integers(1, 4), select=st.booleans(), seed=seeds)
def test_rotate_input_ids(batch: int, select: bool, seed: int) -> None:
    rng = random.Random(seed)
    parts = [[rng.randrange(99) for _ in range(rng.randint(1, 6))] for _ in range(batch)]
    new = [rng.randrange(100, 199) for _ in parts]
    starts = [sum(map(len, parts[:i])) for i in range(batch)]
    places = [rng.randrange(len(part)) if select else len(part) - 1 for part in parts]
    flat = torch.tensor([token for part in parts for token in part])
    at = torch.tensor([s + p for s, p in zip(starts, places, strict=True)]) if select else None
    sgl_kernel.rotate_input_ids_cpu(flat, torch.tensor(starts), torch.tensor([len(p) for p in parts]), torch.tensor(new)[:, None], at)
    expected = []
    for part, token, place in zip(parts, new, places, strict=True):
        moved = [*part[1:], part[-1]]
        moved[place] = token
        expected += moved
    assert flat.tolist() == expected


@dataclass
class Pool:
    """Requests with committed tokens, and distinct slots for every position."""

    table: torch.Tensor
    rows: list[int]
    lengths: list[int]

    @classmethod
    def random(cls, rng: random.Random, batch: int, positions: int) -> Pool:
        slots = rng.sample(range(1, 400), (batch + 1) * positions)
        table = torch.tensor(slots, dtype=torch.int32).view(batch + 1, positions)
        return cls(table, rng.sample(range(batch + 1), batch), [rng.randint(1, positions // 3) for _ in range(batch)])


@given(batch=st.integers(1, 4), seed=seeds)
def test_slots_of_ranges(batch: int, seed: int) -> None:
    rng = random.Random(seed)
    pool = Pool.random(rng, batch, 24)
    ends = [n + rng.randint(0, 8) for n in pool.lengths]
    wanted = [int(pool.table[r, p]) for r, a, b in zip(pool.rows, pool.lengths, ends, strict=True) for p in range(a, b)]
    ranges = torch.tensor(pool.lengths), torch.tensor(ends)
    slots = torch.zeros(len(wanted), dtype=torch.int64)
    sgl_kernel.assign_extend_cache_locs_cpu(torch.tensor(pool.rows), pool.table, *ranges, slots, 24)
    assert slots.tolist() == wanted
    written = torch.zeros_like(pool.table)
    sgl_kernel.assign_req_to_token_pool_cpu(torch.tensor(pool.rows), written, *ranges, slots, 24)
    inside = {(r, p) for r, a, b in zip(pool.rows, pool.lengths, ends, strict=True) for p in range(a, b)}
    for row in range(batch + 1):
        assert written[row].tolist() == [int(pool.table[row, p]) if (row, p) in inside else 0 for p in range(24)]


@given(batch=st.integers(1, 3), topk=st.integers(1, 3), steps=st.integers(1, 4), seed=seeds)
def test_slots_of_branches(batch: int, topk: int, steps: int, seed: int) -> None:
    pool = Pool.random(random.Random(seed), batch, 24)
    args = pool.table, torch.tensor(pool.rows), torch.tensor(pool.lengths)
    slots = torch.zeros(batch * topk * steps, dtype=torch.int64)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(args[1], args[0], args[2], slots, 24, topk, steps)
    branches = sgl_kernel.build_draft_decode_metadata_cpu(*args, topk, steps, 24)
    for b, (row, length) in enumerate(zip(pool.rows, pool.lengths, strict=True)):
        for branch in range(topk):
            own = [int(pool.table[row, length + branch * steps + step]) for step in range(steps)]
            assert slots.view(batch, topk, steps)[b, branch].tolist() == own
            assert branches[b * topk + branch, : length + steps].tolist() == pool.table[row, :length].tolist() + own


@given(batch=st.integers(1, 4), seed=seeds)
def test_slots_of_accepted_nodes(batch: int, seed: int) -> None:
    rng = random.Random(seed)
    slots = torch.tensor(rng.sample(range(500), batch * 6))
    accepted = torch.tensor([[b * 6 + rng.randrange(6) if rng.random() < 0.5 else -1 for _ in range(4)] for b in range(batch)])
    out = torch.full((batch * 4,), -1)
    sgl_kernel.fill_accept_out_cache_loc_cpu(accepted, slots, out)
    kept = [int(slots[i]) for row in accepted.tolist() for i in row if i >= 0]
    assert out.tolist() == kept + [-1] * (batch * 4 - len(kept))


@given(seed=seeds)
def test_moving_cache_rows(seed: int) -> None:
    rng = random.Random(seed)
    buffers = [torch.randn(12, 2, 3), torch.randn(12, 2, 3).bfloat16()]
    before = [buffer.clone() for buffer in buffers]
    sources = [rng.randrange(12) for _ in range(5)]
    targets = rng.sample(range(12), 5)  # may overlap the sources
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers])
    sizes = torch.tensor([buffer[0].nbytes for buffer in buffers])
    sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, sizes, torch.tensor(targets), torch.tensor(sources))
    came_from = dict(zip(targets, sources, strict=True))
    for buffer, old in zip(buffers, before, strict=True):
        assert all(torch.equal(buffer[row], old[came_from.get(row, row)]) for row in range(12))


def slow_attention(q: list[float], keys: list[list[float]], values: list[list[float]], scale: float, cap: float) -> list[float]:
    """One query of one head, in Python numbers."""
    scores = [scale * sum(a * b for a, b in zip(q, key, strict=True)) for key in keys]
    if cap:
        scores = [cap * math.tanh(score / cap) for score in scores]
    weights = [math.exp(score - max(scores)) for score in scores]
    return [sum(w * value[d] for w, value in zip(weights, values, strict=True)) / sum(weights) for d in range(len(q))]


HEADS, KEY_HEADS, WIDTH = 4, 2, 3


@given(batch=st.integers(1, 3), kind=st.sampled_from(["decode", "causal", "full", "tree"]), cap=st.sampled_from([0.0, 2.0]), seed=seeds)
def test_attention(batch: int, kind: str, cap: float, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    pool = Pool.random(rng, batch, 15)
    new = [1 if kind == "decode" else rng.randint(1, 5) for _ in range(batch)]
    lengths = [n + extra for n, extra in zip(pool.lengths, new, strict=True)]
    starts = [sum(new[:b]) for b in range(batch)]
    q, key_buffer, value_buffer = (
        torch.randn(sum(new), HEADS, WIDTH),
        torch.randn(400, KEY_HEADS, WIDTH),
        torch.randn(400, KEY_HEADS, WIDTH),
    )
    masks = [torch.rand(n, n) > 0.5 for n in new]
    for mask in masks:
        mask.fill_diagonal_(True)
    out = torch.empty_like(q)
    where = pool.table, torch.tensor(pool.rows), torch.tensor(lengths)
    if kind == "decode":  # it stores the new key and value itself
        slots = torch.tensor([int(pool.table[r, n - 1]) for r, n in zip(pool.rows, lengths, strict=True)])
        key, value = torch.randn(2, batch, KEY_HEADS * WIDTH)
        torch.ops.sgl_kernel.decode_attention_cpu(
            q, key_buffer, value_buffer, 1.0, 1.0, out, key, value, slots, None, *where, 0.5, cap, False, 0, None, None
        )
        assert torch.equal(key_buffer[slots].flatten(1), key)
        assert torch.equal(value_buffer[slots].flatten(1), value)
    else:
        tree = torch.cat([mask.flatten() for mask in masks]) if kind == "tree" else None
        torch.ops.sgl_kernel.extend_attention_cpu(
            q, None, None, out, key_buffer, value_buffer, 1.0, 1.0, *where, torch.tensor(new), torch.tensor(starts), max(new),
            0.5, cap, False, 0, None, None, tree, kind != "full",
        )  # fmt: skip
    for b in range(batch):
        for i in range(new[b]):
            old = lengths[b] - new[b]
            among = {"decode": [0], "causal": range(i + 1), "full": range(new[b]), "tree": [j for j in range(new[b]) if masks[b][i, j]]}[
                kind
            ]
            slots_seen = [int(pool.table[pool.rows[b], p]) for p in [*range(old), *(old + j for j in among)]]
            for head in range(HEADS):
                shared = head * KEY_HEADS // HEADS
                keys, values = ([buffer[s, shared].tolist() for s in slots_seen] for buffer in (key_buffer, value_buffer))
                expected = slow_attention(q[starts[b] + i, head].tolist(), keys, values, 0.5, cap)
                assert out[starts[b] + i, head].tolist() == pytest.approx(expected, abs=1e-4)


def test_what_is_missing_says_so() -> None:
    from sgl_kernel import fused_experts_cpu

    with pytest.raises(NotImplementedError, match="fused_experts_cpu"):
        fused_experts_cpu()
    with pytest.raises(NotImplementedError, match="sliding windows"):
        sgl_kernel.extend_attention_cpu(*[None] * 17, 5, None, None)
