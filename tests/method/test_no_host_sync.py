"""Nothing in method/ may wait for the device, or loop over anything but levels: GPU engines capture these calls in a graph.

The goodput policies alone decide on the host, between those calls.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adaptivespec.method.acceptance import AcceptanceRule, Margin, Strict, VerifyInputs, child_margins, exact_children
from adaptivespec.method.baseline_policies import AcceptEMA, Confidence, Heuristic, Talon
from adaptivespec.method.baselines import LogitRatio, MarginTop1, RelaxedTopK, Typical, Window
from adaptivespec.method.coins import Rejection, Threshold
from adaptivespec.method.guards import RuleParams, affordable, unprotected
from adaptivespec.method.noise import gumbel, uniform
from adaptivespec.method.policy import Adaptive, Root, Static, TreePolicy
from adaptivespec.method.tree import DraftTree, TreeShape, keep_best
from method.fakes import acceptance_of

# Operators whose result, or its size, must be known on the host; lift_fresh is torch.tensor(...), a copy from the host.
SYNCHRONISING = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_static", "masked_select", "unique_dim", "_unique2",
    "unique_consecutive", "bincount", "repeat_interleave", "argwhere", "_assert_async", "lift_fresh",
}  # fmt: skip


class NoHostSync(TorchDispatchMode):
    """Refuses operators that wait for the device or copy between devices, and counts the others."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name in SYNCHRONISING:
            raise AssertionError(f"{name} waits for the device")
        if name in ("index", "index_put", "index_put_") and any(x.dtype == torch.bool for x in tree_leaves(args[1]) if x is not None):
            raise AssertionError("a boolean index waits for the device")
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if len({x.device.type for x in inputs + outputs}) > 1:
            raise AssertionError(f"{name} copies between devices")
        self.calls[name] += 1
        return result


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: int(x.max()),
        lambda x: x.new_zeros(4, device="cpu").to("meta"),
        lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.int64, device=x.device)),
        lambda x: x.tolist(),
        lambda _: torch.tensor([1.0, 2.0]),
    ],
)
def test_the_guard_sees_what_waits(waits: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), NoHostSync():
        waits(torch.empty(4, device="meta"))


class Batch:
    """Arguments of a given size: random chains of equal depth, then siblings of the first node; contents do not matter on meta."""

    def __init__(self, device: str, batch: int, levels: int, nodes: int, vocab: int) -> None:
        self.size = (batch, levels, nodes, vocab)
        generator = torch.Generator().manual_seed(0)
        parents = torch.arange(-1, nodes - 1).expand(batch, nodes).clone()
        parents[:, levels + 1 :] = 0
        depth = torch.where(parents == 0, 1, parents + 1)
        depth[:, 0] = 0
        cpu = {
            "tokens": torch.randint(vocab, (batch, nodes), generator=generator),
            "parents": parents,
            "depth": depth,
            "log_probs": -depth.float(),
            "size": torch.full((batch,), nodes),
        }
        self.tree = DraftTree(**{name: value.to(device) for name, value in cpu.items()}, levels=levels)
        self.logits = torch.randn(batch, nodes, vocab, generator=generator).to(device)
        self.noise = torch.randn(batch, nodes, vocab, generator=generator).to(device)
        self.temperature = torch.ones(batch, device=device)
        inputs = VerifyInputs.from_logits(self.logits, self.temperature, self.noise)
        coins, q = torch.rand(batch, nodes, generator=generator), torch.rand(batch * nodes, vocab, generator=generator)
        self.inputs = dataclasses.replace(inputs, coins=coins.to(device), q=q.to(device))
        self.params = RuleParams(
            kappa=torch.full((batch,), 0.2, dtype=torch.float64, device=device),
            protect=torch.ones(batch, dtype=torch.bool, device=device),
            protected=torch.zeros(1, vocab, dtype=torch.bool, device=device),
            spent=torch.zeros(batch, dtype=torch.float64, device=device),
            budget=torch.full((batch,), 5.0, dtype=torch.float64, device=device),
            budget_per_100=torch.full((batch,), 5.0, dtype=torch.float64, device=device),
            emitted=torch.zeros(batch, dtype=torch.int64, device=device),
            max_promotions=torch.full((batch,), 9, device=device),
        )
        self.root = Root(torch.zeros(batch, 4, dtype=torch.int64, device=device), torch.zeros(batch, 4, device=device))
        self.count = torch.full((batch,), 3, device=device)
        self.adaptive = Adaptive()
        self.state = self.adaptive.initial(batch, device)
        self.acceptance = acceptance_of([1] * batch, levels)
        for name, value in vars(self.acceptance).items():
            object.__setattr__(self.acceptance, name, value.to(device))
        self.links = self.tree.to_sglang()


@functools.cache
def batch_of(device: str, batch: int, levels: int, nodes: int, vocab: int) -> Batch:
    return Batch(device, batch, levels, nodes, vocab)


RULES: list[AcceptanceRule] = [Typical(), RelaxedTopK(3), LogitRatio(), MarginTop1(), Window(2), Threshold(), Rejection()]
POLICIES: list[TreePolicy] = [Talon(), AcceptEMA(), Heuristic(), Confidence()]


def _of_rule(rule: AcceptanceRule) -> dict[str, Callable[[Batch], Any]]:
    return {
        f"{rule.name} next_child": lambda x: rule.next_child(x.tree, x.inputs, x.params),
        f"{rule.name} accept": lambda x: rule.accept(x.tree, x.inputs, x.params),
    }


def _of_policy(policy: TreePolicy) -> dict[str, Callable[[Batch], Any]]:
    return {
        f"{policy.name} initial": lambda x: policy.initial(x.size[0], x.count.device),
        f"{policy.name} plan": lambda x: policy.plan(x.state, x.root),
        f"{policy.name} keep_going": lambda x: policy.keep_going(x.state, x.tree, x.count),
        f"{policy.name} prune": lambda x: policy.prune(x.state, x.tree, x.count),
        f"{policy.name} update": lambda x: policy.update(x.state, x.tree, x.acceptance, x.count),
    }


CALLS: dict[str, Callable[[Batch], Any]] = {
    "from_logits": lambda x: VerifyInputs.from_logits(x.logits, x.temperature, x.noise),
    "strict next_child": lambda x: Strict().next_child(x.tree, x.inputs, x.params),
    "strict accept": lambda x: Strict().accept(x.tree, x.inputs, x.params),
    "margin next_child": lambda x: Margin().next_child(x.tree, x.inputs, x.params),
    "margin accept": lambda x: Margin().accept(x.tree, x.inputs, x.params),
    "child_margins": lambda x: child_margins(x.tree, x.inputs),
    "affordable": lambda x: affordable(x.tree, child_margins(x.tree, x.inputs), exact_children(x.tree, x.inputs.choice), x.params),
    "unprotected": lambda x: unprotected(x.tree, x.inputs.choice, x.params),
    "adaptive plan": lambda x: x.adaptive.plan(x.state, x.root),
    "adaptive update": lambda x: x.adaptive.update(x.state, x.tree, x.acceptance, x.count),
    "adaptive prune": lambda x: x.adaptive.prune(x.state, x.tree, x.count),
    "adaptive keep_going": lambda x: x.adaptive.keep_going(x.state, x.tree, x.count),
    "static plan": lambda x: Static(TreeShape(3, 4, 4)).plan(x.state, x.root),
    "static update": lambda x: Static(TreeShape(3, 4, 4)).update(x.state, x.tree, x.acceptance, x.count),
    "keep_best": lambda x: keep_best(x.tree.log_probs[:, 1:], x.count),
    "gumbel": lambda x: gumbel(x.count, x.count, x.size[3]),
    "uniform": lambda x: uniform(x.count[:, None], x.tree.depth),
    "ancestor_mask": lambda x: x.tree.ancestor_mask(),
    "to_sglang": lambda x: x.tree.to_sglang(),
    "from_sglang": lambda x: DraftTree.from_sglang(x.tree.tokens, *x.links, x.tree.log_probs, x.tree.levels),
    "root_only": lambda x: DraftTree.root_only(x.count),
    "chain": lambda x: DraftTree.chain(x.tree.tokens, x.tree.log_probs, x.tree.size),
}
for _rule in RULES:
    CALLS |= _of_rule(_rule)
for _policy in POLICIES:
    CALLS |= _of_policy(_policy)
LOG_NODES = {"from_sglang"}  # sibling lists are untangled in log2(nodes) rounds


def _count(call: Callable[[Batch], Any], arguments: Batch) -> collections.Counter[str]:
    call(arguments)  # the first call may prepare constants: engines warm up before they capture
    with NoHostSync() as guard:
        call(arguments)
    return guard.calls


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", CALLS)
def test_no_host_synchronisation(name: str, device: str) -> None:
    assert _count(CALLS[name], batch_of(device, 3, 4, 9, 20)).total() < 200


@pytest.mark.parametrize("name", CALLS)
def test_work_is_dispatched_per_level_only(name: str) -> None:
    """The operators of a call do not depend on batch, nodes or vocabulary, and grow linearly with the levels."""

    def count(batch: int = 2, levels: int = 3, nodes: int = 9, vocab: int = 7) -> collections.Counter[str]:
        return _count(CALLS[name], batch_of("cpu", batch, levels, nodes, vocab))

    assert count() == count(batch=11) == count(vocab=300)
    if name not in LOG_NODES:
        assert count() == count(nodes=33)
    by_levels = [count(levels=levels).total() for levels in (3, 4, 5)]
    assert len({after - before for before, after in itertools.pairwise(by_levels)}) == 1


def test_acceptance_is_no_softmax() -> None:
    """A maximum and a gather: no operator but the noise's addition and one reduction touches the vocabulary."""
    arguments = batch_of("cpu", 2, 3, 9, 50)
    for name in ("from_logits", "strict accept", "margin accept"):
        assert not {op for op in _count(CALLS[name], arguments) if "softmax" in op or "exp" in op or "sort" in op} - {"expand"}
