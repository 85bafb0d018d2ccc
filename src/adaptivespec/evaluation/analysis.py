"""What answers say about arms: accuracy, paired differences, recovery, length, promotions, accept length, throughput at the run's batch."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import POLICY_SETTINGS, RULE_SETTINGS
from ..errors import UserError, nearest
from .findings import ALL, SPAN, Analysis, Cell, Comparison, Interval, PromotedToken, ShapesOverTime, Square, common_group
from .folder import asked_arms
from .statistics import detectable_difference, mcnemar, paired_bootstrap, tango, throughput_ratio, wilson


@dataclass(frozen=True)
class _Table:
    """Numbers of one arm on some questions: a column per question."""

    right: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray
    steps: np.ndarray
    accepted: np.ndarray


Rows = dict[tuple[str, str], dict[str, Any]]
"""An arm's answers by task and id."""


def analyse(run: Mapping[str, Any], answers: Sequence[Mapping[str, Any]], seed: int = 0, reference: str | None = None) -> Analysis:
    """Compare the arms of a run, also of one that is not finished.

    Args:
        run: what run.json says.
        answers: from `folder.read_answers`; those of arms, tasks and questions that run.json does not name are left out.
        seed: of the bootstrap.
        reference: the arm to compare with; None for the first strict one that speculates, else plain decoding.

    Raises:
        UserError: an unknown reference.
    """
    settings = run["settings"]
    plain, tasks = _plain(settings["arms"]), settings["tasks"]
    arms = dict(sorted(settings["arms"].items(), key=lambda item: item[0] != plain))  # plain decoding first, also where it was asked last
    if reference is not None and reference not in arms:
        raise UserError(f"no arm {reference!r} in this run{nearest(reference, arms)}")
    by_arm: dict[str, Rows] = {label: {} for label in arms}
    put_to = {name: asked_arms(settings, name) for name in tasks}
    for row in answers:
        if row["task"] in tasks and row["arm"] in put_to[row["task"]] and row["id"] in tasks[row["task"]]["questions"]:
            by_arm[row["arm"]][row["task"], row["id"]] = dict(row)
    reference = reference or _reference(arms)
    groups = {name: [name] for name in tasks}
    if len(tasks) > 1:
        groups = {ALL: list(tasks), **groups}
    own = {name: [label for label in arms if all(label in put_to[member] for member in members)] for name, members in groups.items()}
    if len(tasks) > 1 and not own[ALL]:
        del groups[ALL], own[ALL]
    cells = [_cell(name, label, groups[name], by_arm, tasks, reference, plain, seed) for name in groups for label in own[name]]
    common = common_group({name: len(labels) for name, labels in own.items()})
    expected = sum(len(put_to[name]) * len(task["questions"]) for name, task in tasks.items())
    return Analysis(
        reference=reference,
        plain=plain,
        kappas={
            label: arm["kinds"][0]["kappa"]
            for label, arm in arms.items()
            if len(arm["kinds"]) == 1 and arm["kinds"][0]["rule"] in ("strict", "margin") and arm["kinds"][0]["kappa"] is not None
        },
        sweeps=_sweeps(arms),
        tasks=list(tasks),
        batch=settings["batch"],
        engine=settings.get("engine", "local"),
        missing=expected - sum(len(rows) for rows in by_arm.values()),
        cells=cells,
        squares=[
            square
            for four in _squares(arms)
            for name, members in groups.items()
            if set(four) <= set(own[name]) and (square := _square(name, members, four, by_arm, seed)) is not None
        ],
        promoted=[entry for label, rows in by_arm.items() for entry in _promoted(label, rows)],
        shapes=[shown for label in own[common] if (shown := _shapes(label, by_arm[label], groups[common])) is not None],
    )


def _reference(arms: Mapping[str, Any]) -> str | None:
    """The first arm whose every setting speculates strictly, else plain decoding."""
    for label, arm in arms.items():
        if all(kind["policy"] != "off" and kind["rule"] == "strict" for kind in arm["kinds"]):
            return label
    return _plain(arms)


def _plain(arms: Mapping[str, Any]) -> str | None:
    return next((label for label, arm in arms.items() if all(kind["policy"] == "off" for kind in arm["kinds"])), None)


def _table(rows: Rows, keys: Sequence[tuple[str, str]]) -> _Table:
    chosen = [rows[each] for each in keys]

    def column(values: list[float]) -> np.ndarray:
        return np.array(values, dtype=float)

    return _Table(
        right=column([row["correct"] for row in chosen]),
        tokens=column([row["tokens"] for row in chosen]),
        seconds=column([row["seconds"] for row in chosen]),
        steps=column([row["steps"] or 0 for row in chosen]),
        accepted=column([_metrics(row).get("num_accepted_draft_tokens", 0) for row in chosen]),
    )


def _metrics(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an answer says about speculation; empty where a server says nothing."""
    metrics: Mapping[str, Any] = row["metrics"].get("speculative_decoding", {})
    return metrics


def _promoted_count(row: Mapping[str, Any]) -> int | None:
    """The promoted tokens of an answer: those listed, or the server's count."""
    return len(row["promoted"]) if row["promoted"] is not None else _metrics(row).get("num_promoted_tokens")


def _per_1k(counts: Sequence[float | None], rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Per 1,000 tokens of the answers whose count is known; None where none is, 0 without answers."""
    known = [(count, row["tokens"]) for count, row in zip(counts, rows, strict=True) if count is not None]
    tokens = sum(number for _, number in known)
    if rows and not known:
        return None
    return 1000 * sum(count for count, _ in known) / tokens if tokens else 0.0


def _strata(keys: Sequence[tuple[str, str]]) -> list[int]:
    names = list(dict.fromkeys(task for task, _ in keys))
    return [names.index(task) for task, _ in keys]


def _cell(
    name: str,
    label: str,
    members: Sequence[str],
    by_arm: Mapping[str, Rows],
    tasks: Mapping[str, Any],
    reference: str | None,
    plain: str | None,
    seed: int,
) -> Cell:
    keys = [each for each in by_arm[label] if each[0] in members]
    rows = [by_arm[label][each] for each in keys]
    table = _table(by_arm[label], keys)
    right, tokens, seconds = int(table.right.sum()), int(table.tokens.sum()), float(table.seconds.sum())
    accepted, steps = table.accepted.sum(), table.steps.sum()
    told = not rows or any(row["steps"] is not None for row in rows)
    counted = [m for m in map(_metrics, rows) if "num_draft_tokens" in m]
    drafted = sum(m["num_draft_tokens"] for m in counted)
    latencies = [row["latency"] for row in rows if row.get("latency") is not None]

    def shared(other: str | None) -> list[tuple[str, str]]:
        return [] if other in (None, label) else [each for each in keys if each in by_arm[str(other)]]

    def times(other: str | None) -> Interval | None:
        both = shared(other)
        return _speed_ratio(_table(by_arm[label], both), _table(by_arm[str(other)], both), _strata(both), seed) if both else None

    both = shared(reference)
    return Cell(
        task=name,
        arm=label,
        answers=len(rows),
        missing=sum(len(tasks[member]["questions"]) for member in members) - len(rows),
        right=right,
        accuracy=Interval(right / len(rows) if rows else 0.0, *wilson(right, len(rows))),
        versus=_compare(by_arm[label], by_arm[str(reference)], both, seed) if both else None,
        mean_tokens=tokens / len(rows) if rows else 0.0,
        truncated=sum(row["finish_reason"] == "length" for row in rows) / len(rows) if rows else 0.0,
        repeating=sum(row["finish_reason"] == "length" and _repeats(row["text"]) for row in rows),
        promoted_per_1k=_per_1k([_promoted_count(row) for row in rows], rows),
        spent_per_1k=_per_1k([row.get("spent") for row in rows], rows),
        accept_length=(float((accepted + steps) / steps) if steps else 0.0) if told else None,
        drafted_only=(float(accepted / steps) if steps else 0.0) if told else None,
        acceptance_rate=(sum(m["num_accepted_draft_tokens"] for m in counted) / drafted if drafted else 0.0)
        if counted or not rows
        else None,
        tokens_right=int(table.tokens[table.right > 0].sum()),
        tokens=tokens,
        seconds=seconds,
        latency=float(np.median(latencies)) if latencies else None,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        times_reference=times(reference),
        times_plain=times(plain),
        histogram=_histogram(rows),
    )


def _repeats(text: str) -> bool:
    """Whether a text's last 40 characters stand in it four times at least."""
    return len(text) > 160 and text.count(text[-40:]) >= 4


def _histogram(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    total: Counter[int] = Counter()
    for row in rows:
        total.update(dict(enumerate(_metrics(row).get("acceptance_histogram", []))))
    return [total[i] for i in range(max(total, default=-1) + 1)]


def _compare(own: Rows, reference: Rows, keys: Sequence[tuple[str, str]], seed: int) -> Comparison:
    count, this, other = len(keys), _table(own, keys), _table(reference, keys)
    only_this, only_other = int((this.right > other.right).sum()), int((this.right < other.right).sum())

    def ratio(own: np.ndarray, reference: np.ndarray) -> Interval:
        bounds = paired_bootstrap(np.array([own, reference]), _strata(keys), lambda totals: totals[0] / totals[1], seed) or (None, None)
        return Interval(float(own.sum() / reference.sum()), *bounds)

    return Comparison(
        questions=count,
        same=sum(own[each]["text"] == reference[each]["text"] for each in keys),
        only_this=only_this,
        only_reference=only_other,
        reference=float(other.right.mean()),
        difference=Interval((only_this - only_other) / count, *tango(only_this, only_other, count)),
        p=mcnemar(only_this, only_other),
        detectable=detectable_difference(count, only_this + only_other),
        recovery=ratio(this.right, other.right) if other.right.sum() else None,
        length=ratio(this.tokens, other.tokens) if other.tokens.sum() else None,
    )


def _speed_ratio(this: _Table, other: _Table, strata: Sequence[int], seed: int) -> Interval | None:
    columns = this.tokens, this.seconds, other.tokens, other.seconds
    if not all(column.sum() for column in columns):
        return None
    return Interval(*throughput_ratio(*columns, seed=seed, strata=strata))  # type: ignore[arg-type]


def _squares(arms: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Labels of static, margin, tree and both, wherever four arms of one setting differ in policy and rule alone."""
    single = {label: (arm["kinds"][0], arm["settings"][0]) for label, arm in arms.items() if len(arm["kinds"]) == 1 and arm["settings"][0]}

    def find(policy: str, strict: bool, like_policy: str, like_rule: str | None) -> str | None:
        for label, (kind, settings) in single.items():
            if label.startswith("server:") != like_policy.startswith("server:"):  # another server: more than settings differs
                continue
            if kind["policy"] != policy or kind["rule"] != ("strict" if strict else "margin"):
                continue
            if any(settings.get(name) != single[like_policy][1].get(name) for name in POLICY_SETTINGS):
                continue
            if like_rule is None or all(settings.get(name) == single[like_rule][1].get(name) for name in RULE_SETTINGS):
                return label
        return None

    squares = []
    for both, (kind, _) in single.items():
        if kind["policy"] != "adaptive" or kind["rule"] != "margin":
            continue
        tree = find("adaptive", True, both, None)
        for margin, (other, _) in single.items():
            if other["policy"] == "static" and other["rule"] == "margin" and find("static", False, margin, both) == margin:
                static = find("static", True, margin, None)
                if tree is not None and static is not None:
                    squares.append((static, margin, tree, both))
    return squares


def _sweeps(arms: Mapping[str, Any]) -> list[list[str]]:
    """Labels of arms of one setting that are equal in all but kappa, from strict to loose."""
    lossy: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    strict: dict[str, str] = {}
    for label, arm in arms.items():
        if len(arm["kinds"]) > 1 or not arm["settings"][0]:
            continue
        kind, settings = arm["kinds"][0], arm["settings"][0]
        tree = repr([kind["policy"], *(settings.get(name) for name in sorted(POLICY_SETTINGS))])
        if kind["rule"] == "margin":
            lossy[tree, repr([settings.get(name) for name in sorted(RULE_SETTINGS - {"margin"})])][label] = kind["kappa"]
        elif kind["rule"] == "strict" and kind["policy"] != "off":
            strict.setdefault(tree, label)
    return [
        [*([strict[tree]] if tree in strict else []), *sorted(kappas, key=lambda label: -kappas[label])]
        for (tree, _), kappas in lossy.items()
        if len(kappas) > 1
    ]


def _shapes(label: str, rows: Rows, tasks: Sequence[str]) -> ShapesOverTime | None:
    """None for an arm of one shape, or whose answers don't say."""
    planned = []
    for (task, _), row in rows.items():
        told = row.get("shapes") if task in tasks else None
        if told and told["steps"]:
            names = [tuple(shape) for shape in told["seen"]]
            planned.append([names[index] for index in told["steps"]])
    shapes = sorted({shape for steps in planned for shape in steps}, key=lambda shape: (shape[0], -shape[1], shape[2]))
    if len(shapes) < 2:
        return None
    begins, shares = [], []
    for begin in range(0, max(map(len, planned)), SPAN):
        running = [steps[begin : begin + SPAN] for steps in planned if len(steps) > begin]
        if len(running) < max(1, len(planned) / 10):
            break
        counts = Counter(shape for steps in running for shape in steps)
        begins.append(begin)
        shares.append([counts[shape] / counts.total() for shape in shapes])
    return ShapesOverTime(label, [",".join(map(str, shape)) for shape in shapes], begins, shares)


def _square(task: str, members: Sequence[str], labels: tuple[str, str, str, str], by_arm: Mapping[str, Rows], seed: int) -> Square | None:
    static, margin, tree, both = labels
    keys = [each for each in by_arm[static] if each[0] in members and all(each in by_arm[label] for label in labels)]
    if not keys:
        return None
    tables = [_table(by_arm[label], keys) for label in labels]

    def interaction(above: Sequence[np.ndarray], below: Sequence[np.ndarray]) -> Interval | None:
        columns = np.array([*above, *below])
        if not columns.sum(-1).all():
            return None

        def value(totals: np.ndarray) -> np.ndarray:
            logs = np.log(totals[:4]) - np.log(totals[4:])
            return np.asarray(logs[3] - logs[2] - logs[1] + logs[0])

        return Interval(float(value(columns.sum(-1))), *(paired_bootstrap(columns, _strata(keys), value, seed) or (None, None)))

    speed = interaction([t.tokens for t in tables], [t.seconds for t in tables])
    if speed is None:
        return None
    accept = interaction([t.accepted + t.steps for t in tables], [t.steps for t in tables])
    return Square(task, static, margin, tree, both, len(keys), speed, accept)


def _promoted(label: str, rows: Rows) -> list[PromotedToken]:
    """An arm's promoted tokens, the most frequent first."""
    verdicts: dict[str, Counter[bool]] = defaultdict(Counter)
    replaced: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows.values():
        for entry in row["promoted"] or ():
            verdicts[entry["token"]][row["correct"]] += 1
            if entry.get("replaced") is not None:
                replaced[entry["token"]][entry["replaced"]] += 1
    ordered = sorted(verdicts.items(), key=lambda item: (-item[1].total(), item[0]))
    return [PromotedToken(label, token, count[True], count[False], replaced[token].most_common(3)) for token, count in ordered]


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Labels of the points (speed, accuracy) that no other one beats in both, from slow to fast."""
    best, front = -math.inf, []
    for label, (_, accuracy) in sorted(points.items(), key=lambda item: (-item[1][0], -item[1][1])):
        if accuracy > best:
            best = accuracy
            front.append(label)
    return front[::-1]
