"""`LLM`: a target and a drafter behind generate, chat and stream."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..build import build_policy, build_rule, require_temperature
from ..config import POLICY_SETTINGS, RULE_SETTINGS, EngineConfig, SamplingParams, SpeculativeConfig
from ..cost_files import load_cached
from ..drafters.base import Drafter
from ..drafters.loading import build_drafter, find_drafter
from ..errors import UserError
from ..method.acceptance import AcceptanceRule
from ..method.costs import CostModel, CostTable
from ..method.policy import TreePolicy
from ..method.tree import TreeShape
from ..models.catalogue import resolve_model
from ..models.loading import LoadedModel, load_model
from ..telemetry.trace import TraceWriter
from .calibrate import BRIEF_NODES, BRIEF_ROUNDS, BRIEF_WIDTHS, calibrate, identity
from .detokenizer import Detokenizer
from .inputs import Prompt, encode, is_message, one_each, prompt_list, sampling_params
from .occurrences import Occurrences
from .refusals import choose_device, nothing_is_ignored, require_drafter
from .request import Request, RequestOutput, StreamChunk
from .runner import Runner
from .scheduler import Scheduler

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Speculative = SpeculativeConfig | Mapping[str, Any] | bool | None
"""What a request says about speculation, see `SpeculativeConfig.for_request`."""

DEFAULT_CONTEXT = 4096

ROOM = TreeShape(16, 10, 64)
"""Room is made for requests that bring trees up to this size, whatever the defaults; it costs a few rows of cache per slot."""

_KEPT = 64  # policies, and rules: requests may bring settings of their own without end


class LLM:
    """A target model with a drafter. Not thread-safe.

    Args:
        model: a short name (`adaptivespec models`), a .gguf file, a folder, a hub id, or a loaded model.
        drafter: an EAGLE-3 head (a folder or hub id), a smaller model of the same tokenizer (as `model`), `ngram`, a drafter object,
            or `none` for plain decoding; None takes the short name's own head, and plain decoding where there is none.
        speculative: default settings of requests. None is AdaptiveSpec where there is a drafter, else plain decoding.
        shapes_for: further settings that requests will bring, when their trees are larger than `ROOM`.
        costs: what a step is to cost, for policies that read costs; they then ignore this machine's own. None takes the machine's
            calibration (`adaptivespec calibrate`), or some seconds at the start to measure it, when `speculative` or `shapes_for` has such
            a policy.
        engine: the other settings, see EngineConfig (dtype, device, context_length, max_running_requests, ...).

    Raises:
        UserError: anything wrong with these, before any weights are read where possible.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        drafter: str | Path | Drafter | None = None,
        speculative: SpeculativeConfig | Mapping[str, Any] | None = None,
        shapes_for: Sequence[SpeculativeConfig | Mapping[str, Any]] = (),
        costs: CostTable | None = None,
        **engine: Any,
    ) -> None:
        config = EngineConfig(**engine)
        if config.prompt_lookup_min > config.prompt_lookup_max:
            raise UserError(f"prompt_lookup_min {config.prompt_lookup_min} is more than prompt_lookup_max {config.prompt_lookup_max}")
        self._policies: dict[str, TreePolicy] = {}
        self._rules: dict[str, AcceptanceRule] = {}
        self.costs = CostModel(costs, follows=costs is None)
        asked = None if speculative is None else SpeculativeConfig().for_request(speculative)
        brought = [asked or SpeculativeConfig(), *(SpeculativeConfig().for_request(settings) for settings in shapes_for)]
        for settings in brought:
            self._rule(settings)
        shapes = [ROOM, *(shape for settings in brought for shape in self._policy(settings).reachable())]
        self.room = TreeShape(max(s.num_steps for s in shapes), max(s.topk for s in shapes), max(s.num_draft_tokens for s in shapes))
        device = choose_device(config.device)
        # The drafter is looked for before the target's weights are read: a wrong name costs no wait.
        source = model.source if isinstance(model, LoadedModel) else resolve_model(model)
        named = drafter is None or isinstance(drafter, str | Path)
        if not named and not hasattr(drafter, "draft"):
            raise UserError(f"drafter: expected a name, a path or a Drafter, not {type(drafter).__name__}")
        found = find_drafter(drafter, source, config.speculative_algorithm) if named else None  # type: ignore[arg-type]
        drafts = found is not None or not named
        self.speculative = asked or SpeculativeConfig(policy="adaptive" if drafts else "off")
        require_drafter(self.speculative, drafts)
        nothing_is_ignored(config, None if found is None else found.kind, model if isinstance(model, LoadedModel) else None, named)
        self._trace = TraceWriter(config.trace) if config.trace is not None else None
        self.model = model if isinstance(model, LoadedModel) else load_model(source, config.dtype, device)
        decoder, limit = self.model.decoder, self.model.config.max_position_embeddings
        if config.context_length is not None and config.context_length > limit:
            raise UserError(f"context_length {config.context_length} is more than the model's {limit}")
        self.context_length = config.context_length or min(limit, DEFAULT_CONTEXT)
        self.drafter: Drafter | None = None if named else drafter  # type: ignore[assignment]
        if found is not None:
            self.drafter = build_drafter(
                found, self.model, decoder.dtype, decoder.device, config.aux_layers, config.prompt_lookup_max, config.prompt_lookup_min
            )
        slots = config.max_running_requests
        self.runner = Runner(decoder, self.drafter, self.context_length, slots, self.room, config.prefill_chunk)
        self.scheduler = Scheduler(self.runner, slots)
        if self._trace is not None:
            self._trace.begin()
        self._num_requests = 0
        self._open: set[int] = set()  # requests whose end is not traced yet
        self._special_ids: frozenset[int] | None = None
        if any(self._policy(settings).reads_costs for settings in brought):
            self._know_costs()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer. Raises UserError when it has none."""
        return self.model.load_tokenizer()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, of chat messages (with the model's chat template), or of ids as they are."""
        return encode(prompt, self.model.load_tokenizer)

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
        speculative: Speculative | Sequence[Speculative] = None,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts together, in their order; the n answers of a prompt stand side by side.

        Args:
            prompts: one prompt (a text, a list of token ids or a list of chat messages), or a list of them.
            params: sampling settings for all, or one per prompt.
            speculative: what differs from the LLM's own speculative settings, for all or one per prompt: a configuration, some
                settings (`{"margin": 0.5}`), or False for plain decoding.
            on_finish: called with each answer as it finishes, in any order.

        Raises:
            UserError: an empty or too long prompt, settings that do not fit: before any work.
        """
        if on_finish is not None and not callable(on_finish):
            raise UserError(f"on_finish: expected a function, not {type(on_finish).__name__}")
        items = prompt_list(prompts)
        settings, wishes = one_each(params, len(items), "sampling"), one_each(speculative, len(items), "speculative")
        requests = [
            request for prompt, own, wish in zip(items, settings, wishes, strict=True) for request in self._requests(prompt, own, wish)
        ]
        outputs: dict[int, RequestOutput] = {}
        pending = requests
        try:
            for request in requests:
                self._queue(request)
            while pending:
                self.step()
                for request in [r for r in pending if r.finish_reason is not None]:
                    outputs[request.id] = self.output(request)
                    if on_finish is not None:
                        on_finish(outputs[request.id])
                pending = [r for r in pending if r.id not in outputs]
        finally:  # after Ctrl-C no slot stays taken
            for request in requests:
                self.abort(request)
        return [outputs[request.id] for request in requests]

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative: Speculative | Sequence[Speculative] = None,
    ) -> list[RequestOutput]:
        """Answer one conversation ([{"role": "user", "content": "..."}, ...]), or several, with the model's chat template.

        Raises:
            UserError: no chat template, or what is no conversation.
        """
        conversations = prompt_list(messages)
        for conversation in conversations or [[]]:
            if not isinstance(conversation, Sequence) or not conversation or not all(is_message(m) for m in conversation):
                raise UserError("a conversation is a list of messages: [{'role': 'user', 'content': '...'}, ...]")
        return self.generate(conversations, params, speculative=speculative)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, speculative: Speculative = None) -> Generator[StreamChunk]:
        """Answer one prompt step by step; leaving the loop early frees the slot. The last chunk carries the whole output."""
        if (n := sampling_params(params).n) > 1:
            raise UserError(f"a stream is one answer; n {n} needs generate")
        [request] = self._requests(prompt, params, speculative, stream=True)
        return self._stream(request)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, speculative: Speculative = None) -> list[Request]:
        """Queue a prompt without waiting: one request per answer. `step` moves them on until they have a finish_reason.

        Raises UserError as `generate` does.
        """
        requests = self._requests(prompt, params, speculative, stream=True)
        for request in requests:
            self._queue(request)
        return requests

    def step(self) -> list[Request]:
        """Admit waiting requests or run one decoding step for all; returns those that got tokens."""
        active = self.scheduler.step()
        last = next((request.records[-1] for request in active if request.records), None)
        if last is not None and last.batch == len(active):  # a step that decoded
            drafting = last.seconds_draft - self.runner.seconds_caught_up
            self.costs.observe(last.draft_rows, last.rows, last.batch, (drafting, last.seconds_verify, last.seconds_rest))
        if self._trace is not None:
            for request in active:
                if request.records:  # none after the prompt alone
                    self._trace.step(request.id, len(request.records) - 1, request.records[-1])
                self._trace_end(request)
        return active

    def abort(self, request: Request) -> None:
        """Drop a request that is not finished, wherever it is; its slot is free at once."""
        self.scheduler.abort(request)
        self._trace_end(request)  # one that failed in its prompt too, which the scheduler has dropped already

    def output(self, request: Request) -> RequestOutput:
        """What a request has come to. Raises UserError while it is still running."""
        if request.finish_reason is None:
            raise UserError("this request is still running: step until it has a finish_reason, or abort it")
        backend = self._backend()
        text = ""
        if request.detokenizer is not None:
            text = request.detokenizer.finish(request.token_ids, request.finish_reason == "abort")
        elif backend is not None:
            text = backend.decode(request.token_ids, skip_special_tokens=True)
        return RequestOutput(
            prompt_token_ids=request.prompt,
            index=request.index,
            token_ids=list(request.token_ids),
            text=text,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            promoted=list(request.promoted),
            logprobs=None if request.params.logprobs is None else list(request.logprobs),
            records=list(request.records),
            params=request.params,
            seed=request.seed,
            speculative=request.config,
            seconds_prefill=request.seconds_prefill,
        )

    def _stream(self, request: Request) -> Generator[StreamChunk]:
        sent = 0

        def chunk(output: RequestOutput | None) -> StreamChunk:
            tokens = request.token_ids[sent:]
            pieces = request.detokenizer.pieces[sent:] if request.detokenizer is not None else [""] * len(tokens)
            return StreamChunk(tokens, request.promoted[sent:], pieces, output)

        try:
            self._queue(request)
            while request.finish_reason is None:
                # Another generate or stream on this LLM may have moved this request on already.
                if sent == len(request.token_ids):
                    self.step()
                if request.finish_reason is None and sent < len(request.token_ids):
                    ready = chunk(None)
                    sent = len(request.token_ids)  # before handing over: whoever takes it may move this request on
                    yield ready
            yield chunk(self.output(request))
        finally:
            self.abort(request)

    def _queue(self, request: Request) -> None:
        request.id = self._num_requests
        self._num_requests += 1
        if self._trace is not None:
            self._open.add(request.id)
            self._trace.request(request.id, request.index, len(request.prompt), request.params, request.config)
        self.scheduler.add(request)

    def _trace_end(self, request: Request) -> None:
        """Trace that a request ended, once."""
        if self._trace is not None and request.finish_reason is not None and request.id in self._open:
            self._open.remove(request.id)
            self._trace.finish(request.id, request.finish_reason, request.token_ids)

    def _requests(self, prompt: Prompt, params: SamplingParams | None, speculative: Speculative, stream: bool = False) -> list[Request]:
        """One request per answer, everything checked, nothing queued. `stream` wants the text as it comes."""
        params = sampling_params(params)
        config = self.speculative.for_request(speculative)
        require_drafter(config, self.drafter is not None)
        policy, rule = self._policy(config), self._rule(config)
        if policy.reads_costs:
            self._know_costs()
        require_temperature(rule, params.temperature)
        room = self.room
        for shape in policy.reachable():
            if shape.num_draft_tokens > room.num_draft_tokens or shape.num_steps > room.num_steps or shape.topk > room.topk:
                raise UserError(f"shape {shape} is larger than this LLM has room for ({room}); pass its settings to LLM(shapes_for=[...])")
        ids = self.encode(prompt)
        self.check_prompt(ids)
        vocab = self.model.config.vocab_size
        if wrong := [i for i in params.stop_token_ids if i >= vocab]:
            raise UserError(f"stop token id {wrong[0]} is outside the model's vocabulary of {vocab}")
        backend = self._backend() if stream or params.stop else None
        if params.stop and backend is None:
            raise UserError("stop strings need a tokenizer, and this model has none: use stop_token_ids")
        eos = () if params.ignore_eos else self.model.config.eos_token_ids
        # Special tokens never become text, so a stop string that is one stands for the token.
        tokens = [(text, backend.token_to_id(text)) for text in params.stop] if backend is not None else []
        special = {text: token for text, token in tokens if token is not None and token in self._specials()}
        strings = tuple(text for text in params.stop if text not in special)
        stop_ids = frozenset([*eos, *params.stop_token_ids, *special.values()])
        return [
            Request(
                prompt=ids,
                params=params,
                config=config,
                policy=policy,
                rule=rule,
                state=policy.initial(1, self.model.decoder.device),
                seed=secrets.randbits(63) if params.seed is None else (params.seed + index) % 2**63,
                stop_ids=stop_ids,
                protected_ids=stop_ids | self._specials(),
                max_tokens=min(params.max_tokens, self.context_length - len(ids)),
                occurrences=Occurrences(ids if params.repetition_penalty != 1 else ()) if params.penalises else None,
                detokenizer=None if backend is None else Detokenizer(backend, strings, params.include_stop_str_in_output),
                index=index,
            )
            for index in range(params.n)
        ]

    def _policy(self, config: SpeculativeConfig) -> TreePolicy:
        """One policy object per distinct setting, so that requests that share it are planned together."""
        # What a policy learns from all its requests it learns of one rule.
        more = {"rule", *RULE_SETTINGS} if config.policy in ("goodput", "goodput_shapes") else set()
        key = config.model_dump_json(include={"policy", *POLICY_SETTINGS, *more})
        if key not in self._policies:
            if len(self._policies) >= _KEPT:
                self._policies.clear()
            self._policies[key] = build_policy(config, self.costs)
        return self._policies[key]

    def _know_costs(self) -> None:
        """Fill in what a step costs here: given, from the cache, or measured now. Raises UserError while requests are running."""
        if self.costs.table is not None or self.drafter is None:
            return
        table = load_cached(identity(self.model.decoder, self.drafter))
        if table is None or self.scheduler.num_slots > 4 * max(table.verify):  # batches far beyond those measured
            if self.scheduler.running or self.scheduler.waiting:
                raise UserError(
                    "goodput needs to know what a step costs here, and others are running: run `adaptivespec calibrate` once, or "
                    "pass its settings to LLM(shapes_for=[...])"
                )
            trace, self._trace, number = self._trace, None, self._num_requests  # these steps are nobody's
            try:
                sizes = (1, self.scheduler.num_slots) if self.scheduler.num_slots > 1 else (1,)
                table = calibrate(self, sizes, nodes=BRIEF_NODES, widths=BRIEF_WIDTHS, rounds=BRIEF_ROUNDS, label="measured at start")
            finally:
                self._trace, self._num_requests = trace, number
        self.costs.use(table)

    def _rule(self, config: SpeculativeConfig) -> AcceptanceRule:
        """One rule object per distinct setting; kappa and guards are the request's own."""
        own = RULE_SETTINGS - {"margin", "guards", "budget", "budget_per_100", "max_promotions"}
        key = config.effective_rule + config.model_dump_json(include=set(own))
        if key not in self._rules:
            if len(self._rules) >= _KEPT:
                self._rules.clear()
            self._rules[key] = build_rule(config)
        return self._rules[key]

    def _backend(self) -> Tokenizer | None:
        """The tokenizer that turns ids into text, None when the model has none."""
        try:
            return getattr(self.tokenizer, "backend_tokenizer", None)
        except UserError:
            return None

    def _specials(self) -> frozenset[int]:
        """End-of-sequence and every special token of the tokenizer: what the margin rule must not touch."""
        if self._special_ids is None:
            ids = set(self.model.config.eos_token_ids)
            if self._backend() is not None:
                added = self.tokenizer.added_tokens_decoder
                ids |= {int(i) for i in self.tokenizer.all_special_ids} | {int(i) for i, token in added.items() if token.special}
            self._special_ids = frozenset(ids)
        return self._special_ids
