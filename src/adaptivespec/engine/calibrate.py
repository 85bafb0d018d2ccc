"""What the parts of a step cost here: real requests whose trees take turns among many shapes, and the medians of their steps' seconds.

Measured inside real steps, because a draft level right after a verify, which has driven its weights out of the caches, takes twice as long
as one after another. Shapes are interleaved, so that a machine whose speed drifts slows all of them alike.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ..config import SamplingParams, SpeculativeConfig
from ..drafters.ngram import NGram
from ..errors import UserError
from ..method.acceptance import Acceptance
from ..method.costs import CostTable, Curve
from ..method.policy import PolicyDefaults, PolicyState, Root
from ..method.records import StepRecord
from ..method.tree import DraftTree, TreeShape
from ..models.decoder import Decoder

if TYPE_CHECKING:
    from .llm import LLM
    from .request import Request

DEEP = 5  # levels of the trees whose draft is compared with that of one level
NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
WIDTHS = (1, 2, 4, 8)
PROMPT = 96  # tokens; attention over a longer context is a few per cent of a step
BRIEF_NODES, BRIEF_WIDTHS, BRIEF_ROUNDS = (4, 8, 16, 32, 64), (1, 4), 3
"""Of a calibration at the start of an engine that has none: some seconds."""


def sweep(batch: int, nodes: Sequence[int] = NODES, widths: Sequence[int] = WIDTHS) -> list[TreeShape]:
    """The shapes that a batch takes turns with: verifies of 1 to 64 rows and more with a batch, and drafts of one and of `DEEP` levels."""
    most = max(64, 8 * batch)
    verified = [TreeShape(DEEP, 4, count) for count in nodes if batch * count <= most]
    drafted = [TreeShape(steps, width, width + 1 if steps == 1 else max(width + 1, DEEP + 1)) for width in widths for steps in (1, DEEP)]
    return list(dict.fromkeys([TreeShape.off(), *verified, *drafted]))


class _Turns(PolicyDefaults):
    """Every step another shape, `level` counting the steps: all requests of a batch plan the same."""

    name = "turns"

    def __init__(self, shapes: Sequence[TreeShape], rounds: int) -> None:
        self.shapes, order, generator = list(shapes), list(range(len(shapes))), random.Random(0)
        self.turns = [0]  # the first step is warm-up
        for _ in range(rounds):
            generator.shuffle(order)
            self.turns += order

    def reachable(self) -> list[TreeShape]:
        """The shapes."""
        return self.shapes

    def plan(self, state: PolicyState, root: Root) -> torch.Tensor:
        """int64 [B]: the shape whose turn it is."""
        return torch.tensor([self.turns[int(count) % len(self.turns)] for count in state.level.tolist()], device=state.level.device)

    def update(self, state: PolicyState, tree: DraftTree, acceptance: Acceptance, num_steps: torch.Tensor) -> PolicyState:
        """The next turn."""
        return dataclasses.replace(state, level=state.level + 1)


def calibrate(
    llm: LLM,
    batches: Sequence[int] = (1,),
    *,
    nodes: Sequence[int] = NODES,
    widths: Sequence[int] = WIDTHS,
    rounds: int = 7,
    label: str = "",
    on_step: Callable[[], None] | None = None,
) -> CostTable:
    """Measure with an engine that has a drafter and nothing to do.

    Args:
        llm: the engine; it answers prompts of random tokens meanwhile.
        batches: sizes, no larger than its `max_running_requests`.
        nodes, widths, rounds: see `sweep`; how often each shape has its turn.
        label: of the table.
        on_step: called after each step, for a progress bar; there are `num_steps` of them.

    Raises:
        UserError: contexts too short for it.
    """
    records: list[StepRecord] = []
    for batch in batches:
        records += _run(llm, batch, _Turns(sweep(batch, nodes, widths), rounds), on_step)
    if not isinstance(llm.drafter, NGram) and not any(len(record.draft_rows) > 1 for record in records):  # a lookup may find nothing
        raise UserError("the drafter drafted no second level, so what one costs is not known: its context is too short")
    return fit(records, label)


def num_steps(batches: Sequence[int], nodes: Sequence[int] = NODES, widths: Sequence[int] = WIDTHS, rounds: int = 7) -> int:
    """Steps that `calibrate` takes."""
    return sum(1 + rounds * len(sweep(batch, nodes, widths)) for batch in batches)


def _run(llm: LLM, batch: int, policy: _Turns, on_step: Callable[[], None] | None) -> list[StepRecord]:
    """A record of every step but the first of `batch` requests in step with each other."""
    vocab, generator = llm.model.config.vocab_size, random.Random(batch)
    room = min(llm.context_length, getattr(llm.drafter, "length", llm.context_length))  # a head's context may be the shorter one
    length = max(1, min(PROMPT, room // 4))
    records: list[StepRecord] = []
    steps = len(policy.turns)
    running: list[Request] = []
    try:
        while steps > 0:
            if not running or any(request.finish_reason is not None for request in running):
                for request in running:
                    llm.abort(request)
                params = SamplingParams(max_tokens=llm.context_length, ignore_eos=True)
                config = SpeculativeConfig(policy="static", margin=None)
                few = [generator.randrange(vocab) for _ in range(8)]  # so that prompt lookup finds something
                prompts = [[generator.choice(few) for _ in range(length)] for _ in range(batch)]
                state = running[0].state if running else policy.initial(1, llm.model.decoder.device)
                running = [request for prompt in prompts for request in llm.submit(prompt, params, speculative=config)]
                for request in running:
                    request.policy, request.state = policy, state
                llm.step()  # the prompts
                if all(request.finish_reason is not None for request in running):
                    raise UserError(f"a context of {llm.context_length} tokens leaves no room to measure what a step costs")
                continue
            llm.step()
            steps -= 1
            records.append(running[0].records[-1])
            if on_step is not None:
                on_step()
    finally:
        for request in running:
            llm.abort(request)
    return records[1:]


def fit(records: Sequence[StepRecord], label: str = "") -> CostTable:
    """The table behind steps whose shapes took turns: medians, and draft levels from deep drafts less shallow ones of the same width."""
    verify: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    start: dict[int, list[float]] = defaultdict(list)
    deep: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
    for record in records:
        verify[record.batch][record.rows].append(record.seconds_verify)
        if len(record.draft_rows) == 1:
            start[record.batch].append(record.seconds_draft)
        if len(record.draft_rows) > 1:
            deep[record.batch, record.draft_rows[1]].append((len(record.draft_rows) - 1, record.seconds_draft))
    begun = {batch: median(seconds) for batch, seconds in start.items()}
    levels: dict[int, list[float]] = defaultdict(list)
    for (batch, rows), found in deep.items():
        # Noise must not make a level cheaper than nothing.
        levels[rows].append(max(1e-6, median((seconds - begun[batch]) / count for count, seconds in found)))
    return CostTable(
        start=_points(begun),
        level=_points({rows: median(seconds) for rows, seconds in levels.items()} or {1: 1e-6}),  # nothing to look up was found
        verify={batch: _points({rows: median(seconds) for rows, seconds in rows.items()}) for batch, rows in verify.items()},
        fixed=median(record.seconds_rest for record in records),
        label=label,
    )


def _points(seconds: dict[int, float]) -> Curve:
    rows = sorted(seconds)
    return Curve(tuple(rows), tuple(seconds[row] for row in rows))


def identity(decoder: Decoder, drafter: object) -> dict[str, Any]:
    """What the seconds of a step depend on: machine, threads, versions, the model's shape and precision, and the drafter."""
    config, draft = decoder.config, getattr(drafter, "config", None) or getattr(getattr(drafter, "decoder", None), "config", None)
    on_cuda = decoder.device.type == "cuda"
    return {
        "processor": torch.cuda.get_device_name(decoder.device) if on_cuda else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "layers": config.num_layers,
        "hidden": config.hidden_size,
        "vocabulary": config.vocab_size,
        "bytes": decoder.num_bytes,
        "linear": decoder.lm_head.kernel,
        "drafter": type(drafter).__name__,
        "drafter_layers": getattr(draft, "num_layers", None),
        "drafter_hidden": getattr(draft, "hidden_size", None),
        "drafter_intermediate": getattr(draft, "intermediate_size", None),
        "drafter_vocabulary": getattr(drafter, "draft_vocab", getattr(draft, "vocab_size", None)),
    }


def _processor() -> str:
    """The CPU's own name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
