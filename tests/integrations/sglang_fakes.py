"""What the plug-in sees of SGLang, as plain objects: requests, and the stock kernel's greedy walk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

TOP_K_ALL = 1 << 30


def make_req(rid: str = "a", prompt: int = 3, wish: object = None, **params: Any) -> Any:
    """A request as SGLang's scheduler holds it; greedy unless a temperature is given."""
    greedy = "temperature" not in params
    sampling = {
        "temperature": 1.0,
        "top_k": 1 if greedy else TOP_K_ALL,
        "top_p": 1.0,
        "min_p": 0.0,
        "n": 1,
        "sampling_seed": None,
        "stop_token_ids": None,
        "custom_params": None if wish is None else {"adaptivespec": wish},
    }
    req = SimpleNamespace(
        rid=rid,
        sampling_params=SimpleNamespace(**{**sampling, **params}),
        origin_input_ids=[5] * prompt,
        eos_token_ids={0},
        tokenizer=None,
        is_retracted=False,
        done=False,
    )
    req.finished = lambda: req.done
    return req


def walk(tokens: list[int], next_token: list[int], next_sibling: list[int], predict: list[int], levels: int) -> tuple[list[int], list[int]]:
    """The stock greedy kernel for one request: accepted nodes, and the tokens emitted after each node that it stood on."""
    node, accepted, emitted = 0, [], []
    for _ in range(levels):
        child = next_token[node]
        while child != -1 and tokens[child] != predict[node]:
            child = next_sibling[child]
        if child == -1:
            break
        emitted.append(predict[node])
        accepted.append(child)
        node = child
    return accepted, [*emitted, predict[node]]


def walk_all(tree_tokens: torch.Tensor, links: tuple[torch.Tensor, torch.Tensor], predict: torch.Tensor, levels: int) -> list[Any]:
    """`walk` of every request."""
    rows = zip(tree_tokens.tolist(), links[0].tolist(), links[1].tolist(), predict.tolist(), strict=True)
    return [walk(*row, levels) for row in rows]
