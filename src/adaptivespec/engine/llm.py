"""`LLM`: a target and a drafter behind generate and stream."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config import EngineConfig, SamplingParams, SpeculativeConfig
from ..drafters.base import Drafter
from ..drafters.eagle3 import Eagle3
from ..errors import UserError
from ..method.policy import TreePolicy, make_policy
from ..models.catalogue import resolve_drafter, resolve_model
from ..models.loading import LoadedModel, load_model
from ..models.tokenizer import encode_chat
from .request import Request, RequestOutput, StreamChunk
from .runner import Runner
from .scheduler import Scheduler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text as it is, token ids, or chat messages."""

DEFAULT_CONTEXT = 4096


def build_policy(config: SpeculativeConfig) -> TreePolicy:
    """The tree policy that settings name. Raises UserError for impossible shapes."""
    try:
        return make_policy(
            config.policy, config.shape, config.low, config.high, config.saturation, config.alpha, config.patience, config.normalise
        )
    except ValueError as error:
        raise UserError(str(error)) from None


def check_unicode(text: str) -> None:
    """Raise UserError for text that no tokenizer can read: lone surrogates, as arguments in a wrong encoding give."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError("the prompt is not valid Unicode text (wrong encoding?)") from None


def choose_device(name: str) -> str:
    """`auto` is CUDA when there is a GPU. Raises UserError for a device that is not there or not supported."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not re.fullmatch(r"cuda(:\d+)?", name):
        raise UserError(f"device {name!r} is not supported; known: auto, cpu, cuda, cuda:0, cuda:1, ...")
    if name != "cpu" and int(name.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return name


def require_drafter(config: SpeculativeConfig, has_drafter: bool) -> None:
    """Raise UserError for settings that draft where nothing can."""
    if config.policy != "off" and not has_drafter:
        raise UserError(f"policy {config.policy} needs a drafter, and this model has none: name one with drafter=, or use policy off")


class LLM:
    """A target model with a drafter. Not thread-safe.

    Args:
        model: a short name (`adaptivespec models`), a .gguf file, a folder, a hub id, or a loaded model.
        drafter: an EAGLE-3 head (a folder or hub id), a drafter object, `none` for plain decoding; None takes the short name's
            own head, and plain decoding where there is none.
        speculative: default settings of requests. None is AdaptiveSpec where there is a drafter, else plain decoding.
        shapes_for: further settings that requests will bring, so that room is made for their trees.
        engine: the other settings, see EngineConfig (dtype, device, context_length, max_running_requests, ...).

    Raises:
        UserError: anything wrong with these, before any weights are read where possible.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        drafter: str | Path | Drafter | None = None,
        speculative: SpeculativeConfig | None = None,
        shapes_for: Sequence[SpeculativeConfig] = (),
        **engine: Any,
    ) -> None:
        config = EngineConfig(**engine)
        self._policies: dict[str, TreePolicy] = {}
        configs = [speculative or SpeculativeConfig(), *shapes_for]
        shapes = [shape for c in configs for shape in self._policy(c).reachable()]
        device = choose_device(config.device)
        # The drafter is looked for before the target's weights are read: a wrong name costs no wait.
        source = model.source if isinstance(model, LoadedModel) else resolve_model(model)
        folder = resolve_drafter(drafter, source.preset) if drafter is None or isinstance(drafter, str | Path) else None
        drafts = folder is not None or not (drafter is None or isinstance(drafter, str | Path))
        self.speculative = speculative or SpeculativeConfig(policy="adaptive" if drafts else "off")
        require_drafter(self.speculative, drafts)
        self.model = model if isinstance(model, LoadedModel) else load_model(source, config.dtype, device)
        decoder, limit = self.model.decoder, self.model.config.max_position_embeddings
        if config.context_length is not None and config.context_length > limit:
            raise UserError(f"context_length {config.context_length} is more than the model's {limit}")
        self.context_length = config.context_length or min(limit, DEFAULT_CONTEXT)
        self.drafter: Drafter | None = None
        if folder is not None:
            self.drafter = Eagle3(folder, decoder, config.aux_layers)
        elif drafter is not None and not isinstance(drafter, str | Path):
            self.drafter = drafter
        self.max_nodes = max(s.num_draft_tokens for s in shapes)
        self.max_steps, self.max_topk = max(s.num_steps for s in shapes), max(s.topk for s in shapes)
        slots = config.max_running_requests
        self.runner = Runner(decoder, self.drafter, self.context_length, slots, shapes, config.prefill_chunk)
        self.scheduler = Scheduler(self.runner, slots)
        self._special_ids: frozenset[int] | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer. Raises UserError when it has none."""
        return self.model.load_tokenizer()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, of chat messages (with the model's chat template), or of ids as they are."""
        if isinstance(prompt, str):
            check_unicode(prompt)
            return [int(i) for i in self.tokenizer.encode(prompt)]
        if prompt and isinstance(prompt[0], Mapping):
            for message in prompt:
                check_unicode(str(message.get("content")))  # type: ignore[union-attr]
            return encode_chat(self.tokenizer, prompt)  # type: ignore[arg-type]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
            raise UserError("a prompt is a text, a list of token ids (ints) or a list of chat messages ({'role': ..., 'content': ...})")
        return list(prompt)  # type: ignore[arg-type]

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Raise UserError for an empty prompt, one that does not fit the context, or ids outside the vocabulary."""
        vocab = self.model.config.vocab_size
        if not ids:
            raise UserError("the prompt is empty: at least one token is needed")
        if wrong := [i for i in ids if not 0 <= i < vocab]:
            raise UserError(f"token id {wrong[0]} is outside the model's vocabulary of {vocab}")
        if len(ids) >= self.context_length:
            raise UserError(f"the prompt has {len(ids)} tokens; the context of {self.context_length} must hold it and at least one more")

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative: SpeculativeConfig | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts together, in their order.

        Args:
            prompts: one prompt (a text, a list of token ids or a list of chat messages), or a list of them.
            params: sampling settings for all, or one per prompt.
            speculative: settings that replace the LLM's own for these requests.

        Raises:
            UserError: an empty or too long prompt, settings that do not fit: before any work.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | Mapping))
        items: Sequence[Prompt] = [prompts] if single else prompts  # type: ignore[list-item, assignment]
        settings = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(items)
        if len(settings) != len(items):
            raise UserError(f"{len(items)} prompts but {len(settings)} sampling settings")
        requests = [self._request(p, s, speculative) for p, s in zip(items, settings, strict=True)]
        for request in requests:
            self.scheduler.add(request)
        try:
            while any(r.finish_reason is None for r in requests):
                self.scheduler.step()
        finally:  # after Ctrl-C no slot stays taken
            for request in requests:
                self.scheduler.abort(request)
        return [self._output(r) for r in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, speculative: SpeculativeConfig | None = None
    ) -> Iterator[StreamChunk]:
        """Answer one prompt step by step; leaving the loop early frees the slot. The last chunk carries the whole output."""
        request = self._request(prompt, params or SamplingParams(), speculative)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[StreamChunk]:
        from tokenizers.decoders import DecodeStream

        # DecodeStream holds back bytes that do not make a character yet.
        decoder = DecodeStream(skip_special_tokens=True)
        backend = getattr(self.tokenizer, "_tokenizer", None) if self._has_tokenizer() else None
        self.scheduler.add(request)
        sent, text = 0, ""
        try:
            while True:
                # Another generate or stream on this LLM may have moved this request on already.
                if request.finish_reason is None and sent == len(request.token_ids):
                    self.scheduler.step()
                tokens, promoted = request.token_ids[sent:], request.promoted[sent:]
                sent = len(request.token_ids)
                pieces = [decoder.step(backend, token) or "" for token in tokens] if backend is not None else [""] * len(tokens)
                text += "".join(pieces)
                if request.finish_reason is not None:
                    break
                if tokens:
                    yield StreamChunk(tokens, promoted, pieces)
            output = self._output(request)
            if pieces and output.text.startswith(text):
                pieces[-1] += output.text[len(text) :]
            yield StreamChunk(tokens, promoted, pieces, output)
        finally:
            self.scheduler.abort(request)

    def _request(self, prompt: Prompt, params: SamplingParams, speculative: SpeculativeConfig | None) -> Request:
        config = speculative or self.speculative
        require_drafter(config, self.drafter is not None)
        policy = self._policy(config)
        for shape in policy.reachable():
            if shape.num_draft_tokens > self.max_nodes or shape.num_steps > self.max_steps or shape.topk > self.max_topk:
                raise UserError(f"shape {shape} is larger than this LLM has room for; pass its settings to LLM(shapes_for=[...])")
        ids = self.encode(prompt)
        self.check_prompt(ids)
        vocab = self.model.config.vocab_size
        if wrong := [i for i in params.stop_token_ids if i >= vocab]:
            raise UserError(f"stop token id {wrong[0]} is outside the model's vocabulary of {vocab}")
        eos = () if params.ignore_eos else self.model.config.eos_token_ids
        stop_ids = frozenset([*eos, *params.stop_token_ids])
        return Request(
            prompt=ids,
            params=params,
            config=config,
            policy=policy,
            state=policy.initial(1, self.model.decoder.device),
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            stop_ids=stop_ids,
            protected_ids=stop_ids | self._specials(),
            max_tokens=min(params.max_tokens, self.context_length - len(ids)),
        )

    def _output(self, request: Request) -> RequestOutput:
        text = str(self.tokenizer.decode(request.token_ids, skip_special_tokens=True)) if self._has_tokenizer() else ""
        return RequestOutput(
            prompt_token_ids=request.prompt,
            token_ids=request.token_ids,
            text=text,
            finish_reason=request.finish_reason or "abort",
            promoted=request.promoted,
            records=request.records,
            speculative=request.config,
            seconds_prefill=request.seconds_prefill,
        )

    def _policy(self, config: SpeculativeConfig) -> TreePolicy:
        """One policy object per distinct setting, so that requests that share it are planned together."""
        key = config.model_dump_json(exclude={"margin", "guards", "budget", "budget_per_100", "max_promotions"})
        if key not in self._policies:
            self._policies[key] = build_policy(config)
        return self._policies[key]

    def _has_tokenizer(self) -> bool:
        try:
            return self.tokenizer is not None
        except UserError:
            return False

    def _specials(self) -> frozenset[int]:
        """End-of-sequence and every special token of the tokenizer: what the margin rule must not touch."""
        if self._special_ids is None:
            ids = set(self.model.config.eos_token_ids)
            if self._has_tokenizer():
                added = self.tokenizer.added_tokens_decoder
                ids |= {int(i) for i in self.tokenizer.all_special_ids} | {int(i) for i, token in added.items() if token.special}
            self._special_ids = frozenset(ids)
        return self._special_ids
