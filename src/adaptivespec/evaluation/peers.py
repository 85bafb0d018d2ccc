"""Peers: transformers' generate on the same weights and prompts, one request at a time, as arms of a benchmark."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..config import SamplingParams
from ..engine.llm import LLM
from ..engine.request import FinishReason
from ..engine.transformers_model import as_transformers, draft_decoder
from ..errors import UserError

if TYPE_CHECKING:
    from transformers import GenerationConfig

LOOKUP_TOKENS = 10
"""Tokens that hf-lookup proposes at most, the number in transformers' own documentation."""

_LACKS = ("presence_penalty", "frequency_penalty", "stop", "n", "logprobs")
"""Sampling settings that a peer cannot answer alike. transformers has stop strings, but assisted generation looks for them only at the
end of a block of tokens, not inside it."""


@dataclass(frozen=True)
class PeerOutput:
    """A peer's answer.

    Attributes:
        token_ids: what was generated; a stop token is the last of them.
        finish_reason: `stop` (a stop token) or `length` (max_tokens or the end of the context).
        steps: forwards of the target, the prompt's included.
    """

    token_ids: list[int]
    finish_reason: FinishReason
    steps: int


class _CountingStreamer:
    """transformers hands every step's tokens to a streamer, after the prompt's: so their number is that of the steps."""

    def __init__(self) -> None:
        self.steps = -1  # the prompt comes first

    def put(self, _: torch.Tensor) -> None:
        """A step's tokens."""
        self.steps += 1

    def end(self) -> None:
        """Nothing follows."""


class Peers:
    """transformers' models on an engine's weights.

    Args:
        llm: the engine; its draft model is hf-assisted's assistant.
        names: the peers that will be asked, of `arms.PEERS`.

    Raises:
        UserError: hf-assisted without a draft model or with one of another vocabulary size; a model that transformers has not.
    """

    def __init__(self, llm: LLM, names: Collection[str]) -> None:
        import transformers

        self.llm, self.assistant = llm, None
        if "hf-assisted" in names:
            draft = draft_decoder(llm)
            if draft is None:
                raise no_draft_model()
            sizes = llm.model.config.vocab_size, draft.config.vocab_size
            if sizes[0] != sizes[1]:
                raise UserError(f"arm hf-assisted: transformers wants vocabularies of one size; target {sizes[0]}, draft model {sizes[1]}")
            self.assistant = as_transformers(draft)
        self.target = as_transformers(llm.model.decoder)
        for model in filter(None, (self.target, self.assistant)):
            # Blank, so that what a request leaves out (a stop token with ignore_eos) is not taken from the model. An assistant's number of
            # drafted tokens and its schedule are read from here too: they are transformers' defaults.
            model.generation_config = transformers.GenerationConfig()

    def answer(self, name: str, prompt: Sequence[int], params: SamplingParams) -> PeerOutput:
        """One answer of one peer.

        Args:
            name: of `arms.PEERS`.
            prompt: token ids that fit the engine's context.
            params: see `check_peers`; the seed is torch's, so samples are not those of our arms.
        """
        ids = torch.tensor([prompt], device=self.target.device)
        config = self._config(name, len(prompt), params)
        if params.temperature > 0 and params.seed is not None:
            torch.manual_seed(params.seed)
        streamer, more = _CountingStreamer(), {"assistant_model": self.assistant} if name == "hf-assisted" else {}
        # Without a mask, prompt tokens that equal the padding token would be hidden.
        out = self.target.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=streamer, **more)
        tokens = out[0, len(prompt) :].tolist()
        return PeerOutput(tokens, "stop" if tokens[-1] in (config.eos_token_id or ()) else "length", streamer.steps)

    def _config(self, name: str, prompt_length: int, params: SamplingParams) -> GenerationConfig:
        import transformers

        eos = () if params.ignore_eos else self.llm.model.config.eos_token_ids
        values: dict[str, Any] = {
            "max_new_tokens": min(params.max_tokens, self.llm.context_length - prompt_length),
            "eos_token_id": sorted({*eos, *params.stop_token_ids}) or None,
            "pad_token_id": 0,  # never used with one request, but asked for
            "do_sample": params.temperature > 0,
            "repetition_penalty": params.repetition_penalty,
        }
        if params.min_tokens > 0:
            values["min_new_tokens"] = params.min_tokens
        if params.temperature > 0:
            values |= {"temperature": params.temperature, "top_k": max(0, params.top_k), "top_p": params.top_p}
            if params.min_p > 0:
                values["min_p"] = params.min_p
        if name == "hf-lookup":
            values["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        return transformers.GenerationConfig(**values)


def check_peers(names: Collection[str], batch: int, params: SamplingParams) -> None:
    """Raise UserError for what peers cannot do alike: batches, and some sampling settings. Nothing to check without peers.

    Args:
        names: the peers to be asked.
        batch: most requests decoded together.
        params: sampling settings of every answer.
    """
    if not names:
        return
    name = next(iter(names))
    if batch > 1:
        raise UserError(f"arm {name} decodes one request at a time: it cannot be compared with batch {batch}")
    defaults = SamplingParams()
    if lacking := [field for field in _LACKS if getattr(params, field) != getattr(defaults, field)]:
        raise UserError(f"arm {name}: transformers has no equal of {', '.join(lacking)}; leave that out, or the arm")


def no_draft_model() -> UserError:
    """The refusal of hf-assisted where no smaller model drafts."""
    return UserError("arm hf-assisted needs a smaller model as the drafter: name one (--drafter)")


def peer_version(name: str) -> dict[str, str]:
    """A peer for a report: its name, and what it is with its version."""
    import transformers

    return {"name": name, "engine": "transformers", "version": transformers.__version__}
