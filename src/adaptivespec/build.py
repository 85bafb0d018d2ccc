"""From settings to policies and rules, the same for every engine, and the refusal of those that none can serve."""

from __future__ import annotations

from .config import SpeculativeConfig
from .errors import UserError
from .method.acceptance import AcceptanceRule
from .method.costs import CostModel
from .method.policy import TreePolicy
from .method.registry import make_policy, make_rule


def build_policy(config: SpeculativeConfig, costs: CostModel | None = None) -> TreePolicy:
    """The tree policy that settings name. Raises UserError for impossible shapes.

    `costs` is where a policy that reads them looks; it may be filled later, before the first step.
    """
    try:
        return make_policy(
            config.policy,
            shape=config.shape,
            low=config.low,
            high=config.high,
            saturation=config.saturation,
            alpha=config.alpha,
            patience=config.patience,
            normalise=config.normalise,
            mu=config.talon_mu,
            candidate_steps=config.candidate_steps,
            confidence_threshold=config.confidence_threshold,
            shapes=config.shapes,
            probe=config.probe,
            costs=costs or CostModel(),
        )
    except ValueError as error:
        raise UserError(str(error)) from None


def build_rule(config: SpeculativeConfig) -> AcceptanceRule:
    """The acceptance rule that settings name. Raises UserError for one that no drafter here can serve."""
    rule = make_rule(
        config.effective_rule,
        threshold_single=config.threshold_single,
        threshold_acc=config.threshold_acc,
        typical_epsilon=config.typical_epsilon,
        typical_delta=config.typical_delta,
        relaxed_topk=config.relaxed_topk,
        relaxed_delta=config.relaxed_delta,
        logit_ratio=config.logit_ratio,
        window=config.window,
        window_entropy=config.window_entropy,
    )
    if rule.needs_q:
        raise UserError(
            f"rule {rule.name} needs a drafter that samples and hands over its probabilities; the drafters here propose their best tokens: "
            "use rule strict, which is lossless at every temperature"
        )
    return rule


def require_temperature(rule: AcceptanceRule, temperature: float) -> None:
    """Raise UserError for a rule that is not defined at the request's temperature."""
    if temperature == 0 and not rule.serves_greedy:
        raise UserError(f"rule {rule.name} samples: it needs a temperature above 0, not 0")
    if temperature > 0 and not rule.serves_sampling:
        raise UserError(f"rule {rule.name} is defined at temperature 0 only, not {temperature:g}")
