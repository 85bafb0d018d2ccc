"""Tokenizers from GGUF files, against transformers' own classes on the same vocabulary; chat prompts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.errors import UserError
from adaptivespec.models.gguf_file import GGUFFile
from adaptivespec.models.gguf_tokenizer import build_tokenizer
from adaptivespec.models.tokenizer import check_same_tokenizer, encode_chat, load_tokenizer, tokens_by_id
from tiny_models import write_gguf

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "1 2", "12 3", "Ġ Ġ", "Ċ Ċ", "' t"]
CONTROL, USER_DEFINED = ["<eos>", "<bos>", "<|im_end|>"], ["<think>"]  # 0 and 1 as in tiny_models
PRE = ["gpt-2", "smollm", "qwen2", "llama-bpe"]


def vocabulary() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return [*CONTROL, *USER_DEFINED, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def fields(pre: str, **more: Any) -> dict[str, Any]:
    tokens = vocabulary()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [4] * len(USER_DEFINED) + [1] * (len(tokens) - len(CONTROL + USER_DEFINED)),
        "tokenizer.ggml.merges": MERGES,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


@pytest.fixture(scope="module")
def files(tiny_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, GGUFFile]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {pre: GGUFFile(write_gguf(tiny_folders["llama"], folder / f"{pre}.gguf", fields(pre))) for pre in PRE}


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["Ġ", "Ġ12345", "Ġapples", "Ġdon", "'t", "ĊĊ"]),
        ("smollm", ["ĠĠ", "1", "2", "3", "4", "5", "Ġapples", "Ġdon", "'t", "ĊĊ"]),
        ("qwen2", ["Ġ", "Ġ", "1", "2", "3", "4", "5", "Ġapples", "Ġdon", "'t", "ĊĊ"]),
        ("llama-bpe", ["Ġ", "Ġ", "123", "45", "Ġapples", "Ġdon", "'t", "ĊĊ"]),
    ],
)
def test_pre_tokenizers(pre: str, pieces: list[str], files: dict[str, GGUFFile]) -> None:
    got = [piece for piece, _ in build_tokenizer(files[pre]).pre_tokenizer.pre_tokenize_str("  12345 apples don't\n\n")]
    assert got == pieces


@pytest.mark.parametrize("pre", PRE)
@given(text=st.text() | st.text(alphabet="hello world 123\n\t'té好🙂<>"))
def test_round_trip(pre: str, files: dict[str, GGUFFile], text: str) -> None:
    import unicodedata

    tokenizer = build_tokenizer(files[pre])
    text = text.encode("utf-8", "ignore").decode()
    wanted = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == wanted


@given(text=st.text(alphabet="hello WORLD's 123\n\r\t '’é好🙂-_=+{}"))
def test_qwen2_equals_transformers(files: dict[str, GGUFFile], text: str) -> None:
    from transformers import Qwen2Tokenizer

    merges = [tuple(merge.split()) for merge in MERGES]
    reference = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(vocabulary())}, merges=merges)
    assert build_tokenizer(files["qwen2"]).encode(text).ids == reference.encode(text)


@given(text=st.text(alphabet="hello WORLD's 123\n\r\t '’é好🙂-_=+{}"))
def test_gpt2_equals_transformers(files: dict[str, GGUFFile], text: str) -> None:
    from transformers import GPT2Tokenizer

    merges = [tuple(merge.split()) for merge in MERGES]
    reference = GPT2Tokenizer(vocab={token: i for i, token in enumerate(vocabulary())}, merges=merges)
    assert build_tokenizer(files["gpt-2"]).encode(text).ids == reference.encode(text)


def test_special_tokens_and_roles(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    values = fields("qwen2", padding_token_id=2)
    values["tokenizer.chat_template"] = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    tokenizer = load_tokenizer(write_gguf(tiny_folders["qwen2"], tmp_path / "m.gguf", values))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<bos>", "<eos>", "<|im_end|>")
    hello = tokenizer.encode("hello")
    assert tokenizer.encode("hello<|im_end|><think>") == [*hello, 2, 3]
    assert tokenizer.decode([*hello, 2, 3], skip_special_tokens=True) == "hello<think>"  # user-defined tokens are text
    assert encode_chat(tokenizer, [{"role": "user", "content": "hello"}]) == [*hello, 2]


@pytest.mark.parametrize(
    ("pre", "flag", "begins"),
    [("qwen2", None, False), ("qwen2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", True, True)],
)
def test_bos(pre: str, flag: bool | None, begins: bool, tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    more = {} if flag is None else {"add_bos_token": flag}
    tokenizer = load_tokenizer(write_gguf(tiny_folders["llama"], tmp_path / "m.gguf", fields(pre, **more)))
    bos = tokenizer.bos_token_id
    assert (tokenizer.encode("hello")[0] == bos) is begins
    assert bos not in tokenizer.encode("hello", add_special_tokens=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken'; supported: .*gpt-2.*qwen2.*smollm"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer of the kind 'llama'; supported: gpt2"),
        ({"tokenizer.ggml.merges": ["x yz"]}, "its tokenizer is damaged"),
        ({"tokenizer.ggml.padding_token_id": 100000}, "padding_token_id 100000 is outside the vocabulary"),
    ],
)
def test_refusals(values: dict[str, Any], message: str, tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    file = write_gguf(tiny_folders["llama"], tmp_path / "m.gguf", {**fields("qwen2"), **values})
    with pytest.raises(UserError, match=message):
        load_tokenizer(file)


def test_gguf_without_tokenizer(tiny_ggufs: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"lacks the metadata tokenizer.ggml.tokens"):
        load_tokenizer(tiny_ggufs["llama"])


def test_folder(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_folders["llama"])
    assert tokenizer.encode("Hi") == [ord("H"), ord("i")]
    assert encode_chat(tokenizer, [{"role": "user", "content": "Hi"}]) == [ord(c) for c in "u:Hi\na:"]
    with pytest.raises(UserError, match="has no tokenizer files"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot load the tokenizer of"):
        load_tokenizer(tmp_path)


def test_chat_without_template(files: dict[str, GGUFFile]) -> None:
    tokenizer = load_tokenizer(files["smollm"].path)
    assert tokenizer.encode("hello")
    with pytest.raises(UserError, match="has no chat template: give a plain prompt"):
        encode_chat(tokenizer, [{"role": "user", "content": "Hi"}])


def test_template_that_rejects(tiny_folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(tiny_folders["llama"])
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match="rejects these messages: roles must alternate"):
        encode_chat(tokenizer, [{"role": "user", "content": "Hi"}])


def test_transformers_is_imported_only_for_a_tokenizer(tiny_folders: dict[str, Path]) -> None:
    code = (
        "import sys; from adaptivespec.models.loading import load_model; from adaptivespec.models import tokenizer;"
        f"load_model({str(tiny_folders['llama'])!r}, 'float32'); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_long_prompts_are_the_engines_business(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers warns of texts above this length, beside the engine's one clear line."""
    for path in (tiny_folders["llama"], write_gguf(tiny_folders["llama"], tmp_path / "a.gguf", fields("qwen2"))):
        assert load_tokenizer(path).model_max_length > 10**9


def test_the_same_tokenizer_in_two_formats_is_accepted(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    tokens = vocabulary()
    padded = [*tokens, *(f"[PAD{i}]" for i in range(len(tokens), len(tokens) + 20))]
    kinds = [3] * len(CONTROL) + [4] * len(USER_DEFINED) + [1] * (len(padded) - len(CONTROL + USER_DEFINED))
    file = write_gguf(tiny_folders["llama"], tmp_path / "a.gguf", fields("qwen2"))
    longer = write_gguf(tiny_folders["llama"], tmp_path / "b.gguf", fields("qwen2", tokens=padded, token_type=kinds))
    load_tokenizer(file).save_pretrained(tmp_path / "folder")
    ours, theirs, folders = (tokens_by_id(path) for path in (file, longer, tmp_path / "folder"))
    for pair in ((ours, theirs), (theirs, ours), (ours, folders), (folders, theirs)):
        check_same_tokenizer(*pair, len(padded))


def test_another_tokenizer_is_refused_with_the_first_token_that_differs(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    tokens = vocabulary()
    size, one, two = len(tokens), len(tokens) - 3, len(tokens) - 2
    tokens[one], tokens[two] = tokens[two], tokens[one]
    ours = tokens_by_id(write_gguf(tiny_folders["llama"], tmp_path / "a.gguf", fields("qwen2")))
    swapped = tokens_by_id(write_gguf(tiny_folders["llama"], tmp_path / "b.gguf", fields("qwen2", tokens=tokens)))
    message = f"token {one} is {tokens[two]!r} for the target and {tokens[one]!r} for the draft model; use a draft model"
    with pytest.raises(UserError, match=message):
        check_same_tokenizer(ours, swapped, size)
    plain = dict(ours)
    ours[size] = "<extra>"
    check_same_tokenizer(ours, plain, size)  # a token that one of the models cannot express
    with pytest.raises(UserError, match=f"token {size} is '<extra>' for the target and nothing for the draft model"):
        check_same_tokenizer(ours, plain, size + 1)
