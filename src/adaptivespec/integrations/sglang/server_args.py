"""SGLang's flags when the plug-in runs: the shape they must reserve memory for, and what cannot be served."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ...errors import UserError
from ...method.tree import TreeShape
from .settings import ENVIRONMENT, SGLangConfig, served_policy
from .shapes import Shapes

ALGORITHMS = ("EAGLE3", "EAGLE", "STANDALONE")

_SHAPE_FLAGS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")

_MUST_BE = {
    "speculative_adaptive": (False, "the plug-in's tree policy takes its place (policy accept_ema is the same idea)"),
    "speculative_use_rejection_sampling": (False, "the plug-in samples for itself; rule strict is lossless at every temperature"),
    "speculative_accept_threshold_single": (1.0, "the plug-in's rule takes its place (rule threshold is the same rule)"),
    "speculative_accept_threshold_acc": (1.0, "the plug-in's rule takes its place (rule threshold is the same rule)"),
    "enable_multi_layer_eagle": (False, "it has a worker of its own"),
    "enable_dp_attention": (False, "ranks would have to agree on a shape"),
    "enable_two_batch_overlap": (False, "it splits the batch that shares a shape"),
    "enable_watermark": (False, "the rule would promote other tokens than the watermark's"),
    "pp_size": (1, "the last stage drafts ahead of the policy"),
    "skip_tokenizer_init": (False, "guards protect the tokenizer's special tokens"),
    "tokenizer_worker_num": (1, "SGLang loads no plug-ins in the processes of further ones"),
    "disaggregation_mode": ("null", "prefill servers hand over roots of their own width"),
}
"""Flags that must keep a value, and why."""


def room(settings: SGLangConfig) -> TreeShape | None:
    """The shape that memory is reserved for; None where the server's own flags name the static shape."""
    if settings.policy == "static" and not settings.fixed_shape:
        return None
    return Shapes(served_policy(settings)).room


def resolve(settings: SGLangConfig, server_args: Any, previous: Callable[[Any], None]) -> None:
    """Set the shape, let SGLang resolve its speculative flags, and look at what came out.

    Args:
        settings: the plug-in's.
        server_args: SGLang's ServerArgs.
        previous: SGLang's own step.

    Raises:
        UserError: flags that do not fit the settings, or that the plug-in cannot serve.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolved_view

    flags = resolved_view(server_args)
    algorithm = (flags.speculative_algorithm or "").upper()
    if algorithm not in (*ALGORITHMS, "NEXTN"):
        given = f"is {algorithm}" if algorithm else "is missing"
        raise UserError(f"{ENVIRONMENT} is set, but --speculative-algorithm {given}; it serves {', '.join(ALGORITHMS)}")
    shape = room(settings)
    if shape is not None:
        wanted = dict(zip(_SHAPE_FLAGS, (shape.num_steps, shape.topk, shape.num_draft_tokens), strict=True))
        for flag, value in wanted.items():
            if (given := getattr(flags, flag)) not in (None, value):
                name = flag.replace("_", "-")
                raise UserError(f"--{name} {given} contradicts {ENVIRONMENT}, whose largest shape is {shape} (so {value}); leave it out")
        declare_resolution(server_args, ENVIRONMENT.lower(), **wanted)
    try:
        previous(server_args)
    except (ValueError, AssertionError, NotImplementedError) as error:  # as of topk > 1 with pages that an attention backend can't share
        largest = f", with {shape} as the largest shape" if shape is not None else ""
        raise UserError(f"SGLang refuses its speculative flags{largest}: {' '.join(str(error).split())}") from None
    _require_served(resolved_view(server_args))


def _require_served(flags: Any) -> None:
    if flags.speculative_algorithm not in ALGORITHMS:
        raise UserError(f"SGLang chose the algorithm {flags.speculative_algorithm} for this draft model; the plug-in serves {ALGORITHMS}")
    for flag, (value, why) in _MUST_BE.items():
        if (given := getattr(flags, flag, value)) != value:
            raise UserError(f"--{flag.replace('_', '-')} {given} does not go with {ENVIRONMENT}: {why}")
    if flags.device not in ("cuda", "cpu"):
        raise UserError(f"--device {flags.device} does not go with {ENVIRONMENT}; it serves cuda and cpu")
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes", "on"):
        raise UserError(f"SGLANG_RUST_SERVER answers requests where no plug-in runs; unset it, or unset {ENVIRONMENT}")
    if float(os.environ.get("SGLANG_SIMULATE_ACC_LEN") or 0) > 0:
        raise UserError(f"SGLANG_SIMULATE_ACC_LEN invents acceptance; unset it, or unset {ENVIRONMENT}")
