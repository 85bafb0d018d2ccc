"""The report of a run as Markdown: the same numbers and figures, between two marker lines around which a text of one's own may stand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UserError
from .figures import caption, concurrency
from .findings import Analysis, Cell, Interval, Square
from .report import FEW_QUESTIONS, detects, known, number, per_answer, percent, points, signed

BEGIN, END = "<!-- numbers: begin -->", "<!-- numbers: end -->"
SHOWN_TOKENS = 12
MOST_TRUNCATED = 0.05
"""Above this share of cut answers accuracies are those of the limit, and the report says so."""

Timed = tuple[Mapping[str, Any], Analysis]
"""run.json and the numbers of a run."""


def splice(old: str | None, numbers: str) -> str:
    """A file's text with new numbers between the marker lines; with nothing there yet, a heading, the markers and the numbers.

    Raises:
        UserError: a file without the markers, or with them in another order: it is not ours to overwrite.
    """
    block = f"{BEGIN}\n{numbers.strip()}\n{END}"
    if old is None or not old.strip():
        return f"# Results\n\n{block}\n"
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"no lines {BEGIN!r} and {END!r} in it, between which the numbers go")
    return before + block + after


def markdown(quality: Timed, timed: Timed | None, figures: Mapping[str, str], command: str) -> str:
    """Tables, figures and provenance.

    Args:
        quality: the run whose answers count.
        timed: the run that measured speed; None for the same.
        figures: paths of the figures, as the text is to link them, by name.
        command: what makes this text. Of absolute paths only the last part is shown: they say nothing elsewhere.
    """
    run, analysis = quality
    speed = timed[1] if timed else analysis
    found = troubles(analysis, speed, all(session.get("kernels") == "native" for session in run["sessions"]))
    shown = [
        f"Made by `{_relative(command)}`; {_size(analysis)}.",
        _unfinished(analysis),
        _unfinished(speed, "of the run that measured speed ") if timed else "",
        "## Accuracy",
        *(_of_group(group, _quality(analysis, group)) for group in analysis.groups),
        ABOUT_QUALITY.format(reference=f"`{analysis.reference}`" if analysis.reference else "nothing, as no arm is strict"),
        _figure("accuracy-by-task", figures, analysis, speed),
        f"## Speed at {concurrency(speed)}",
        *(_of_group(group, _speed(speed, group, analysis)) for group in speed.groups),
        _about_speed(timed[0] if timed else run, speed),
        _figure("accuracy-and-speed", figures, analysis, speed),
        *_ablation(analysis, speed, figures),
        "## Accept length and shapes" if {"accept-length", "shape-over-time"} & set(figures) else "",
        _steps(analysis) if timed else "",
        _figure("accept-length", figures, analysis, speed),
        _figure("shape-over-time", figures, analysis, speed),
        *_promoted(analysis),
        "## What went badly",
        "\n".join(f"- {line}" for line in found) or "Nothing of what is looked for.",
        "## Provenance",
        _provenance("Answers", run),
        _provenance("Speed", timed[0]) if timed else "",
    ]
    return "\n\n".join(part for part in shown if part)


def troubles(analysis: Analysis, speed: Analysis, exact: bool = False) -> list[str]:
    """What a reader should hold against the numbers, found in them by fixed rules, not by hand. `exact`: our kernels ran throughout."""
    found = []
    for group in analysis.tasks:
        if cut := [_cut(cell) for cell in analysis.of(group) if cell.truncated > MOST_TRUNCATED]:
            found.append(f"{group}: more than {MOST_TRUNCATED:.0%} of answers were cut off by the token limit: {', '.join(cut)}.")
    for group in analysis.groups:
        for cell in analysis.of(group):
            if cell.versus and cell.versus.p < 0.05:
                word = "worse" if cell.versus.difference.value < 0 else "better"
                by = f"{points(cell.versus.difference)} points, p = {cell.versus.p:.3f}"
                found.append(f"{group}, `{cell.arm}`: {word} than `{analysis.reference}`, {by}.")
    for group in speed.groups:
        for cell in speed.of(group):
            times = cell.times_plain
            if times and times.high is not None and times.high < 1:
                found.append(f"{group}, `{cell.arm}`: slower than plain decoding, {number(times)} times its tokens per second.")
    lossy = [cell for cell in analysis.cells if cell.versus and analysis.kappas.get(cell.arm) != 1]
    if blind := [f"{cell.task} `{cell.arm}`" for cell in lossy if cell.versus and cell.versus.blind]:
        found.append(f"The reference gets so little right that even the loss of all of it might go unnoticed: {', '.join(blind)}.")
    largest = max((c.versus.detectable for c in lossy if c.versus and c.versus.detectable), default=None)
    if largest is not None:
        found.append(f"Samples are small: in the worst place only a difference of {100 * largest:.1f} points would probably be noticed.")
    if few := [group for group in speed.tasks if any(0 < cell.answers < FEW_QUESTIONS for cell in speed.of(group))]:
        found.append(f"Speed was measured on fewer than {FEW_QUESTIONS} questions of {', '.join(few)}: intervals there are rough.")
    strict = [arm for arm in analysis.arms if analysis.kappas.get(arm) == 1 and arm not in (analysis.reference, analysis.plain)]
    for arm in [*strict, *([analysis.plain] if analysis.plain and analysis.plain != analysis.reference else [])]:
        pairs = [own.versus for task in analysis.tasks if (own := analysis.cell(task, arm)) and own.versus]
        if parted := sum(pair.questions - pair.same for pair in pairs):
            of_all = f"{parted} of {sum(pair.questions for pair in pairs)} texts differ from `{analysis.reference}`'s"
            why = (
                "our kernels ran, which leave no room for that with heads a multiple of 32 wide: there it is a fault, please report it."
                if exact
                else "near-ties, which another number of rows rounds differently, or seeds that a server does not keep. So much of any "
                "difference is noise."
            )
            found.append(f"`{arm}` is lossless, and yet {of_all}: {why}")
    return found


def _cut(cell: Cell) -> str:
    count = round(cell.truncated * cell.answers)
    return f"`{cell.arm}` {100 * cell.truncated:.1f} % ({count}, of which {cell.repeating} repeated themselves without end)"


ABOUT_QUALITY = """Right and recovery in %, differences in percentage points, with 95 % intervals (Wilson; paired bootstrap over questions;
Tango's score for paired shares). Compared with {reference} on the same questions: same, in %: answers of the same text; `only` counts
questions that just this arm, or just the reference got right; p is McNemar's exact test, not corrected for several arms; `detects` is the
smallest true difference that the test would find in 80 % of such samples, `none` where that is more than the reference gets right;
recovery is accuracy / the reference's. Length: tokens per answer, also relative to the reference's. Cut: ended by the token limit, in %.
Promoted: per 1,000 tokens."""


def _size(analysis: Analysis) -> str:
    counts = {name: max((cell.answers for cell in analysis.of(name)), default=0) for name in analysis.tasks}
    return ", ".join(f"{name}: {count} questions" for name, count in counts.items())


def _unfinished(analysis: Analysis, whose: str = "") -> str:
    return f"**Not finished: {analysis.missing} answers {whose}are missing.**" if analysis.missing else ""


def _of_group(group: str, table: str) -> str:
    return f"### {group}\n\n{table}"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("\\|", "|").replace("|", "\\|") for cell in row] for row in (names, *rows)]  # a bar of its own ends a cell
    lines = [cells[0], ["---", *["--:"] * (len(names) - 1)], *cells[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _figure(name: str, figures: Mapping[str, str], analysis: Analysis, speed: Analysis) -> str:
    if name not in figures:
        return ""
    return f"![{name.replace('-', ' ')}]({figures[name]})\n\n{caption(name, analysis, speed)}"


def _quality(analysis: Analysis, group: str) -> str:
    names = [
        "arm",
        "n",
        "right",
        "same",
        "difference",
        "only this / ref.",
        "p",
        "detects",
        "recovery",
        "length",
        "x ref.",
        "cut",
        "promoted",
    ]
    return _table(names, [_quality_row(cell, analysis.reference) for cell in analysis.of(group) if cell.answers])


def _quality_row(cell: Cell, reference: str | None) -> list[str]:
    versus = cell.versus
    compared, longer = ["-", "reference" if cell.arm == reference else "-", "-", "-", "-", "-"], "-"
    if versus is not None:
        compared = [
            f"{100 * versus.same / versus.questions:.0f}",
            points(versus.difference),
            f"{versus.only_this} / {versus.only_reference}",
            f"{versus.p:.3f}",
            detects(versus),
            percent(versus.recovery) if versus.recovery else "-",
        ]
        longer = number(versus.length) if versus.length else "-"
    ends = [f"{cell.mean_tokens:.0f}", longer, f"{100 * cell.truncated:.1f}", known(cell.promoted_per_1k, "%.1f")]
    return [f"`{cell.arm}`", str(cell.answers), percent(cell.accuracy), *compared, *ends]


def _speed(speed: Analysis, group: str, quality: Analysis) -> str:
    names = ["arm", "tok/s", "x plain", "x reference", "per answer", "accept length", "without bonus", "taken, %", "tokens"]

    def times(interval: Interval | None) -> str:
        return number(interval) if interval else "-"

    rows = [
        [
            f"`{cell.arm}`",
            f"{cell.tokens_per_second:.1f}",
            times(cell.times_plain),
            times(cell.times_reference),
            known(per_answer(cell, speed, quality), "%.2f"),
            known(cell.accept_length, "%.2f"),
            known(cell.drafted_only, "%.2f"),
            known(cell.acceptance_rate, "%.0f", 100),
            str(cell.tokens),
        ]
        for cell in speed.of(group)
        if cell.answers
    ]
    return _table(names, rows)


def _about_speed(run: Mapping[str, Any], speed: Analysis) -> str:
    turns = "Arms took turns at every question." if run["settings"].get("interleave") else "Arms ran one after the other, beside judging."
    limits = ", ".join(f"{name} {task['max_tokens']}" for name, task in run["settings"]["tasks"].items())
    return (
        f"All tokens / all seconds, prompts included, of {_size(speed)}; at most so many tokens an answer: {limits}. {turns} "
        "Ratios with 95 % intervals (paired bootstrap over questions). Accept length: tokens per verify step, the bonus token included. "
        "Taken: of the drafted tokens, those that were accepted. Per answer: x reference, divided by the relative length of whole answers. "
        "Tokens: emitted in all."
    )


def _ablation(analysis: Analysis, speed: Analysis, figures: Mapping[str, str]) -> list[str]:
    if not analysis.squares:
        return []
    timed = {(square.task, square.arms): square for square in speed.squares}
    parts = ["## Ablation: tree and rule"]
    if speed is not analysis:
        parts.append(
            f"Accuracy and accept length of all answers, at {concurrency(analysis)}; pace of the run for speed, at {concurrency(speed)}."
        )
    for square in analysis.squares:
        parts.append(f"### {square.task}: `{square.both}`\n\n{_square(square, analysis, speed)}\n\n{_interaction(square, timed)}")
    parts += [_figure(name, figures, analysis, speed) for name in figures if name.startswith("ablation")]
    return parts


def _square(square: Square, analysis: Analysis, speed: Analysis) -> str:
    def cell(arm: str) -> str:
        own, at = analysis.cell(square.task, arm), speed.cell(square.task, arm)
        right = f"{percent(own.accuracy)} %" if own else "-"
        length = f"accept {known(own.accept_length, '%.2f')}" if own else "-"
        pace = f"{number(at.times_plain)}x" if at and at.times_plain else f"{at.tokens_per_second:.1f} tok/s" if at else "-"
        return f"{right}, {pace}, {length}"

    rows = [["strict", cell(square.static), cell(square.tree)], ["margin", cell(square.margin), cell(square.both)]]
    return _table(["", "static tree", "adaptive tree"], rows)


def _interaction(square: Square, timed: Mapping[tuple[str, tuple[str, str, str, str]], Square]) -> str:
    length = signed(square.accept_length) if square.accept_length else "unknown"
    said = f"Interaction, log(both) - log(tree) - log(margin) + log(static): accept length {length} on {square.questions} questions"
    same = timed.get((square.task, square.arms))
    if same is not None:
        said += f"; tokens per second {signed(same.speed)} on {same.questions}"
    return said + ". Above 0 the parts help each other."


def _steps(analysis: Analysis) -> str:
    """Accept lengths of whole answers, where speed was measured on others."""
    rows = [
        [f"`{arm}`", *(known(cell.accept_length, "%.2f") if (cell := analysis.cell(group, arm)) else "-" for group in analysis.groups)]
        for arm in analysis.arms
    ]
    return f"Accept length of all answers, at {concurrency(analysis)}:\n\n{_table(['arm', *analysis.groups], rows)}"


def _promoted(analysis: Analysis) -> list[str]:
    """The most frequent promotions of the fullest square's arm, else of the arm that promotes most."""
    totals: dict[str, int] = {}
    for entry in analysis.promoted:
        totals[entry.arm] = totals.get(entry.arm, 0) + entry.right + entry.wrong
    if not totals:
        return []
    arm = next((square.both for square in analysis.squares if square.both in totals), max(totals, key=lambda label: totals[label]))
    own = [entry for entry in analysis.promoted if entry.arm == arm]
    cells = [cell for task in analysis.tasks if (cell := analysis.cell(task, arm))]
    promoted = f"{sum(entry.right for entry in own) / totals[arm]:.0%}"
    written = f"{sum(cell.tokens_right for cell in cells) / max(1, sum(cell.tokens for cell in cells)):.0%}"
    rows = [
        [
            _code(entry.token),
            str(entry.right),
            str(entry.wrong),
            ", ".join(f"{_code(text)} {count}" for text, count in entry.replaced) or "not recorded",
        ]
        for entry in own[:SHOWN_TOKENS]
    ]
    return [
        "## Promoted tokens",
        f"`{arm}`: {totals[arm]} promotions of {len(own)} different tokens, {promoted} of them in right answers, which have {written} of "
        "all its tokens. The most frequent:",
        _table(["token", "in right answers", "in wrong answers", "instead of"], rows),
    ]


def _relative(text: str) -> str:
    return re.sub(r"(?<![\w./~])/(?:[^\s/'\"]+/)+([^\s/'\"]+)", r"\1", text)


def _code(text: str) -> str:
    """A token as code in a table's cell."""
    return f"`` {text!r} ``".replace("|", "\\|")


def _provenance(what: str, run: Mapping[str, Any]) -> str:
    settings, last = run["settings"], run["sessions"][-1]
    commands = "\n".join(dict.fromkeys(session["command"] for session in run["sessions"]))
    revisions = ", ".join(dict.fromkeys(str(session["git_revision"]) for session in run["sessions"]))
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    machine = "; ".join(f"{name}: {value}" for name, value in last["machine"].items())
    machine = re.sub(r"(platform: Linux-[\d.]+)[^;]*", r"\1", machine)  # a kernel's build is one host's own
    began, starts = run["sessions"][0]["began"], len(run["sessions"])
    weights = f" ({_relative(str(last['model']))})" if last.get("model") not in (None, settings["model"]) else ""
    drafter = f", drafter {_relative(str(settings['drafter']))}" if settings.get("drafter") else ""
    kernels = f", kernels {last['kernels']}" if last.get("kernels") else ""
    sampling = f"temperature {settings['sampling']['temperature']}, seed {last['seed']}"
    return (
        f"{what}: model {_relative(settings['model'])}{weights}{drafter}, {last['dtype'] or 'dtype unknown'}{kernels}, {sampling}; "
        f"begun {began}, starts: {starts}; revision {revisions}; {versions}; {machine}.\n\n```bash\n{_relative(commands)}\n```"
    )
