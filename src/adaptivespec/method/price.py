"""What a second is worth: the running tokens per second of a batch, and whether drafting pays there at all. Host numbers alone."""

from __future__ import annotations

from .costs import CostModel
from .records import StepTotals

HORIZON = 64  # steps that the running rate remembers: some hundred tokens
_FIRST_PAUSE = 4  # steps without the drafter after it began to lose; doubles up to `probe`
_CREDIT = 0.1  # tokens per request and step that drafting is believed to gain before any were seen
_FAITH = 8  # steps that this belief weighs as much as


class Price:
    """The books of one size of batch.

    Drafting that has lost over the last steps is paused: for 4 steps first, then one request tries it again for a step, and the pause
    doubles, up to `probe` steps, for as long as that one loses.

    Args:
        costs: what steps cost. Seconds are its, not the stopwatch's: a process that froze says nothing about the next step.
        requests: in the batch.
        probe: most steps of a pause.
        like: the books of another size, whose findings hold until these have their own.
    """

    def __init__(self, costs: CostModel, requests: int, probe: int, like: Price | None = None) -> None:
        self.costs, self.requests, self.probe = costs, requests, probe
        # As if plain decoding had run for an eighth of the horizon: the least that the best policy brings.
        self._tokens, self._seconds = HORIZON / 8 * requests, HORIZON / 8 * costs.plain(requests)
        self._gain, self._seen, self._left, self._pause = _CREDIT * requests, 0, 0, 0
        if like is not None:
            found = requests * like._gain / like.requests
            self._gain, self._left, self._pause = min(max(found, -self._gain), self._gain), like._left, like._pause

    @property
    def tokens_per_second(self) -> float:
        """The running rate, no less than that of plain decoding."""
        return max(self._tokens / self._seconds, self.requests / self.costs.plain(self.requests))

    def asks(self, own: int) -> int:
        """For how many of `own` requests the drafter is to be asked in the next step: all, one as a probe, or none."""
        if not self._pause:
            return own
        return 0 if self._left else min(own, 1)

    def book(self, step: StepTotals) -> None:
        """One step more."""
        price, keep = self.tokens_per_second, 1 - 1 / HORIZON
        self._tokens = keep * self._tokens + step.emitted
        self._seconds = (
            keep * self._seconds
            + self.costs.drafting(step.draft_rows)
            + self.costs.verifying(step.requests, step.rows)
            + self.costs.resting(bool(step.draft_rows))
        )
        if not step.asked:
            self._left = max(0, self._left - 1)
            return
        gain = self._gained(step, price)
        if self._pause and gain > 0:  # a good probe of one request: all may try, but what it gained is not yet believed of them
            self._gain, self._seen, self._pause = _CREDIT * self.requests, 0, 0
            return
        self._seen += 1
        self._gain += (gain - self._gain) / min(self._seen + _FAITH, HORIZON / 2)
        if self._gain < 0 or self._pause:
            self._pause = self._left = min(self.probe, max(_FIRST_PAUSE, 2 * self._pause))

    def _gained(self, step: StepTotals, price: float) -> float:
        """Tokens that drafting brought beyond what its seconds are worth, as if all own requests had drafted like those that were asked."""
        scale = step.own_requests / step.asked
        others = step.rows - step.own_rows
        drafted = self.costs.verifying(step.requests, others + round(step.own_requests + scale * (step.own_rows - step.own_requests)))
        undrafted = self.costs.verifying(step.requests, others + step.own_requests)
        seconds = drafted - undrafted
        if step.draft_rows:  # others drafted too: they pay for themselves
            together = step.draft_rows[0] - step.asked + step.own_requests
            draft = self.costs.drafting([round(rows * together / step.draft_rows[0]) for rows in step.draft_rows])
            bookkeeping = max(0.0, self.costs.resting(True) - self.costs.resting(False))
            seconds += step.own_requests / together * (draft + bookkeeping)
        return scale * step.accepted - price * seconds
