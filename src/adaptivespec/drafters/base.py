"""What every drafter offers the engine. A drafter keeps one slot of state per running request, like the target's KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..method.policy import PolicyState, Root, TreePolicy
from ..method.tree import DraftTree, TreeShape


class Drafter(Protocol):
    """Proposes trees of any `TreeShape`. The engine calls start, then commit and begin / draft in turn."""

    feature_layers: tuple[int, ...]
    """Layers of the target whose inputs `commit` must be given; empty when the drafter needs none."""

    def allocate(self, num_slots: int, length: int, shapes: Sequence[TreeShape]) -> None:
        """Make room for requests of up to `length` tokens and trees of any of `shapes`."""
        ...

    def start(self, slot: int, prompt: Sequence[int]) -> None:
        """A new request takes a slot."""
        ...

    def commit(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], features: torch.Tensor | None) -> None:
        """Tell what was committed.

        Args:
            slots: the requests.
            tokens: per request the tokens that follow its feature rows (accepted tokens and bonus, or the prompt shifted by one).
            features: [sum of len(tokens), F], the target's features of the rows before those tokens, in order.
        """
        ...

    def begin(self, slots: Sequence[int], width: int) -> Root:
        """The best `width` continuations of each request; log-probabilities of -inf where it cannot draft any more."""
        ...

    def draft(
        self,
        slots: Sequence[int],
        last_tokens: torch.Tensor,
        root: Root,
        shapes: Sequence[TreeShape],
        policy: TreePolicy,
        state: PolicyState,
    ) -> DraftTree:
        """Grow one tree per request.

        Args:
            slots: the requests.
            last_tokens: int64 [B], the last committed tokens: the trees' roots.
            root: what `begin` returned.
            shapes: the planned shape of each request, from `policy.plan`.
            policy: asked for `keep_going` when it decides per level, and for `prune`.
            state: the policy's state of these requests.
        """
        ...
