"""What a step costs on a machine: measured tables, interpolated between their points and assumed to be neither convex nor rising.

A step's seconds are those of its draft (`start` once when the drafter is asked, `level` per further draft forward), of the target's forward
(`verify`, of all rows of the batch) and of the rest (`fixed`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_LOAD_WEIGHT = 1 / 32  # of the newest step in the load factors: a burst of other work is followed within a second or two
_LOAD_STEP = 2.0  # a step further off than this counts as so far off: a frozen process says nothing about the next step
_BEND = 4.0  # a verify takes this norm of its two parts: it turns from waiting to computing about as sharply as a CPU's does
_LOAD_MOST = 64.0  # times as slow, or as fast, as the table


@dataclass(frozen=True)
class Curve:
    """Seconds at some numbers of rows: linear between them, constant before the first; beyond the last the last slope, unless it falls.

    Raises:
        ValueError: no points, points out of order, or seconds that are negative or not finite.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.seconds):
            raise ValueError("a cost curve needs as many seconds as rows, and at least one")
        if self.rows[0] < 0 or any(a >= b for a, b in pairwise(self.rows)):
            raise ValueError(f"the rows of a cost curve ascend from 0 or more, not {list(self.rows)}")
        if not all(0 <= value < float("inf") for value in self.seconds):
            raise ValueError(f"the seconds of a cost curve are finite and not negative, not {list(self.seconds)}")

    def at(self, rows: float) -> float:
        """Seconds at a number of rows."""
        points, seconds = self.rows, self.seconds
        if rows <= points[0] or len(points) == 1:
            return seconds[0]
        i = min(bisect_left(points, rows), len(points) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (points[i] - points[i - 1])
        if rows > points[-1]:
            return seconds[-1] + max(slope, 0.0) * (rows - points[-1])
        return seconds[i - 1] + slope * (rows - points[i - 1])

    def arithmetic_at(self, rows: float) -> float:
        """Seconds that computing takes: the line through the curve's further half, drawn on to where waiting hides it; 0 if flat."""
        last, end = self.rows[-1], self.seconds[-1]
        middle = max(last / 2, self.rows[0])
        slope = (end - self.at(middle)) / (last - middle) if len(self.rows) > 1 else 0.0
        return max(0.0, end - slope * (last - rows)) if slope > 0 else 0.0


@dataclass(frozen=True)
class CostTable:
    """Seconds of the parts of a step.

    Attributes:
        start: by requests: the drafter commits what was accepted and proposes the trees' first level.
        level: by rows: one further draft forward.
        verify: for each measured batch size, by rows: the target's forward of so many rows, every request's root among them.
        fixed: acceptance, commit and bookkeeping of a step.
        label: where the numbers come from; shown wherever they are used.

    Raises:
        ValueError: no verify curve, a batch below 1, or a fixed time that is negative or not finite.
    """

    start: Curve
    level: Curve
    verify: Mapping[int, Curve]
    fixed: float
    label: str = ""

    def __post_init__(self) -> None:
        if not self.verify or min(self.verify) < 1:
            raise ValueError("a cost table needs a verify curve for some batch size, 1 or more")
        if not 0 <= self.fixed < float("inf"):
            raise ValueError(f"the fixed seconds of a cost table are finite and not negative, not {self.fixed}")
        if min(curve.at(batch) for batch, curve in self.verify.items()) <= 0:
            raise ValueError("a verify takes more than no time")

    def verify_at(self, batch: int, rows: float) -> float:
        """Seconds of the target's forward; between measured batch sizes linear, beyond them the nearest one's."""
        return self._between(batch, lambda curve: curve.at(rows))

    def arithmetic_at(self, batch: int, rows: float) -> float:
        """Seconds of a verify's arithmetic (see `Curve.arithmetic_at`) over those of waiting, which a single row shows."""
        return min(self._between(batch, lambda curve: curve.arithmetic_at(rows)) / max(self.verify_at(1, 1), 1e-9), 1e6)

    def _between(self, batch: int, value: Callable[[Curve], float]) -> float:
        """A value of the verify curves: between measured batch sizes linear, beyond them the nearest one's."""
        sizes = sorted(self.verify)
        if batch <= sizes[0]:
            return value(self.verify[sizes[0]])
        if batch >= sizes[-1]:
            return value(self.verify[sizes[-1]])
        i = bisect_left(sizes, batch)
        low, high = sizes[i - 1], sizes[i]
        share = (batch - low) / (high - low)
        return (1 - share) * value(self.verify[low]) + share * value(self.verify[high])

    def draft_at(self, draft_rows: Sequence[int]) -> float:
        """Seconds of drafting from `StepRecord.draft_rows`; 0 when the drafter was not asked."""
        return self.start.at(draft_rows[0]) + sum(map(self.level.at, draft_rows[1:])) if draft_rows else 0.0

    def step(self, draft_rows: Sequence[int], rows: int, batch: int) -> tuple[float, float, float]:
        """Seconds of draft, verify and rest of a step; arguments as `StepRecord` names them."""
        return self.draft_at(draft_rows), self.verify_at(batch, rows), self.fixed


@dataclass
class CostModel:
    """A table as policies read it, scaled by how the machine's steps compare with it lately.

    A verify waits for its weights or computes, whichever takes longer, and other work on a machine may slow either. A scale alone would not
    do: where memory has become slow further rows are free, where it has become fast they are not, whatever the table says.

    Attributes:
        table: None until somebody has calibrated.
        follows: whether `observe` moves the factors; a modelled run stays with its table.
        draft: measured over tabled seconds.
        rest, drafted_rest: the same of the rest of a step, without drafting and with it, which takes longer.
        memory, arithmetic: the same of the seconds for which a verify waits for its weights, and of those for which it computes.
    """

    table: CostTable | None = None
    follows: bool = True
    draft: float = 1.0
    memory: float = 1.0
    arithmetic: float = 1.0
    rest: float = 1.0
    drafted_rest: float = 1.0
    _tabled: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict, repr=False)
    _beyond: dict[tuple[int, int], list[float]] = field(default_factory=dict, repr=False)

    @property
    def known(self) -> CostTable:
        """The table. Raises ValueError when nobody has calibrated."""
        if self.table is None:
            raise ValueError("nobody knows what a step costs here yet: calibrate, or give a cost table")
        return self.table

    def use(self, table: CostTable) -> None:
        """Take another table."""
        self.table, self.draft, self.memory, self.arithmetic, self.rest, self.drafted_rest = table, 1.0, 1.0, 1.0, 1.0, 1.0
        self._tabled.clear()
        self._beyond.clear()

    def plain(self, batch: int) -> float:
        """Seconds of a step of plain decoding."""
        return self.verifying(batch, batch) + self.resting(False)

    def drafting(self, draft_rows: Sequence[int]) -> float:
        """Seconds of a step's drafting."""
        return self.draft * self.known.draft_at(draft_rows)

    def resting(self, drafted: bool) -> float:
        """Seconds of the rest of a step."""
        return (self.drafted_rest if drafted else self.rest) * self.known.fixed

    def verifying(self, batch: int, rows: int) -> float:
        """Seconds of a verify."""
        told, arithmetic = self._tabled_verify(batch, rows)
        loaded: float = told * ((self.memory**_BEND + self.arithmetic**_BEND * arithmetic) / (1 + arithmetic)) ** (1 / _BEND)
        return loaded

    def _tabled_verify(self, batch: int, rows: int) -> tuple[float, float]:
        """Seconds of a verify, and `CostTable.arithmetic_at` to the power of the bend; looked up once, since a step asks many times."""
        found = self._tabled.get((batch, rows))
        if found is None:
            found = self.known.verify_at(batch, rows), self.known.arithmetic_at(batch, rows) ** _BEND
            self._tabled[batch, rows] = found
        return found

    def rows_beyond(self, batch: int, base: int, count: int) -> list[float]:
        """Seconds that 1, 2, ... and at least `count` rows more than `base` add to a verify."""
        beyond = self._beyond.setdefault((batch, base), [])  # a step asks several times
        if len(beyond) < count:
            now = self.verifying(batch, base)
            beyond += (self.verifying(batch, base + n) - now for n in range(len(beyond) + 1, count + 1))
        return beyond

    def observe(self, draft_rows: Sequence[int], rows: int, batch: int, seconds: tuple[float, float, float]) -> None:
        """Follow the load: fold one step's seconds of draft, verify and rest in."""
        self._beyond.clear()
        if not self.follows or self.table is None:
            return
        tabled = (self.table.draft_at(draft_rows), self.verifying(batch, rows), self.table.fixed)
        factors = (self.draft, 1.0, self.drafted_rest if draft_rows else self.rest)
        moved = [
            factor + _LOAD_WEIGHT * (min(max(measured / told, factor / _LOAD_STEP), factor * _LOAD_STEP) - factor) if told > 0 else factor
            for factor, measured, told in zip(factors, seconds, tabled, strict=True)
        ]
        self.draft, change = moved[0], moved[1] - 1.0
        if draft_rows:
            self.drafted_rest = moved[2]
        else:
            self.rest = moved[2]
        # Waiting and computing share the news by their parts in what so many rows cost, so that this cost moves by `change`.
        memory = self.memory**_BEND
        waiting = memory / (memory + self.arithmetic**_BEND * self._tabled_verify(batch, rows)[1])
        change /= waiting**2 + (1 - waiting) ** 2
        self.memory = min(max(self.memory * (1 + waiting * change), 1 / _LOAD_MOST), _LOAD_MOST)
        self.arithmetic = min(max(self.arithmetic * (1 + (1 - waiting) * change), 1 / _LOAD_MOST), _LOAD_MOST)
