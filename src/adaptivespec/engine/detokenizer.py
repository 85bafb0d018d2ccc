"""Text out of tokens as they come: never half a character, never a piece of a stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Detokenizer:
    """One answer's text. Bytes that make no character yet and beginnings of stop strings are held back until decided.

    Args:
        backend: the tokenizer; special tokens are left out of the text.
        stop: strings that end the answer.
        include_stop: whether the text keeps the stop string.

    Attributes:
        pieces: per token the text that it made certain; their concatenation is the answer's text once `finish` was called.
        stopped_by: the stop string that was found.
    """

    def __init__(self, backend: Tokenizer, stop: tuple[str, ...] = (), include_stop: bool = False) -> None:
        self.backend, self.stop, self.include_stop = backend, stop, include_stop
        self.pieces: list[str] = []
        self.stopped_by: str | None = None
        self._stream = self._new_stream()
        self._text = ""
        self._released = 0
        self._searchable = 0

    @staticmethod
    def _new_stream() -> Any:
        from tokenizers.decoders import DecodeStream

        return DecodeStream(skip_special_tokens=True)

    def add(self, token: int, search: bool = True) -> bool:
        """Take the next token in; True when it completes a stop string.

        With `search` off (fewer than min_tokens so far) nothing is looked for, not even later, in the text up to here.
        """
        try:
            piece = self._stream.step(self.backend, token) or ""
        except Exception:  # tokenizers gives up on some invalid byte sequences; what follows is decoded afresh
            self._stream = self._new_stream()
            piece = self._stream.step(self.backend, token) or ""
        start = len(self._text)
        self._text += piece
        if not search:
            self._searchable = len(self._text)
        elif piece and self.stop and self._find(start):
            self._release(len(self._text))
            return True
        self._release(len(self._text) - self._undecided())
        return False

    def finish(self, token_ids: list[int], aborted: bool = False) -> str:
        """The whole text, once no token follows; what was held back joins the last piece, or is dropped when the answer was aborted."""
        if aborted:
            self._text = self._text[: self._released]
        elif self.stopped_by is None:
            whole = self.backend.decode(token_ids, skip_special_tokens=True)
            if whole.startswith(self._text):  # a character that never became whole shows as the replacement character
                self._text = whole
            if self.pieces:
                self.pieces[-1] += self._text[self._released :]
            self._released = len(self._text)
        return self._text

    def _find(self, start: int) -> bool:
        """Cut the text at the earliest stop string that ends after `start`."""
        found = []
        for stop in self.stop:
            at = self._text.find(stop, max(self._searchable, start - len(stop) + 1))
            if at >= 0:
                found.append((at, -len(stop), stop))
        if not found:
            return False
        at, _, self.stopped_by = min(found)
        self._text = self._text[: at + len(self.stopped_by) if self.include_stop else at]
        return True

    def _undecided(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = min(max(map(len, self.stop), default=0) - 1, len(self._text) - self._searchable)
        for count in range(longest, 0, -1):
            if any(stop.startswith(self._text[-count:]) for stop in self.stop):
                return count
        return 0

    def _release(self, end: int) -> None:
        self.pieces.append(self._text[self._released : end])
        self._released = max(self._released, end)
