"""Draft trees: their shape, their nodes as tensors, who is whose ancestor, and SGLang's linked form of the same tree."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class TreeShape:
    """How much to draft in one step, in SGLang's words.

    Attributes:
        num_steps: depth in levels.
        topk: children tried per node, and nodes kept as the next level's frontier.
        num_draft_tokens: nodes in all, the root included.

    Raises:
        ValueError: no tree has this shape; the message says which rule it breaks.
    """

    num_steps: int
    topk: int
    num_draft_tokens: int

    def __post_init__(self) -> None:
        steps, topk, nodes = self.num_steps, self.topk, self.num_draft_tokens
        if steps == 0:
            if (topk, nodes) != (1, 1):
                raise ValueError(f"shape {self}: num_steps 0 drafts nothing and must be 0,1,1")
            return
        if steps < 0 or topk < 1 or nodes < 2:
            raise ValueError(f"shape {self}: num_steps and topk must be at least 1 and num_draft_tokens (the root included) at least 2")
        if topk == 1 and nodes != steps + 1:
            raise ValueError(f"shape {self}: topk 1 is a chain, so num_draft_tokens must be num_steps + 1 = {steps + 1}")
        if nodes - 1 > (most := topk + (steps - 1) * topk**2):
            raise ValueError(f"shape {self}: {steps} levels of topk {topk} have at most {most} drafted nodes, so {most + 1} with the root")

    def __str__(self) -> str:
        return f"{self.num_steps},{self.topk},{self.num_draft_tokens}"

    @classmethod
    def off(cls) -> TreeShape:
        """The shape that drafts nothing: plain decoding."""
        return cls(0, 1, 1)


@dataclass(frozen=True)
class DraftTree:
    """The trees of a batch, padded to the largest: node 0 is the last committed token, parents precede children.

    Attributes:
        tokens: int64 [B, N].
        parents: int64 [B, N], -1 for the root and for padding.
        depth: int64 [B, N], 0 for the root and for padding.
        log_probs: fp32 [B, N], the drafter's cumulative natural log-probability; 0 for the root, -inf for padding.
        size: int64 [B]; nodes from size on are padding.
        levels: a host-side bound on the deepest level, so that loops over levels need no device read.
        draft_rows: what drafting the batch took: the requests asked, then the rows of each further draft forward; empty when nobody asked.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depth: torch.Tensor
    log_probs: torch.Tensor
    size: torch.Tensor
    levels: int
    draft_rows: tuple[int, ...] = ()

    @classmethod
    def root_only(cls, tokens: torch.Tensor) -> DraftTree:
        """Trees that draft nothing, for last committed tokens [B]."""
        zero = torch.zeros_like(tokens)[:, None]
        return cls(tokens[:, None], zero - 1, zero, zero.float(), zero[:, 0] + 1, 0)

    @classmethod
    def chain(cls, tokens: torch.Tensor, log_probs: torch.Tensor, size: torch.Tensor | None = None) -> DraftTree:
        """A chain per request: tokens and cumulative log_probs [B, N] with the root first."""
        batch, nodes = tokens.shape
        index = torch.arange(nodes, device=tokens.device).expand(batch, nodes)
        if size is None:
            size = torch.full((batch,), nodes, device=tokens.device)
        real = index < size[:, None]
        return cls(
            torch.where(real, tokens, 0),
            torch.where(real, index - 1, -1),
            torch.where(real, index, 0),
            torch.where(real, log_probs, -math.inf),
            size,
            nodes - 1,
        )

    @property
    def drafted(self) -> torch.Tensor:
        """Bool [B, N]: nodes that are neither the root nor padding."""
        return self.parents >= 0

    def ancestor_mask(self) -> torch.Tensor:
        """Bool [B, N, N]: entry (i, j) says whether node j is node i or one of its ancestors."""
        batch, nodes = self.tokens.shape
        self_mask = torch.eye(nodes, dtype=torch.bool, device=self.tokens.device).expand(batch, nodes, nodes)
        parent = self.parents.clamp(min=0)[:, :, None].expand(batch, nodes, nodes)
        has_parent = self.drafted[:, :, None]
        mask = self_mask
        for _ in range(self.levels):
            mask = self_mask | (has_parent & mask.gather(1, parent))
        return mask

    def to_sglang(self) -> tuple[torch.Tensor, torch.Tensor]:
        """SGLang's retrieve_next_token (first child) and retrieve_next_sibling, int64 [B, N] with -1 for none."""
        nodes = self.tokens.shape[1]
        index = torch.arange(nodes, device=self.tokens.device)
        other = index.expand(1, 1, nodes)
        is_child = self.parents[:, None, :] == index[None, :, None]
        is_later_sibling = self.drafted[:, :, None] & (self.parents[:, None, :] == self.parents[:, :, None]) & (other > index[:, None])
        first = [torch.where(mask, other, nodes).amin(-1) for mask in (is_child, is_later_sibling)]
        return torch.where(first[0] < nodes, first[0], -1), torch.where(first[1] < nodes, first[1], -1)

    @classmethod
    def from_sglang(
        cls, tokens: torch.Tensor, next_token: torch.Tensor, next_sibling: torch.Tensor, log_probs: torch.Tensor, levels: int
    ) -> DraftTree:
        """The inverse of `to_sglang`; a node that nothing links to is padding.

        Args:
            tokens, next_token, next_sibling: int64 [B, N].
            log_probs: fp32 [B, N].
            levels: bound on the deepest level.
        """
        batch, nodes = tokens.shape
        index = torch.arange(nodes, device=tokens.device).expand(batch, nodes)

        def invert(link: torch.Tensor, default: torch.Tensor) -> torch.Tensor:
            # One extra column swallows the links that are -1.
            wide = torch.cat([default, default[:, :1]], 1)
            return wide.scatter(1, torch.where(link >= 0, link, nodes), index)[:, :nodes]

        none = torch.full_like(index, -1)
        eldest = invert(next_sibling, index)
        for _ in range(max(1, nodes - 1).bit_length()):  # pointer jumping: sibling lists of any length in log2(N) rounds
            eldest = eldest.gather(1, eldest)
        parents = invert(next_token, none).gather(1, eldest)
        depth = torch.zeros_like(index)
        for _ in range(levels):
            depth = torch.where(parents >= 0, depth.gather(1, parents.clamp(min=0)) + 1, 0)
        real = (parents >= 0) | (index == 0)
        return cls(torch.where(real, tokens, 0), parents, depth, torch.where(real, log_probs, -math.inf), real.sum(1), levels)


def keep_best(log_probs: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Which drafted candidates to keep: bool [B, C], the `count` [B] best by cumulative log-probability.

    Ties go to the lower index. A child is never more probable than its parent and comes after it, so no tie can keep a
    child without its parent. Candidates at -inf are never kept.
    """
    order = log_probs.sort(dim=1, descending=True, stable=True).indices
    index = torch.arange(log_probs.shape[1], device=log_probs.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, index)
    return (rank < count[:, None]) & (log_probs > -math.inf)


def spread(tree: DraftTree, rows: list[int], last: torch.Tensor) -> DraftTree:
    """The trees of some requests (`rows`) in a batch whose others have only their root, `last` [B]."""
    alone, nodes = DraftTree.root_only(last), tree.tokens.shape[1]

    def place(root: torch.Tensor, values: torch.Tensor, padding: float) -> torch.Tensor:
        whole = torch.cat([root, root.new_full((len(last), nodes - 1), padding)], 1)
        whole[rows] = values
        return whole

    size = alone.size.clone()
    size[rows] = tree.size
    return DraftTree(
        place(alone.tokens, tree.tokens, 0),
        place(alone.parents, tree.parents, -1),
        place(alone.depth, tree.depth, 0),
        place(alone.log_probs, tree.log_probs, -math.inf),
        size,
        tree.levels,
        tree.draft_rows,
    )


def select_rows(batch: T, rows: list[int]) -> T:
    """Some requests of a batch: any dataclass of this package whose tensors have the batch first, with only `rows` (host ints)."""
    value: Any = batch
    tensors = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if isinstance(getattr(value, f.name), torch.Tensor)}
    return dataclasses.replace(value, **{name: tensor[rows] for name, tensor in tensors.items()})  # type: ignore[no-any-return]


def stack_rows(parts: Sequence[T]) -> T:
    """One batch of several, in their order: the inverse of `split_rows`."""
    first: Any = parts[0]
    if len(parts) == 1:
        return parts[0]
    names = [f.name for f in dataclasses.fields(first) if isinstance(getattr(first, f.name), torch.Tensor)]
    return dataclasses.replace(first, **{name: torch.cat([getattr(part, name) for part in parts]) for name in names})  # type: ignore[no-any-return]


def split_rows(batch: T, count: int) -> list[T]:
    """A batch of `count` requests as batches of one."""
    value: Any = batch
    if count == 1:
        return [batch]
    tensors = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if isinstance(getattr(value, f.name), torch.Tensor)}
    rows = zip(*(torch.split(tensor, 1) for tensor in tensors.values()), strict=True)
    return [dataclasses.replace(value, **dict(zip(tensors, row, strict=True))) for row in rows]


def merge_rows(parts: Sequence[T], rows: Sequence[list[int]]) -> T:
    """The inverse of `select_rows`: parts of one batch, and the rows (host ints, together 0..B-1) that each of them is."""
    order = [row for part in rows for row in part]
    back = sorted(range(len(order)), key=order.__getitem__)
    return select_rows(stack_rows(parts), back)
