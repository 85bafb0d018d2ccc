"""Who runs: requests wait for a free slot, join at any step and leave at any step."""

from __future__ import annotations

from collections import deque

from .request import Request
from .runner import Runner


class Scheduler:
    """First come, first served over the runner's slots. Not thread-safe."""

    def __init__(self, runner: Runner, num_slots: int) -> None:
        self.runner, self.num_slots = runner, num_slots
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._owes_decoding = False

    @property
    def free(self) -> list[int]:
        """Slots that nobody has, low ones first, which keeps the running requests neighbours.

        Counted anew each time: no interruption, wherever it comes, can hand a slot out twice or lose it.
        """
        taken = {request.slot for request in self.running}
        return [slot for slot in range(self.num_slots) if slot not in taken]

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def step(self) -> list[Request]:
        """Admit who fits, or one decoding step for all who run; in turn when there is always somebody to admit.

        A prompt gives its first token, which is handed out before anything else is done. When a prompt fails (Ctrl-C too), its
        request is aborted; when a decoding step does, all who ran in it are: what it had written of them is not known.

        Returns:
            Every request that got tokens, finished ones included.
        """
        self._drop_finished()
        admitted = []
        may_admit = not (self._owes_decoding and self.running)
        self._owes_decoding = False
        while may_admit and self.waiting and (free := self.free):
            request = self.waiting.popleft()
            try:
                request.slot = free[0]
                self.running.append(request)
                self.runner.prefill(request)
            except BaseException:
                self.abort(request)
                raise
            admitted.append(request)
        if admitted:
            self._owes_decoding = True  # or a queue of short requests would keep those who run from ever going on
            self._drop_finished()
            return admitted
        active = self.running = sorted(self.running, key=lambda r: r.slot)
        if active:
            try:
                self.runner.step(active)
            except BaseException:
                for request in active:
                    request.finish_reason = "abort"  # also who reached an end in it: the step's record may be missing
                self._drop_finished()
                raise
            self._drop_finished()
        return active

    def abort(self, request: Request) -> None:
        """Drop a request wherever it is; its slot is free at once. What a finished one has come to stays."""
        if request.finish_reason is None:
            request.finish_reason = "abort"
        if request in self.waiting:
            self.waiting.remove(request)
        self._drop_finished()

    def _drop_finished(self) -> None:
        self.running = [r for r in self.running if r.finish_reason is None]
