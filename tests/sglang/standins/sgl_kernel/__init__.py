"""Stand-in for the CPU build of SGLang's kernel package: what a dense Llama with EAGLE calls on a CPU, in plain torch.

Made from the call sites of sglang 0.5.23, checked against brute force in tests/sglang/test_standins.py. Anything else that is
imported from here fails when it is called, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .attention import decode_attention_cpu, extend_attention_cpu
from .cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
)
from .trees import build_tree_kernel_efficient_cpu, fill_bonus_tokens_cpu, rotate_input_ids_cpu, verify_tree_greedy_cpu

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

# SGLang takes these two from torch's operator namespace
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> Any:
        raise NotImplementedError(f"the stand-in for sgl_kernel has no {name}")

    return missing
