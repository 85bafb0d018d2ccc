"""Arms of a server: settings that travel with each request, or `server:LABEL`, what that server was started with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import POLICIES, RULES, SpeculativeConfig
from ..errors import UserError
from .arms import BASES, Arm, parse_arm
from .runs import arm_kind

Wish = dict[str, Any] | bool
"""A request's `speculative` field: settings, or False for plain decoding."""

PREFIX = "server:"
WORDS: dict[str, dict[str, Any]] = {
    "ar": {"policy": "off", "rule": "strict", "kappa": 1.0},
    "strict": {"policy": "server", "rule": "strict", "kappa": 1.0},
}
"""What a label says that is no arm, by its first word: plain decoding, or some lossless speculation."""

UNKNOWN: dict[str, Any] = {"policy": "server", "rule": "server", "kappa": None}
"""What any other label says."""


@dataclass(frozen=True)
class ServerArm:
    """An arm as a server knows it.

    Attributes:
        label: the text it was written as.
        wishes: what requests send as `speculative`, taking turns when there are several; empty sends nothing.
        kinds: policy, rule and kappa, as `runs.arm_kind`; `server` and None where the label does not say.
        settings: all of SpeculativeConfig; empty objects where the label does not say.
    """

    label: str
    wishes: tuple[Wish, ...]
    kinds: tuple[dict[str, Any], ...]
    settings: tuple[dict[str, Any], ...]

    def wish(self, number: int) -> Wish | None:
        """What the request of a question sends, counted from 0; None sends nothing."""
        return self.wishes[number % len(self.wishes)] if self.wishes else None


def parse_server_arm(text: str) -> ServerArm:
    """An arm as `arms.parse_arm` reads it, or `server:LABEL`.

    A label that is an arm itself, such as `server:static:3,4,4`, says all about the server. Of any other the first word up to a `-`
    counts where it is `ar` or `strict`, as in `server:strict-eagle3`; the rest only names it.

    Raises:
        UserError: an unknown arm, one whose settings do not fit, or a label with anything but letters, digits and `._:=,/-`.
    """
    label = re.sub(r"\s+", "", text)
    if not label.startswith(PREFIX):
        return _of(parse_arm(label), sends=True)
    name = label.removeprefix(PREFIX)
    if not re.fullmatch(r"[\w.:=,/-]+", name):
        raise UserError(f"arm {label!r}: expected {PREFIX}LABEL, such as {PREFIX}strict-eagle3")
    if name.partition(":")[0] in BASES:
        known = _of(parse_arm(name), sends=False)
        return ServerArm(label, (), known.kinds, known.settings)
    return ServerArm(label, (), (WORDS.get(name.partition("-")[0], UNKNOWN),), ({},))


def parse_server_arms(text: str) -> list[ServerArm]:
    """Arms separated by `;`. Raises UserError for none at all, or for the same arm twice."""
    arms = [parse_server_arm(part) for part in text.split(";") if part.strip()]
    if not arms:
        raise UserError("no arms given; for example 'server:strict-eagle3', or 'ar; static:3,4,4; adaptivespec'")
    labels = [arm.label for arm in arms]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise UserError(f"arm {twice[0]!r} is given twice")
    if sum(not arm.wishes for arm in arms) > 1:
        raise UserError("a server was started with one setting only: give one server:LABEL a run, and the next one into the same --out")
    return arms


def wish_of(config: SpeculativeConfig) -> Wish:
    """Settings as a request sends them: all that have an effect, whatever the server's defaults are."""
    if config.policy == "off":
        return False
    values = config.model_dump(mode="json")
    names = ("policy", "rule", *POLICIES[config.policy], *RULES[config.rule])
    off = ("budget", "budget_per_100", "max_promotions") if config.guards == "none" else ()
    return {name: values[name] for name in names if name not in off}


def _of(arm: Arm, sends: bool) -> ServerArm:
    return ServerArm(
        arm.label,
        tuple(wish_of(one) for one in arm.speculative) if sends else (),
        tuple(arm_kind(one) for one in arm.speculative),
        tuple(one.model_dump(mode="json") for one in arm.speculative),
    )


def not_obeyed(wish: Wish, echo: Any) -> str | None:
    """What an answer's `speculative` (the settings in effect) says against the wish, None when all is as wished."""
    if echo is None:
        return "the answer has no 'speculative' that says what was in effect"
    policy = echo.get("policy") if isinstance(echo, Mapping) else None
    if wish is False:
        return None if echo is False or policy == "off" else f"it speculated with {echo!r}"
    if not isinstance(echo, Mapping) or not isinstance(wish, dict):
        return f"in effect was {echo!r}"
    for name in (name for name in wish if name in echo and echo[name] != wish[name]):
        return f"{name} was {echo[name]!r}, not {wish[name]!r}"
    for name in (name for name in wish if name not in echo):
        return f"it does not say what {name} was"
    return None
