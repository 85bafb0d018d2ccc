"""One request on its way through the engine, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..config import SamplingParams, SpeculativeConfig
from ..method.acceptance import AcceptanceRule
from ..method.policy import PolicyState, TreePolicy
from ..method.records import StepRecord
from ..telemetry.stats import speculative_metrics
from .detokenizer import Detokenizer
from .occurrences import Occurrences

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class TokenLogprob:
    """What the target thought of one emitted token, at temperature 1 and before any processing.

    Attributes:
        token_id: the token.
        logprob: its natural log-probability.
        rank: 1 for the most probable token.
        top: log-probabilities of the most probable tokens by id, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


@dataclass(eq=False)
class Request:
    """State of one request. `max_tokens` is already cut to what the context holds; `index` counts the n answers of a prompt."""

    prompt: list[int]
    params: SamplingParams
    config: SpeculativeConfig
    policy: TreePolicy
    rule: AcceptanceRule
    state: PolicyState
    seed: int
    stop_ids: frozenset[int]
    protected_ids: frozenset[int]
    max_tokens: int
    detokenizer: Detokenizer | None = None
    id: int = 0
    index: int = 0
    slot: int = -1
    token_ids: list[int] = field(default_factory=list)
    occurrences: Occurrences | None = None
    promoted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    spent: float = 0.0
    seconds_prefill: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def drafts(self) -> bool:
        """Whether this request ever asks the drafter."""
        return self.config.policy != "off"

    def emit(self, tokens: list[int], promoted: list[bool], logprobs: list[TokenLogprob] | None = None) -> None:
        """Append a block in token order; what ends the request inside it lets nothing follow.

        A stop token comes before a stop string, and both before the cap of max_tokens.
        """
        for i, token in enumerate(tokens):
            self.token_ids.append(token)
            if self.occurrences is not None:
                self.occurrences.add(token)
            self.promoted.append(promoted[i])
            if logprobs is not None:
                self.logprobs.append(logprobs[i])
            enough = len(self.token_ids) >= self.params.min_tokens
            stopped = self.detokenizer is not None and self.detokenizer.add(token, search=enough)
            if token in self.stop_ids and enough:
                self.finish_reason, self.stop_reason = "stop", token
            elif stopped and self.detokenizer is not None:
                self.finish_reason, self.stop_reason = "stop", self.detokenizer.stopped_by
            elif len(self.token_ids) >= self.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return


@dataclass(frozen=True)
class RequestOutput:
    """A finished answer.

    Attributes:
        prompt_token_ids: what was asked.
        index: which of the n answers to the prompt this is.
        token_ids: what was generated; a stop token, or the token that completed a stop string, is the last of them.
        text: the same decoded, without special tokens and up to the stop string; empty when the model has no tokenizer.
        finish_reason: `stop` (a stop token or string), `length` (max_tokens or the end of the context) or `abort`.
        stop_reason: the token id or string that stopped it.
        promoted: per generated token whether the margin rule let it stand although it was not the target's choice.
        logprobs: per generated token, when asked for.
        records: one StepRecord per step; see telemetry.summarise.
        params: what was asked for.
        seed: of this answer's noise, drawn when none was asked for.
        speculative: the speculative settings in effect.
        seconds_prefill: time the prompt took, up to the first token.
    """

    prompt_token_ids: list[int]
    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None
    promoted: list[bool]
    logprobs: list[TokenLogprob] | None
    records: list[StepRecord]
    params: SamplingParams
    seed: int
    speculative: SpeculativeConfig
    seconds_prefill: float

    @property
    def metrics(self) -> dict[str, Any]:
        """`{"speculative_decoding": {...}}` under the names of vLLM's responses, see `telemetry.stats.speculative_metrics`."""
        return {"speculative_decoding": speculative_metrics(self.records)}


@dataclass(frozen=True)
class StreamChunk:
    """What one step added: per token its id, whether it was promoted, and the text that it made certain; the output at the end."""

    token_ids: list[int]
    promoted: list[bool]
    pieces: list[str]
    output: RequestOutput | None = None

    @property
    def text(self) -> str:
        """The text that became certain."""
        return "".join(self.pieces)
