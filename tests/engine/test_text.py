"""Text: whole characters only, stop strings found wherever they begin, and never a piece of one in a stream."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from adaptivespec import LLM, SamplingParams, SpeculativeConfig
from adaptivespec.engine.detokenizer import Detokenizer
from adaptivespec.errors import UserError
from adaptivespec.models.catalogue import resolve_model
from adaptivespec.models.loading import LoadedModel, load_model
from adaptivespec.models.tokenizer import load_tokenizer
from engine.fakes import ReferenceDrafter
from tiny_models import VOCAB, make_tiny_model

PROMPT = [5, 9, 33]
LONG = SamplingParams(max_tokens=60, ignore_eos=True)
TEXT = st.text(st.sampled_from("ab. é漢🙂"), max_size=30)


@cache
def real_tokenizer() -> Tokenizer:
    """Byte-level BPE of 49k tokens, where many characters take several tokens."""
    return load_tokenizer(resolve_model("smollm2-135m").path).backend_tokenizer


@cache
def byte_tokens() -> dict[int, int]:
    """The token of every single byte, so that any text can be cut anywhere."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = real_tokenizer().get_vocab()
    return {byte: vocab[character] for byte, character in bytes_to_unicode().items() if character in vocab}


def pieces_of(text: str, rng: random.Random) -> list[int]:
    """Tokens of a text, some characters as single bytes, some runs as the tokenizer would have them."""
    tokens: list[int] = []
    while text:
        cut = rng.randint(1, 4)
        head, text = text[:cut], text[cut:]
        if rng.random() < 0.5:
            tokens += [byte_tokens()[b] for b in head.encode()]
        else:
            tokens += real_tokenizer().encode(head, add_special_tokens=False).ids
    return tokens


@given(TEXT, st.lists(st.text(st.sampled_from("ab. é漢🙂"), min_size=1, max_size=4), max_size=3, unique=True), st.booleans(), st.randoms())
def test_streams_release_exactly_the_text_before_the_stop_string(text: str, stops: list[str], include: bool, rng: random.Random) -> None:
    tokens = pieces_of(text, rng)
    detokenizer = Detokenizer(real_tokenizer(), tuple(stops), include)
    seen = 0
    for token in tokens:
        seen += 1
        stopped = detokenizer.add(token)
        if stopped:
            break
    sent = "".join(detokenizer.pieces)
    final = detokenizer.finish(tokens[:seen])
    assert final.startswith(sent)  # nothing that was sent had to be taken back
    assert "\ufffd" not in final
    assert "".join(detokenizer.pieces) == final
    assert len(detokenizer.pieces) == seen
    decoded = real_tokenizer().decode(tokens[:seen], skip_special_tokens=True)
    if detokenizer.stopped_by is None:
        assert final == decoded == text
        assert not any(s in text for s in stops)
    else:
        # A token may complete two stop strings at once: the earliest in the text counts then.
        earliest = min((decoded.find(s), -len(s), s) for s in stops if s in decoded)
        assert (detokenizer.stopped_by, final) == (earliest[2], decoded[: earliest[0] + (len(earliest[2]) if include else 0)])
        before = real_tokenizer().decode(tokens[: seen - 1], skip_special_tokens=True)
        assert not any(s in before.rstrip("\ufffd") for s in stops)  # not a token too late


@given(TEXT.filter(lambda t: len(t) > 2), st.integers(0, 12), st.randoms())
def test_stop_strings_are_not_looked_for_before_min_tokens(text: str, minimum: int, rng: random.Random) -> None:
    tokens, stop = pieces_of(text, rng), text[1]
    detokenizer = Detokenizer(real_tokenizer(), (stop,))
    for count, token in enumerate(tokens, start=1):
        if detokenizer.add(token, search=count >= minimum):
            assert count >= minimum
            break
    ignored = real_tokenizer().decode(tokens[: max(minimum - 1, 0)], skip_special_tokens=True).rstrip("\ufffd")
    assert (detokenizer.stopped_by is not None) == (stop in text[len(ignored) :])


def test_a_character_cut_by_the_end_shows_as_a_replacement() -> None:
    tokens = [byte_tokens()[b] for b in "é".encode()[:1]]
    detokenizer = Detokenizer(real_tokenizer())
    detokenizer.add(tokens[0])
    assert detokenizer.pieces == [""]
    assert detokenizer.finish(tokens) == "\ufffd" == "".join(detokenizer.pieces)


def with_oracle(model: LoadedModel, params: SamplingParams) -> tuple[LLM, str]:
    plain = LLM(model).generate([PROMPT], params)[0]
    config = SpeculativeConfig(policy="static", num_steps=5, topk=1, num_draft_tokens=6, margin=None)
    return LLM(model, drafter=ReferenceDrafter({tuple(PROMPT): plain.token_ids}, VOCAB, 1.0), speculative=config), plain.text


@pytest.mark.parametrize("start", [0, 1, 2, 5, 6, 11])
@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_a_stop_string_inside_an_accepted_block(model: LoadedModel, start: int, length: int) -> None:
    llm, text = with_oracle(model, LONG)
    stop = text[start : start + length]
    params = LONG.updated({"stop": ("never there", stop)})
    at = text.index(stop)
    for output in (llm.generate([PROMPT], params)[0], LLM(model).generate([PROMPT], params)[0]):
        assert (output.text, output.finish_reason, output.stop_reason) == (text[:at], "stop", stop)
        assert len(output.token_ids) == at + length  # one character per token here: the one that completed it is the last
    chunks = list(llm.stream(PROMPT, params))
    assert "".join(c.text for c in chunks) == text[:at]
    assert [len(c.pieces) for c in chunks] == [len(c.token_ids) for c in chunks]
    kept = llm.generate([PROMPT], params.updated({"include_stop_str_in_output": True}))[0]
    assert kept.text == text[: at + length]


def test_streams_hold_back_what_may_become_a_stop_string(model: LoadedModel) -> None:
    llm, text = with_oracle(model, LONG)
    almost = text[4:7] + "\x7f"  # begins like the answer and never comes true
    sent = ""
    for chunk in llm.stream(PROMPT, LONG.updated({"stop": (almost,)})):
        assert text.startswith(sent := sent + chunk.text)
    assert sent == text


def test_a_special_token_as_a_stop_string_is_that_token(model: LoadedModel) -> None:
    """Special tokens never become text, so the string alone would never be found."""
    llm = LLM(model)
    [request] = llm.submit(PROMPT, LONG.updated({"stop": ("<eos>", "x")}))
    assert request.stop_ids == {0}  # although end-of-sequence is ignored
    assert request.detokenizer is not None
    assert request.detokenizer.stop == ("x",)
    llm.abort(request)


def test_what_a_stream_sent_is_the_text_of_an_aborted_answer(model: LoadedModel) -> None:
    llm, text = with_oracle(model, LONG)
    stream = llm.stream(PROMPT, LONG.updated({"stop": (text[3:20],)}))
    sent = next(stream).text + next(stream).text
    for request in llm.scheduler.running:
        llm.abort(request)
    last = list(stream)[-1]
    assert last.output is not None
    assert last.output.text == sent + last.text
    assert len(last.output.text) <= 4 < len(last.output.token_ids)


def test_stop_strings_need_a_tokenizer(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    llm = LLM(load_model(folder, "fp32"))
    with pytest.raises(UserError, match="stop strings need a tokenizer"):
        llm.generate([PROMPT], SamplingParams(stop="x"))
    output = llm.generate([PROMPT], SamplingParams(max_tokens=3))[0]
    assert (output.text, len(output.token_ids)) == ("", 3)
