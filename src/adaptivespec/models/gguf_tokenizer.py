"""The byte-level BPE tokenizer that a GGUF file carries, rebuilt with the tokenizers library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .gguf_file import GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_GPT4_LIKE = (  # {digits} is where Llama 3 and Qwen2 differ
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REGEX = {"qwen2": _GPT4_LIKE.format(digits=r"\p{N}"), "llama-bpe": _GPT4_LIKE.format(digits=r"\p{N}{1,3}")}
_ALIASES = {"default": "gpt-2", "llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
_PRE_TOKENIZERS = ("gpt-2", "llama-bpe", "qwen2", "smollm")


def tokenizer_from_gguf(file: GGUFFile) -> PreTrainedTokenizerBase:
    """Build the tokenizer. Raises UserError naming what the file lacks or which kind of tokenizer is not supported."""
    from transformers import PreTrainedTokenizerFast

    tokens = _tokens(file)
    tokenizer = build_tokenizer(file)

    def text(role: str) -> str | None:
        index = file.get(f"tokenizer.ggml.{role}_token_id")
        if index is not None and not 0 <= index < len(tokens):
            raise UserError(f"{file.path}: {role}_token_id {index} is outside the vocabulary of {len(tokens)}")
        return None if index is None else tokens[index]

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=text("bos"),
        eos_token=text("eos"),
        pad_token=text("padding") or text("eos"),
        unk_token=text("unknown"),
        chat_template=file.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """The bare `tokenizers.Tokenizer`, without special roles and chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    pre = _pre_name(file)
    tokens = _tokens(file)
    merges = [tuple(merge.split(" ")) for merge in file.require("tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # tokenizers raises bare exceptions, e.g. for a merge outside the vocabulary
        raise UserError(f"{file.path}: its tokenizer is damaged ({error})") from None
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = file.get("tokenizer.ggml.token_type", [])
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, k in zip(tokens, kinds, strict=False) if k == _CONTROL]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in zip(tokens, kinds, strict=False) if k == _USER_DEFINED])
    tokenizer.post_processor = _post_processor(file, tokens, pre)
    return tokenizer


def _tokens(file: GGUFFile) -> list[str]:
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    return tokens


def _pre_name(file: GGUFFile) -> str:
    kind = file.require("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UserError(f"{file.path} has a tokenizer of the kind {kind!r}; supported: gpt2 (byte-level BPE)")
    name = file.get("tokenizer.ggml.pre", "default")
    pre = _ALIASES.get(name, name)
    if pre not in _PRE_TOKENIZERS:
        raise UserError(f"{file.path} has the pre-tokenizer {name!r}; supported: {', '.join(sorted((*_PRE_TOKENIZERS, *_ALIASES)))}")
    return str(pre)


def _pre_tokenizer(pre: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if pre in _REGEX:
        split = pre_tokenizers.Split(Regex(_REGEX[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level


def _post_processor(file: GGUFFile, tokens: list[str], pre: str) -> Any:
    from tokenizers import processors

    bos = file.get("tokenizer.ggml.bos_token_id")
    # llama.cpp's rule: Llama 3 begins every text with BOS unless the file says otherwise.
    if bos is None or not file.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        return processors.ByteLevel(trim_offsets=False)
    begin = processors.TemplateProcessing(
        single=f"{tokens[bos]}:0 $A:0", pair=f"{tokens[bos]}:0 $A:0 $B:1", special_tokens=[(tokens[bos], bos)]
    )
    return processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
