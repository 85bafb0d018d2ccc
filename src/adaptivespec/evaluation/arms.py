"""Arms: named settings to compare, written as `ar; static:3,4,4; margin; tree; adaptivespec` or `name:key=value,...`.

`A+B` is an arm whose prompts take turns with the settings A and B, side by side in one batch. `hf`, `hf-assisted` and `hf-lookup` are
other engines (`peers`), for the benchmark alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..config import ALIASES, SpeculativeConfig
from ..errors import UserError, nearest

BASES: dict[str, dict[str, Any]] = {
    "ar": {"policy": "off", "margin": None},
    "static": {"policy": "static", "margin": None},
    "margin": {"policy": "static"},
    "tree": {"policy": "adaptive", "margin": None},
    "adaptivespec": {"policy": "adaptive"},
    "goodput": {"policy": "goodput", "margin": None},
    "goodput_shapes": {"policy": "goodput_shapes", "margin": None},
    **{rule: {"policy": "static", "rule": rule} for rule in ("margin_top1", "threshold", "typical", "relaxed_topk", "logit_ratio")},
    "window": {"policy": "static", "rule": "window", "num_steps": 15, "topk": 1, "num_draft_tokens": 16},
    **{policy: {"policy": policy, "margin": None} for policy in ("talon", "accept_ema", "heuristic", "confidence")},
}
"""Plain decoding; static EAGLE-3; static with the margin rule; the adaptive tree alone; both; the goodput policy, strict. Margin arms use
the shipped default.
Then what they are compared with: rules on the static tree, FLy's window on its chain, and policies with the strict rule."""

PEERS = ("hf", "hf-assisted", "hf-lookup")
"""transformers on the same weights: its generate, the same assisted by the draft model, and with prompt lookup."""

DEFAULT_ARMS = "ar; static:3,4,4; margin; tree; adaptivespec"


@dataclass(frozen=True)
class Arm:
    """Settings under a label (the text it was written as); prompts take turns with them when there are several.

    `peer` is one of `PEERS` for an arm that is another engine, without settings; None for ours.
    """

    label: str
    speculative: tuple[SpeculativeConfig, ...]
    peer: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether this engine answers and never drafts: what the others are compared with."""
        return self.peer is None and all(settings.policy == "off" for settings in self.speculative)

    def for_prompt(self, number: int) -> SpeculativeConfig:
        """The settings of a prompt, counted from 0."""
        return self.speculative[number % len(self.speculative)]


def parse_arm(text: str, peers: bool = False) -> Arm:
    """One arm: a base name, then optional settings: three numbers are a static shape, the rest `key=value`; or several, joined by `+`.

    Shapes as values are written with slashes: `adaptivespec:low=3/4/8,high=7/4/16`.

    Args:
        text: the arm.
        peers: whether it may be one of `PEERS`.

    Raises:
        UserError: an unknown base or setting (with the nearest name), a value that does not fit, or a peer where none may be.
    """
    label = re.sub(r"\s+", "", text)
    if found := [name for part in label.split("+") if (name := part.partition(":")[0]) in PEERS]:
        if not peers:
            raise UserError(f"arm {label!r}: {found[0]} is another engine, which only bench compares with")
        if label != found[0]:
            raise UserError(f"arm {label!r}: {found[0]} is another engine, which takes no settings and mixes with none")
        return Arm(label, (), label)
    return Arm(label, tuple(_parse_settings(part) for part in label.split("+")))


def _parse_settings(label: str) -> SpeculativeConfig:
    name, _, rest = label.partition(":")
    if name not in BASES:
        advice = "; arms are separated by `;`" if "," in name else nearest(name, [*BASES, *PEERS])
        raise UserError(f"unknown arm {name!r}{advice}")
    numbers = [part for part in rest.split(",") if part and "=" not in part]
    pairs = [part.partition("=") for part in rest.split(",") if "=" in part]
    keys = [key for key, _, _ in pairs]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise UserError(f"arm {label!r}: {twice[0]} is given twice")
    values: dict[str, Any] = {**BASES[name], **{ALIASES.get(key, key): value for key, _, value in pairs}}
    if numbers:
        if len(numbers) != 3 or not all(n.isascii() and n.isdigit() for n in numbers) or values["policy"] != "static":
            raise UserError(
                f"arm {label!r}: expected num_steps,topk,num_draft_tokens (only static and margin take a shape, or rules) or key=value"
            )
        values |= dict(zip(("num_steps", "topk", "num_draft_tokens"), map(int, numbers), strict=True))
    try:
        return SpeculativeConfig(**values)
    except UserError as error:
        raise UserError(f"arm {label!r}: {error}") from None


def parse_arms(text: str, peers: bool = False) -> list[Arm]:
    """Arms separated by `;`, other engines among them with `peers`. Raises UserError for none at all, or for the same arm twice."""
    arms = [parse_arm(part, peers) for part in text.split(";") if part.strip()]
    if not arms:
        raise UserError(f"no arms given; for example {DEFAULT_ARMS!r}")
    labels = [arm.label for arm in arms]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise UserError(f"arm {twice[0]!r} is given twice")
    return arms
