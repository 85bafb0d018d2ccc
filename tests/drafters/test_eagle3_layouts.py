"""EAGLE-3 checkpoints in other layouts and file formats are the same head; what is not understood is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptivespec.drafters.eagle3 import Eagle3
from adaptivespec.drafters.eagle3_checkpoint import is_head
from adaptivespec.errors import UserError
from adaptivespec.method.policy import Static
from adaptivespec.method.tree import TreeShape
from adaptivespec.models.loading import LoadedModel, load_model
from drafters.tree_paths import paths
from tiny_heads import make_tiny_head
from tiny_models import make_tiny_model

SHAPE = TreeShape(5, 4, 16)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(make_tiny_model("llama", tmp_path_factory.mktemp("target")), "fp32")


def drafted(folder: Path, target: LoadedModel) -> dict[tuple[int, ...], float]:
    """The tree that a head drafts after some fixed rows."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 128, (9,), generator=generator).tolist()
    drafter, policy = Eagle3(folder, target.decoder), Static(SHAPE)
    drafter.allocate(1, 64, [SHAPE])
    drafter.start(0, [0])
    drafter.commit([0], [tokens], torch.randn(9, 192, generator=generator))
    root = drafter.begin([0], SHAPE.topk)
    return paths(drafter.draft([0], torch.tensor(tokens[-1:]), root, [SHAPE], policy, policy.initial(1)))


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_layouts_and_formats_are_the_same_head(target: LoadedModel, tmp_path: Path, norm_before_residual: bool) -> None:
    settings: dict[str, Any] = {"own_embeddings": True, "norm_before_residual": norm_before_residual}
    expected = drafted(make_tiny_head(tmp_path / "public", **settings), target)
    assert len(expected) == 15
    assert drafted(make_tiny_head(tmp_path / "bin", format="bin", **settings), target) == expected
    assert drafted(make_tiny_head(tmp_path / "speculators", layout="speculators", **settings), target) == expected
    assert drafted(make_tiny_head(tmp_path / "both", layout="speculators", format="bin", **settings), target) == expected
    del settings["norm_before_residual"]
    inner = make_tiny_head(tmp_path / "inner", eagle_config={"norm_before_residual": norm_before_residual}, **settings)
    assert drafted(inner, target) == expected


def test_norm_before_residual_changes_the_drafts(target: LoadedModel, tmp_path: Path) -> None:
    heads = [make_tiny_head(tmp_path / str(flag), layout="speculators", norm_before_residual=flag) for flag in (False, True)]
    assert drafted(heads[0], target) != drafted(heads[1], target)


def test_explicit_feature_layers_at_the_top_level(target: LoadedModel, tmp_path: Path) -> None:
    folder = make_tiny_head(tmp_path / "a", layout="speculators", eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    assert Eagle3(folder, target.decoder).feature_layers == (1, 2, 4)
    assert Eagle3(folder, target.decoder, aux_layers="output").feature_layers == (2, 3, 5)
    folder = make_tiny_head(tmp_path / "b", layout="speculators", eagle_aux_hidden_state_layer_ids=None)
    assert Eagle3(folder, target.decoder).feature_layers == (2, 3, 3)


REFUSALS = {
    "other speculators": ({"speculators_model_type": "mlp"}, "speculators of type 'mlp' are not supported (eagle3 is)"),
    "no layer": ({"transformer_layer_config": None}, "lacks transformer_layer_config"),
    "layer type": ({"transformer_layer_config": {"model_type": "qwen3"}}, "of type qwen3 is not supported; needed 1 of type llama"),
    "layers": ({"transformer_layer_config": {"num_hidden_layers": 2}}, "a head with 2 layers of type"),
    "norm_output": ({"norm_output": True}, "heads with norm_output are not supported"),
    "norm_before_fc": ({"norm_before_fc": True}, "heads with norm_before_fc are not supported"),
    "hidden size": ({"target_hidden_size": 96}, "a head for a target of hidden size 96; this target's is 64"),
    "layer ids": ({"eagle_aux_hidden_state_layer_ids": ["x"]}, "['x'] must be three layers of the target's 6"),
    "missing tensor": ({"tensors": {"midlayer.mlp.up_proj.weight": None}}, "tensor midlayer.mlp.up_proj.weight is missing"),
}


@pytest.mark.parametrize("case", REFUSALS, ids=str)
def test_speculators_heads_that_do_not_fit_are_refused(target: LoadedModel, tmp_path: Path, case: str) -> None:
    settings, message = REFUSALS[case]
    with pytest.raises(UserError) as error:
        Eagle3(make_tiny_head(tmp_path, layout="speculators", **settings), target.decoder)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_residual_that_is_not_told_is_refused(target: LoadedModel, tmp_path: Path) -> None:
    folder = make_tiny_head(tmp_path, layout="speculators")
    config = json.loads((folder / "config.json").read_text())
    del config["norm_before_residual"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="does not say norm_before_residual: add true or false"):
        Eagle3(folder, target.decoder)


def test_a_folder_without_weights_is_refused(target: LoadedModel, tmp_path: Path) -> None:
    folder = make_tiny_head(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no weights: neither \*\.safetensors nor pytorch_model\.bin"):
        Eagle3(folder, target.decoder)


def test_heads_are_told_from_whole_models(tmp_path: Path) -> None:
    assert is_head(make_tiny_head(tmp_path / "a"))
    assert is_head(make_tiny_head(tmp_path / "b", layout="speculators"))
    assert is_head(make_tiny_head(tmp_path / "c", architectures=["LlamaForCausalLMEagle"]))  # refused later, as a head
    assert is_head(make_tiny_head(tmp_path / "d", architectures=["LlamaForCausalLM"]))
    assert is_head(make_tiny_head(tmp_path / "e", architectures=["LlamaForCausalLM"], format="bin"))
    assert not is_head(make_tiny_model("llama", tmp_path / "f"))
    assert not is_head(make_tiny_model("llama", tmp_path / "g", num_hidden_layers=1))
