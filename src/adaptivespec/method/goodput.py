"""`policy="goodput"`: trees that bring the most tokens per second, given what a row costs here and how often drafts are accepted lately.

The long-run rate of a process that renews itself every step is E[tokens of a step] / E[its seconds], and the policy that maximises it
maximises E[tokens] - price * E[seconds] at every step, where the price is that best rate itself (Dinkelbach, renewal-reward). So the
running tokens per second are the price of a second, and every decision is one comparison: does it bring more tokens than its seconds cost?

- Gain: a node's acceptance probability (`learned`). Their sum over a tree is the expected number of accepted tokens.
- Cost: `CostModel`; a verify costs what the table says of the rows of the whole batch, so requests compete for rows.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from .acceptance import Acceptance
from .costs import CostModel
from .learned import Learned, power_of
from .policy import PolicyDefaults, PolicyState, Root
from .price import Price
from .records import StepTotals
from .tree import DraftTree, TreeShape, keep_best

_REFIT = 16  # steps between two fits of the learned table, after as many fits at its start


class PricedPolicy(PolicyDefaults):
    """What policies share that know acceptance, costs and the price of a second.

    Per request the state holds the evidence of its power (`learned`) and the running chance of the best child of a node (`rar`).
    Table, price and pauses belong to all requests and are kept here, so one object serves one acceptance rule, and `update` is never
    captured in a graph. Requests of other policies in the batch are taken to be as in the last step.

    Args:
        costs: what steps cost; it may be filled later, before the first step.
        probe: most steps without asking the drafter.
    """

    reads_costs = True

    def __init__(self, costs: CostModel, probe: int) -> None:
        if probe < 1:
            raise ValueError("goodput policy: probe is at least 1")
        self.costs, self.probe = costs, probe
        self._learned: dict[torch.device, Learned] = {}
        self._prices: dict[int, Price] = {}
        self._observed = 0
        self._other_requests = self._other_rows = self._undrafted = 0

    def learned(self, device: torch.device) -> Learned:
        """What all requests on a device taught."""
        if device not in self._learned:
            self._learned[device] = Learned(device)
        return self._learned[device]

    def price(self, own: int) -> Price:
        """The books for `own` drafting requests of this policy beside its others and those of other policies."""
        batch = own + self._undrafted + self._other_requests
        if batch not in self._prices:
            nearest = min(self._prices, key=lambda size: abs(size - batch), default=batch)
            self._prices[batch] = Price(self.costs, batch, self.probe, self._prices.get(nearest))
        return self._prices[batch]

    def asks(self, requests: int) -> int:
        """All where drafting pays, now and then one where it does not."""
        self._undrafted = 0
        asked = self.price(requests).asks(requests)
        self._undrafted = requests - asked
        return asked

    def observe(self, step: StepTotals) -> None:
        """Book a step, and now and then bring the table up to date."""
        self._other_requests, self._other_rows, self._undrafted = step.requests - step.own_requests, step.rows - step.own_rows, 0
        self.price(step.own_requests).book(step)
        self._observed += 1
        if self._observed <= _REFIT or self._observed % _REFIT == 0:
            for learned in self._learned.values():
                learned.refit()

    def log_chances(self, state: PolicyState, tree: DraftTree) -> torch.Tensor:
        """fp32 [B, N]: log of every node's acceptance probability, never above the parent's; 0 of the root, -inf of padding."""
        learned = self.learned(tree.tokens.device)
        return learned.paths(learned.bins(tree), tree, state.power)

    def update(self, state: PolicyState, tree: DraftTree, acceptance: Acceptance, num_steps: torch.Tensor) -> PolicyState:
        """Learn from what was accepted; requests that had nothing verified keep their state."""
        if tree.tokens.shape[1] == 1:
            return state
        learned = self.learned(tree.tokens.device)
        bins = learned.bins(tree)
        evidence, best = learned.learn(bins, tree, acceptance, state.evidence, state.power)
        rar = torch.where(tree.size > 1, torch.lerp(state.rar, best, 0.1), state.rar)
        return dataclasses.replace(state, rar=rar, evidence=evidence, power=power_of(evidence))

    def _added_by_rows(self, own: int, count: int, device: torch.device) -> torch.Tensor:
        """fp32 [count]: tokens that 1, 2, ... drafted rows must bring, at this price."""
        own_rows = own + self._undrafted
        rows = self.costs.rows_beyond(own_rows + self._other_requests, own_rows + self._other_rows, count, device)
        return rows * self.price(own).tokens_per_second


class Goodput(PricedPolicy):
    """Drafts a level more if and only if its expected gain exceeds its price, then keeps the nodes of the batch that are worth their rows.

    - `prune`: the nodes of all requests, sorted by acceptance probability, S_n the sum of the best n: n maximises S_n - price * verify(n),
      looked for over all n, because costs need not be convex. The best n never hold a child without its parent.
    - `keep_going`: the next level's candidates are predicted from the request's running chance (`Learned.brood`). The gain is what
      `prune`'s maximum would rise by. Requests share it by the predicted probability that they add, and as many go on as pay.

    Args:
        costs, probe: see `PricedPolicy`.
        shape: the deepest level, the frontier's width and the most nodes of a request's tree, the root included.
    """

    name = "goodput"
    per_level = True

    def __init__(self, costs: CostModel, shape: TreeShape = TreeShape(10, 4, 64), probe: int = 16) -> None:
        super().__init__(costs, probe)
        self.shape = shape

    def reachable(self) -> list[TreeShape]:
        """The largest tree; how deep and large a tree really is shows while drafting."""
        return [self.shape]

    def plan(self, state: PolicyState, root: Root) -> torch.Tensor:
        """Index 0 for every request."""
        return torch.zeros_like(state.misses)

    def keep_going(self, state: PolicyState, tree: DraftTree, num_steps: torch.Tensor) -> torch.Tensor:
        """Bool [B]: another level pays."""
        batch, width = len(num_steps), self.shape.topk
        chance = self.log_chances(state, tree)[:, 1:].exp()
        frontier = torch.where(tree.depth[:, 1:] == tree.levels, chance, 0.0).topk(min(width, chance.shape[1]), 1).values
        brood = self.learned(frontier.device).brood(state.rar, width)
        children = (frontier[:, :, None] * brood[:, None, :]).flatten(1)
        both = torch.cat([chance, children], 1)
        without = torch.nn.functional.pad(chance, (0, children.shape[1]))
        ranked = torch.stack([without, both]).flatten(1).sort(1, descending=True).values[:, : batch * (self.shape.num_draft_tokens - 1)]
        worth = self._worth(ranked, batch)
        most = worth.amax(1).clamp(min=0)
        gain = most[1] - most[0]
        able = (num_steps > tree.levels) & (frontier[:, 0] > 0)
        per_second = self.price(batch).tokens_per_second * self.costs.draft
        if batch == 1:
            return able & (gain > per_second * self.costs.known.level.at(width))
        cut = torch.where(worth[1] == most[1], ranked[1], math.inf).amin()
        added = torch.where(able, torch.where(children >= cut, children, 0.0).sum(1), 0.0)
        order = added.sort(descending=True, stable=True)
        share = (gain * order.values / added.sum().clamp(min=1e-9)).cumsum(0)
        profit = share - per_second * self.costs.levels_of(width, batch, added.device)
        going = torch.where(profit.amax() > 0, profit.argmax() + 1, 0)
        return able & (added > 0) & _first(order.indices, going)

    def prune(self, state: PolicyState, tree: DraftTree, num_draft_tokens: torch.Tensor) -> torch.Tensor:
        """Bool [B, N - 1]: of each request at most `num_draft_tokens` - 1 nodes, and of the batch those that are worth their rows."""
        chance = self.log_chances(state, tree)[:, 1:]
        if chance.shape[1] >= self.shape.num_draft_tokens:
            chance = torch.where(keep_best(chance, num_draft_tokens - 1), chance, -math.inf)
        order = chance.flatten().sort(descending=True, stable=True)  # of equals the parent stands first
        worth = self._worth(order.values.exp(), len(chance))
        kept = torch.where(worth.amax() > 0, worth.argmax() + 1, 0)
        return _first(order.indices, kept).view(chance.shape)

    def _worth(self, ranked: torch.Tensor, own: int) -> torch.Tensor:
        """fp32 [..., M]: S_n - price * (verify(n) - verify(0)) for n from 1 of falling probabilities; -inf from the first that is 0."""
        worth = ranked.cumsum(-1) - self._added_by_rows(own, ranked.shape[-1], ranked.device)
        return torch.where(ranked > 0, worth, -math.inf)


def _first(order: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Bool [M]: those among the first `count` (int64 []) of an order [M]."""
    place = torch.arange(len(order), device=order.device)
    return torch.zeros_like(order, dtype=torch.bool).scatter_(0, order, place < count)
