"""EAGLE-3: trees equal a slow oracle's, and heads that do not fit are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from adaptivespec.drafters.eagle3 import Eagle3
from adaptivespec.errors import UserError
from adaptivespec.method.policy import Static
from adaptivespec.method.tree import TreeShape
from adaptivespec.models.loading import LoadedModel, load_model
from drafters.slow_eagle3 import SlowHead
from drafters.tree_paths import paths
from tiny_heads import make_tiny_head
from tiny_models import make_tiny_model

SHAPES = [TreeShape(3, 4, 4), TreeShape(3, 1, 4), TreeShape(5, 4, 8), TreeShape(6, 8, 16), TreeShape(7, 10, 60), TreeShape(1, 3, 3)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(make_tiny_model("llama", tmp_path_factory.mktemp("target")), "fp32")


def feed(drafter: Eagle3, slot: int, features: torch.Tensor, tokens: list[int], pieces: list[int]) -> None:
    """Commit rows in pieces, as prefill and decoding steps do."""
    drafter.start(slot, [0])
    start = 0
    for size in [*pieces, len(tokens)]:
        end = min(start + size, len(tokens))
        if end > start:
            drafter.commit([slot], [tokens[start:end]], features[start:end])
        start = end


@pytest.mark.parametrize("variant", ["offsets", "own embeddings", "whole vocabulary", "norm_before_residual"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_equal_the_oracle(target: LoadedModel, tmp_path: Path, shape: TreeShape, variant: str) -> None:
    vocab = 128 if variant == "whole vocabulary" else 48
    folder = make_tiny_head(
        tmp_path,
        draft_vocab=vocab,
        own_embeddings=variant == "own embeddings",
        norm_before_residual=variant == "norm_before_residual",
    )
    drafter, slow = Eagle3(folder, target.decoder), SlowHead(folder, target.decoder.embedding)
    drafter.allocate(3, 64, [shape])
    features, tokens = torch.randn(17, 192), torch.randint(0, 128, (17,)).tolist()
    feed(drafter, 1, features, tokens, [9, 1, 4])
    policy = Static(shape)
    for _ in range(2):  # drafting leaves no trace: the second tree is the same
        root = drafter.begin([1], shape.topk)
        tree = drafter.draft([1], torch.tensor(tokens[-1:]), root, [shape], policy, policy.initial(1))
        expected = dict(slow.tree(features, tokens, shape.num_steps, shape.topk, shape.num_draft_tokens))
        assert paths(tree) == pytest.approx(expected, abs=1e-4)
    drafter.commit([1], [[5, 6]], features[:2])
    root = drafter.begin([1], shape.topk)
    tree = drafter.draft([1], torch.tensor([6]), root, [shape], policy, policy.initial(1))
    expected = dict(slow.tree(torch.cat([features, features[:2]]), [*tokens, 5, 6], shape.num_steps, shape.topk, shape.num_draft_tokens))
    assert paths(tree) == pytest.approx(expected, abs=1e-4)


@settings(max_examples=20)
@given(data=st.data())
def test_ragged_batches_of_different_shapes_equal_the_oracle(
    target: LoadedModel, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = make_tiny_head(tmp_path_factory.mktemp("head"))
    drafter, slow = Eagle3(folder, target.decoder), SlowHead(folder, target.decoder.embedding)
    batch = data.draw(st.integers(1, 4))
    shapes = [data.draw(st.sampled_from([*SHAPES[:4], TreeShape.off(), TreeShape(7, 1, 8)])) for _ in range(batch)]
    drafter.allocate(5, 64, [*SHAPES, TreeShape(7, 1, 8)])
    slots = data.draw(st.permutations(range(5)))[:batch]
    rows = []
    for slot in slots:
        n = data.draw(st.integers(1, 12))
        rows.append((torch.randn(n, 192), torch.randint(0, 128, (n,)).tolist()))
        feed(drafter, slot, *rows[-1], pieces=[data.draw(st.integers(1, 12))])
    policy = Static(SHAPES[0])
    root = drafter.begin(slots, max(s.topk for s in shapes))
    tree = drafter.draft(slots, torch.tensor([t[-1] for _, t in rows]), root, shapes, policy, policy.initial(batch))
    for b, (shape, (features, tokens)) in enumerate(zip(shapes, rows, strict=True)):
        expected = dict(slow.tree(features, tokens, shape.num_steps, shape.topk, shape.num_draft_tokens)) if shape.num_steps else {}
        assert paths(tree, b) == pytest.approx(expected, abs=1e-4)
        assert int(tree.size[b]) == len(expected) + 1


def test_beyond_its_context_a_head_stops_drafting(target: LoadedModel, tmp_path: Path) -> None:
    folder = make_tiny_head(tmp_path, max_positions=24)
    shape = TreeShape(4, 2, 6)
    drafter, policy = Eagle3(folder, target.decoder), Static(shape)
    drafter.allocate(2, 100, [shape])
    sizes = []
    for slot, n in ((0, 5), (1, 19)):
        feed(drafter, slot, torch.randn(n, 192), list(range(n)), [n])
    for _ in range(4):
        root = drafter.begin([0, 1], 2)
        tree = drafter.draft([0, 1], torch.tensor([1, 2]), root, [shape] * 2, policy, policy.initial(2))
        sizes.append(tree.size.tolist())
        drafter.commit([0, 1], [[1], [2]], torch.randn(2, 192))
    assert sizes == [[6, 6], [6, 6], [6, 1], [6, 1]]  # 24 positions leave room for 20 rows and 4 levels
    drafter.start(1, [0])  # the next request in the slot drafts again
    drafter.commit([1], [[3]], torch.randn(1, 192))
    assert drafter.begin([1], 2).log_probs.isfinite().all()


def test_explicit_feature_layers(target: LoadedModel, tmp_path: Path) -> None:
    folder = make_tiny_head(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 4]})
    assert Eagle3(folder, target.decoder).feature_layers == (1, 2, 4)
    assert Eagle3(folder, target.decoder, aux_layers="output").feature_layers == (2, 3, 5)
    assert Eagle3(make_tiny_head(tmp_path / "b"), target.decoder).feature_layers == (2, 3, 3)


REFUSALS = {
    "hidden size": ({"hidden": 32}, "is a head for a target of hidden size 32; this target's is 64"),
    "d2t beyond": ({"tensors": {"d2t": torch.full((48,), 90)}}, "d2t points outside the target's vocabulary of 128 tokens"),
    "d2t below": ({"tensors": {"d2t": torch.full((48,), -1)}}, "d2t points outside the target's vocabulary"),
    "d2t length": ({"tensors": {"d2t": torch.zeros(40, dtype=torch.int64)}}, "d2t has shape [40], expected [48]"),
    "no d2t": ({"tensors": {"d2t": None}}, "has no d2t although its vocabulary (48) is not the target's (128)"),
    "missing fc": ({"tensors": {"fc.weight": None}}, "tensor fc.weight is missing"),
    "missing q": ({"tensors": {"midlayer.self_attn.q_proj.weight": None}}, "tensor midlayer.self_attn.q_proj.weight is missing"),
    "missing mlp": ({"tensors": {"midlayer.mlp.up_proj.weight": None}}, "tensor midlayer.mlp.up_proj.weight is missing"),
    "shape of q": ({"tensors": {"midlayer.self_attn.q_proj.weight": torch.zeros(64, 64)}}, "q_proj.weight is [64, 64], expected [64, 128]"),
    "two layers": ({"num_hidden_layers": 2}, "is not an EAGLE-3 head: architectures ['LlamaForCausalLMEagle3'] with 2 layers"),
    "architecture": ({"architectures": ["LlamaForCausalLMEagle"]}, "is not an EAGLE-3 head"),
    "norm_output": ({"eagle_config": {"norm_output": True}}, "heads with norm_output are not supported"),
    "norm_before_fc": ({"norm_before_fc": True}, "heads with norm_before_fc are not supported"),
    "unknown tensor": ({"tensors": {"input_norm.weight": torch.ones(192)}}, "has the tensor input_norm.weight, which no supported"),
    "bias": ({"tensors": {"midlayer.self_attn.q_proj.bias": torch.ones(64)}}, "has the tensor midlayer.self_attn.q_proj.bias"),
    "no features": ({"eagle_config": {"use_aux_hidden_state": False}}, "heads without auxiliary hidden states"),
    "layer ids": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 9]}}, "must be three layers of the target's 6"),
}


@pytest.mark.parametrize("case", REFUSALS, ids=str)
def test_heads_that_do_not_fit_are_refused(target: LoadedModel, tmp_path: Path, case: str) -> None:
    settings, message = REFUSALS[case]
    with pytest.raises(UserError) as error:
        Eagle3(make_tiny_head(tmp_path, **settings), target.decoder)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_damaged_folders_are_refused(target: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json: not an EAGLE-3 head"):
        Eagle3(tmp_path, target.decoder)
    folder = make_tiny_head(tmp_path / "head")
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot read"):
        Eagle3(folder, target.decoder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(UserError, match="not a JSON object"):
        Eagle3(folder, target.decoder)
    folder = make_tiny_head(tmp_path / "other")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(UserError, match="cut short"):
        Eagle3(folder, target.decoder)


def test_the_shipped_head_has_the_public_layout() -> None:
    import adaptivespec

    folder = Path(adaptivespec.__file__).parent / "heads" / "smollm2-135m"
    assert (folder / "model.safetensors").stat().st_size <= 25e6
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    hidden, vocab = config["hidden_size"], config["draft_vocab_size"]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert "eagle_aux_hidden_state_layer_ids" not in json.dumps(config)
    assert tensors["fc.weight"].shape == (hidden, 3 * hidden)
    assert tensors["lm_head.weight"].shape == (vocab, hidden)
    assert tensors["fc.weight"].dtype == torch.bfloat16
    ids = torch.arange(vocab) + tensors["d2t"]
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    assert 2 in ids.tolist()  # end of turn can be drafted
