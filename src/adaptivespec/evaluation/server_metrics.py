"""What a server's answer says about speculation, under the names of vLLM's `metrics.speculative_decoding`; absent where it says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = (
    "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps", "num_accepted_draft_tokens",
    "num_draft_tokens", "num_spec_tokens", "num_promoted_tokens", "spent_budget",
)  # fmt: skip
"""vLLM's, then our two; see docs/settings.md."""

SGLANG = {
    "num_spec_steps": ("spec_verify_ct",),
    "num_accepted_draft_tokens": ("spec_num_correct_drafts", "spec_accept_token_num"),
    "num_draft_tokens": ("spec_num_proposed_drafts", "spec_draft_token_num"),
    "acceptance_histogram": ("spec_correct_drafts_histogram", "spec_accept_histogram"),
    "draft_acceptance_rate": ("spec_accept_rate",),
    "mean_acceptance_length": ("spec_accept_length",),
}
"""Our names and SGLang's, the newest first; in its lengths too the bonus counts."""


def speculative_metrics(answer: Mapping[str, Any], tokens: int) -> dict[str, Any] | None:
    """The speculative metrics of a chat completion, or None.

    vLLM writes `metrics.speculative_decoding` (with `--per-request-spec-decode-metrics summary`), and so do we. SGLang writes
    `sglext.spec_tokens_details` (asked for with `return_spec_tokens_details`) or `meta_info` beside each choice.

    Args:
        answer: the response's JSON.
        tokens: of the answer: where a server counts steps but not accepted tokens, each step emitted one more than it accepted.
    """
    vllm = _mapping(_mapping(answer.get("metrics")).get("speculative_decoding"))
    if vllm:
        found = {name: vllm[name] for name in NAMES if vllm.get(name) is not None}
    else:
        choices = answer.get("choices") or [{}]
        sglang = _mapping(_mapping(choices[0]).get("meta_info")) | _mapping(_mapping(answer.get("sglext")).get("spec_tokens_details"))
        found = {ours: sglang[name] for ours, names in SGLANG.items() for name in names[::-1] if sglang.get(name) is not None}
    steps = found.get("num_spec_steps")
    if not steps:  # counters of a request that never speculated are no news
        return None
    found.setdefault("num_accepted_draft_tokens", max(0, tokens - 1 - steps))  # the first token comes from the prompt
    return found


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}
