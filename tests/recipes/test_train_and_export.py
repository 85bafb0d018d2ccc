"""Training resumes exactly, and what is exported is what was trained, in the public layout."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from recipes.eagle3_head.config import Run, TrainConfig
from recipes.eagle3_head.evaluate import ExportedHead, stretched
from recipes.eagle3_head.export import check_exportable, export, public_config
from recipes.eagle3_head.head import Batch, soft_cross_entropy
from recipes.eagle3_head.metrics import ChainAccuracy
from recipes.eagle3_head.plot import read_log
from recipes.eagle3_head.store import chunk_files, read_answers
from recipes.eagle3_head.train import Trainer, draft_vocabulary, load_heldout, read_weights, train
from safetensors.torch import load_file
from tiny_target import EOS, HEAD, TARGET, TRAIN

from adaptivespec.models.architecture import RopeScaling
from adaptivespec.models.decoder import Decoder
from adaptivespec.models.rotary import inverse_frequencies


def make(decoder: Decoder, folder: Path, config: TrainConfig = TRAIN) -> Trainer:
    return Trainer(TARGET, (decoder.embedding, decoder.embedding, decoder.norm.weight), Run(folder), config, HEAD, {EOS})


@pytest.fixture(scope="module")
def trained(answered_run: Path, tmp_path_factory: pytest.TempPathFactory, decoder: Decoder) -> Trainer:
    folder = tmp_path_factory.mktemp("trained") / "run"
    shutil.copytree(answered_run, folder)
    trainer = make(decoder, folder)
    train(trainer, {}, quiet=True)
    return trainer


def test_killed_and_resumed_equals_uninterrupted(trained: Trainer, answered_run: Path, tmp_path: Path, decoder: Decoder) -> None:
    folder = tmp_path / "run"
    shutil.copytree(answered_run, folder)
    for steps in (7, 4, 1, 20):  # each time some steps past the last checkpoint are lost
        trainer = make(decoder, folder)
        start = trainer.step
        while trainer.step < min(start + steps, TRAIN.steps):
            trainer.train_step()
            if trainer.step % TRAIN.checkpoint_steps == 0:
                trainer.save()
    assert trainer.step == TRAIN.steps
    for name, value in trained.average.items():
        assert torch.equal(trainer.average[name], value), name
    assert trainer.tokens_seen == trained.tokens_seen


def test_log_of_a_resumed_run_goes_on(trained: Trainer, answered_run: Path, tmp_path: Path, decoder: Decoder) -> None:
    folder = tmp_path / "run"
    shutil.copytree(answered_run, folder)
    for until in (3, None):
        train(make(decoder, folder), {}, until=until, quiet=True)
    assert read_log(folder / "train_log.jsonl")[0][-1]["loss"] == read_log(trained.run.log)[0][-1]["loss"]


def test_kill_during_the_last_evaluation_loses_none(
    answered_run: Path, tmp_path: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(answered_run, folder)
    config = replace(TRAIN, steps=6, checkpoint_steps=3, evaluate_steps=6)
    heldout = {"general": list(read_answers(chunk_files(folder / "answers")))[:2]}
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(make(decoder, folder, config), heldout, quiet=True)
    train(make(decoder, folder, config), heldout, quiet=True)
    assert [row["step"] for row in read_log(folder / "train_log.jsonl")[1]] == [6]


def test_training_reduces_the_loss(answered_run: Path, tmp_path: Path, decoder: Decoder) -> None:
    shutil.copytree(answered_run, tmp_path / "run")
    config = TrainConfig(steps=60, decay_steps=10, warmup_steps=2, batch_size=8, unroll=2, learning_rate=1e-2, lm_head_rate=1.0)
    trainer = make(decoder, tmp_path / "run", config)
    losses = [trainer.train_step()[0] for _ in range(60)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_a_later_pass_sees_new_chunks(answered_run: Path, tmp_path: Path, decoder: Decoder) -> None:
    folder = tmp_path / "run"
    shutil.copytree(answered_run, folder)
    files = chunk_files(folder / "answers")
    aside = files[-1].rename(tmp_path / files[-1].name)
    trainer = make(decoder, folder)
    trainer.train_step()
    assert len(trainer.files) == len(files) - 1
    shutil.copy(aside, files[-1])
    while trainer.epoch == 0:
        assert len(trainer.files) == len(files) - 1
        trainer.train_step()
    assert len(trainer.files) == len(files)


def test_public_layout(trained: Trainer, tmp_path: Path) -> None:
    path = export(trained.run.checkpoint, TARGET, tmp_path)
    tensors, config = load_file(path), json.loads((tmp_path / "config.json").read_text())
    attention, mlp = [f"self_attn.{x}_proj" for x in "qkvo"], [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    norms = ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    expected = {f"midlayer.{name}.weight" for name in attention + mlp + norms} | {
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
    }
    assert set(tensors) == expected
    assert {tensors[name].dtype for name in expected - {"d2t", "t2d"}} == {torch.bfloat16}
    assert tensors["fc.weight"].shape == (32, 96)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    assert tensors["lm_head.weight"].shape == (48, 32)
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype, tensors["t2d"].shape) == (torch.int64, torch.bool, (96,))
    target_ids = torch.arange(48) + tensors["d2t"]  # offsets, not ids
    assert torch.equal(target_ids, trained.vocabulary)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], target_ids)
    assert EOS in target_ids
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["hidden_size"], config["tie_word_embeddings"]) == (48, 32, False)
    assert "eagle_config" not in config


def test_exported_head_predicts_what_training_says(trained: Trainer, tmp_path: Path, decoder: Decoder) -> None:
    """The independent forward of evaluate.py and the one of training agree; only the bf16 rounding of the weights stands between."""
    for name in trained.average:
        trained.average[name] = trained.average[name].bfloat16().float()
    trained.head.feature_scale.fill_(0.5)  # exact in bf16, and a wrong fold would show
    trained.save()
    export(trained.run.checkpoint, TARGET, tmp_path)
    answers = load_heldout(trained.run)["general"]
    head = ExportedHead(tmp_path, decoder.embedding, torch.float32)
    ours, theirs = trained.evaluate(answers), head.evaluate(answers)
    assert ours.seen == theirs.seen
    assert ours.right == theirs.right
    assert ours.emitted == theirs.emitted
    assert ours.verified == theirs.verified


def test_the_unroll_is_causal_and_ignores_padding(trained: Trainer, decoder: Decoder) -> None:
    answers = list(read_answers(chunk_files(trained.run.answers)))[:5]
    weights = trained.head.cast(torch.float32)

    def states(batch: Batch) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(trained.head.unroll(weights, batch, decoder.embedding, trained.rotary, 4))

    together = states(Batch.collate(answers))
    for b, answer in enumerate(answers):
        for i, alone in enumerate(states(Batch.collate([answer]))):
            torch.testing.assert_close(together[i][b, : alone.shape[1]], alone[0], atol=1e-4, rtol=1e-4)
    longest = max(answers, key=lambda a: len(a.hidden))
    changed = Batch.collate([longest])
    changed.features[:, changed.first + 4 :] += 1.0
    for before, after in zip(states(Batch.collate([longest])), states(changed), strict=True):
        torch.testing.assert_close(before[:, :4], after[:, :4])  # starts 0..3 know no later feature at any step


def test_cross_entropy_and_its_gradients() -> None:
    torch.manual_seed(0)
    states, weight = torch.randn(300, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    targets, rows = torch.softmax(torch.randn(50, 20), -1), torch.randint(0, 50, (300,))
    loss = soft_cross_entropy(states, weight, targets, rows, 0.1)
    got = torch.autograd.grad(loss, (states, weight))
    plain = -0.1 * (targets[rows] * torch.log_softmax(states @ weight.T, -1)).sum()
    torch.testing.assert_close(loss, plain)
    for a, b in zip(got, torch.autograd.grad(plain, (states, weight)), strict=True):
        torch.testing.assert_close(a, b)


def test_vocabulary_is_by_frequency_and_holds_eos(answered_run: Path) -> None:
    answers = list(read_answers(chunk_files(answered_run / "answers")))
    ids = draft_vocabulary(answers, 96, 10, {EOS, 95})
    assert {EOS, 95} <= set(ids.tolist())
    assert torch.equal(ids, ids.sort()[0])
    counts = sum(torch.bincount(a.tokens[a.prompt_length :].long(), minlength=96) for a in answers)
    assert int(counts.argmax()) in ids  # type: ignore[union-attr]


def test_chain_accuracy_by_hand() -> None:
    metrics = ChainAccuracy(steps=3, depths=(3,))
    # starts 0..3; start 0 has two right steps in a row, start 3 one (the answer ends there)
    metrics.add(torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 0], [1, 0, 0]], dtype=torch.bool))
    assert metrics.accuracy == [3 / 4, 2 / 3, 1 / 2]
    # step 1: two accepted and a bonus, at 0; step 2: one accepted at 3, no room for a bonus
    assert metrics.accept_length == {3: 4 / 2}


def test_scaled_rotary_frequencies_go_into_the_config() -> None:
    """As Llama 3.1 has them; a GGUF's table of factors cannot go anywhere and is refused before training."""
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    config = public_config(replace(TARGET, rope_scaling=scaling), 8, 16)
    assert config["rope_scaling"] == {"rope_type": "llama3", **asdict(scaling)}
    plain = TARGET.rope_theta ** (-torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    expected = inverse_frequencies(replace(TARGET, head_dim=64, rope_scaling=scaling))
    torch.testing.assert_close(stretched(plain, config["rope_scaling"]), expected)
    check_exportable(TARGET)
    with pytest.raises(SystemExit, match="use the safetensors weights"):
        check_exportable(replace(TARGET, rope_factors=(1.0,)))


@pytest.mark.parametrize("source", ["head", "checkpoint.pt"])
def test_warm_start_takes_over_what_was_learned(source: str, trained: Trainer, tmp_path: Path, decoder: Decoder) -> None:
    """A new run on other features' scale and another vocabulary drafts like the old one, but for bf16 rounding of an exported head."""
    trained.save()
    path = export(trained.run.checkpoint, TARGET, tmp_path / "head").parent if source == "head" else trained.run.checkpoint
    shutil.copytree(trained.run.answers, tmp_path / "run" / "answers")
    config, tables = replace(TRAIN, seed=7), (decoder.embedding, decoder.embedding, decoder.norm.weight)
    wider = replace(HEAD, draft_vocab_size=HEAD.draft_vocab_size + 8)
    again = Trainer(TARGET, tables, Run(tmp_path / "run"), config, wider, {EOS}, warm_start=path)
    assert not torch.equal(again.head.feature_scale, trained.head.feature_scale)
    answers = load_heldout(trained.run)["general"]
    batch = Batch.collate(answers)
    with torch.no_grad():
        old = next(trained.head.unroll(trained.average, batch, decoder.embedding, trained.rotary, 1))
        new = next(again.head.unroll(again.head.cast(torch.float32), batch, decoder.embedding, again.rotary, 1))
    torch.testing.assert_close(new, old, atol=2e-2, rtol=2e-2)
    common = [int(i) for i in trained.vocabulary if i in again.vocabulary]
    rows = [[t.vocabulary.tolist().index(i) for i in common] for t in (trained, again)]
    torch.testing.assert_close(again.head.lm_head.weight[rows[1]], trained.average["lm_head.weight"][rows[0]], atol=1e-2, rtol=1e-2)


def test_warm_start_from_nothing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="neither the folder of an exported head nor a checkpoint"):
        read_weights(tmp_path)
