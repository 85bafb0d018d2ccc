"""A drafter whose hits are prescribed: it knows what the target will say and hides the truth among wrong tokens."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import torch

from adaptivespec.drafters.grow import Level, grow
from adaptivespec.method.policy import PolicyState, Root, TreePolicy
from adaptivespec.method.tree import DraftTree, TreeShape


class ReferenceDrafter:
    """Drafts from known answers through the real tree growth.

    Args:
        answers: for each prompt the tokens that plain decoding gives.
        vocab: size of the vocabulary.
        hit: chance that a node's children contain the true next token at all; 1 always, 0 never.
        seed: of the places where the truth is put and of the wrong tokens.
    """

    feature_layers = ()

    def __init__(self, answers: dict[tuple[int, ...], list[int]], vocab: int, hit: float = 0.8, seed: int = 0) -> None:
        self.answers, self.vocab, self.hit, self.random = answers, vocab, hit, random.Random(seed)
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.known: dict[int, int] = {}
        self.drafted_slots: list[int] = []

    def allocate(self, num_slots: int, length: int, shapes: Sequence[TreeShape]) -> None:
        self.shapes = list(shapes)

    def start(self, slot: int, prompt: Sequence[int]) -> None:
        self.prompts[slot] = tuple(prompt)
        self.known[slot] = -(len(prompt) - 1)  # commit counts the prompt's own tokens first

    def commit(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], features: torch.Tensor | None) -> None:
        for slot, block in zip(slots, tokens, strict=True):
            self.known[slot] += len(block)

    def _children(self, slot: int, level: int, on_path: bool, width: int) -> list[int]:
        """Distinct tokens after `level` drafted ones; the truth is among them when the node is on the true path and luck has it."""
        answer = self.answers[self.prompts[slot]]
        index = self.known[slot] + level
        tokens = self.random.sample(range(self.vocab), width)
        if on_path and index < len(answer) and self.random.random() < self.hit:
            truth = answer[index]
            if truth not in tokens:  # mostly the drafter's favourite, always when it never fails
                favourite = self.hit == 1 or self.random.random() < 0.6
                tokens[0 if favourite else self.random.randrange(width)] = truth
        return tokens

    def begin(self, slots: Sequence[int], width: int) -> Root:
        tokens = [self._children(slot, 0, True, width) for slot in slots]
        return Root(torch.tensor(tokens), self._log_probs(len(slots), width))

    def _log_probs(self, rows: int, width: int) -> torch.Tensor:
        # a clear favourite, so that deep and narrow beats shallow and wide as with a real drafter
        scores = torch.tensor(
            [[-0.4 * self.random.random(), *(-1 - 3 * self.random.random() for _ in range(width - 1))] for _ in range(rows)]
        )
        return scores.sort(-1, descending=True).values - 0.1

    def draft(
        self,
        slots: Sequence[int],
        last_tokens: torch.Tensor,
        root: Root,
        shapes: Sequence[TreeShape],
        policy: TreePolicy,
        state: PolicyState,
    ) -> DraftTree:
        self.drafted_slots += [slot for slot, shape in zip(slots, shapes, strict=True) if shape.num_steps]
        paths: dict[tuple[int, int], list[int]] = {}

        def expand(level: Level) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal paths
            now: dict[tuple[int, int], list[int]] = {}
            width = level.tokens.shape[1]
            children = torch.zeros(len(level.rows), width, width, dtype=torch.int64)
            log_probs = torch.full((len(level.rows), width, width), -math.inf)
            for (i, row), column in itertools.product(enumerate(level.rows), range(width)):
                if not level.real[i, column]:
                    continue
                above = paths[row, int(level.parent_column[i, column])] if level.index > 1 else []
                path = now[row, column] = [*above, int(level.tokens[i, column])]
                answer = self.answers[self.prompts[slots[row]]]
                start = self.known[slots[row]]
                true = path == answer[start : start + len(path)]
                children[i, column] = torch.tensor(self._children(slots[row], len(path), true, width))
                log_probs[i, column] = self._log_probs(1, width)[0]
            paths = now
            return children, log_probs

        return grow(last_tokens, root, shapes, policy, state, expand)
