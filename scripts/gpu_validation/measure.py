"""Everything that one server is asked, and what must hold."""

from __future__ import annotations

import contextlib
import datetime
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Any

from .answers import Question, agreement, ask_all, counts_of, first_difference, gaps_of, least_likely, series, settings_of
from .plan import Cell
from .server import Failed, Server, wait_for


@dataclass(frozen=True)
class Options:
    """How much is asked, see --help."""

    tokens: int
    requests: int
    concurrency: int
    tie: float
    slack: float
    scored: int
    limit: float


class Checks(list[dict[str, Any]]):
    """What must hold."""

    def add(self, name: str, ok: bool, detail: str = "") -> None:
        """One more."""
        self.append({"check": name, "ok": bool(ok), "detail": detail})


def measure(
    cell: Cell, server: Server, questions: Sequence[Question], options: Options, reference: dict[str, Any] | None
) -> dict[str, Any]:
    """Ask a running server everything; the cell's result."""
    checks, plug_in = Checks(), cell.settings is not None
    lossless = False if plug_in else None  # what a request sends for the target's own opinion
    result: dict[str, Any] = {"seconds_to_start": round(server.seconds_to_start, 1), "checks": checks}
    ask_all(server, questions[: options.concurrency], [settings_of(16)] * min(len(questions), options.concurrency), options.concurrency)

    groups = {"alone": 1, f"{options.concurrency} at once": options.concurrency}
    texts: dict[str, list[list[int]]] = {}
    for group, at_once in groups.items():
        params = [settings_of(options.tokens)] * len(questions)
        answers, seconds, _, errors = ask_all(server, questions, params, at_once)
        checks.add(f"{group}: no errors", not errors, "; ".join(errors[:3]))
        texts[group] = [answer.get("output_ids", []) for answer in answers]
        tokens = sum(map(len, texts[group]))
        result[group] = {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds, **counts_of(answers)}
    result["answers"] = texts

    if reference is not None:
        for group in groups:
            found = agreement(questions, texts[group], reference["answers"][group], gaps_of(server, lossless), options.tie)
            result[group]["agreement"] = asdict(found)
            words = f"{found.identical} identical, {found.ties} part at a near-tie, {len(found.parted)} elsewhere {found.parted[:3]}"
            checks.add(f"{group}: the text of {cell.reference}", not found.parted, words)
    alone, company = texts.values()
    own = agreement(questions, alone, company, gaps_of(server, lossless), options.tie)
    result["alone beside company"] = asdict(own)  # how much batches change by rounding alone; lossy texts may part anywhere
    if cell.kind == "strict":
        checks.add("strict promotes nothing", all(result[group]["promoted"] == 0 for group in groups))
        checks.add("alone and in company the same text", not own.parted, "; ".join(own.parted[:3]))
    if cell.kind == "margin" and cell.settings is not None:
        promoted = sum(result[group]["promoted"] for group in groups)
        checks.add("margin promotes something", promoted > 0, f"{promoted} promoted")
        least = [least_likely(server, q, a, lossless) for q, a in zip(questions[: options.scored], texts["alone"], strict=False) if a]
        floor = math.log(cell.settings["margin"])
        result["least_likely"] = min(least)
        checks.add("no token below kappa", min(least) > floor - options.slack, f"{min(least):.3f} nats, kappa is {floor:.3f}")
    if plug_in:
        used = {shape for group in groups for shape in result[group]["shapes"]}
        if cell.shapes:
            checks.add("only the prepared shapes", used <= set(cell.shapes), ", ".join(sorted(used)))
        else:
            checks.add("several shapes are drafted", len(used) > 1, ", ".join(sorted(used)))
        sampled = sampling(server, questions, options)
        result["sampled"] = sampled
    load(cell, server, questions, options, result, checks)
    return result


def sampling(server: Server, questions: Sequence[Question], options: Options) -> dict[str, Any]:
    """Strict answers at temperature 0.8 with a seed, alone and in company: how many are the same. Rounding may part them."""
    few = questions[: options.concurrency]
    params = [settings_of(options.tokens, False, temperature=0.8, sampling_seed=i) for i in range(len(few))]
    alone, company = (ask_all(server, few, params, at_once)[0] for at_once in (1, options.concurrency))
    places = [first_difference(a.get("output_ids", []), b.get("output_ids", [])) for a, b in zip(alone, company, strict=True)]
    return {"answers": len(few), "identical": sum(place is None for place in places)}


def load(cell: Cell, server: Server, questions: Sequence[Question], options: Options, result: dict[str, Any], checks: Checks) -> None:
    """Many requests of different lengths, some of them dropped half-way; then nothing may be left of them."""
    plug_in = cell.settings is not None
    before = server.metrics()
    many = list(islice(cycle(questions), options.requests))
    kinds: list[Any] = [None, {"margin": 0.3}, False, {"margin": 0.1, "budget": 5.0}] if plug_in else [None]
    lengths = [max(1, options.tokens * (1 + i % 8) // 8) for i in range(len(many))]
    params = [settings_of(length, kinds[i % len(kinds)]) for i, length in enumerate(lengths)]
    answers, seconds, latencies, errors = ask_all(server, many, params, options.concurrency)
    got = [len(answer.get("output_ids", [])) for answer in answers]
    checks.add(f"load: {len(many)} requests, {options.concurrency} at once, no errors", not errors, "; ".join(errors[:3]))
    checks.add("load: every answer has its length", got == lengths, f"{sum(a != b for a, b in zip(got, lengths, strict=True))} have not")
    result["load"] = {
        "requests": len(many),
        "errors": len(errors),
        "tokens": sum(got),
        "seconds": seconds,
        "tokens_per_second": sum(got) / seconds,
        "median_latency": statistics.median(latencies),
        **counts_of(answers),
    }
    reports = [answer["meta_info"].get("adaptivespec", {}) for answer in answers if answer]
    over = [report for report in reports if report.get("spent_budget", 0) > report.get("budget", math.inf)]
    checks.add("load: no budget is overspent", not over, f"{sum('budget' in report for report in reports)} had one")
    dropped = 0
    for question in questions[:4]:
        with contextlib.suppress(Failed):
            server.ask(question.ids, stop_after=3, sampling_params=settings_of(4 * options.tokens))
            dropped += 1
    quiet = wait_for(lambda: series(server.metrics(), "sglang:num_running_reqs") == 0, 60)
    server.ask(questions[0].ids, sampling_params=settings_of(8))  # what was dropped is counted with the next step at the latest
    quiet = wait_for(lambda: series(server.metrics(), "sglang:num_running_reqs") == 0, 60) and quiet
    if plug_in:
        wait_for(lambda: series(server.metrics(), "adaptivespec:requests") == 0, 10)
    after = server.metrics()
    checks.add(f"nothing runs any more, {dropped} dropped connections included", quiet)
    if plug_in:
        held = series(after, "adaptivespec:requests")
        checks.add("no request's state is left", held == 0, f"{held:g} held")
        grown = {
            n: series(after, f"adaptivespec:{n}_total") - series(before, f"adaptivespec:{n}_total")
            for n in ("drafted_tokens", "accepted_tokens")
        }
        short = [n for n, key in zip(grown, ("drafted", "accepted"), strict=True) if grown[n] < result["load"][key]]
        checks.add("the counters have all that answers report", not short and result["load"]["reports"] == len(many), str(grown))
        result["load"]["counters"] = grown
    words = server.words()
    found = {name: len(re.findall(pattern, words)) for name, pattern in (("tracebacks", "Traceback"), ("leaks", r"(?i)memory leak"))}
    result["log"] = found | {
        "warnings": [line[:300] for line in server.log.read_text(errors="replace").splitlines() if "adaptivespec: CUDA graphs" in line][:3]
    }
    checks.add("no traceback and no leak in the log since it was ready", not any(found.values()), str(found))


def run_cell(
    cell: Cell, server: Server, questions: Sequence[Question], options: Options, results: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Start the server of a cell and measure it; whatever happens becomes its result."""
    result: dict[str, Any] = {"cell": asdict(cell), "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    checks = Checks()
    reference = results.get(cell.reference)
    try:
        if cell.kind == "refused":
            try:
                with server:
                    checks.add("refused at start", False, "it started")
            except Failed as error:
                checks.add("refused at start", cell.says in str(error), str(error))
        elif cell.reference and (reference is None or "answers" not in reference):
            checks.add("its reference was measured", False, f"{cell.reference} was not")
        else:
            with server:
                return result | measure(cell, server, questions, options, reference)
    except Failed as error:
        checks.add("measured", False, str(error))
    except (KeyError, ValueError, TypeError, IndexError) as error:
        checks.add("measured", False, f"an answer that was not understood: {type(error).__name__}: {error}")
    return result | {"checks": checks}
