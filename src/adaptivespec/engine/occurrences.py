"""Which tokens a request's text holds and how often, kept as it grows, so that penalties need not go through the text at every step."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import torch


class Occurrences:
    """Distinct tokens in the order of their first occurrence, a column each.

    Args:
        prompt: its tokens occur, but count nothing.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self._column: dict[int, int] = {}
        self._tokens = array("q")
        self._counts = array("f")
        for token in prompt:
            self._find(token)
        self.prompt_columns = len(self._tokens)

    def add(self, token: int) -> None:
        """One more token of the answer."""
        self._counts[self._find(token)] += 1

    def columns(self, drafted: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What penalties act on while `drafted` tokens (distinct or not) may follow.

        Returns:
            Token ids int64 [U] and their counts fp32 [U] in the answer so far, columns of drafted tokens that are new at the end; and
            each drafted token's column, int64 [len(drafted)].
        """
        column, new = self._column, dict[int, int]()
        places = [column[token] if token in column else new.setdefault(token, len(self._tokens) + len(new)) for token in drafted]
        tokens = self._tokens + array("q", new)
        counts = self._counts + array("f", bytes(4 * len(new)))
        # frombuffer shares the memory of the copies just made
        ids = torch.frombuffer(tokens, dtype=torch.int64) if tokens else torch.empty(0, dtype=torch.int64)
        seen = torch.frombuffer(counts, dtype=torch.float32) if counts else torch.empty(0)
        return ids.to(device), seen.to(device), torch.tensor(places, dtype=torch.int64, device=device)

    def _find(self, token: int) -> int:
        """The token's column, a new one when it has none."""
        place = self._column.setdefault(token, len(self._tokens))
        if place == len(self._tokens):
            self._tokens.append(token)
            self._counts.append(0.0)
        return place
