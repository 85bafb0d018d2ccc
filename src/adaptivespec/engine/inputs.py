"""What users hand to the engine, in all the forms it may have: prompts, and settings for all or one per prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..config import SamplingParams
from ..errors import UserError
from ..models.tokenizer import encode_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text as it is, token ids, or chat messages."""

T = TypeVar("T")

_FORMS = "a prompt is a text, a list of token ids (ints) or a list of chat messages ({'role': ..., 'content': ...})"


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Several prompts from one or several. Raises UserError for what is neither."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray | memoryview):
        raise UserError(f"{_FORMS}, not {type(prompts).__name__}")
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | Mapping))
    return [prompts] if single else list(prompts)  # type: ignore[list-item, arg-type]


def encode(prompt: Prompt, tokenizer: Callable[[], PreTrainedTokenizerBase]) -> list[int]:
    """Token ids of a text, of chat messages (with the model's chat template), or of ids as they are.

    Raises:
        UserError: another kind of value, text that is not Unicode, messages that the template rejects.
    """
    if isinstance(prompt, str):
        check_unicode(prompt)
        return [int(i) for i in tokenizer().encode(prompt)]
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray | memoryview):
        if prompt and all(is_message(message) for message in prompt):
            for message in prompt:
                check_unicode(str(message["content"]))  # type: ignore[index]
            return encode_chat(tokenizer(), prompt)  # type: ignore[arg-type]
        if all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
            return list(prompt)  # type: ignore[arg-type]
    raise UserError(_FORMS)


def is_message(value: Any) -> bool:
    """Whether a value is a chat message."""
    return isinstance(value, Mapping) and "role" in value and "content" in value


def check_unicode(text: str) -> None:
    """Raise UserError for text that no tokenizer can read: lone surrogates, as arguments in a wrong encoding give."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError("the prompt is not valid Unicode text (wrong encoding?)") from None


def one_each(settings: T | Sequence[T], count: int, kind: str) -> list[T]:
    """Settings for each of `count` prompts, from one for all or one per prompt. Raises UserError when their numbers differ."""
    if not isinstance(settings, list | tuple):
        return [settings] * count  # type: ignore[list-item]
    if len(settings) != count:
        raise UserError(f"{count} prompts but {len(settings)} {kind} settings")
    return list(settings)


def sampling_params(params: Any) -> SamplingParams:
    """What was given, or the defaults for None. Raises UserError for another kind of value."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise UserError(f"params: expected SamplingParams, or a list of one per prompt, not {type(params).__name__}")
    return params
