"""`adaptivespec simulate`: rules and policies against each other without any model, in worlds of prescribed acceptance and cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ..errors import UserError, nearest
from ..evaluation.arms import DEFAULT_ARMS, Arm, parse_arms
from .options import to_json
from .render import CAPTION

if TYPE_CHECKING:
    from ..engine.synthetic import Costs, Process, SyntheticResult

WORLDS: dict[str, dict[str, float]] = {
    "stationary": {"chance": 0.7},
    "drifting": {"low": 0.2, "high": 0.95, "period": 120},
    "bursty": {"low": 0.2, "high": 0.95, "length": 40},
}
"""Acceptance processes of `engine.synthetic` and their default parameters: chances that the drafter is right, and lengths in tokens."""

DEFAULT_WORLDS = "; ".join(WORLDS)
COSTS = {"level": 2.0, "verify": 20.0, "row": 0.5}
"""Milliseconds of a draft level, of the target's forward of one row, and of each further row."""

DEFAULT_COSTS = ",".join(f"{name}={value:g}" for name, value in COSTS.items())


def simulate(
    arms: Annotated[str, typer.Option(help="Arms separated by `;`, as in bench; without mixtures and other engines.")] = DEFAULT_ARMS,
    worlds: Annotated[
        str,
        typer.Option(
            help="Worlds separated by `;`: stationary:chance=0.7 (the drafter is right so often), drifting:low=0.2,high=0.95,period=120 "
            "(up and down in so many tokens), bursty:low=0.2,high=0.95,length=40 (easy and hard stretches)."
        ),
    ] = DEFAULT_WORLDS,
    mean_margin: Annotated[
        float, typer.Option(help="Mean log-margin in nats of tokens that are not the target's choice; smaller means more promotions.")
    ] = 3.0,
    costs: Annotated[
        str, typer.Option(help="Milliseconds of a draft level, of the target's forward of one row, and of each further row of it.")
    ] = DEFAULT_COSTS,
    requests: Annotated[int, typer.Option(min=1, max=4096, help="Texts per world.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, max=10**6, help="Tokens of each text.")] = 500,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy; rules that sample need more.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Another seed is another text.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare rules and policies without any model, in seconds and to the last digit the same every time.

    A synthetic target and drafter take the models' place: how often the drafter is right, how far the target's other tokens lie behind its
    choice, and what a step costs are prescribed. Seconds are modelled, of requests that run alone. It says nothing of accuracy.

    Examples:

        adaptivespec simulate

        adaptivespec simulate --arms 'static:3,4,4; static:6,8,16; talon; confidence' --worlds bursty

        adaptivespec simulate --arms 'margin; margin:margin=0.2; typical; window' --mean-margin 1.5

        adaptivespec simulate --worlds 'stationary:chance=0.9' --costs level=1,verify=8,row=0.02    # a GPU: rows cost little

        adaptivespec simulate --json | jq '.worlds.bursty.arms[].accept_length'
    """
    chosen, places, priced = parse_arms(arms), parse_worlds(worlds), parse_costs(costs)
    if mixed := [arm.label for arm in chosen if len(arm.speculative) > 1]:
        raise UserError(f"arm {mixed[0]!r}: mixtures need an engine, see bench")
    if not 0 < mean_margin < float("inf"):
        raise UserError(f"--mean-margin must be above 0, not {mean_margin:g}")
    results = decode_all(chosen, places, mean_margin, priced, requests, max_tokens, temperature, seed)
    settings = {"mean_margin": mean_margin, "requests": requests, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    if json:
        typer.echo(to_json(as_json(results, chosen, priced, settings)))
    else:
        Console().print(tables(results, priced))


def decode_all(
    arms: Sequence[Arm],
    worlds: Mapping[str, Process],
    mean_margin: float,
    costs: Costs,
    requests: int,
    max_tokens: int,
    temperature: float,
    seed: int,
) -> dict[str, dict[str, SyntheticResult]]:
    """Every arm in every world, by label. Raises UserError for what an arm can't do."""
    import torch

    from ..engine.synthetic import World
    from ..engine.synthetic import simulate as decode

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for such small tensors threads cost three times what they bring
    try:
        return {
            label: {
                arm.label: decode(
                    arm.speculative[0],
                    World(process, mean_margin=mean_margin, seed=seed),
                    costs,
                    requests=requests,
                    max_tokens=max_tokens,
                    temperature=temperature,
                )
                for arm in arms
            }
            for label, process in worlds.items()
        }
    finally:
        torch.set_num_threads(threads)


def parse_worlds(text: str) -> dict[str, Process]:
    """Worlds by their labels, as they were written without spaces. Raises UserError."""
    from ..engine import synthetic

    makers: dict[str, Callable[..., Process]] = {name: getattr(synthetic, name) for name in WORLDS}
    found: dict[str, Process] = {}
    for part in text.split(";"):
        label = "".join(part.split())
        if not label:
            continue
        name, _, rest = label.partition(":")
        if name not in WORLDS:
            raise UserError(f"unknown world {name!r}{nearest(name, WORLDS)}")
        if label in found:
            raise UserError(f"world {label!r} is given twice")
        values = _numbers(f"world {label!r}", rest, WORLDS[name])
        for key, value in values.items():
            if key in ("period", "length") and not (value >= 1 and value.is_integer()):
                raise UserError(f"world {label!r}: {key} is a whole number of tokens, at least 1, not {value:g}")
            if key not in ("period", "length") and not 0 < value < 1:
                raise UserError(f"world {label!r}: {key} is a chance between 0 and 1, not {value:g}")
        found[label] = makers[name](**{key: int(value) if key in ("period", "length") else value for key, value in values.items()})
    if not found:
        raise UserError(f"no worlds given; for example {DEFAULT_WORLDS!r}")
    return found


def parse_costs(text: str) -> Costs:
    """Costs in seconds from milliseconds such as `level=2,verify=20,row=0.5`; what is left out has its default. Raises UserError."""
    from ..engine.synthetic import Costs

    values = _numbers("--costs", "".join(text.split()), COSTS)
    if not (0 <= values["level"] < float("inf") and 0 < values["verify"] < float("inf") and 0 <= values["row"] < float("inf")):
        raise UserError(f"--costs: milliseconds can't be negative, and a verify takes some, not {text!r}")
    return Costs(values["level"] / 1000, values["verify"] / 1000, values["row"] / 1000)


def _numbers(where: str, text: str, defaults: Mapping[str, float]) -> dict[str, float]:
    """`key=number,...` over defaults. Raises UserError."""
    values = {key: float(value) for key, value in defaults.items()}
    pairs = [part.partition("=") for part in text.split(",") if part]
    for key, equals, value in pairs:
        if key not in defaults:
            raise UserError(f"{where}: no parameter {key!r}; it has {', '.join(defaults)}")
        if sum(other == key for other, _, _ in pairs) > 1:
            raise UserError(f"{where}: {key} is given twice")
        try:
            values[key] = float(value)
        except ValueError:
            raise UserError(f"{where}: expected {key}=NUMBER, not {key + equals + value!r}") from None
    return values


def row(result: SyntheticResult, costs: Costs) -> dict[str, Any]:
    """One arm in one world, under the names of bench's JSON; `speedup_vs_ar` is exact, since plain decoding's cost is known."""
    tokens = result.accepted + result.steps
    return {
        "steps": result.steps,
        "tokens": tokens,
        "drafted": result.drafted,
        "accepted": result.accepted,
        "promoted": result.promoted,
        "accept_length": result.accept_length,
        "acceptance_rate": result.acceptance_rate,
        "promoted_per_1k": 1000 * result.promoted / tokens,
        "modelled_seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
        "speedup_vs_ar": result.tokens_per_second * costs.step(0, 1),
    }


def as_json(
    results: Mapping[str, Mapping[str, SyntheticResult]], arms: list[Arm], costs: Costs, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything: settings, costs in seconds, and the rows by world and arm."""
    return {
        **settings,
        "costs": asdict(costs),
        "settings": {arm.label: arm.speculative[0].model_dump(mode="json") for arm in arms},
        "worlds": {world: {"arms": {label: row(one, costs) for label, one in own.items()}} for world, own in results.items()},
    }


def tables(results: Mapping[str, Mapping[str, SyntheticResult]], costs: Costs) -> Group:
    """A block of rows per world; fits 80 columns."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("arm", overflow="fold", min_width=12)
    for name in ("steps", "drafted", "accept", "taken", "promoted", "tok/s", "x plain"):
        table.add_column(name, justify="right", no_wrap=True)
    for world, own in results.items():
        table.add_row(Text(world, style="bold", overflow="fold"))
        for label, result in own.items():
            one = row(result, costs)
            table.add_row(
                label,
                str(one["steps"]),
                f"{one['drafted'] / one['steps']:.1f}",
                f"{one['accept_length']:.2f}",
                f"{one['acceptance_rate']:.0%}" if one["drafted"] else "-",
                f"{one['promoted_per_1k']:.1f}",
                f"{one['tokens_per_second']:.1f}",
                f"{one['speedup_vs_ar']:.2f}",
            )
    caption = (
        "drafted: tokens per step; accept: tokens per step, bonus included; taken:\n"
        "of the drafted tokens; promoted: per 1,000 tokens; tok/s: modelled, one\n"
        "request at a time"
    )
    return Group(table, Text(caption, style=CAPTION))
