"""`adaptivespec chat`: a conversation in the terminal, or over a pipe with one message per line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from ..errors import UserError
from . import options as o
from .conversation import Conversation
from .files import input_lines
from .render import aside


def chat(
    engine: o.EngineFlags,
    sampling: o.SamplingFlags,
    speculation: o.SpeculativeFlags,
    max_tokens: o.MaxTokens = 512,
    seed: o.Seed = None,
    system: Annotated[str | None, typer.Option(help="System message at the head of the conversation.")] = None,
) -> None:
    """Talk to a model; promoted tokens (not the target's own choice) are coloured.

    /help lists what can be set on the way. Ctrl-C stops an answer, Ctrl-D or /exit ends. Over a pipe every line is a message.

    Examples:

        adaptivespec chat

        adaptivespec chat --system "Answer in one sentence." --temperature 0.7 --margin 0.5

        printf 'My name is Ada.\\nWhat is my name?\\n' | adaptivespec chat --max-tokens 40
    """
    config = speculation.config(engine.is_plain)
    params = sampling.params(seed=seed, max_tokens=max_tokens)
    require_chat_template(engine.model)
    conversation = Conversation(engine.build(config), params, system)
    interactive = sys.stdin.isatty()
    if interactive:
        aside(f"{engine.model}: /help for help, Ctrl-D or /exit to end")
    for line in typed_lines() if interactive else input_lines():
        try:
            if not conversation.take(line, remarks=interactive):
                return
        except UserError as error:
            aside(f"error: {error}", "red")


def require_chat_template(model: str) -> None:
    """Refuse a model without a chat template before its weights are read. Raises UserError."""
    from ..models.catalogue import resolve_model
    from ..models.tokenizer import load_tokenizer

    if not load_tokenizer(resolve_model(model).path).chat_template:
        raise UserError(f"{model} has no chat template, so it cannot chat: use `generate --raw`, or an instruction-tuned model")


def typed_lines() -> Iterator[str]:
    """What is typed at the prompt, with line editing and history where readline exists; Ctrl-C clears the line, Ctrl-D ends."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  input() uses it once it is imported
    while True:
        try:
            yield input("> ")
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo()
            aside("Ctrl-D or /exit ends")
        except UnicodeDecodeError:
            aside("error: that is not UTF-8 text", "red")
