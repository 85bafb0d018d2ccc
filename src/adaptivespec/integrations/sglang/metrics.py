"""Prometheus series beside SGLang's own, published by the scheduler process: counts of what was really drafted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...method.tree import TreeShape


class Series:
    """Counters and a gauge under SGLang's labels.

    Args:
        labels: SGLang's labels with their values, as its own collector has them.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        # SGLang sets the folder that processes share their values in before anything may import this
        from prometheus_client import Counter, Gauge

        names, values = list(labels), dict(labels)
        steps = "Verify steps, one per request and step, by the shape that was drafted."
        self._labels = values
        self._steps = Counter("adaptivespec:verify_steps", steps, [*names, "shape"])
        about = {
            "drafted_tokens": "Drafted tokens sent to the target.",
            "accepted_tokens": "Accepted drafted tokens, promoted ones included, the bonus excluded.",
            "promoted_tokens": "Accepted tokens that were not the target's own choice.",
            "spent_nats": "Quality budget spent on promotions, in nats.",
        }
        self._drafted, self._accepted, self._promoted, self._spent = (
            Counter(f"adaptivespec:{name}", text, names).labels(**values) for name, text in about.items()
        )
        held = Gauge("adaptivespec:requests", "Requests whose state is held.", names, multiprocess_mode="mostrecent")
        self._requests = held.labels(**values)

    def add(self, shape: TreeShape, rows: Iterable[tuple[int, int, float]]) -> None:
        """One step: per request its accepted and promoted tokens and the nats it spent."""
        for accepted, promoted, nats in rows:
            self._steps.labels(**self._labels, shape=str(shape)).inc()
            self._drafted.inc(shape.num_draft_tokens - 1)
            self._accepted.inc(accepted)
            self._promoted.inc(promoted)
            self._spent.inc(max(nats, 0.0))

    def hold(self, requests: int) -> None:
        """So many requests have a state now."""
        self._requests.set(requests)
