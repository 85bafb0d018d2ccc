"""Shapes on SGLang's worker: everything of a shape is in place for a step and gone after it; memory decides how many there are."""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from adaptivespec.integrations.sglang.shapes import Shapes
from adaptivespec.integrations.sglang.worker import ShapeSwitch
from adaptivespec.method.policy import Adaptive
from adaptivespec.method.tree import TreeShape


class Spec(SimpleNamespace):
    """SGLang's bag of speculative settings."""

    @contextlib.contextmanager
    def override(self, **values: Any) -> Iterator[None]:
        kept = {name: getattr(self, name) for name in values}
        self.__dict__.update(values)
        try:
            yield
        finally:
            self.__dict__.update(kept)


class Drafter(SimpleNamespace):
    def _rebuild_topk1_chain_buffers(self) -> None:
        if self.topk == 1:
            assert self.speculative_num_draft_tokens == self.speculative_num_steps + 1
            self._topk1_parents_prealloc = f"parents of {self.speculative_num_steps}"


class Worker(SimpleNamespace):
    """What the plug-in reads and sets of EAGLEWorkerV2; building a shape takes 2 of its GiB."""

    def build_adaptive_runtime_state(self, num_steps: int, num_draft_tokens: int) -> Any:
        drafter = self.draft_worker
        assert (self.speculative_num_steps, drafter.speculative_num_draft_tokens) == (num_steps, num_draft_tokens)
        assert self.spec.speculative_eagle_topk == self.topk == drafter.topk
        self.built.append(TreeShape(num_steps, self.topk, num_draft_tokens))
        self.free -= self.cost
        name = str(self.built[-1])
        return SimpleNamespace(
            draft_attn_backend=f"draft {name}",
            cuda_graph_runner=f"draft graph {name}",
            target_attn_backend=f"target {name}",
            target_graph_runner=f"target graph {name}",
            draft_extend_attn_backend=f"extend {name}",
            cuda_graph_runner_for_draft_extend=f"extend graph {name}",
        )


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    numbers = {"topk": 4, "speculative_num_steps": 7, "speculative_num_draft_tokens": 8}
    spec = Spec(speculative_num_steps=7, speculative_eagle_topk=4, speculative_num_draft_tokens=8)
    runner = SimpleNamespace(attn_backend="stock", draft_attn_backend="stock", decode_cuda_graph_runner="stock")
    drafter = Drafter(
        **numbers,
        draft_runner=runner,
        draft_attn_backend="stock",
        draft_extend_attn_backend="stock",
        cuda_graph_runner="stock",
        cuda_graph_runner_for_draft_extend="stock",
        parallel_layout=None,
        _topk1_parents_prealloc=None,
        _topk1_score_indices_prealloc=None,
    )
    target = SimpleNamespace(model_runner=SimpleNamespace(attn_backend="stock", decode_cuda_graph_runner="stock"))
    made = Worker(**numbers, draft_worker=drafter, target_worker=target, device="cuda", gpu_id=0, spec=spec, built=[], free=40.0, cost=2.0)
    modules: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.layers": {},
        "sglang.srt.layers.moe": {},
        "sglang.srt.speculative": {},
        "sglang.srt.utils": {},
        "sglang.srt.runtime_context": {
            "get_spec": lambda: spec,
            "get_parallel": lambda: SimpleNamespace(tp_group=SimpleNamespace(world_size=1, cpu_group=None)),
        },
        "sglang.srt.layers.moe.utils": {
            "speculative_moe_a2a_backend_context": contextlib.nullcontext,
            "speculative_moe_backend_context": contextlib.nullcontext,
        },
        "sglang.srt.speculative.spec_utils": {"draft_tp_context": lambda layout: contextlib.nullcontext()},
        "sglang.srt.utils.common": {"get_available_gpu_memory": lambda device, gpu, distributed, cpu_group: made.free},
    }
    for name, values in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return made


def everything(worker: Worker) -> list[Any]:
    """All that may change, by value."""
    drafter, target = worker.draft_worker, worker.target_worker.model_runner
    owners = (drafter, drafter.draft_runner, target, worker.spec)
    numbers = [worker.topk, worker.speculative_num_steps, worker.speculative_num_draft_tokens]
    return [
        *numbers,
        *itertools.chain.from_iterable(sorted((k, str(v)) for k, v in vars(owner).items() if k != "draft_runner") for owner in owners),
    ]


def test_every_shape_is_built_and_put_in_place_for_a_step(worker: Worker) -> None:
    before, shapes, switch = everything(worker), Shapes(Adaptive()), ShapeSwitch(worker)
    switch.prepare(shapes, None)
    assert sorted(worker.built) == sorted(shapes.all)
    assert everything(worker) == before
    for shape in shapes.all:
        with switch.at(shape):
            drafter, target = worker.draft_worker, worker.target_worker.model_runner
            assert (worker.speculative_num_steps, worker.topk, worker.speculative_num_draft_tokens) == tuple(vars(shape).values())
            assert (drafter.draft_attn_backend, drafter.cuda_graph_runner) == (f"draft {shape}", f"draft graph {shape}")
            assert (drafter.draft_runner.draft_attn_backend, drafter.draft_runner.attn_backend) == (f"draft {shape}", f"extend {shape}")
            assert (target.attn_backend, target.decode_cuda_graph_runner) == (f"target {shape}", f"target graph {shape}")
            assert worker.spec.speculative_num_draft_tokens == shape.num_draft_tokens
            if shape.topk == 1:
                assert drafter._topk1_parents_prealloc == f"parents of {shape.num_steps}"
        assert everything(worker) == before


def test_a_failing_step_leaves_nothing_behind(worker: Worker) -> None:
    before, shapes, switch = everything(worker), Shapes(Adaptive()), ShapeSwitch(worker)
    switch.prepare(shapes, None)
    with pytest.raises(KeyError), switch.at(shapes.all[0]):
        raise KeyError
    assert everything(worker) == before


@pytest.mark.parametrize(("limit", "count"), [(16, 8), (15.9, 7), (7, 3), (0, 1), (None, 8)])
def test_memory_limits_the_shapes(worker: Worker, limit: float | None, count: int, caplog: pytest.LogCaptureFixture) -> None:
    shapes = Shapes(Adaptive())
    ShapeSwitch(worker).prepare(shapes, limit)
    assert len(shapes.prepared) == count
    assert {shapes.stand_in(i) for i in range(8)} == set(shapes.prepared)
    assert ("shapes are prepared" in caplog.text) == (count < 8)


def test_half_of_the_free_memory_is_the_default(worker: Worker) -> None:
    worker.free = 12.0
    shapes = Shapes(Adaptive())
    ShapeSwitch(worker).prepare(shapes, None)
    assert len(shapes.prepared) == 3


def test_a_cpu_captures_nothing_and_prepares_all(worker: Worker) -> None:
    worker.device, worker.cost = "cpu", 0.0
    shapes = Shapes(Adaptive())
    ShapeSwitch(worker).prepare(shapes, None)
    assert shapes.prepared == shapes.all
