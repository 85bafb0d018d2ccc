"""The state of a chat: messages so far, settings of the next answer, and the commands that change them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from ..config import ALIASES, SamplingParams, SpeculativeConfig
from ..errors import UserError, nearest
from .render import aside, show

if TYPE_CHECKING:
    from ..engine.llm import LLM
    from ..engine.request import RequestOutput

HELP = """\
/set                  show the settings of the next answer
/set NAME VALUE       change one: /set margin 0.5, /set policy off, /set temperature 0.7, /set max_tokens 100
/reset                forget the conversation (a system message stays)
/exit, Ctrl-D         end
Ctrl-C                stop an answer; what was said stays in the conversation"""

COMMANDS = ("/set", "/reset", "/exit", "/help")


class Conversation:
    """One user and one model taking turns.

    Args:
        llm: the models; its speculative settings are those of the first answer.
        params: sampling settings of the first answer.
        system: a message at the head.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self.llm, self.params, self.speculative = llm, params, llm.speculative
        self._head = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._head)
        self._console = Console()

    def take(self, line: str, remarks: bool = False) -> bool:
        """Answer a message or obey a command; `remarks` adds a line on each answer. False once the conversation is to end.

        Raises:
            UserError: a command or setting that does not exist or fit, or no room for the message; the conversation stays as it was.
        """
        text = line.strip()
        if not re.match(r"/\w*(\s|$)", text):  # a path such as /usr/bin is no command
            if text:
                self._answer(text, remarks)
            return True
        command, _, rest = text.partition(" ")
        if command == "/exit":
            return False
        if command == "/reset":
            self.messages = list(self._head)
        elif command == "/set":
            self._set(rest.split(maxsplit=1))
        elif command == "/help":
            typer.echo(HELP)
        else:
            raise UserError(f"no command {command!r}{nearest(command, COMMANDS)}")
        return True

    def _answer(self, text: str, remarks: bool) -> None:
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.llm.encode(messages)
        room = self.llm.context_length
        if len(ids) >= room:
            raise UserError(
                f"the conversation has {len(ids)} tokens with this message and the context holds {room}: /reset starts a new one"
            )
        said, output = "", None
        try:
            for chunk in self.llm.stream(ids, self.params, speculative=self.speculative):
                for piece, promoted in zip(chunk.pieces, chunk.promoted, strict=True):
                    said += piece
                    show(self._console, piece, promoted)
                output = chunk.output
        except KeyboardInterrupt:
            output = None
        typer.echo()
        if said:  # an answer stopped before its first word leaves no trace, not even of the question
            self.messages = [*messages, {"role": "assistant", "content": said}]
        if output is None:
            aside("stopped")
        elif len(ids) + len(output.token_ids) >= room:
            aside(f"the context of {room} tokens is full: /reset starts a new conversation", "yellow")
        elif remarks:
            aside(remark(output))

    def _set(self, words: list[str]) -> None:
        if len(words) != 2:
            if words:
                raise UserError(f"/set {words[0]} needs a value")
            for settings in (self.params, self.speculative):
                typer.echo(", ".join(f"{name} {value}" for name, value in settings.model_dump(exclude_none=True).items()))
            return
        name, value = ALIASES.get(words[0], words[0]), words[1]
        params, speculative = self.params, self.speculative
        if name in SpeculativeConfig.model_fields:
            speculative = speculative.for_request({name: value})
        elif name in SamplingParams.model_fields and name != "logprobs":
            params = params.updated({name: value})
        else:
            raise UserError(f"no setting {name!r}{nearest(name, SpeculativeConfig.model_fields.keys() | SamplingParams.model_fields)}")
        # A stream that is never read checks everything and does nothing.
        self.llm.stream([0], params, speculative=speculative)
        self.params, self.speculative = params, speculative


def remark(output: RequestOutput) -> str:
    """What an answer was like, in a line."""
    from ..telemetry.stats import summarise

    summary = summarise(output.records)
    rate = f"{(len(output.token_ids) - 1) / summary.seconds:.1f} tok/s, " if summary.seconds else ""
    cut = ", cut at max_tokens" if output.finish_reason == "length" else ""
    return f"{len(output.token_ids)} tokens, {rate}accept length {summary.accept_length:.2f}, {sum(output.promoted)} promoted{cut}"
