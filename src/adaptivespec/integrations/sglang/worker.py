"""SGLang's speculative worker with more than one shape: each shape's attention backends and CUDA graphs, and switching between them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...method.tree import TreeShape
from .shapes import Shapes

logger = logging.getLogger(__name__)

_CHAIN_BUFFERS = ("_topk1_parents_prealloc", "_topk1_score_indices_prealloc")


@dataclass(frozen=True)
class PreparedShape:
    """What belongs to a shape.

    Attributes:
        shape: the shape.
        runtime: SGLang's SpecRuntimeState: attention backends and CUDA graphs of draft, verify and draft-extend.
        chain_buffers: SGLang's constants of a chain (topk 1).
    """

    shape: TreeShape
    runtime: Any
    chain_buffers: tuple[Any, ...]


class ShapeSwitch:
    """Prepares shapes on SGLang's worker and puts one in place for a step; between steps the worker has the shape of the server's flags.

    Args:
        worker: SGLang's EAGLEWorkerV2.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._prepared: dict[TreeShape, PreparedShape] = {}

    def prepare(self, shapes: Shapes, graph_memory: float | None) -> None:
        """Build every shape of the policy, or, where CUDA graphs of all would take too much memory, an even selection of them.

        Args:
            shapes: the policy's; told which of them are prepared.
            graph_memory: GiB that all may take together; None is half of what is free now.
        """
        free = self._free_memory()
        limit = free / 2 if graph_memory is None else graph_memory
        largest = max(shapes.all, key=lambda shape: (shape.num_draft_tokens, shape.topk))
        first = self._build(largest)
        each = free - self._free_memory()
        fit = len(shapes.all) if each <= 0 else max(1, int(limit / each))
        chosen = shapes.prepare_only(min(fit, len(shapes.all)))
        if len(chosen) < len(shapes.all):
            logger.warning(
                "adaptivespec: CUDA graphs of a shape take %.2f GiB and %.2f GiB are allowed: %d of %d shapes are prepared (%s)",
                each,
                limit,
                len(chosen),
                len(shapes.all),
                " ".join(map(str, chosen)),
            )
        for shape in chosen:
            self._prepared[shape] = first if shape == largest else self._build(shape)

    @contextlib.contextmanager
    def at(self, shape: TreeShape) -> Iterator[None]:
        """The worker with this shape in place."""
        prepared = self._prepared[shape]
        worker, runtime = self._worker, prepared.runtime
        drafter, target = worker.draft_worker, worker.target_worker.model_runner
        extend_backend = runtime.draft_extend_attn_backend
        if extend_backend is None:  # the runner's own backend serves draft-extend at every shape
            extend_backend = drafter.draft_runner.attn_backend
        values = [
            (drafter, "draft_attn_backend", runtime.draft_attn_backend),
            (drafter, "draft_extend_attn_backend", runtime.draft_extend_attn_backend),
            (drafter, "cuda_graph_runner", runtime.cuda_graph_runner),
            (drafter, "cuda_graph_runner_for_draft_extend", runtime.cuda_graph_runner_for_draft_extend),
            (drafter.draft_runner, "draft_attn_backend", runtime.draft_attn_backend),
            (drafter.draft_runner, "attn_backend", extend_backend),
            (target, "attn_backend", runtime.target_attn_backend),
            (target, "decode_cuda_graph_runner", runtime.target_graph_runner),
            *((drafter, name, value) for name, value in zip(_CHAIN_BUFFERS, prepared.chain_buffers, strict=True)),
        ]
        with self._numbers(shape), _replaced(values):
            yield

    def _build(self, shape: TreeShape) -> PreparedShape:
        from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
        from sglang.srt.speculative.spec_utils import draft_tp_context

        worker, drafter = self._worker, self._worker.draft_worker
        with (
            self._numbers(shape),
            _replaced([(drafter, name, getattr(drafter, name)) for name in _CHAIN_BUFFERS]),
            draft_tp_context(drafter.parallel_layout),
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
        ):
            drafter._rebuild_topk1_chain_buffers()
            runtime = worker.build_adaptive_runtime_state(shape.num_steps, shape.num_draft_tokens)
            return PreparedShape(shape, runtime, tuple(getattr(drafter, name) for name in _CHAIN_BUFFERS))

    @contextlib.contextmanager
    def _numbers(self, shape: TreeShape) -> Iterator[None]:
        """The shape's numbers wherever SGLang reads them."""
        from sglang.srt.runtime_context import get_spec

        numbers = {
            "topk": shape.topk,
            "speculative_num_steps": shape.num_steps,
            "speculative_num_draft_tokens": shape.num_draft_tokens,
        }
        values = [(owner, name, value) for owner in (self._worker, self._worker.draft_worker) for name, value in numbers.items()]
        with (
            _replaced(values),
            # The configuration's own scoped override: RuntimeContext.override would add to its log at every step.
            get_spec().override(
                speculative_num_steps=shape.num_steps,
                speculative_eagle_topk=shape.topk,
                speculative_num_draft_tokens=shape.num_draft_tokens,
            ),
        ):
            yield

    def _free_memory(self) -> float:
        """GiB, the least over all ranks; 0 on a CPU, where no graph is captured."""
        worker = self._worker
        if worker.device != "cuda":
            return 0.0
        from sglang.srt.runtime_context import get_parallel
        from sglang.srt.utils.common import get_available_gpu_memory

        group = get_parallel().tp_group
        shared = group.world_size > 1
        return float(get_available_gpu_memory(worker.device, worker.gpu_id, distributed=shared, cpu_group=group.cpu_group))


@contextlib.contextmanager
def _replaced(values: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Attributes (owner, name, value) set for a while."""
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in values]
    try:
        for owner, name, value in values:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)
