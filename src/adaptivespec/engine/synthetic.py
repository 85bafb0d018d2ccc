"""A target and a drafter without models: any rule and policy in seconds, in worlds whose acceptance and costs are prescribed.

>>> world = World(bursty(0.2, 0.9, 40))
>>> simulate(SpeculativeConfig(policy="adaptive"), world, Costs()).accept_length

What happens at a position depends on the world's seed and the text before it alone, never on rule, policy or batch, so that arms are
compared in the same world. At temperature 0 the drafter is calibrated, unless the world says otherwise: a child to which it gives
probability p is the target's choice with probability p. Modelled seconds are those of requests that run alone, one after the other, or all
together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..build import build_policy, build_rule, require_temperature
from ..config import SpeculativeConfig
from ..drafters.grow import Level, grow
from ..method.acceptance import AcceptanceRule, VerifyInputs
from ..method.costs import CostModel, CostTable, Curve
from ..method.guards import protected_mask
from ..method.noise import derive, gumbel, uniform
from ..method.policy import PolicyState, Root, TreePolicy
from ..method.records import StepTotals
from ..method.tree import DraftTree, TreeShape, select_rows, spread
from .sampling import rule_params

Process = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""int64 request seeds and positions, of one shape -> fp32: the chance in (0, 1) that the drafter's best token there is the target's."""


def stationary(chance: float) -> Process:
    """The same chance everywhere."""
    return lambda seeds, positions: torch.full(positions.shape, chance)


def drifting(low: float, high: float, period: int) -> Process:
    """From `low` to `high` and back along a cosine of `period` tokens."""
    return lambda seeds, positions: low + (high - low) * (0.5 - 0.5 * (positions * (2 * math.pi / period)).cos())


def bursty(low: float, high: float, length: int) -> Process:
    """Stretches of `length` tokens that are easy (`high`) or hard (`low`), each with an even chance."""
    return lambda seeds, positions: torch.where(uniform(seeds, positions // length) < 0.5, low, high)


_BEST_LOGIT = 20.0  # where the top logit of language models often lies: rules that read logits as they are need some place


@dataclass(frozen=True)
class Costs:
    """Modelled seconds.

    Attributes:
        draft_level: one level of a draft tree.
        verify: the target's forward of the root alone; verify_row: what each further row adds.
    """

    draft_level: float = 2e-3
    verify: float = 20e-3
    verify_row: float = 0.5e-3

    def table(self) -> CostTable:
        """The same as policies read it: the first level comes with asking the drafter."""
        level, verify = Curve((1,), (self.draft_level,)), Curve((1, 2), (self.verify, self.verify + self.verify_row))
        return CostTable(level, level, {1: verify}, 0.0, "modelled")

    def step(self, levels: int, rows: int) -> float:
        """Seconds of a step that drafts so many levels and verifies so many rows, the root included."""
        return levels * self.draft_level + self.verify + (rows - 1) * self.verify_row


@dataclass(frozen=True)
class World:
    """A text that writes itself. Contexts are 64-bit hashes of everything before.

    With chance a of the process, the drafter's k-th best child is right with a (1 - a)^k, k from 0: a of what is left each time.
    Tokens that are not the target's choice lie an exponentially distributed log-margin below it.

    Attributes:
        process: how often the drafter is right, and where.
        mean_margin: mean of those log-margins in nats; a mismatch exceeds kappa with chance 1 - kappa^(1 / mean_margin).
        vocab_size: tokens there are.
        seed: another text for every seed.
        claims: what the drafter says the chance is, where it is wrong about itself; None: it knows.
    """

    process: Process
    mean_margin: float = 3.0
    vocab_size: int = 64
    seed: int = 0
    claims: Process | None = None

    def candidates(
        self, context: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The drafter's best children of contexts [...], for requests with these seeds: tokens and log-probabilities [..., width]."""
        rank = torch.arange(width)
        chance = self._chance(seeds, positions, self.claims)[..., None]
        return (self._favourite(context)[..., None] + rank) % self.vocab_size, chance.log() + rank * torch.log1p(-chance)

    def logits(self, context: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """fp32 [R, V]: the target's logits in contexts [R] whose next token has these positions [R]; its choice is at 20."""
        right = (uniform(context, positions).log() / torch.log1p(-self._chance(seeds, positions))).long()  # geometric
        choice = (self._favourite(context) + right) % self.vocab_size
        # A Gumbel variable is minus the logarithm of an exponential one.
        margins = self.mean_margin * (-gumbel(context, positions, self.vocab_size)).exp_()
        return _BEST_LOGIT - margins.scatter_(1, choice[:, None], 0.0)

    def _chance(self, seeds: torch.Tensor, positions: torch.Tensor, process: Process | None = None) -> torch.Tensor:
        return (process or self.process)(seeds, positions).clamp(1e-3, 1 - 1e-3)

    def _favourite(self, context: torch.Tensor) -> torch.Tensor:
        return derive(context, -1) % self.vocab_size


@dataclass(frozen=True)
class SyntheticResult:
    """What an arm did in a world.

    Attributes:
        steps: verify steps; drafted, accepted, promoted: drafted tokens of each kind.
        seconds: modelled.
    """

    steps: int
    drafted: int
    accepted: int
    promoted: int
    seconds: float

    @property
    def accept_length(self) -> float:
        """Tokens per step, the bonus included."""
        return 1 + self.accepted / self.steps

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the drafted tokens, the bonus excluded; 0 when nothing was drafted."""
        return self.accepted / max(1, self.drafted)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per modelled second."""
        return (self.accepted + self.steps) / self.seconds


def simulate(
    config: SpeculativeConfig,
    world: World,
    costs: Costs | CostTable,
    *,
    requests: int = 4,
    max_tokens: int = 500,
    temperature: float = 0.0,
    together: bool = False,
) -> SyntheticResult:
    """Decode `requests` texts of the world until each has `max_tokens` tokens or more; nothing is cut off.

    Args:
        config: rule, policy and their parameters, as for a request. No token is protected.
        world, costs: see there.
        requests: texts; what one does changes no other, unless the policy decides for the batch.
        max_tokens: see above.
        temperature: of all requests; above 0 the drafter is not calibrated.
        together: whether they share steps, and so their cost; else each runs alone, after the ones before.

    Raises:
        UserError: settings that the engine refuses, or a rule that is not defined at this temperature.
    """
    table = costs.table() if isinstance(costs, Costs) else costs
    rule, policy = build_rule(config), build_policy(config, CostModel(table, follows=False))
    require_temperature(rule, temperature)
    seeds = derive(torch.full((requests,), world.seed), torch.arange(requests))
    # One that decides for the batch must not see a batch when the costs are those of requests alone.
    parts = torch.split(seeds, 1) if policy.reads_costs and not together else [seeds]
    results = [_decode(config, rule, policy, world, table, part, max_tokens, temperature, together) for part in parts]
    return SyntheticResult(*(sum(column) for column in zip(*map(dataclasses.astuple, results), strict=True)))


def _decode(
    config: SpeculativeConfig,
    rule: AcceptanceRule,
    policy: TreePolicy,
    world: World,
    table: CostTable,
    seeds: torch.Tensor,
    max_tokens: int,
    temperature: float,
    together: bool,
) -> SyntheticResult:
    """The texts of some request seeds, side by side."""
    running = _Running(
        seeds, derive(seeds, 0), torch.zeros_like(seeds), torch.zeros(len(seeds), dtype=torch.float64), torch.zeros_like(seeds)
    )
    state, shapes, protected = policy.initial(len(seeds)), policy.reachable(), protected_mask(world.vocab_size, ())
    width = max(shape.topk for shape in shapes)
    steps = drafted = accepted = promoted = 0
    seconds = 0.0
    while len(running.seeds):
        asked = policy.asks(len(running.seeds)) if config.policy != "off" else 0
        tree, planned = DraftTree.root_only(running.last), [TreeShape.off()] * len(running.seeds)
        levels: list[list[int]] = [[] for _ in planned]
        if rows := list(range(asked)):
            drafting, own_state = select_rows(running, rows), select_rows(state, rows)
            root = Root(*world.candidates(drafting.context, drafting.seeds, drafting.emitted, width))
            planned[:asked] = (shapes[index] for index in policy.plan(own_state, root).tolist())
            tree, levels[:asked] = _draft(world, drafting, root, planned[:asked], policy, own_state)
            tree = tree if asked == len(planned) else spread(tree, rows, running.last)
        inputs, contexts = _verify(world, running, tree, temperature)
        params = rule_params([config] * len(planned), running.spent.tolist(), running.emitted.tolist(), protected)
        acceptance = rule.accept(tree, inputs, params)
        state = policy.update(state, tree, acceptance, torch.tensor([shape.num_steps for shape in planned]))
        sizes = tree.size.tolist()
        steps += len(sizes)
        drafted += sum(sizes) - len(sizes)
        taken = int(acceptance.num_accepted.sum())
        accepted += taken
        promoted += int(acceptance.promoted.sum())
        if together:
            seconds += sum(table.step(tree.draft_rows, sum(sizes), len(sizes)))
        else:
            seconds += sum(sum(table.step(own, rows, 1)) for own, rows in zip(levels, sizes, strict=True))
        own = len(sizes), sum(sizes)
        policy.observe(StepTotals(*own, taken + len(sizes), tree.draft_rows, *own, taken, asked))
        running = running.after(contexts, acceptance.path, acceptance.num_accepted, acceptance.bonus, acceptance.log_margin)
        going = [row for row, count in enumerate(running.emitted.tolist()) if count < max_tokens]
        if len(going) < len(sizes):
            running, state = select_rows(running, going), select_rows(state, going)
    return SyntheticResult(steps, drafted, accepted, promoted, seconds)


@dataclass(frozen=True)
class _Running:
    """The requests that still run: seed, context before the root and root token (all int64 [B]), nats spent and tokens emitted."""

    seeds: torch.Tensor
    context: torch.Tensor
    last: torch.Tensor
    spent: torch.Tensor
    emitted: torch.Tensor

    def after(
        self, contexts: torch.Tensor, path: torch.Tensor, num_accepted: torch.Tensor, bonus: torch.Tensor, log_margin: torch.Tensor
    ) -> _Running:
        """One step later; `contexts` int64 [B, N] are those after every node."""
        whole = torch.nn.functional.pad(path, (1, 0))
        last = whole.gather(1, num_accepted[:, None])
        context = derive(contexts.gather(1, last)[:, 0], bonus)
        spent = self.spent
        for level in range(log_margin.shape[1]):  # in the order in which the rule added them up against the budget
            spent = spent - log_margin[:, level]
        return _Running(self.seeds, context, bonus, spent, self.emitted + num_accepted + 1)


def _draft(
    world: World, running: _Running, root: Root, shapes: list[TreeShape], policy: TreePolicy, state: PolicyState
) -> tuple[DraftTree, list[list[int]]]:
    """Trees, and the draft rows of each request as if it were alone (see `StepRecord`)."""
    levels = [[1] for _ in shapes]
    contexts = running.context[:, None]

    def expand(level: Level) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal contexts
        if level.survivors is not None:
            contexts = contexts[level.survivors]
        contexts = derive(contexts.gather(1, level.parent_column), level.tokens)
        for row, count in zip(level.rows, level.counts, strict=True):
            levels[row].append(count)
        positions = (running.emitted[level.rows] + level.index)[:, None].expand_as(contexts)
        return world.candidates(contexts, running.seeds[level.rows][:, None].expand_as(contexts), positions, contexts.shape[1])

    return grow(running.last, root, shapes, policy, state, expand), levels


def _verify(world: World, running: _Running, tree: DraftTree, temperature: float) -> tuple[VerifyInputs, torch.Tensor]:
    """The target on all nodes, padding too, and the contexts [B, N] after them."""
    contexts = running.context[:, None].expand_as(tree.tokens)
    for _ in range(tree.levels):
        contexts = torch.where(tree.drafted, derive(contexts.gather(1, tree.parents.clamp(min=0)), tree.tokens), running.context[:, None])
    seeds, positions = running.seeds[:, None].expand_as(contexts), running.emitted[:, None] + tree.depth
    logits = world.logits(contexts.flatten(), seeds.flatten(), positions.flatten()).view(*contexts.shape, -1)
    noise = gumbel(seeds.flatten(), positions.flatten(), world.vocab_size).view_as(logits) if temperature else None
    inputs = VerifyInputs.from_logits(logits, torch.full((len(logits),), temperature), noise)
    return dataclasses.replace(inputs, coins=uniform(seeds, positions)), contexts
