"""One request on its way through the engine, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..config import SamplingParams, SpeculativeConfig
from ..method.policy import PolicyState, TreePolicy
from ..method.records import StepRecord

FinishReason = Literal["stop", "length", "abort"]


@dataclass(eq=False)
class Request:
    """State of one request. `max_tokens` is already cut to what the context holds."""

    prompt: list[int]
    params: SamplingParams
    config: SpeculativeConfig
    policy: TreePolicy
    state: PolicyState
    seed: int
    stop_ids: frozenset[int]
    protected_ids: frozenset[int]
    max_tokens: int
    slot: int = -1
    token_ids: list[int] = field(default_factory=list)
    promoted: list[bool] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    spent: float = 0.0
    seconds_prefill: float = 0.0
    finish_reason: FinishReason | None = None

    @property
    def drafts(self) -> bool:
        """Whether this request ever asks the drafter."""
        return self.config.policy != "off"

    def emit(self, tokens: list[int], promoted: list[bool]) -> None:
        """Append a block in token order; stop tokens and max_tokens end the request inside it, and nothing follows."""
        for token, was_promoted in zip(tokens, promoted, strict=True):
            self.token_ids.append(token)
            self.promoted.append(was_promoted)
            if token in self.stop_ids and len(self.token_ids) >= self.params.min_tokens:
                self.finish_reason = "stop"
                return
            if len(self.token_ids) >= self.max_tokens:
                self.finish_reason = "length"
                return


@dataclass(frozen=True)
class RequestOutput:
    """A finished answer.

    Attributes:
        prompt_token_ids: what was asked.
        token_ids: what was generated; a stop token is the last of them.
        text: the same decoded, without special tokens; empty when the model has no tokenizer.
        finish_reason: `stop` (a stop token), `length` (max_tokens or the end of the context) or `abort`.
        promoted: per generated token whether the margin rule let it stand although it was not the target's choice.
        records: one StepRecord per step; see telemetry.summarise.
        speculative: the settings in effect.
        seconds_prefill: time until the first token.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    promoted: list[bool]
    records: list[StepRecord]
    speculative: SpeculativeConfig
    seconds_prefill: float


@dataclass(frozen=True)
class StreamChunk:
    """What one step added: per token its id, whether it was promoted, and the text that it made complete; the output at the end."""

    token_ids: list[int]
    promoted: list[bool]
    pieces: list[str]
    output: RequestOutput | None = None

    @property
    def text(self) -> str:
        """The text that became complete."""
        return "".join(self.pieces)
