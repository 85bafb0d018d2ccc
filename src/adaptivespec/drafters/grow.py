"""Growing draft trees level by level by cumulative log-probability: the same beam for every model drafter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..method.policy import PolicyState, Root, TreePolicy
from ..method.tree import DraftTree, TreeShape


@dataclass
class Level:
    """One level's frontier, for the requests that go on.

    Attributes:
        index: 1 for the first level.
        rows: host indices of the requests in the batch.
        survivors: where those stood among the rows of the level before; None when nobody dropped out.
        counts: frontier nodes of each request, host ints.
        real: bool [A, K]: a request's first `counts` of the K columns.
        tokens: int64 [A, K] target ids.
        parent_column: int64 [A, K], the column of the level before that each node hangs from (0 at level 1).
        visible: bool [A, K, index * K], which columns of all levels so far a node sees: itself and its ancestors.
    """

    index: int
    rows: list[int]
    survivors: list[int] | None
    counts: list[int]
    real: torch.Tensor
    tokens: torch.Tensor
    parent_column: torch.Tensor
    visible: torch.Tensor


Expand = Callable[[Level], tuple[torch.Tensor, torch.Tensor]]
"""Runs the draft model on a level: target token ids and log-probabilities of each node's best K children, both [A, K, K]."""


def grow(
    last_tokens: torch.Tensor, root: Root, shapes: Sequence[TreeShape], policy: TreePolicy, state: PolicyState, expand: Expand
) -> DraftTree:
    """Trees of the planned shapes: level 1 is the root's top-k, each frontier's topk * topk children are candidates, the best topk
    of them the next frontier; the policy then keeps the best nodes of all (EAGLE-2's rerank).

    Args:
        last_tokens: int64 [B].
        root: tokens and log-probabilities [B, >= K]; rows at -inf draft nothing.
        shapes: per request.
        policy, state: as in `Drafter.draft`.
        expand: the draft model.
    """
    device, batch = last_tokens.device, len(shapes)
    width, depth = min(max(s.topk for s in shapes), root.tokens.shape[1]), max(s.num_steps for s in shapes)
    if depth == 0:
        return dataclasses.replace(DraftTree.root_only(last_tokens), draft_rows=(batch,))
    topk = [min(s.topk, width) for s in shapes]
    steps = torch.tensor([s.num_steps for s in shapes], device=device)
    columns = torch.arange(width, device=device)
    real = columns < torch.tensor(topk, device=device)[:, None]  # bool [B, K]
    own = torch.eye(width, dtype=torch.bool, device=device).expand(batch, width, width)

    tokens = root.tokens[:, :width]
    log_probs = torch.where(real & (steps > 0)[:, None], root.log_probs[:, :width], -math.inf)
    number = (columns + 1).expand(batch, width)  # candidates are numbered from 1; 0 is the root
    pool = _Pool(batch, device)
    pool.add(list(range(batch)), tokens, log_probs, torch.zeros_like(number), 1)
    rows, visible, parent_column = list(range(batch)), own, torch.zeros_like(number)
    draft_rows = [batch]

    for level in range(1, depth):
        if policy.per_level:
            alive = torch.zeros(batch, dtype=torch.bool, device=device)
            alive[rows] = log_probs[:, 0] > -math.inf
            going = (policy.keep_going(state, pool.tree(last_tokens), steps) & alive).tolist()
        else:
            going = [level < s.num_steps for s in shapes]
        survivors = [i for i, row in enumerate(rows) if going[row]]
        if not survivors:
            break
        dropped = len(survivors) < len(rows)
        if dropped:
            rows = [rows[i] for i in survivors]
            kept = (tokens, log_probs, number, parent_column, visible, real)
            tokens, log_probs, number, parent_column, visible, real = (x[survivors] for x in kept)
        counts = [topk[row] for row in rows]
        frontier_level = Level(level, rows, survivors if dropped else None, counts, real, tokens, parent_column, visible)
        draft_rows.append(sum(counts))
        child_tokens, child_log_probs = expand(frontier_level)
        limit = real[:, None, :] & real[:, :, None]  # neither a padded node nor more than topk children of a node
        scores = torch.where(limit, log_probs[:, :, None] + child_log_probs, -math.inf).flatten(1)
        child_tokens = child_tokens.flatten(1)
        first = pool.add(rows, child_tokens, scores, number[:, :, None].expand(-1, -1, width).flatten(1), level + 1)
        # Stable, so that ties fall the same way whatever else is in the batch.
        best, order = (x[:, :width] for x in scores.sort(dim=1, descending=True, stable=True))
        log_probs = torch.where(real, best, -math.inf)
        tokens, number, parent_column = child_tokens.gather(1, order), order + first, order // width
        seen = visible.gather(1, parent_column[:, :, None].expand(-1, -1, visible.shape[2]))
        visible = torch.cat([seen, own[: len(rows)]], 2)
    tree = _select(last_tokens, pool, torch.tensor([s.num_draft_tokens for s in shapes], device=device), policy, state)
    return dataclasses.replace(tree, draft_rows=tuple(draft_rows))


class _Pool:
    """All candidates of the batch, level after level."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.batch, self.device, self.total, self.levels = batch, device, 0, 0
        self.parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(self, rows: list[int], tokens: torch.Tensor, log_probs: torch.Tensor, parents: torch.Tensor, depth: int) -> int:
        """Candidates [A, C] of the requests `rows`; returns the number of the first of them."""
        first, width = self.total + 1, tokens.shape[1]
        if len(rows) < self.batch:
            whole_tokens, whole_parents = (torch.zeros(self.batch, width, dtype=torch.int64, device=self.device) for _ in range(2))
            whole_log_probs = torch.full((self.batch, width), -math.inf, device=self.device)
            whole_tokens[rows], whole_parents[rows], whole_log_probs[rows] = tokens, parents, log_probs
            tokens, parents, log_probs = whole_tokens, whole_parents, whole_log_probs
        self.parts.append((tokens, parents, torch.full((self.batch, width), depth, device=self.device), log_probs))
        self.total, self.levels = self.total + width, depth
        return first

    def tree(self, last_tokens: torch.Tensor) -> DraftTree:
        """Everything as one big tree behind the roots."""
        root = torch.zeros_like(last_tokens)[:, None]
        behind = zip((last_tokens[:, None], root - 1, root, root.float()), zip(*self.parts, strict=True), strict=True)
        tokens, parents, depth, log_probs = (torch.cat([first, *rest], 1) for first, rest in behind)
        return DraftTree(tokens, parents, depth, log_probs, root[:, 0] + self.total + 1, self.levels)


def _select(last_tokens: torch.Tensor, pool: _Pool, num_draft_tokens: torch.Tensor, policy: TreePolicy, state: PolicyState) -> DraftTree:
    """The candidates that the policy keeps, renumbered in index order behind the root."""
    everything = pool.tree(last_tokens)
    keep = torch.cat([torch.ones_like(last_tokens, dtype=torch.bool)[:, None], policy.prune(state, everything, num_draft_tokens)], 1)
    renumbered = keep.cumsum(1) - 1
    size = keep.sum(1)
    # Kept nodes in index order first, then the others: a stable sort of the inverted mask.
    order = (~keep).int().sort(dim=1, stable=True).indices[:, : int(size.max())]
    real = torch.arange(order.shape[1], device=order.device) < size[:, None]
    parents = everything.parents.gather(1, order)
    parents = torch.where(parents >= 0, renumbered.gather(1, parents.clamp(min=0)), -1)
    return DraftTree(
        torch.where(real, everything.tokens.gather(1, order), 0),
        torch.where(real, parents, -1),
        torch.where(real, everything.depth.gather(1, order), 0),
        torch.where(real, everything.log_probs.gather(1, order), -math.inf),
        size,
        pool.levels,
    )
