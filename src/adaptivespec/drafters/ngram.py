"""Prompt lookup decoding: what followed the context's last tokens when they occurred before is drafted again. No model at all.

Prior art: prompt lookup decoding (PLD, Saxena 2023), in transformers `prompt_lookup_num_tokens`. They copy one span, a chain; here
every node of the tree is looked up anew, so trees of any shape grow, and the request's running hit rate stands for the confidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..errors import UserError
from ..method.policy import PolicyState, Root, TreePolicy
from ..method.tree import DraftTree, TreeShape
from .grow import Level, grow

SCAN = 64  # earlier occurrences that one lookup reads, latest first: bounds its cost in texts that repeat themselves
_ALPHA, _START, _CLAMP = 0.1, 0.5, 0.02  # of the hit rate: the newest step's weight, the first value, the distance kept from 0 and 1


class _Context:
    """The committed tokens of one request and where their n-grams occurred.

    An n-gram is filed once a token follows it, under that token's position: so the context's own end never finds itself.
    """

    def __init__(self, bits: int, least: int, most: int) -> None:
        self.bits, self.hit_rate = bits, _START
        self.key = 0  # the last `most` tokens, 1 added to each, `bits` each: its low n * bits bits are the n-gram at the end
        self.guess: int | None = None  # the best candidate of the last `begin`, until it is settled
        self.tokens: list[int] = []
        # For each n the latest position after each n-gram, and for each position the one before it with the same n-gram; 0 is none.
        self.files: list[tuple[int, dict[int, int], list[int]]] = [((1 << n * bits) - 1, {}, []) for n in range(most, least - 1, -1)]

    def after(self, key: int, token: int) -> int:
        """The key after one more token; zeros are the time before the first, so no n-gram that reaches there occurs again."""
        return (key << self.bits | token + 1) & self.files[0][0]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens and file the n-grams that they follow."""
        for token in tokens:
            position = len(self.tokens)
            for mask, latest, earlier in self.files:
                gram = self.key & mask
                earlier.append(latest.get(gram, 0))
                latest[gram] = position
            self.tokens.append(token)
            self.key = self.after(self.key, token)

    def lookup(self, key: int, width: int, columns: int) -> tuple[list[int], list[float]]:
        """Up to `width` distinct tokens that followed the text `key` before, longest n-gram, then latest, first; -1 up to `columns`.

        Their log-probabilities are log h + rank * log(1 - h), h the hit rate kept off 0 and 1; -inf up to `columns`.
        """
        found: dict[int, None] = {}
        left = SCAN
        for mask, latest, earlier in self.files:
            position = latest.get(key & mask, 0)
            while position and left and len(found) < width:
                found[self.tokens[position]] = None
                position, left = earlier[position], left - 1
        h = min(max(self.hit_rate, _CLAMP), 1 - _CLAMP)
        first, step, padding = math.log(h), math.log1p(-h), columns - len(found)
        return [*found, *[-1] * padding], [*(first + rank * step for rank in range(len(found))), *[-math.inf] * padding]


class NGram:
    """Drafts by prompt lookup from the request's own tokens.

    Args:
        target_vocab_size: every token id is below it.
        device: where the tensors it returns live; the lookups run on the host.
        max_ngram, min_ngram: longest and shortest suffix to look up, in tokens.

    Raises:
        UserError: not 1 <= min_ngram <= max_ngram.
    """

    feature_layers: tuple[int, ...] = ()

    def __init__(self, target_vocab_size: int, device: torch.device, max_ngram: int = 4, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise UserError(f"n-gram drafter: needs 1 <= min_ngram <= max_ngram, not min_ngram {min_ngram} and max_ngram {max_ngram}")
        self.device = device
        self._sizes = target_vocab_size.bit_length(), min_ngram, max_ngram

    def allocate(self, num_slots: int, length: int, shapes: Sequence[TreeShape]) -> None:
        """One empty context per slot, which grows with its request. Raises UserError when the drafter already serves another LLM."""
        if hasattr(self, "_contexts"):
            raise UserError("this drafter object already serves another LLM: make one for each")
        self._contexts = [_Context(*self._sizes) for _ in range(num_slots)]

    def start(self, slot: int, prompt: Sequence[int]) -> None:
        """A new request takes a slot; the tokens of the one before and its hit rate are forgotten."""
        self._contexts[slot] = _Context(*self._sizes)
        self._contexts[slot].extend(prompt[:1])  # the rest comes through commit, which is told what follows each row

    def commit(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], features: torch.Tensor | None) -> None:
        """Append what was committed and settle the hit rate; `features` is not read. See `Drafter.commit`."""
        for slot, block in zip(slots, tokens, strict=True):
            context = self._contexts[slot]
            if block and context.guess is not None:
                context.hit_rate += _ALPHA * ((block[0] == context.guess) - context.hit_rate)
                context.guess = None
            context.extend(block)

    def begin(self, slots: Sequence[int], width: int) -> Root:
        """The best `width` continuations of each request; tokens -1 at log-probability -inf where there are fewer."""
        found = []
        for slot in slots:
            context = self._contexts[slot]
            found.append(context.lookup(context.key, width, width))
            context.guess = best if (best := found[-1][0][0]) >= 0 else None
        return Root(*self._tensors(found, (len(slots), width)))

    def draft(
        self,
        slots: Sequence[int],
        last_tokens: torch.Tensor,
        root: Root,
        shapes: Sequence[TreeShape],
        policy: TreePolicy,
        state: PolicyState,
    ) -> DraftTree:
        """Grow one tree per request, each node's children from a lookup of its own path; see `Drafter.draft`."""
        matched = (root.log_probs[:, 0] > -math.inf).tolist()  # nothing to grow without: the whole batch is often like that
        shapes = [shape if found else TreeShape.off() for shape, found in zip(shapes, matched, strict=True)]
        keys = {row: [self._contexts[slot].key] for row, slot in enumerate(slots)}  # of the nodes of the level before

        def expand(level: Level) -> tuple[torch.Tensor, torch.Tensor]:
            width, found = level.tokens.shape[1], []
            nothing = [-1] * width, [-math.inf] * width
            nodes = zip(level.rows, level.counts, level.tokens.tolist(), level.parent_column.tolist(), strict=True)
            for row, count, tokens, parents in nodes:
                context, above = self._contexts[slots[row]], keys[row]
                keys[row] = [context.after(above[parent], token) for token, parent in zip(tokens, parents, strict=True)]
                for key, token in zip(keys[row][:count], tokens, strict=False):  # -1 are candidates at -inf that fill a frontier up
                    found.append(context.lookup(key, count, width) if token >= 0 else nothing)
                found += [nothing] * (width - count)
            return self._tensors(found, (len(level.rows), width, width))

        return grow(last_tokens, root, shapes, policy, state, expand)

    def _tensors(self, found: list[tuple[list[int], list[float]]], shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, log_probs = zip(*found, strict=True)
        ids, scores = torch.tensor(tokens, device=self.device), torch.tensor(log_probs, dtype=torch.float32, device=self.device)
        return ids.view(shape), scores.view(shape)
