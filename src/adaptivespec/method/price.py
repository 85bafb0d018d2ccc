"""What a second is worth: the running tokens per second of a batch, and whether drafting pays there at all. Host numbers alone."""

from __future__ import annotations

from .costs import CostModel
from .records import StepTotals

HORIZON = 64  # steps that the running rate remembers: some hundred tokens
_FIRST_PAUSE = 4  # steps without the drafter after it began to lose; doubles up to `probe`
_CREDIT = 0.1  # tokens per request and step that drafting is believed to gain before any were seen


class Price:
    """The books of one size of batch.

    Drafting that has lost over the last steps is paused: for 4 steps first, then one step tries it again, and the pause doubles, up to
    `probe` steps, for as long as that one step loses.

    Args:
        costs: what steps cost. Seconds are its, not the stopwatch's: a process that froze says nothing about the next step.
        requests: in the batch.
        probe: most steps of a pause.
    """

    def __init__(self, costs: CostModel, requests: int, probe: int) -> None:
        self.costs, self.requests, self.probe = costs, requests, probe
        # As if plain decoding had run for an eighth of the horizon: the least that the best policy brings.
        self._tokens, self._seconds = HORIZON / 8 * requests, HORIZON / 8 * costs.plain(requests)
        self._gain, self._left, self._pause = _CREDIT * requests, 0, 0

    @property
    def tokens_per_second(self) -> float:
        """The running rate, no less than that of plain decoding."""
        return max(self._tokens / self._seconds, self.requests / self.costs.plain(self.requests))

    @property
    def rests(self) -> bool:
        """Whether the drafter is to be left alone in the next step."""
        return self._left > 0

    def book(self, step: StepTotals) -> None:
        """One step more."""
        price, keep = self.tokens_per_second, 1 - 1 / HORIZON
        draft = self.costs.drafting(step.draft_rows)
        verify = self.costs.verifying(step.requests, step.rows)
        self._tokens = keep * self._tokens + step.emitted
        self._seconds = keep * self._seconds + draft + verify + self.costs.rest * self.costs.known.fixed
        if not step.asked:
            self._left = max(0, self._left - 1)
            return
        undrafted = self.costs.verifying(step.requests, step.rows - step.own_rows + step.own_requests)
        share = step.own_requests / step.draft_rows[0] if step.draft_rows else 0.0  # others drafted too: they pay for themselves
        gain = step.accepted - price * (share * draft + verify - undrafted)
        if self._pause and gain > 0:  # a good probe
            self._gain, self._pause = _CREDIT * self.requests, 0
        self._gain += (gain - self._gain) / (HORIZON / 2)
        if self._gain < 0 or self._pause:
            self._pause = self._left = min(self.probe, max(_FIRST_PAUSE, 2 * self._pause))
