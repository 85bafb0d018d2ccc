"""`adaptivespec bench`: arms side by side on the same prompts, in one process."""

from __future__ import annotations

import json as json_module
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..config import SamplingParams
from ..errors import UserError
from ..evaluation.arms import DEFAULT_ARMS, Arm, parse_arms
from . import options as o
from .files import check_writable, write
from .machine import machine, peak_rss_bytes, rss_bytes, versions
from .render import aside, batch_table, comparison_table, group_table, modelled_table, progress_bars

if TYPE_CHECKING:
    from ..engine.inputs import Prompt
    from ..engine.llm import LLM
    from ..evaluation.prompts import BenchPrompt
    from ..method.costs import CostTable
    from ..models.loading import LoadedModel

FEW_ANSWERS = 10
"""Below so many answers per arm the table comes with a warning."""


def bench(
    engine: o.EngineFlags,
    sampling: o.SamplingFlags,
    arms: Annotated[
        str,
        typer.Option(
            help="Arms separated by `;`: ar, static:STEPS,TOPK,NODES, margin, tree, adaptivespec, or name:key=value,...; "
            "A+B mixes settings in one batch. hf, hf-assisted and hf-lookup are transformers on the same weights."
        ),
    ] = DEFAULT_ARMS,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with a field prompt, question, turns or messages; default: 24 packaged prompts.")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Ask the questions of tasks instead: gsm8k, math500, humaneval, or several.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="TASK=FILE: a JSON-lines file instead of the hub's, as in eval.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts, of each task with --tasks.")] = None,
    batch: Annotated[str, typer.Option(help="Requests decoded together; a list such as 1,2,4,8 runs each in turn.")] = "1",
    max_tokens: o.MaxTokens = 64,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling, of the order and of the bootstrap.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds over all prompts; with a batch over 1, intervals need 3.")] = 1,
    cost_table: Annotated[
        str | None,
        typer.Option(
            help="A cost table (a file of `calibrate --json`, or h100-8b): adds modelled seconds to the measured ones, and policies "
            "that read costs take it for this machine's."
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write everything measured to this file.")] = None,
) -> None:
    """Compare arms on the same prompts, interleaved so that ratios are fair: prompt by prompt, or batch by batch.

    Examples:

        adaptivespec bench

        adaptivespec bench --arms 'ar; static:5,4,8; adaptivespec:margin=0.5,low=3/4/8,high=7/4/16' --repeats 3 --json out.json

        adaptivespec bench --batch 1,2,4,8 --repeats 3     # what speculation brings as the batch grows

        adaptivespec bench --batch 8 --arms 'ar; ar+static:5,4,8+adaptivespec:margin=0.5'     # settings mixed in one batch

        adaptivespec bench --tasks gsm8k,humaneval --limit 20 --max-tokens 160     # accept length by task, too

        adaptivespec bench --arms 'ar; adaptivespec; hf; hf-lookup'     # beside transformers, on the same weights

        adaptivespec bench --arms 'ar; static:3,4,4; goodput' --cost-table h100-8b     # real acceptance, modelled seconds of a GPU

        adaptivespec bench --drafter ngram --temperature 0.8 --top-p 0.9

        adaptivespec bench -m qwen3-8b --prompts questions.jsonl --max-tokens 512    # on a GPU machine
    """
    chosen, sizes = parse_arms(arms, peers=True), parse_sizes(batch)
    params = sampling.params(seed=seed, max_tokens=max_tokens)
    chosen_prompts = find_prompts(prompts, tasks, data, limit)
    messages = [prompt.messages for prompt in chosen_prompts]
    groups = [prompt.group for prompt in chosen_prompts]
    check_enough(chosen, sizes, len(messages))
    traces = trace_files(engine.trace, sizes)
    for path in (*traces.values(), json):
        if path is not None:
            check_writable(path)
    if json is not None and json.resolve() in [path.resolve() for path in traces.values() if path]:
        raise UserError(f"--json and --trace are the same file, {json}")
    from ..cost_files import load, to_json

    costs = None if cost_table is None else load(cost_table)
    peers = [arm.peer for arm in chosen if arm.peer is not None]
    if peers:
        require_peers(peers, engine, max(sizes), params)
    import transformers

    transformers.PreTrainedTokenizerFast  # noqa: B018  the imports that tokenizers need belong to the baseline
    if peers:
        transformers.LlamaForCausalLM  # noqa: B018  and so do those of a peer
        transformers.logging.set_verbosity_error()  # its assisted generation warns of how it calls itself
    from ..engine import llm as _  # noqa: F401

    after_imports = rss_bytes()
    settings = [settings for arm in chosen for settings in arm.speculative]
    total = repeats * len(messages)
    runs: list[dict[str, Any]] = []
    loaded: LoadedModel | None = None
    with progress_bars() as progress:
        task = progress.add_task("loading", total=total * len(chosen) * len(sizes))
        for size in sizes:
            llm = engine.build(
                # one that drafts, so that a missing drafter is noticed before weights are read
                max(settings, key=lambda one: one.policy != "off", default=None),
                shapes_for=settings,
                max_running_requests=size,
                loaded=loaded,
                trace=traces[size],
                costs=costs,
            )
            loaded = llm.model

            def count(arm: Arm, size: int = size) -> None:
                progress.update(task, advance=1, description=arm.label if len(sizes) == 1 else f"batch {size}: {arm.label}")

            try:
                runs.append(measure(llm, chosen, as_prompts(llm, messages), groups, params, repeats, size, count, costs))
            except KeyboardInterrupt:
                if not runs:
                    raise
                break  # the sizes before this one are finished
            finally:
                del llm  # its caches, before the next one makes its own
            if runs[-1]["answers_per_arm"] < total:
                break
    assert loaded is not None
    complete = len(runs) == len(sizes) and runs[-1]["answers_per_arm"] == total
    report = {
        "command": shlex.join(["adaptivespec", *sys.argv[1:]]),
        "machine": machine(loaded.decoder.device),
        "kernels": loaded.decoder.lm_head.kernel,
        "versions": versions(),
        "model": str(loaded.source.path),
        "dtype": str(loaded.decoder.dtype).removeprefix("torch."),
        "params": params.model_dump(),
        "prompts": len(messages),
        "repeats": repeats,
        "complete": complete,
        "cost_table": None if costs is None else {"name": cost_table, **to_json(costs)},
        "rss_after_imports_bytes": after_imports,
        "peak_rss_bytes": max(peak_rss_bytes(), after_imports),  # the system counts both a little late
        "weights_bytes": loaded.decoder.num_bytes,
        **(runs[0] if len(sizes) == 1 else {"batches": runs}),
    }
    table = comparison_table(runs[0]["arms"]) if len(sizes) == 1 else batch_table({run["batch"]: run["arms"] for run in runs})
    try:
        Console().print(table)
        if len(sizes) == 1 and any(row["groups"] for row in runs[0]["arms"].values()):
            Console().print(group_table(runs[0]["arms"]))
        if costs is not None:
            Console().print(modelled_table({run["batch"]: run["arms"] for run in runs}, costs.label))
    finally:  # whoever reads the table may have left, as `| head` does; the file is written all the same
        if json is not None:
            write(json, json_module.dumps(report, indent=2))
    finished = runs[-1]["answers_per_arm"]
    if finished < FEW_ANSWERS:
        aside(f"only {finished} answers per arm: too few to tell arms apart", "yellow")
    if not complete:
        done = f"{finished} of {total} answers per arm" + (f" with batch {runs[-1]['batch']}" if len(sizes) > 1 else "")
        aside(f"interrupted: {done}", "red")
        raise typer.Exit(130)


def measure(
    llm: LLM,
    arms: list[Arm],
    prompts: Sequence[Prompt],
    groups: Sequence[str | None],
    params: SamplingParams,
    repeats: int,
    batch: int,
    on_answer: Callable[[Arm], None],
    costs: CostTable | None = None,
) -> dict[str, Any]:
    """One batch size: what its arms did, for the report, with modelled seconds by `costs`. KeyboardInterrupt when nothing was finished."""
    from ..evaluation.bench import ArmResult, describe, describe_groups, run_bench
    from ..evaluation.modelled import modelled

    results = run_bench(llm, arms, prompts, params, repeats, batch, on_answer)
    baseline = next((result for result in results if result.arm.is_plain), None)
    cache = llm.runner.cache.data

    def row(result: ArmResult) -> dict[str, Any]:
        measured = {**describe(result, baseline, params.seed or 0), "groups": describe_groups(result, groups)}
        return measured if costs is None else measured | {"modelled": modelled(result, baseline, costs, params.seed or 0)}

    return {
        "batch": batch,
        "answers_per_arm": len(results[0].outputs),
        "kv_cache_bytes": cache.numel() * cache.element_size(),
        "arms": {result.arm.label: row(result) for result in results},
    }


def find_prompts(path: Path | None, tasks: str | None, data: list[str] | None, limit: int | None) -> list[BenchPrompt]:
    """The prompts of a file, of tasks, or the packaged ones. Raises UserError."""
    from ..evaluation.prompts import BenchPrompt, load_prompts
    from .eval_setup import load_questions, parse_data, parse_names

    if tasks is None:
        if data:
            raise UserError("--data has no effect without --tasks")
        return load_prompts(path, limit)
    if path is not None:
        raise UserError("--prompts and --tasks exclude each other")
    names = parse_names(tasks)
    questions = load_questions(names, parse_data(data or [], names), {} if limit is None else dict.fromkeys(names, limit), {})
    return [BenchPrompt(question.messages, name) for name, own in questions.items() for question in own]


def parse_sizes(text: str) -> list[int]:
    """Batch sizes such as `4` or `1,2,4`. Raises UserError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) <= 1024 for part in parts):
        raise UserError(f"--batch: expected a size such as 4, or several such as 1,2,4,8 (at most 1024), not {text!r}")
    sizes = [int(part) for part in parts]
    if len(set(sizes)) < len(sizes):
        raise UserError(f"--batch: the same size is given twice in {text!r}")
    return sizes


def check_enough(arms: Sequence[Arm], sizes: Sequence[int], num_prompts: int) -> None:
    """Refuse batches that would never be full and mixes of which some part would never be asked. Raises UserError."""
    if max(sizes) > num_prompts:
        raise UserError(f"--batch {max(sizes)} needs at least as many prompts, and there are {num_prompts}")
    for arm in arms:
        if len(arm.speculative) > num_prompts:
            raise UserError(f"arm {arm.label!r} mixes {len(arm.speculative)} settings, and there are {num_prompts} prompts")


def require_peers(peers: Sequence[str], engine: o.EngineFlags, batch: int, params: SamplingParams) -> None:
    """Refuse what other engines cannot do, before weights are read. Raises UserError."""
    from ..drafters.loading import find_drafter
    from ..evaluation.peers import check_peers, no_draft_model
    from ..models.catalogue import resolve_model

    check_peers(peers, batch, params)
    if "hf-assisted" in peers:
        found = find_drafter(engine.drafter, resolve_model(engine.model), engine.speculative_algorithm)
        if found is None or found.kind != "draft_model":
            raise no_draft_model()


def trace_files(path: Path | None, sizes: Sequence[int]) -> dict[int, Path | None]:
    """The trace of each batch size: the file itself, or FILE-1.jsonl, FILE-2.jsonl, ... since each engine counts its own requests."""
    if path is None or len(sizes) == 1:
        return dict.fromkeys(sizes, path)
    return {size: path.with_name(f"{path.stem}-{size}{path.suffix}") for size in sizes}


def as_prompts(llm: LLM, messages: list[list[dict[str, str]]]) -> list[Prompt]:
    """Chat messages for models with a chat template, the bare text of the last message for others."""
    return [message if llm.tokenizer.chat_template else message[-1]["content"] for message in messages]
