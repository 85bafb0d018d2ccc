"""A draft model: trees equal a slow oracle's at every point of a generation, whatever the vocabularies' padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptivespec.drafters.draft_model import DraftModel
from adaptivespec.errors import UserError
from adaptivespec.method.policy import Static
from adaptivespec.method.tree import TreeShape
from adaptivespec.models.kv_cache import Block
from adaptivespec.models.loading import LoadedModel, load_model
from drafters.slow_draft_model import SlowDraftModel
from drafters.tree_paths import paths
from tiny_models import DRAFT_NOISE, FAMILIES, make_tiny_model

SHAPES = [TreeShape(3, 4, 4), TreeShape(3, 1, 4), TreeShape(5, 4, 8), TreeShape(7, 1, 8), TreeShape(1, 3, 3), TreeShape(2, 10, 20)]
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(make_tiny_model("llama", tmp_path_factory.mktemp("target")), "fp32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("draft"), seed=1, **SMALL)


def feed(drafter: DraftModel, slot: int, prompt: list[int], following: int, chunk: int) -> None:
    """Commit a prompt in chunks as prefill does: each brings the tokens that follow its rows."""
    drafter.start(slot, prompt)
    shifted = [*prompt[1:], following]
    for start in range(0, len(shifted), chunk):
        drafter.commit([slot], [shifted[start : start + chunk]], None)


def check(drafter: DraftModel, slow: SlowDraftModel, slots: list[int], texts: list[list[int]], shapes: list[TreeShape]) -> None:
    """Draft one tree per request and compare each with the oracle's."""
    policy = Static(shapes[0])
    root = drafter.begin(slots, max(s.topk for s in shapes))
    tree = drafter.draft(slots, torch.tensor([t[-1] for t in texts]), root, shapes, policy, policy.initial(len(slots)))
    for row, (text, shape) in enumerate(zip(texts, shapes, strict=True)):
        assert paths(tree, row) == pytest.approx(slow.tree(text, shape.num_steps, shape.topk, shape.num_draft_tokens), abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_equal_the_oracle(target: LoadedModel, tmp_path: Path, family: str, shape: TreeShape) -> None:
    folder = make_tiny_model(family, tmp_path, seed=1, **SMALL)
    drafter, slow = DraftModel(load_model(folder, "fp32").decoder, target.decoder), SlowDraftModel(folder, 128)
    assert drafter.feature_layers == ()
    drafter.allocate(3, 64, [shape])
    text = torch.randint(2, 128, (14,)).tolist()
    feed(drafter, 1, text[:-1], text[-1], chunk=5)
    check(drafter, slow, [1], [text], [shape])
    check(drafter, slow, [1], [text], [shape])  # drafting leaves no trace
    for block in ([5, 6, 7], [9]):
        drafter.commit([1], [block], None)
        text = [*text, *block]
        check(drafter, slow, [1], [text], [shape])


@settings(max_examples=15)
@given(data=st.data())
def test_ragged_batches_over_several_steps_equal_the_oracle(target: LoadedModel, folder: Path, data: st.DataObject) -> None:
    drafter, slow = DraftModel(load_model(folder, "fp32").decoder, target.decoder), SlowDraftModel(folder, 128)
    batch = data.draw(st.integers(1, 4))
    shapes = [data.draw(st.sampled_from([*SHAPES, TreeShape.off()])) for _ in range(batch)]
    drafter.allocate(5, 64, SHAPES)
    slots = list(data.draw(st.permutations(range(5)))[:batch])
    token = st.integers(0, 127)
    texts = [data.draw(st.lists(token, min_size=2, max_size=14)) for _ in slots]
    for slot, text in zip(slots, texts, strict=True):
        feed(drafter, slot, text[:-1], text[-1], chunk=data.draw(st.integers(1, 14)))
    for _ in range(3):
        check(drafter, slow, slots, texts, shapes)
        blocks = [data.draw(st.lists(token, min_size=1, max_size=4)) for _ in slots]
        drafter.commit(slots, blocks, None)
        texts = [text + block for text, block in zip(texts, blocks, strict=True)]


def test_a_chain_costs_one_forward_a_level(target: LoadedModel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, shape = load_model(folder, "fp32").decoder, TreeShape(4, 1, 5)
    drafter, policy, rows = DraftModel(decoder, target.decoder), Static(shape), []
    drafter.allocate(1, 64, [shape])
    feed(drafter, 0, [3, 4, 5], 6, chunk=8)
    forward = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda tokens, *rest: rows.append(len(tokens)) or forward(tokens, *rest))
    drafter.commit([0], [[7, 8]], None)
    root = drafter.begin([0], 1)
    assert int(drafter.draft([0], torch.tensor([8]), root, [shape], policy, policy.initial(1)).size[0]) == 5
    assert rows == [2, 1, 1, 1]  # the commit's rows, then one for each level behind the first


@pytest.mark.parametrize(("draft_rows", "target_rows"), [(160, 128), (128, 160), (120, 128), (160, 144)])
def test_vocabularies_padded_to_other_sizes(tmp_path: Path, draft_rows: int, target_rows: int) -> None:
    target = load_model(make_tiny_model("llama", tmp_path / "target", padded_vocab=target_rows), "fp32")
    folder = make_tiny_model("llama", tmp_path / "draft", seed=1, padded_vocab=draft_rows, **SMALL)
    drafter, slow = DraftModel(load_model(folder, "fp32").decoder, target.decoder), SlowDraftModel(folder, target_rows)
    shape = TreeShape(3, 4, 10)
    drafter.allocate(2, 64, [shape])
    text = [2, target_rows - 1, 7, 100, target_rows - 1]
    feed(drafter, 0, text[:-1], text[-1], chunk=3)
    check(drafter, slow, [0], [text], [shape])
    root = drafter.begin([0], 1000)
    assert root.tokens.shape == (1, min(draft_rows, target_rows))
    assert int(root.tokens.max()) < target_rows
    assert float(root.log_probs.exp().sum()) == pytest.approx(1, abs=1e-4)
    assert drafter.begin([0], 1).tokens[0, 0] == root.tokens[0, 0]


def test_beyond_its_context_a_draft_model_stops_drafting(target: LoadedModel, tmp_path: Path) -> None:
    decoder = load_model(make_tiny_model("llama", tmp_path, seed=1, max_position_embeddings=24, **SMALL), "fp32").decoder
    shape = TreeShape(4, 2, 6)
    drafter, policy = DraftModel(decoder, target.decoder), Static(shape)
    drafter.allocate(3, 100, [shape])
    sizes = []
    for slot, n in ((0, 5), (1, 18), (2, 30)):
        feed(drafter, slot, list(range(n)), 9, chunk=7)
    assert drafter.committed == [6, 19, 0]  # a prompt that leaves no room is never run
    for _ in range(3):
        root = drafter.begin([0, 1, 2], 2)
        tree = drafter.draft([0, 1, 2], torch.tensor([1, 2, 3]), root, [shape] * 3, policy, policy.initial(3))
        sizes.append(tree.size.tolist())
        drafter.commit([0, 1, 2], [[1], [2], [3]], None)
    assert sizes == [[6, 6, 1], [6, 6, 1], [6, 1, 1]]  # 24 positions leave room for 20 rows and 4 levels
    feed(drafter, 2, [3, 4], 5, chunk=7)  # the next request in the slot drafts again
    assert drafter.begin([2], 2).log_probs.isfinite().all()


def test_one_object_serves_one_llm(target: LoadedModel, folder: Path) -> None:
    drafter = DraftModel(load_model(folder, "fp32").decoder, target.decoder)
    drafter.allocate(1, 64, SHAPES)
    with pytest.raises(UserError, match="already serves another LLM"):
        drafter.allocate(1, 64, SHAPES)


def test_a_disturbed_model_drafts_well_for_the_undisturbed_one(target: LoadedModel, tmp_path: Path) -> None:
    noisy = load_model(make_tiny_model("llama", tmp_path, noise=DRAFT_NOISE), "fp32").decoder
    tokens = torch.randint(2, 128, (300,))
    block = Block([0], [0], [0], [300], torch.ones(1, 300, 300, dtype=torch.bool).tril())
    choices = []
    for decoder in (target.decoder, noisy):
        hidden, _ = decoder.forward(tokens, torch.arange(300), decoder.new_cache(1, 300), block)
        choices.append(decoder.logits(hidden).argmax(-1))
    assert 0.6 <= float((choices[0] == choices[1]).float().mean()) <= 0.9
