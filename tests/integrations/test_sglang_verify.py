"""The rewritten prediction leads the stock kernel along the rule's own path, for any tree, rule, guard and temperature."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.config import SpeculativeConfig
from adaptivespec.integrations.sglang.requests import RequestBatch, Requests
from adaptivespec.integrations.sglang.shapes import Shapes
from adaptivespec.integrations.sglang.step import Step, book, root_of
from adaptivespec.integrations.sglang.verify import agreed, decide, spent_after
from adaptivespec.method.acceptance import VerifyInputs
from adaptivespec.method.noise import gumbel
from adaptivespec.method.policy import Adaptive
from adaptivespec.method.tree import DraftTree, TreeShape
from integrations.sglang_fakes import make_req, walk_all
from method.fakes import Nodes, make_tree
from method.test_no_host_sync import NoHostSync

VOCAB = 9
CPU = torch.device("cpu")
WISHES: list[dict[str, Any]] = [
    {"rule": "strict"},
    {"margin": 0.2, "guards": "none"},
    {"margin": 0.05},
    {"margin": 0.01, "budget": 1.5},
    {"margin": 0.01, "budget_per_100": 0.9},
    {"margin": 0.01, "max_promotions": 1},
    {"rule": "typical"},
    {"rule": "margin_top1", "margin": 0.1},
]


def random_tree(rng: random.Random, requests: int, nodes: int) -> DraftTree:
    """Trees of the same size, as SGLang's are, children of a node with distinct tokens."""
    trees = []
    for _ in range(requests):
        parents, tokens, taken = [-1], [rng.randrange(VOCAB)], {}
        while len(parents) < nodes:
            parent = rng.randrange(len(parents))
            free = [t for t in range(VOCAB) if t not in taken.get(parent, set())]
            if free:
                tokens.append(rng.choice(free))
                parents.append(parent)
                taken.setdefault(parent, set()).add(tokens[-1])
        trees.append(Nodes(tokens, parents, [0.0] * nodes))
    return make_tree(trees)


@dataclasses.dataclass
class Case:
    tree: DraftTree
    logits: torch.Tensor
    requests: Requests
    batch: RequestBatch
    seq_lens: torch.Tensor

    def decide(self) -> Any:
        links = self.tree.to_sglang()
        states = [state for state in self.batch.states if state is not None]
        return decide(
            self.batch,
            self.requests.protected(states, CPU, VOCAB),
            logits=self.logits,
            target_predict=self.logits.argmax(-1).view_as(self.tree.tokens),
            candidates=self.tree.tokens.to(torch.int32),
            retrieve_next_token=links[0],
            retrieve_next_sibling=links[1],
            seq_lens=self.seq_lens,
            levels=self.tree.levels,
        )


def make_case(seed: int, wishes: list[dict[str, Any]], params: list[dict[str, Any]], nodes: int = 8) -> tuple[Case, list[Any]]:
    rng = random.Random(seed)
    tree = random_tree(rng, len(wishes), nodes)
    logits = torch.randn(len(wishes) * nodes, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    reqs = [make_req(f"r{i}", prompt=3 + i, wish=wish, **p) for i, (wish, p) in enumerate(zip(wishes, params, strict=True))]
    policy = Adaptive()
    requests = Requests(SpeculativeConfig(), policy)
    seq_lens = torch.tensor([10 + i for i in range(len(wishes))])
    return Case(tree, logits, requests, requests.batch(reqs, CPU), seq_lens), reqs


SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "sampling_seed": 3},
    {"temperature": 1.3, "sampling_seed": 4, "top_k": 4, "top_p": 0.8},
]


@given(st.integers(0, 10_000), st.lists(st.sampled_from(range(len(WISHES))), min_size=1, max_size=5), st.integers(0, 2))
def test_the_stock_walk_takes_the_rules_path(seed: int, chosen: list[int], sampling: int) -> None:
    case, _reqs = make_case(seed, [WISHES[i] for i in chosen], [SAMPLING[(sampling + i) % 3] for i in range(len(chosen))])
    decision = case.decide()
    assert decision.target_predict.is_contiguous()  # the CUDA kernel reads the memory as it lies
    for b, (accepted, emitted) in enumerate(walk_all(case.tree.tokens, case.tree.to_sglang(), decision.target_predict, case.tree.levels)):
        count = int(decision.acceptance.num_accepted[b])
        assert accepted == decision.acceptance.path[b, :count].tolist()
        assert emitted == [*case.tree.tokens[b, accepted].tolist(), int(decision.acceptance.bonus[b])]


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_request_decides_as_if_alone(seed: int, other: int) -> None:
    wishes = [WISHES[2], WISHES[other]]
    case, _reqs = make_case(seed, wishes, [{}, SAMPLING[1]])
    together = case.decide()
    alone, _reqs = make_case(seed, wishes[:1], [{}])
    alone.tree = dataclasses.replace(
        case.tree, **{f.name: getattr(case.tree, f.name)[:1] for f in dataclasses.fields(case.tree) if f.name != "levels"}
    )
    alone.logits = case.logits[:8]
    assert torch.equal(alone.decide().target_predict, together.target_predict[:1])


@given(st.integers(0, 10_000))
def test_decisions_are_the_methods(seed: int) -> None:
    """The same inputs put together by hand, as the local engine does."""
    case, _reqs = make_case(seed, [{"margin": 0.05, "guards": "none"}], [{"temperature": 0.9, "sampling_seed": 11}])
    positions = (case.seq_lens[:, None] + case.tree.depth + 1).view(-1)
    noise = gumbel(torch.full_like(positions, 11), positions, VOCAB)
    inputs = VerifyInputs.from_logits(case.logits.view(1, 8, VOCAB), torch.tensor([0.9]), noise.view(1, 8, VOCAB))
    rule = next(iter(case.batch.by_rule))
    expected = rule.accept(case.tree, inputs, case.batch.params(torch.zeros(1, VOCAB, dtype=torch.bool), case.seq_lens))
    acceptance = case.decide().acceptance
    for field in dataclasses.fields(expected):
        assert torch.equal(getattr(acceptance, field.name), getattr(expected, field.name))


def test_strict_emits_the_targets_choice() -> None:
    for seed in range(50):
        case, _reqs = make_case(seed, [{"rule": "strict"}] * 3, [{}] * 3)
        plain = case.logits.argmax(-1).view_as(case.tree.tokens)
        assert torch.equal(case.decide().target_predict, plain)


@pytest.mark.parametrize("guards", ["protected", "none"])
def test_end_of_sequence_is_guarded(guards: str) -> None:
    tree = make_tree([Nodes([1, 4], [-1, 0], [0.0, 0.0])])
    logits = torch.full((2, VOCAB), -5.0)
    logits[0, 0], logits[0, 4] = 3.0, 2.9  # end-of-sequence a little ahead of the drafted token
    logits[1, 2] = 1.0
    case, _reqs = make_case(0, [{"margin": 0.5, "guards": guards}], [{}], nodes=2)
    case.tree, case.logits = tree, logits
    assert case.decide().target_predict[0].tolist() == ([0, 2] if guards == "protected" else [4, 2])


@given(st.integers(0, 10_000), st.floats(0, 4))
def test_budget_is_never_exceeded(seed: int, budget: float) -> None:
    case, _reqs = make_case(seed, [{"margin": 0.001, "budget": budget}], [{}])
    for _ in range(6):
        decision = case.decide()
        case.batch.spent = spent_after(case.batch.spent, decision.acceptance)
        assert float(case.batch.spent) <= budget
        case.logits = case.logits.roll(1, 1)


def test_emitted_tokens_are_counted_from_the_cache() -> None:
    """A prompt of p tokens and n emitted ones fill p + n - 1 rows: the last token has none yet."""
    case, _reqs = make_case(0, [{}], [{}])  # prompt 3
    params = case.batch.params(torch.zeros(1, VOCAB, dtype=torch.bool), torch.tensor([3]))
    assert params.emitted.tolist() == [1]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "sampling_seed": 1}, SAMPLING[2]])
def test_nothing_waits_for_the_device(sampling: dict[str, Any]) -> None:
    case, _reqs = make_case(1, [WISHES[3]] * 2, [sampling] * 2)
    policy, shapes = Adaptive(), Shapes(Adaptive())
    case.decide()  # protected masks are made once
    step = Step(case.batch, TreeShape(7, 1, 8), case.seq_lens)
    root = root_of(torch.rand(2, 4), torch.zeros(2, 4, dtype=torch.int64))
    policy.shape_index(torch.rand(1))  # as are its breakpoints
    with NoHostSync():
        step.decision = case.decide()
        book(step, policy)
        shapes.signal(case.batch.policy, root)


@pytest.mark.parametrize("sampling", [1, 2])
def test_other_ranks_take_the_first_ones_decision(sampling: int) -> None:
    """A rank whose sums round differently ends with the first rank's path, bonus and margins, exactly."""
    wishes, params = [WISHES[2], WISHES[0], WISHES[4]], [SAMPLING[sampling]] * 3
    case, _reqs = make_case(1, wishes, params)
    first = case.decide()
    case.logits = case.logits.flip(1)
    other = case.decide()
    assert not torch.equal(first.target_predict, other.target_predict)
    messages: list[torch.Tensor] = []
    agreed(first, lambda values: messages.append(values) or values)  # type: ignore[func-returns-value]
    taken = agreed(other, lambda _: messages[0])
    assert torch.equal(taken.target_predict, first.target_predict)
    assert taken.target_predict.dtype == first.target_predict.dtype
    assert taken.target_predict.is_contiguous()
    for field in dataclasses.fields(first.acceptance):
        mine, theirs = getattr(taken.acceptance, field.name), getattr(first.acceptance, field.name)
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs), field.name
