"""Every place where the plug-in touches SGLang, in one table, and the check that SGLang still looks there as the plug-in expects."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import UserError

TESTED = ("0.5.23",)
"""Versions of SGLang that the plug-in's tests ran on."""

Kind = Literal["around", "resolution", "call", "class", "fields"]
"""`around` is SGLang's hook type; `resolution` wraps a step of its argument resolution; the others are only used: `call` a function,
`class` a constructor, `fields` attributes of a class."""

_SPECULATIVE = "sglang.srt.speculative"
_WORKER = f"{_SPECULATIVE}.eagle_worker_v2.EAGLEWorkerV2"
_DRAFT_WORKER = f"{_SPECULATIVE}.eagle_worker_v2.EagleDraftWorker"
_SCHEDULER = "sglang.srt.managers.scheduler_components"
_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


@dataclass(frozen=True)
class Touch:
    """One place of SGLang.

    Attributes:
        target: dotted path.
        kind: how it is touched.
        names: parameters of the function or constructor in order, or attributes of the class.
        purpose: what for.
        handler: the plug-in's method that is hooked there; empty where SGLang's own is only called.
    """

    target: str
    kind: Kind
    names: tuple[str, ...]
    purpose: str
    handler: str = ""


def _touch(target: str, kind: Kind, names: str, purpose: str, handler: str = "") -> Touch:
    return Touch(target, kind, tuple(names.split()), purpose, handler)


TABLE = (
    _touch(
        "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding",
        "resolution",
        "server_args",
        "reserve memory for the policy's largest shape; refuse what cannot be served",
        "resolve_server_args",
    ),
    _touch(
        "sglang.srt.sampling.sampling_params.SamplingParams.verify",
        "around",
        "self vocab_size",
        "refuse a request's settings where it comes in",
        "verify_request",
    ),
    _touch(
        f"{_WORKER}.init_cuda_graphs",
        "around",
        "self",
        "prepare attention backends and CUDA graphs of every shape",
        "prepare_shapes",
    ),
    _touch(
        f"{_WORKER}.forward_batch_generation",
        "around",
        "self batch on_publish grammar_barrier pp_proxy_tensors",
        "choose the step's shape, keep what the step did",
        "run_step",
    ),
    _touch(
        f"{_DRAFT_WORKER}._draft_extend_for_prefill",
        "around",
        "self batch target_hidden_states next_token_ids mm_input_embeds kv_loc_plan",
        "hand over roots for the widest shape",
        "extend_wide",
    ),
    _touch(
        f"{_DRAFT_WORKER}._draft_extend_for_decode",
        "around",
        "self batch batch_result kv_loc_plan",
        "hand over roots for the widest shape, with their confidence",
        "extend_wide",
    ),
    _touch(
        f"{_SPECULATIVE}.eagle_utils.eagle_sample",
        "around",
        "verify_input batch logits_output grammar_mask uno_target_max_top_k watermark_state watermark_full_mask",
        "see the target's logits, penalties and grammar masks applied",
        "see_logits",
    ),
    _touch(
        f"{_SPECULATIVE}.eagle_utils._verify_uses_greedy",
        "around",
        "is_all_greedy is_cpu is_hip is_xpu use_rejection_sampling",
        "let the greedy kernel walk at every temperature",
        "walk_greedily",
    ),
    _touch(
        "sglang.kernels.ops.speculative.spec_tree.verify_tree_greedy_func",
        "around",
        "predicts accept_index accept_token_num candidates retrieve_index retrieve_next_token retrieve_next_sibling target_predict topk",
        "rewrite the target's prediction to the path of the acceptance rule",
        "rewrite_prediction",
    ),
    _touch(
        "sglang.srt.layers.sampler.Sampler._sample_from_probs",
        "around",
        "self probs sampling_info positions simple_sampling_case",
        "draw the first token with the request's own noise",
        "sample_first",
    ),
    _touch(
        f"{_SCHEDULER}.batch_result_processor.SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        "around",
        "self result batch",
        "count what each request's step did",
        "count_step",
    ),
    _touch(
        f"{_SCHEDULER}.metrics_reporter.SchedulerMetricsReporter.report_decode_stats",
        "around",
        "self can_run_cuda_graph running_batch num_generated_tokens",
        "SGLang's acceptance rate: per token drafted, not per configured maximum",
        "report_drafted",
    ),
    _touch(
        f"{_SCHEDULER}.output_streamer.SchedulerOutputStreamer.build_additional_customized_info",
        "around",
        "self reqs",
        "send a finished request's counts to its meta_info",
        "send_report",
    ),
    _touch(
        f"{_TOKENIZER_MANAGER}.update_request_meta_info",
        "around",
        "self meta_info state customized_info index finish_reason",
        "put the counts into meta_info",
        "receive_report",
    ),
    _touch(
        f"{_TOKENIZER_MANAGER}._calculate_spec_decoding_metrics",
        "around",
        "self meta_info recv_obj i",
        "meta_info's acceptance rate: per token drafted, not per configured maximum",
        "correct_rate",
    ),
    _touch(
        f"{_WORKER}.build_adaptive_runtime_state",
        "call",
        "self speculative_num_steps speculative_num_draft_tokens cuda_graph_bs",
        "build a shape's attention backends and CUDA graphs",
    ),
    _touch(
        f"{_SPECULATIVE}.adaptive_runtime_state.SpecRuntimeState",
        "class",
        "speculative_num_steps speculative_num_draft_tokens draft_attn_backend cuda_graph_runner target_attn_backend target_graph_runner "
        "draft_extend_attn_backend cuda_graph_runner_for_draft_extend",
        "what belongs to a shape",
    ),
    _touch(
        f"{_SPECULATIVE}.base_spec_worker.EagleDraftWorkerBase._rebuild_topk1_chain_buffers",
        "call",
        "self",
        "a chain's constants",
    ),
    _touch(
        f"{_SPECULATIVE}.eagle_info.EagleDraftInput",
        "fields",
        "topk_p topk_index hidden_states bonus_tokens",
        "the roots and their confidence",
    ),
    _touch(
        f"{_SPECULATIVE}.eagle_info.EagleVerifyInput",
        "fields",
        "draft_token positions retrieve_next_token retrieve_next_sibling spec_steps topk draft_token_num",
        "the trees",
    ),
    _touch(
        "sglang.srt.managers.utils.GenerationBatchResult",
        "fields",
        "next_draft_input accept_lens logits_output",
        "what a step's result carries to the host",
    ),
    _touch("sglang.srt.runtime_context.get_spec", "call", "", "the shape that SGLang's parts read"),
    _touch(
        f"{_SCHEDULER}.output_streamer.SchedulerOutputStreamer",
        "fields",
        "has_additional_customized_info",
        "ask for the report of finished requests",
    ),
    _touch(
        "sglang.srt.arg_groups.overrides.declare_resolution",
        "call",
        "server_args source fields",
        "set the server's shape",
    ),
    _touch("sglang.srt.arg_groups.overrides.resolved_view", "call", "server_args", "read the server's flags"),
    _touch(
        "sglang.srt.arg_groups.resolution_hooks.register_resolution_hook",
        "call",
        "name",
        "wrap the resolution of speculative flags",
    ),
    _touch(
        "sglang.srt.plugins.hook_registry.HookRegistry.register",
        "call",
        "target hook hook_type source",
        "hook",
    ),
)
"""Everything that the plug-in hooks, calls or reads where another version of SGLang may differ."""


@dataclass(frozen=True)
class Finding:
    """What stands at one place of the table; `problem` is empty where it is as expected."""

    touch: Touch
    problem: str


def installed_version() -> str:
    """SGLang's version. Raises UserError when it is not installed."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("SGLang is not installed here: pip install sglang") from None


def require_found() -> None:
    """Raise UserError where SGLang would not find the plug-in, and would serve without a word."""
    if not any(point.name == "adaptivespec" for point in importlib.metadata.entry_points(group="sglang.srt.plugins")):
        raise UserError("SGLang would not find the plug-in: install adaptivespec itself here (pip install adaptivespec)")
    if "adaptivespec" not in (os.environ.get("SGLANG_PLUGINS") or "adaptivespec").replace(" ", "").split(","):
        raise UserError("SGLANG_PLUGINS leaves adaptivespec out, so SGLang would serve without it; add it there, or unset the variable")


def inspect_all(table: Sequence[Touch] = TABLE) -> list[Finding]:
    """Look at every place of the table, without a model and without starting anything."""
    return [Finding(touch, _problem(touch)) for touch in table]


def require(findings: Sequence[Finding]) -> None:
    """Raise UserError, naming the first place that differs, and how many do."""
    wrong = [finding for finding in findings if finding.problem]
    if wrong:
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(
            f"SGLang {installed_version()} is not built as expected at {wrong[0].touch.target}: {wrong[0].problem}{others}; "
            f"tested with {', '.join(TESTED)}; `adaptivespec check sglang` lists every place"
        )


def require_version(allow_untested: bool) -> None:
    """Raise UserError for a version of SGLang that the plug-in was not tested with."""
    version = installed_version()
    if version not in TESTED and not allow_untested:
        raise UserError(
            f"SGLang {version} was not tested with AdaptiveSpec (tested: {', '.join(TESTED)}); install one of those, or set "
            '"allow_untested_version": true'
        )


def install(plugin: object, table: Sequence[Touch] = TABLE) -> None:
    """Hook the plug-in's methods into SGLang, which applies them when all plug-ins are loaded."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    SchedulerOutputStreamer.has_additional_customized_info = True
    for touch in table:
        if not touch.handler:
            continue
        handler: Callable[..., Any] = getattr(plugin, touch.handler)
        if touch.kind == "resolution":
            register_resolution_hook(touch.target.rpartition(".")[2])(handler)
        else:
            HookRegistry.register(touch.target, handler, HookType.AROUND)


def _problem(touch: Touch) -> str:
    try:
        found = pkgutil.resolve_name(touch.target)
    except Exception as error:  # an import inside SGLang may fail with anything
        return f"{type(error).__name__}: {' '.join(str(error).split())}" if str(error) else f"{type(error).__name__}"
    if touch.kind == "fields":
        missing = [name for name in touch.names if not _has(found, name)]
        return f"no attribute {', '.join(missing)}" if missing else ""
    if not callable(found):
        return "not a function"
    try:
        names = tuple(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return "no signature"
    expected = touch.names
    return "" if names == expected else f"parameters are ({', '.join(names)}), not ({', '.join(expected)})"


def _has(owner: Any, name: str) -> bool:
    """Whether a class has an attribute, or a field without a default."""
    return hasattr(owner, name) or any(name in getattr(kind, "__annotations__", {}) for kind in getattr(owner, "__mro__", ()))
