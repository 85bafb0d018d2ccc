"""The plug-in in one process of SGLang: what each hook does. Every method here is named by a row of `hooks.TABLE`."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ...errors import UserError
from ...method.policy import Static, TreePolicy
from ...method.tree import TreeShape
from . import hooks, server_args
from .metrics import Series
from .requests import ATTRIBUTE, RequestBatch, Requests, RequestState, living
from .settings import REQUEST_KEY, SGLangConfig, load_settings, request_config, served_policy
from .shapes import Shapes
from .step import Step, StepResult, book, no_signal, result_of, root_of
from .verify import agreed, decide
from .worker import ShapeSwitch

logger = logging.getLogger(__name__)


def start() -> None:
    """Check settings and SGLang, then hook the method in.

    Raises:
        SystemExit: with one line, when either is not as it must be.
    """
    with _one_line():
        settings = load_settings()
        hooks.require_version(settings.allow_untested_version)
        hooks.require(hooks.inspect_all())
        hooks.install(Plugin(settings))


@contextmanager
def _one_line() -> Iterator[None]:
    """SGLang logs what plug-ins raise and serves on; SystemExit it lets through."""
    try:
        yield
    except UserError as error:
        raise SystemExit(f"adaptivespec: {error}") from None
    except Exception as error:
        raise SystemExit(f"adaptivespec: could not be started: {type(error).__name__}: {error}") from error


class Plugin:
    """The hooks and what they share.

    Args:
        settings: from the environment.
    """

    def __init__(self, settings: SGLangConfig) -> None:
        self.settings = settings
        self.defaults = settings.speculative
        self.policy: TreePolicy | None = None
        self.shapes: Shapes | None = None
        self.requests: Requests | None = None
        self.switch: ShapeSwitch | None = None
        self.step: Step | None = None
        self.prefilling: list[Any] | None = None
        self.series: Series | None = None
        self.drafted = self.verified = 0

    # Start-up

    def resolve_server_args(self, args: Any, previous: Callable[[Any], None]) -> None:
        """Set the shape that memory is reserved for; refuse what cannot be served."""
        try:
            server_args.resolve(self.settings, args, previous)
        except UserError as error:
            raise SystemExit(f"adaptivespec: {error}") from None

    def prepare_shapes(self, original: Callable[[Any], None], worker: Any) -> None:
        """After SGLang has captured its own graphs: build those of every shape."""
        original(worker)
        with _one_line():
            if server_args.room(self.settings) is None:  # the server's flags are the static shape
                shape = TreeShape(worker.speculative_num_steps, worker.topk, worker.speculative_num_draft_tokens)
                self.policy = Static(shape)
            else:
                self.policy = served_policy(self.settings)
            self.shapes = Shapes(self.policy, self.settings.aggregate)
            self.requests = Requests(self.defaults, self.policy)
            if len(self.shapes.all) > 1:
                self.switch = ShapeSwitch(worker)
                self.switch.prepare(self.shapes, self.settings.graph_memory)
            self._say()

    def _say(self) -> None:
        assert self.shapes is not None
        rule = self.defaults.effective_rule
        kappa = f" {self.defaults.kappa:g}" if rule == "margin" else ""
        logger.info(
            "adaptivespec: rule %s%s, policy %s, shapes %s",
            rule,
            kappa,
            self.settings.policy,
            " ".join(map(str, self.shapes.prepared)),
        )

    # Requests

    def verify_request(self, original: Callable[..., None], params: Any, vocab_size: int) -> None:
        """Refuse a request's settings where it comes in: SGLang answers with the line."""
        original(params, vocab_size)
        request_config(self.defaults, params.custom_params, 0.0 if params.top_k <= 1 else params.temperature)

    # The step

    def run_step(self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """A prefill, whose first token is drawn with the requests' own noise, or a decoding step with the shape of its own."""
        if self.requests is None:
            raise RuntimeError("adaptivespec: SGLang runs a step on a worker that the plug-in has not prepared")
        if batch.forward_mode.is_idle() or not batch.reqs:
            return original(worker, batch, *args, **kwargs)
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            self.prefilling = batch.reqs
            try:
                return original(worker, batch, *args, **kwargs)
            finally:
                self.prefilling = None
        return self._decode(original, worker, batch, *args, **kwargs)

    def _decode(self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.requests is not None
        states = [self.requests.state_of(req) for req in batch.reqs]
        rows = self.requests.batch(batch.reqs, batch.seq_lens.device)
        shape = self._choose(states, rows, batch)
        self.step = step = Step(rows, shape, batch.seq_lens)
        try:
            if self.switch is not None:
                batch.spec_info = _narrowed(batch.spec_info, shape.topk)
            with nullcontext() if self.switch is None else self.switch.at(shape):
                result = original(worker, batch, *args, **kwargs)
        finally:
            self.step = None
        if step.decision is None:
            raise RuntimeError("adaptivespec: SGLang verified a step past the acceptance rule")
        result.adaptivespec = result_of(step, states, self._signal_after(step, result))
        return result

    def _choose(self, states: list[RequestState], rows: RequestBatch, batch: Any) -> TreeShape:
        """The batch's shape. `current` waits for the device; `lagged` takes what the host has."""
        assert self.shapes is not None
        if len(self.shapes.all) == 1:
            return self.shapes.all[0]
        if self.settings.confidence == "lagged":
            # With overlap scheduling the last step is still under way, and what the host has is of the step before it already.
            lagged = [state.signal if batch.enable_overlap else state.signal_before for state in states]
            return self.shapes.stand_in(self.shapes.plan_on_host(lagged))
        root = root_of(batch.spec_info.topk_p, batch.spec_info.topk_index)
        index = self.shapes.plan(self.shapes.signal(rows.policy, root))
        return self.shapes.stand_in(int(_from_first_rank(index)))

    def _signal_after(self, step: Step, result: Any) -> torch.Tensor:
        """fp32 [B]: the signal for the next step, whose roots the drafter has handed over."""
        assert self.shapes is not None
        roots = result.next_draft_input
        if len(self.shapes.all) == 1 or roots.topk_p is None:
            return no_signal(step.batch.policy)
        return _from_first_rank(self.shapes.signal(step.batch.policy, root_of(roots.topk_p, roots.topk_index)))

    def extend_wide(self, original: Callable[..., Any], drafter: Any, *args: Any, **kwargs: Any) -> Any:
        """The drafter's pass over accepted tokens hands over as many roots as the widest shape needs, with their probabilities."""
        if self.shapes is None or self.switch is None:
            return original(drafter, *args, **kwargs)
        kept, drafter.topk = drafter.topk, self.shapes.root_width
        try:
            return original(drafter, *args, **kwargs)
        finally:
            drafter.topk = kept

    def see_logits(self, original: Callable[..., Any], verify_input: Any, batch: Any, logits_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep the target's logits in sight: SGLang applies penalties and grammar masks to them in place before it takes the argmax."""
        step = self.step
        if step is None:
            return original(verify_input, batch, logits_output, *args, **kwargs)
        step.logits = logits_output.next_token_logits
        try:
            return original(verify_input, batch, logits_output, *args, **kwargs)
        finally:
            step.logits = None

    def walk_greedily(self, original: Callable[..., bool], **kwargs: Any) -> bool:
        """The greedy kernel walks what the rule decided, at every temperature."""
        return True if self.step is not None else original(**kwargs)

    def rewrite_prediction(self, original: Callable[..., Any], **kwargs: Any) -> Any:
        """Let the rule decide and the stock kernel walk."""
        step = self.step
        if step is None or step.logits is None:
            return original(**kwargs)
        assert self.requests is not None
        logits = step.logits
        states = [state for state in step.batch.states if state is not None]
        step.decision = decide(
            step.batch,
            self.requests.protected(states, logits.device, logits.shape[1]),
            logits=logits,
            target_predict=kwargs["target_predict"],
            candidates=kwargs["candidates"],
            retrieve_next_token=kwargs["retrieve_next_token"],
            retrieve_next_sibling=kwargs["retrieve_next_sibling"],
            seq_lens=step.seq_lens,
            levels=step.shape.num_steps,
        )
        if step.batch.sampling.samples and _ranks() > 1:
            step.decision = agreed(step.decision, _from_first_rank)
        book(step, self.policy)
        return original(**{**kwargs, "target_predict": step.decision.target_predict})

    def sample_first(self, original: Callable[..., Any], sampler: Any, probs: Any, sampling_info: Any, positions: Any, simple: bool) -> Any:
        """The token after a prompt, with the noise that belongs to its position; `probs` are tempered probabilities [B, V]."""
        reqs = self.prefilling
        if self.requests is None or reqs is None or len(reqs) != len(probs) or sampling_info.sampling_mask_batch_indices is not None:
            return original(sampler, probs, sampling_info, positions, simple)
        rows = self.requests.batch(reqs, probs.device)
        return rows.draw(probs, positions.to(torch.int64) + 1), None

    # The host's side

    def count_step(self, original: Callable[..., Any], processor: Any, result: Any, batch: Any) -> Any:
        """Count a finished step for requests that still run."""
        done: StepResult | None = getattr(result, "adaptivespec", None)
        running = [not (req.is_retracted or req.finished()) for req in batch.reqs]
        answer = original(processor, result, batch)
        if done is not None:
            counted = []
            for state, runs, (accepted, promoted, nats, spent, signal) in zip(done.states, running, done.rows(), strict=True):
                state.signal_before, state.signal = state.signal, signal
                if not runs:  # its tokens are dropped, and decoded again after a retraction
                    state.refund += nats
                else:
                    state.totals.add(done.shape, accepted, promoted, spent)
                    counted.append((accepted, promoted, nats))
            self.drafted += len(counted) * (done.shape.num_draft_tokens - 1)
            self.verified += len(counted)
            self._publish(processor.metrics_reporter, done.shape, counted)
            result.adaptivespec = None  # SGLang keeps results for a while, and they the requests
        return answer

    def _publish(self, reporter: Any, shape: TreeShape, counted: list[tuple[int, int, float]]) -> None:
        if not reporter.current_scheduler_metrics_enabled:
            return
        if self.series is None:
            self.series = Series(reporter.metrics_collector.labels)
        self.series.add(shape, counted)
        self.series.hold(living())

    def report_drafted(self, original: Callable[..., Any], reporter: Any, *args: Any, **kwargs: Any) -> Any:
        """SGLang divides accepted tokens by steps times the configured maximum; for a while that is the mean of what was drafted."""
        if not self.verified:
            return original(reporter, *args, **kwargs)
        from sglang.srt.runtime_context import get_spec

        before = reporter.spec_num_forward_ct
        with get_spec().override(speculative_num_draft_tokens=1 + self.drafted / self.verified):
            answer = original(reporter, *args, **kwargs)
        if before and not reporter.spec_num_forward_ct:  # it has reported, and counts anew
            self.drafted = self.verified = 0
        return answer

    def send_report(self, original: Callable[..., dict[str, Any]], streamer: Any, reqs: list[Any]) -> dict[str, Any]:
        """Counts of finished requests, sent once, with their last output."""
        reports: list[list[Any]] = []
        for req in reqs:
            state = req.__dict__.pop(ATTRIBUTE, None) if req.finished() else None  # SGLang keeps the request until the next batch
            reports.append([state.report()] if isinstance(state, RequestState) else [])
            del state
        if self.series is not None:
            self.series.hold(living())
        return {**original(streamer, reqs), REQUEST_KEY: reports}

    def receive_report(
        self,
        original: Callable[..., None],
        manager: Any,
        meta_info: dict[str, Any],
        state: Any,
        customized_info: dict[str, Any],
        index: int,
        finish_reason: Any,
    ) -> None:
        """Into meta_info as one object; SGLang would take it for a list of values per token."""
        others = {name: values for name, values in customized_info.items() if name != REQUEST_KEY}
        original(manager, meta_info, state, others, index, finish_reason)
        if own := customized_info.get(REQUEST_KEY, [[]] * (index + 1))[index]:
            meta_info[REQUEST_KEY] = own[0]

    def correct_rate(self, original: Callable[..., None], manager: Any, meta_info: dict[str, Any], recv_obj: Any, i: int) -> None:
        """SGLang's own fields of meta_info, from what was drafted."""
        original(manager, meta_info, recv_obj, i)
        report = meta_info.get(REQUEST_KEY)
        if "spec_accept_rate" not in meta_info:
            return
        if report:
            meta_info["spec_num_proposed_drafts"] = report["drafted"]
            meta_info["spec_accept_rate"] = report["acceptance_rate"]
        else:  # in the middle of a stream nobody here knows what was drafted
            del meta_info["spec_accept_rate"]
            meta_info.pop("spec_num_proposed_drafts", None)


def _narrowed(roots: Any, topk: int) -> Any:
    """SGLang's draft input with only the best `topk` roots."""
    narrow = copy.copy(roots)
    narrow.topk_p, narrow.topk_index = roots.topk_p[:, :topk].contiguous(), roots.topk_index[:, :topk].contiguous()
    return narrow


def _ranks() -> int:
    """Ranks of tensor parallelism."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_group.world_size)


def _from_first_rank(values: torch.Tensor) -> torch.Tensor:
    """The same values on every rank of tensor parallelism: ranks that disagreed on a shape would wait for each other forever."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    return group.broadcast(values.contiguous(), src=0) if group.world_size > 1 else values
