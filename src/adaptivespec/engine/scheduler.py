"""Who runs: requests wait for a free slot, join at any step and leave at any step."""

from __future__ import annotations

import heapq
from collections import deque

from .request import Request
from .runner import Runner


class Scheduler:
    """First come, first served over the runner's slots. Not thread-safe."""

    def __init__(self, runner: Runner, num_slots: int) -> None:
        self.runner = runner
        self.free = list(range(num_slots))  # a heap: low slots first keeps the running ones neighbours
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def step(self) -> list[Request]:
        """Admit who fits, or else one decoding step for all who run.

        A prompt gives its first token, which is handed out before anything else is done.

        Returns:
            Every request that got tokens, finished ones included.
        """
        admitted = []
        while self.waiting and self.free:
            request = self.waiting.popleft()
            self.running.append(request)  # before it takes a slot: whatever happens now, releasing it gives the slot back
            try:
                request.slot = heapq.heappop(self.free)
                self.runner.prefill(request)
            except BaseException:  # Ctrl-C too: a request without tokens must not stay among the running
                self.abort(request)
                raise
            admitted.append(request)
        if admitted:
            self._release_finished()
            return admitted
        active = self.running = sorted(self.running, key=lambda r: r.slot)
        if active:
            self.runner.step(active)
            self._release_finished()
        return active

    def abort(self, request: Request) -> None:
        """Drop a request wherever it is; its slot is free at once. Finished ones are left alone."""
        if request.finish_reason is not None:
            return
        request.finish_reason = "abort"
        if request in self.waiting:
            self.waiting.remove(request)
        self._release_finished()

    def _release_finished(self) -> None:
        for request in self.running:
            if request.finish_reason is not None and request.slot >= 0:
                heapq.heappush(self.free, request.slot)
        self.running = [r for r in self.running if r.finish_reason is None]
