"""Rules and policies by name, with the parameters that settings hold."""

from __future__ import annotations

from collections.abc import Sequence

from .acceptance import AcceptanceRule, Margin, Strict
from .baseline_policies import AcceptEMA, Confidence, Heuristic, Talon
from .baselines import LogitRatio, MarginTop1, RelaxedTopK, Typical, Window
from .coins import Rejection, Threshold
from .costs import CostModel
from .goodput import Goodput
from .goodput_shapes import GoodputShapes
from .policy import Adaptive, Static, TreePolicy
from .tree import TreeShape


def make_policy(
    policy: str,
    *,
    shape: tuple[int, int, int],
    low: tuple[int, int, int],
    high: tuple[int, int, int],
    saturation: float,
    alpha: float,
    patience: int,
    normalise: str,
    mu: float,
    candidate_steps: Sequence[int],
    confidence_threshold: float,
    shapes: Sequence[tuple[int, int, int]],
    probe: int,
    costs: CostModel,
) -> TreePolicy:
    """The policy that settings name; each reads the parameters it has. Raises ValueError for impossible shapes or names."""
    match policy:
        case "off":
            return Static(TreeShape.off())
        case "static":
            return Static(TreeShape(*shape))
        case "adaptive":
            return Adaptive(TreeShape(*low), TreeShape(*high), saturation, alpha, patience, normalise)
        case "talon":
            return Talon(TreeShape(*shape), mu)
        case "accept_ema":
            return AcceptEMA(candidate_steps, alpha)
        case "heuristic":
            return Heuristic(shape[0])
        case "confidence":
            return Confidence(shape[0], confidence_threshold)
        case "goodput":
            return Goodput(costs, TreeShape(*shape), probe)
        case "goodput_shapes":
            return GoodputShapes(costs, [TreeShape(*one) for one in shapes], probe)
    known = "accept_ema, adaptive, confidence, goodput, goodput_shapes, heuristic, off, static, talon"
    raise ValueError(f"unknown policy {policy!r}; known: {known}")


def make_rule(
    rule: str,
    *,
    threshold_single: float,
    threshold_acc: float,
    typical_epsilon: float,
    typical_delta: float,
    relaxed_topk: int,
    relaxed_delta: float,
    logit_ratio: float,
    window: int,
    window_entropy: float,
) -> AcceptanceRule:
    """The rule that settings name; kappa and guards are tensors of `RuleParams` instead. Raises ValueError for unknown names."""
    match rule:
        case "strict":
            return Strict()
        case "margin":
            return Margin()
        case "margin_top1":
            return MarginTop1()
        case "threshold":
            return Threshold(threshold_single, threshold_acc)
        case "typical":
            return Typical(typical_epsilon, typical_delta)
        case "relaxed_topk":
            return RelaxedTopK(relaxed_topk, relaxed_delta)
        case "logit_ratio":
            return LogitRatio(logit_ratio)
        case "window":
            return Window(window, window_entropy)
        case "rejection":
            return Rejection()
    raise ValueError(
        f"unknown rule {rule!r}; known: logit_ratio, margin, margin_top1, rejection, relaxed_topk, strict, threshold, typical, window"
    )
