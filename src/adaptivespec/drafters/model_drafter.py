"""What drafters that run a model share: a cache of slots, the committed rows in it, and trees grown behind them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from ..errors import UserError
from ..method.policy import PolicyState, Root, TreePolicy
from ..method.tree import DraftTree, TreeShape
from ..models.kv_cache import Block, KVCache
from .grow import Level, grow


class ModelDrafter(ABC):
    """Commits true rows, drafts behind them with rows that are overwritten by the next commit; see `Drafter`.

    A subclass says how its cache is made, what its committed rows are made of, how rows are run and what they predict.

    Args:
        context: positions the model was made for; a request that leaves them is drafted for no more.
        hidden_size: of the rows that `_run` returns.
        dtype, device: of the model.
    """

    feature_layers: tuple[int, ...] = ()
    feeds_hidden = False
    """Whether a drafted row is given its parent's output, beside its own token."""

    def __init__(self, context: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.context, self.hidden_size, self.dtype, self.device = context, hidden_size, dtype, device

    @abstractmethod
    def _new_cache(self, num_slots: int, rows: int) -> KVCache:
        """An empty cache, and whatever else depends on the number of rows."""

    @abstractmethod
    def _run(self, tokens: torch.Tensor, hidden: torch.Tensor | None, positions: torch.Tensor, block: Block) -> torch.Tensor:
        """Run rows: tokens [M], hidden [M, H] (None unless `feeds_hidden`), positions [M] -> output [M, H]."""

    @abstractmethod
    def _top(self, out: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Output rows [M, H] -> target ids and log-probabilities, both [M, <= width], of the best next tokens."""

    def _fuse(self, features: torch.Tensor | None) -> torch.Tensor | None:
        """The hidden rows [M, H] of committed rows from the target's features [M, F]; None unless `feeds_hidden`."""
        return None

    def allocate(self, num_slots: int, length: int, shapes: Sequence[TreeShape]) -> None:
        """A cache of `length` committed rows and the speculative rows of the largest of `shapes`, within the model's own context.

        Raises:
            UserError: the drafter already serves another LLM.
        """
        if hasattr(self, "cache"):
            raise UserError("this drafter object already serves another LLM: make one for each")
        self.speculative_rows = max(0, max(s.num_steps for s in shapes) - 1) * max(s.topk for s in shapes)
        self.length = min(length, self.context - max(s.num_steps for s in shapes))
        self.cache = self._new_cache(num_slots, max(self.length, 0) + self.speculative_rows)
        self.committed = [0] * num_slots
        self.exhausted = [False] * num_slots
        self.hidden = torch.zeros(num_slots, self.hidden_size, dtype=self.dtype, device=self.device)

    def start(self, slot: int, prompt: Sequence[int]) -> None:
        """A new request takes a slot; for a prompt that leaves no room in the model's context no row is ever run."""
        self.committed[slot], self.exhausted[slot] = 0, len(prompt) > self.length

    @torch.inference_mode()
    def commit(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], features: torch.Tensor | None) -> None:
        """Extend the committed rows; a request that leaves the model's context is drafted for no more."""
        counts = [len(t) for t in tokens]
        keep = []
        for i, slot in enumerate(slots):
            self.exhausted[slot] = self.exhausted[slot] or self.committed[slot] + counts[i] > self.length
            if not self.exhausted[slot]:
                keep.append(i)
        if not keep:
            return
        if len(keep) < len(slots) and features is not None:
            firsts = [sum(counts[:i]) for i in keep]
            features = torch.cat([features[first : first + counts[i]] for first, i in zip(firsts, keep, strict=True)])
        slots, counts = [slots[i] for i in keep], [counts[i] for i in keep]
        flat = torch.tensor([token for i in keep for token in tokens[i]], device=self.device)
        starts = [self.committed[slot] for slot in slots]
        positions = torch.tensor([start + j for start, n in zip(starts, counts, strict=True) for j in range(n)], device=self.device)
        width = max(counts)
        visible = (
            torch.ones(width, width, dtype=torch.bool, device=self.device).tril().expand(len(slots), width, width) if width > 1 else None
        )
        block = Block(list(slots), starts, starts, counts, visible)
        out = self._run(flat, self._fuse(features), positions, block)
        ends = torch.tensor(counts, device=self.device).cumsum(0) - 1
        self.hidden[list(slots)] = out[ends]
        for slot, count in zip(slots, counts, strict=True):
            self.committed[slot] += count

    @torch.inference_mode()
    def begin(self, slots: Sequence[int], width: int) -> Root:
        """The model's best `width` continuations of each request."""
        tokens, log_probs = self._top(self.hidden[list(slots)], width)
        if any(out := [self.exhausted[slot] for slot in slots]):
            log_probs = log_probs.masked_fill(torch.tensor(out, device=self.device)[:, None], -math.inf)
        return Root(tokens, log_probs)

    @torch.inference_mode()
    def draft(
        self,
        slots: Sequence[int],
        last_tokens: torch.Tensor,
        root: Root,
        shapes: Sequence[TreeShape],
        policy: TreePolicy,
        state: PolicyState,
    ) -> DraftTree:
        """Grow one tree per request; see `Drafter.draft`."""
        shapes = [TreeShape.off() if self.exhausted[slot] else shape for slot, shape in zip(slots, shapes, strict=True)]
        # [A, K, H]: the rows that the next level's nodes hang from
        hidden = self.hidden[list(slots)][:, None] if self.feeds_hidden else None

        def expand(level: Level) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal hidden
            parents = None
            if hidden is not None:
                if level.survivors is not None:
                    hidden = hidden[level.survivors]
                parents = hidden.gather(1, level.parent_column[:, :, None].expand(-1, -1, hidden.shape[2]))
            requests = [slots[row] for row in level.rows]
            bases = [self.committed[slot] for slot in requests]
            width = level.tokens.shape[1]
            starts = [base + (level.index - 1) * width for base in bases]
            positions = [base + level.index - 1 for base, n in zip(bases, level.counts, strict=True) for _ in range(n)]
            # A lone node per level sees everything before it: no mask.
            visible = None if width == 1 else level.visible
            block = Block(requests, bases, starts, level.counts, visible)
            position = torch.tensor(positions, device=self.device)
            if min(level.counts) == width:  # no column is padding: views instead of masks, which cost more than the tree's other steps
                out = self._run(level.tokens.flatten(), None if parents is None else parents.flatten(0, 1), position, block)
                tokens, log_probs = self._top(out, width)
                if parents is not None:
                    hidden = out.view(parents.shape)
                return tokens.view(*level.tokens.shape, width), log_probs.view(*level.tokens.shape, width)
            real = level.real
            out = self._run(level.tokens[real], None if parents is None else parents[real], position, block)
            tokens, log_probs = self._top(out, width)
            if parents is not None:
                hidden = out.new_zeros(parents.shape)
                hidden[real] = out
            all_tokens = tokens.new_zeros(*level.tokens.shape, width)
            all_log_probs = log_probs.new_full((*level.tokens.shape, width), -math.inf)
            all_tokens[real], all_log_probs[real] = tokens, log_probs
            return all_tokens, all_log_probs

        return grow(last_tokens, root, shapes, policy, state, expand)
