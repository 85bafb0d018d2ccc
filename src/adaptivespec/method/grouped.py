"""Several tree policies, and several acceptance rules, in one batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from .acceptance import Acceptance, AcceptanceRule, Margin, Strict, VerifyInputs
from .guards import RuleParams
from .policy import PolicyDefaults, PolicyState, Root, TreePolicy
from .tree import DraftTree, TreeShape, merge_rows, select_rows


class Grouped(PolicyDefaults):
    """Several policies in one batch: each is asked for its own requests. The state is that of the whole batch.

    Args:
        policies: one per request, in the batch's order.
    """

    name = "grouped"

    def __init__(self, policies: Sequence[TreePolicy]) -> None:
        self.members: dict[TreePolicy, list[int]] = {}
        for row, policy in enumerate(policies):
            self.members.setdefault(policy, []).append(row)
        self.per_level = any(policy.per_level for policy in self.members)

    def reachable(self) -> list[TreeShape]:
        """The shapes of all policies, one after the other."""
        return [shape for policy in self.members for shape in policy.reachable()]

    def plan(self, state: PolicyState, root: Root) -> torch.Tensor:
        """int64 [B]: indices into the joined `reachable()`."""
        index, first = torch.empty_like(state.misses), 0
        for policy, rows in self.members.items():
            index[rows] = policy.plan(select_rows(state, rows), select_rows(root, rows)) + first
            first += len(policy.reachable())
        return index

    def keep_going(self, state: PolicyState, tree: DraftTree, num_steps: torch.Tensor) -> torch.Tensor:
        """Bool [B]: each policy's own answer."""
        going = torch.empty_like(state.tripped)
        for policy, rows in self.members.items():
            going[rows] = policy.keep_going(select_rows(state, rows), select_rows(tree, rows), num_steps[rows])
        return going

    def prune(self, state: PolicyState, tree: DraftTree, num_draft_tokens: torch.Tensor) -> torch.Tensor:
        """Bool [B, N - 1]: each policy's own answer."""
        keep = torch.empty_like(tree.drafted[:, 1:])
        for policy, rows in self.members.items():
            keep[rows] = policy.prune(select_rows(state, rows), select_rows(tree, rows), num_draft_tokens[rows])
        return keep

    def update(self, state: PolicyState, tree: DraftTree, acceptance: Acceptance, num_steps: torch.Tensor) -> PolicyState:
        """Each policy's new state of its own requests."""
        parts = [
            policy.update(select_rows(state, rows), select_rows(tree, rows), select_rows(acceptance, rows), num_steps[rows])
            for policy, rows in self.members.items()
        ]
        return merge_rows(parts, list(self.members.values()))


def grouped(policies: Sequence[TreePolicy]) -> TreePolicy:
    """The policy that all requests share (one per request is given), or the combination of theirs."""
    return policies[0] if all(policy is policies[0] for policy in policies) else Grouped(policies)


def rows_by_rule(rules: Sequence[AcceptanceRule]) -> dict[AcceptanceRule, list[int]]:
    """Which requests each rule decides for; one rule per request is given."""
    groups: dict[AcceptanceRule, list[int]] = {}
    for row, rule in enumerate(rules):
        groups.setdefault(rule, []).append(row)
    strict, margin = (next((rule for rule in groups if isinstance(rule, kind)), None) for kind in (Strict, Margin))
    if strict is not None and margin is not None:  # kappa is 1 in strict rows, which is strict: one call serves both
        groups[margin] = sorted(groups[margin] + groups.pop(strict))
    return groups


def accept_by_rule(groups: dict[AcceptanceRule, list[int]], tree: DraftTree, inputs: VerifyInputs, params: RuleParams) -> Acceptance:
    """What each request's rule accepts; `groups` is from `rows_by_rule`, everything else is the whole batch's."""
    if len(groups) == 1:
        return next(iter(groups)).accept(tree, inputs, params)
    whole = dataclasses.replace(params, protected=params.protected.expand(len(tree.tokens), -1))
    parts = [rule.accept(select_rows(tree, rows), inputs.of_requests(rows), select_rows(whole, rows)) for rule, rows in groups.items()]
    return merge_rows(parts, list(groups.values()))
