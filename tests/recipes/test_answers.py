"""Answers: what the target says, with the rows the head will see, and the same after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recipes.eagle3_head.answers import answer_file, is_looping, sample
from recipes.eagle3_head.store import Answer, chunk_files, read_answers, write_chunk
from tiny_target import ANSWERS, EOS

from adaptivespec.models.decoder import Decoder
from adaptivespec.models.kv_cache import Block


def by_index(folder: Path) -> dict[int, Answer]:
    return {a.index: a for a in read_answers(chunk_files(folder))}


def test_rows_are_the_targets_own(answered_run: Path, decoder: Decoder) -> None:
    """Recompute every answer in one prefill: features, final states and, at temperature 0, the tokens."""
    greedy = 0
    for a in by_index(answered_run / "answers").values():
        n, p = len(a.tokens), a.prompt_length
        block = Block([0], [0], [0], [n], torch.ones(1, n, n, dtype=torch.bool).tril())
        hidden, features = decoder.forward(
            a.tokens.long(), torch.arange(n), decoder.new_cache(1, n), block, aux_layers=decoder.config.aux_layers
        )
        assert features is not None
        torch.testing.assert_close(a.features, features[:-1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(a.hidden, hidden[p:-1], atol=1e-4, rtol=1e-4)
        if ANSWERS.temperature(a.index) == 0:
            greedy += 1
            assert decoder.logits(hidden).argmax(-1)[p - 1 : -1].tolist() == a.tokens[p:].tolist()
        assert (a.tokens[p:-1] != EOS).all()
        assert a.tokens[-1] == EOS or a.num_answer_tokens == ANSWERS.max_new_tokens
    assert greedy > 20


class Killed(Exception):
    pass


@pytest.mark.parametrize("kill_at", [1, 3])
def test_killed_and_resumed_gives_the_same_answers(
    kill_at: int, answered_run: Path, tmp_path: Path, decoder: Decoder, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def write_or_die(folder: Path, answers: list[Answer], shard: int) -> Path:
        nonlocal calls
        calls += 1
        if calls > kill_at:
            (folder / "chunk-00009-0.partial").write_bytes(b"half a fi")
            raise Killed
        return write_chunk(folder, answers, shard)

    with monkeypatch.context() as patch:
        patch.setattr("recipes.eagle3_head.answers.write_chunk", write_or_die)
        with pytest.raises(Killed):
            answer_file(decoder, {EOS}, prompts, tmp_path, ANSWERS, max_prompt=12)
    assert len(chunk_files(tmp_path)) == kill_at
    answer_file(decoder, {EOS}, prompts, tmp_path, ANSWERS, max_prompt=12)
    expected, got = by_index(answered_run / "answers"), by_index(tmp_path)
    assert sorted(got) == sorted(expected)
    for index, answer in expected.items():
        assert got[index].tokens.tolist() == answer.tokens.tolist()


def test_shards_share_the_work(answered_run: Path, tmp_path: Path, decoder: Decoder, prompts: list[list[int]]) -> None:
    for shard in range(2):
        answer_file(decoder, {EOS}, prompts, tmp_path, ANSWERS, max_prompt=12, shard=(shard, 2))
    expected, got = by_index(answered_run / "answers"), by_index(tmp_path)
    assert {i: a.tokens.tolist() for i, a in got.items()} == {i: a.tokens.tolist() for i, a in expected.items()}


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -float("inf")]])
    draws = torch.tensor([sample(logits, [0.5], [f"key {i}"])[0] for i in range(4000)])
    share = torch.bincount(draws, minlength=4) / 4000
    torch.testing.assert_close(share, torch.softmax(logits[0] / 0.5, -1), atol=0.03, rtol=0)
    assert sample(logits, [0.0], [""]) == [2]


def test_loops_end() -> None:
    assert is_looping([1, 2, 3] * 40)
    assert not is_looping(list(range(100)))
    assert not is_looping([1, 2, 3] * 10)
