"""The tokenizer of a model folder or of a GGUF file, as a transformers tokenizer; transformers is imported only here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from .gguf_file import GGUFFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder or a .gguf file.

    Raises UserError when the folder holds none, or the file's kind of tokenizer is not supported.
    """
    path = Path(path)
    if path.is_file():
        from .gguf_tokenizer import tokenizer_from_gguf

        tokenizer = tokenizer_from_gguf(GGUFFile(path))
    else:
        tokenizer = _from_folder(path)
    tokenizer.model_max_length = int(1e30)  # the engine checks lengths; transformers would warn of them on its own
    return tokenizer


def _from_folder(path: Path) -> PreTrainedTokenizerBase:
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")):
        raise UserError(f"{path} has no tokenizer files (tokenizer.json)")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # whatever transformers and tokenizers raise for damaged files
        reason = str(error).strip().splitlines()
        raise UserError(f"cannot load the tokenizer of {path}: {reason[0] if reason else type(error).__name__}") from None


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation ([{"role": ..., "content": ...}, ...]) up to where the assistant's answer begins.

    Raises UserError when the tokenizer has no chat template or the template rejects the messages.
    """
    if not tokenizer.chat_template:
        raise UserError("this model's tokenizer has no chat template: give a plain prompt (raw text) instead of a chat")
    try:
        ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True, return_dict=False)
    except Exception as error:  # templates raise what they like, as jinja errors
        raise UserError(f"the chat template rejects these messages: {error}") from None
    return [int(i) for i in ids]


def tokens_by_id(path: Path) -> dict[int, str]:
    """Every token's text as the vocabulary of a Hugging Face folder or .gguf file writes it; no tokenizer is built for the latter.

    Raises UserError when there is no tokenizer.
    """
    if path.is_file():
        return dict(enumerate(GGUFFile(path).require("tokenizer.ggml.tokens")))
    return {i: token for token, i in load_tokenizer(path).get_vocab().items()}


def check_same_tokenizer(target: Mapping[int, str], draft: Mapping[int, str], vocab_size: int) -> None:
    """Raise UserError, naming the first token that differs, unless both vocabularies give every id the same text.

    Args:
        target, draft: from `tokens_by_id`.
        vocab_size: of the smaller model: ids from there on cannot pass between the models. The `[PAD<id>]` tokens that llama.cpp
            writes for padding do not count either.
    """
    ours, theirs = ({i: token for i, token in tokens.items() if i < vocab_size and token != f"[PAD{i}]"} for tokens in (target, draft))
    if ours == theirs:
        return
    first = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    texts = [repr(tokens[first]) if first in tokens else "nothing" for tokens in (ours, theirs)]
    raise UserError(
        f"the draft model has another tokenizer: token {first} is {texts[0]} for the target and {texts[1]} for the draft model; "
        "use a draft model of the target's family, or ngram"
    )
