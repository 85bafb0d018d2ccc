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
from collections.abc import Callable, Sequence

import torch

from .acceptance import Acceptance
from .costs import CostModel
from .learned import HostTree, Learned, Outcome, power_of
from .policy import PolicyDefaults, PolicyState, Root
from .price import Price
from .records import StepTotals
from .tree import DraftTree, TreeShape

_REFIT = 16  # steps between two fits of the learned table, after as many fits at its start


class PricedPolicy(PolicyDefaults):
    """What policies share that know acceptance, costs and the price of a second.

    Per request the state holds the evidence of its power (`learned`) and the running chance of the best child of a node (`rar`).
    Table, price and pauses belong to all requests and are kept here, so one object serves one acceptance rule. All of it is decided on the
    host, so nothing here can be captured in a graph. Requests of other policies in the batch are taken to be as in the last step.

    Args:
        costs: what steps cost; it may be filled later, before the first step.
        probe: most steps without asking the drafter.
    """

    reads_costs = True

    def __init__(self, costs: CostModel, probe: int) -> None:
        if probe < 1:
            raise ValueError("goodput policy: probe is at least 1")
        self.costs, self.probe = costs, probe
        self.learned = Learned()
        self._prices: dict[int, Price] = {}
        self._observed = 0
        self._other_requests = self._other_rows = self._undrafted = 0

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
            self.learned.refit()

    def update(self, state: PolicyState, tree: DraftTree, acceptance: Acceptance, num_steps: torch.Tensor) -> PolicyState:
        """Learn from what was accepted; requests that had nothing verified keep their state."""
        if tree.tokens.shape[1] == 1:
            return state
        columns = acceptance.path.tolist(), acceptance.promoted.tolist(), state.power.tolist(), state.evidence.tolist()
        found = self.learned.learn([Outcome(*own) for own in zip(HostTree.of(tree), *columns, strict=True)])
        rars = [rar if mean is None else rar + 0.1 * (mean - rar) for rar, (_, mean) in zip(state.rar.tolist(), found, strict=True)]
        evidence = [own for own, _ in found]
        device = state.rar.device
        return dataclasses.replace(
            state,
            rar=torch.tensor(rars, device=device),
            evidence=torch.tensor(evidence, device=device),
            power=torch.tensor([power_of(own) for own in evidence], device=device),
        )

    def added(self, own: int, count: int) -> Callable[[int], float]:
        """The tokens that n drafted rows of `own` requests must bring, at this price, for n up to `count`.

        A probe pays what a row costs when the others draft as much.
        """
        all_own, price = own + self._undrafted, self.price(own).tokens_per_second
        scale = all_own / own
        beyond = self.costs.rows_beyond(all_own + self._other_requests, all_own + self._other_rows, math.ceil(scale * count))
        return lambda n: price * beyond[round(scale * n) - 1] / scale

    def level(self, own: int, rows: int) -> float:
        """The tokens that a draft forward of `rows` rows, of `own` requests, must bring; a probe pays its share of everybody's."""
        scale = (own + self._undrafted) / own
        return self.price(own).tokens_per_second * self.costs.draft * self.costs.known.level.at(scale * rows) / scale


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
        width, known = self.shape.topk, list[float]()
        foretold: list[list[float]] = []
        for own, power, rar, steps in zip(HostTree.of(tree), state.power.tolist(), state.rar.tolist(), num_steps.tolist(), strict=True):
            chances = self.learned.chances(own, power)
            known += (chance for chance in chances[1:] if chance)
            last = (chance for chance, depth in zip(chances, own.depth, strict=True) if chance and depth == tree.levels)
            frontier = sorted(last, reverse=True)[:width] if steps > tree.levels else []
            foretold.append([chance * each for each in self.learned.brood(rar, width) if each for chance in frontier])
        batch = len(foretold)
        without, _, _ = self._best(known, batch)
        worth, _, cut = self._best([*known, *(child for children in foretold for child in children)], batch)
        added = [sum(child for child in children if child >= cut) for children in foretold]
        order = sorted((row for row in range(batch) if added[row]), key=lambda row: -added[row])
        going, best, shared = 0, 0.0, 0.0
        for n, row in enumerate(order, 1):
            shared += added[row]
            profit = (worth - without) * shared / sum(added) - self.level(batch, width * n)
            if profit > best:
                going, best = n, profit
        return torch.tensor([row in order[:going] for row in range(batch)], device=num_steps.device)

    def prune(self, state: PolicyState, tree: DraftTree, num_draft_tokens: torch.Tensor) -> torch.Tensor:
        """Bool [B, N - 1]: of each request at most `num_draft_tokens` - 1 nodes, and of the batch those that are worth their rows."""
        trees = HostTree.of(tree)
        ranked: list[tuple[float, int, int]] = []  # of equals the parent stands first
        for row, (own, power, most) in enumerate(zip(trees, state.power.tolist(), num_draft_tokens.tolist(), strict=True)):
            chances = self.learned.chances(own, power)
            ranked += sorted((-chance, row, node) for node, chance in enumerate(chances) if node and chance)[: most - 1]
        ranked.sort()
        _, count, _ = self._best([-negative for negative, _, _ in ranked], len(trees))
        keep = [[False] * (len(own.parents) - 1) for own in trees]
        for _, row, node in ranked[:count]:
            keep[row][node - 1] = True
        return torch.tensor(keep, dtype=torch.bool, device=tree.tokens.device)

    def _best(self, chances: Sequence[float], own: int) -> tuple[float, int, float]:
        """The best S_n - price * (verify(n) - verify(0)), that n, and its least chance; S_n sums the n highest of `own` requests."""
        chances = sorted(chances, reverse=True)[: own * (self.shape.num_draft_tokens - 1)]
        best, count, cut, expected = 0.0, 0, math.inf, 0.0
        added = self.added(own, len(chances))
        for n, chance in enumerate(chances, 1):
            expected += chance
            if (worth := expected - added(n)) > best:
                best, count, cut = worth, n, chance
        return best, count, cut
