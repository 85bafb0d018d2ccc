"""What an analysis finds: the numbers of a run, arm by arm and task by task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ALL = "all"
"""The name under which tasks are pooled, question by question."""


def common_group(arms: Mapping[str, int]) -> str:
    """`all`, where several arms were put to every task, else the task that most were put to; `arms` counts those of each group."""
    return ALL if arms.get(ALL, 0) > 1 else max(arms, key=lambda name: arms[name])


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval; bounds are None where there are too few questions."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Comparison:
    """An arm and the reference on the questions that both answered.

    Attributes:
        questions: how many.
        same: answers of the same text.
        only_this, only_reference: questions that just one of them got right.
        reference: the reference's accuracy on these questions.
        difference: of accuracies, this minus the reference, with Tango's score interval.
        p: exact McNemar, two-sided.
        detectable: smallest difference found with 80 % power at this size and discordance; None with fewer than six questions.
        recovery: accuracy / the reference's; None where the reference got nothing right.
        length: tokens / the reference's; None where that has none.
    """

    questions: int
    same: int
    only_this: int
    only_reference: int
    reference: float
    difference: Interval
    p: float
    detectable: float | None
    recovery: Interval | None
    length: Interval | None

    @property
    def blind(self) -> bool:
        """Whether even the loss of all that the reference gets right might go unnoticed, being less than the smallest that shows."""
        return self.detectable is not None and self.detectable > self.reference


@dataclass(frozen=True)
class Cell:
    """One arm on one task (or on all of them).

    Attributes:
        answers, missing: questions answered, and not answered yet.
        right, accuracy: how many, and the share with its Wilson interval.
        versus: compared with the reference; None for the reference itself, and where they share no question.
        mean_tokens: per answer. truncated: share of answers that max_tokens or the context cut off; repeating: how many of those were
            saying the same again and again, so that no limit would have been long enough.
        promoted_per_1k: promoted tokens per 1,000 emitted.
        spent_per_1k: nats spent on promotions per 1,000 emitted tokens.
        accept_length: tokens per verify step, bonus included, before stop conditions cut the last step; drafted_only: bonus excluded.
        acceptance_rate: accepted / drafted tokens, bonus excluded. These five are of the answers that say so, None where none does.
        tokens_right: emitted in right answers.
        tokens, seconds: emitted, and the arm's share of the engine's time (prompts included), at the run's batch; of a server, the wall
            time in which it had requests.
        latency: median seconds from a request to its answer, of a server; else None.
        tokens_per_second: one by the other.
        times_reference, times_plain: that relative to the reference and to plain decoding, on shared questions.
        histogram: steps that drafted, by the number of accepted tokens.
    """

    task: str
    arm: str
    answers: int
    missing: int
    right: int
    accuracy: Interval
    versus: Comparison | None
    mean_tokens: float
    truncated: float
    repeating: int
    promoted_per_1k: float | None
    spent_per_1k: float | None
    accept_length: float | None
    drafted_only: float | None
    acceptance_rate: float | None
    tokens_right: int
    tokens: int
    seconds: float
    latency: float | None
    tokens_per_second: float
    times_reference: Interval | None
    times_plain: Interval | None
    histogram: list[int]


@dataclass(frozen=True)
class Square:
    """The 2 x 2 ablation on one task (or all): static or adaptive tree, strict or margin rule, with settings that agree pairwise.

    `speed` and `accept_length` are interactions, log(both) - log(tree) - log(margin) + log(static): above 0 the two parts bring more
    together than the product of what each brings alone. None for accept lengths that a server does not say.
    """

    task: str
    static: str
    margin: str
    tree: str
    both: str
    questions: int
    speed: Interval
    accept_length: Interval | None

    @property
    def arms(self) -> tuple[str, str, str, str]:
        """The four labels: static, margin, tree, both."""
        return self.static, self.margin, self.tree, self.both


@dataclass(frozen=True)
class PromotedToken:
    """How often an arm emitted a token by promotion, in right and in wrong answers, and what it stood in for most often (where known)."""

    arm: str
    token: str
    right: int
    wrong: int
    replaced: list[tuple[str, int]]


@dataclass(frozen=True)
class ShapesOverTime:
    """Which shapes an arm planned early and late in its answers, on the tasks of `Analysis.common`.

    Attributes:
        arm: its label; only arms with several shapes are listed.
        shapes: `num_steps,topk,num_draft_tokens`, from shallow to deep.
        steps: the first step, counted from 0, of each span of `SPAN` steps, as far as a tenth of the answers reach.
        shares: of each span the share of each shape, over the answers that were still running.
    """

    arm: str
    shapes: list[str]
    steps: list[int]
    shares: list[list[float]]


SPAN = 5
"""Steps that `ShapesOverTime` counts together."""


@dataclass(frozen=True)
class Analysis:
    """All numbers of a run.

    Attributes:
        reference: the arm that accuracy is compared with: the one asked for, else the first strict one that speculates, else plain
            decoding, else None.
        plain: the arm of plain decoding, if any.
        kappas: the margin threshold of each arm of one setting; 1 is strict. Without arms of other rules, and those of a server
            whose labels do not say it.
        sweeps: labels of arms that differ in kappa alone, from strict to loose; at least two lossy ones each.
        tasks: those of the run; with several, cells of `all` come first, of the arms that were put to every task.
        batch: requests decoded together, or in flight to a server.
        engine: who answered: `local`, or `openai` for a server.
        missing: answers that were asked for and are not there yet.
    """

    reference: str | None
    plain: str | None
    kappas: dict[str, float]
    sweeps: list[list[str]]
    tasks: list[str]
    batch: int
    engine: str
    missing: int
    cells: list[Cell]
    squares: list[Square]
    promoted: list[PromotedToken]
    shapes: list[ShapesOverTime]

    def of(self, task: str) -> list[Cell]:
        """A task's cells, in the order of arms."""
        return [cell for cell in self.cells if cell.task == task]

    @property
    def groups(self) -> list[str]:
        """Names that cells have: `all` with several tasks, then the tasks."""
        return list(dict.fromkeys(cell.task for cell in self.cells))

    @property
    def common(self) -> str:
        """The group that figures of steps are of: see `common_group`."""
        return common_group({name: len(self.of(name)) for name in self.groups})

    @property
    def arms(self) -> list[str]:
        """All labels."""
        return list(dict.fromkeys(cell.arm for name in [*self.tasks, *self.groups] for cell in self.of(name)))

    def cell(self, task: str, arm: str) -> Cell | None:
        """An arm's cell, None where it was not asked or has answered nothing."""
        return next((cell for cell in self.of(task) if cell.arm == arm and cell.answers), None)
