"""`adaptivespec bench`: arms side by side on the same prompts, in one process."""

from __future__ import annotations

import json as json_module
import os
import platform
import resource
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..config import SamplingParams
from ..errors import UserError
from ..evaluation.arms import DEFAULT_ARMS, parse_arms
from . import options as o
from .render import comparison_table


def bench(
    model: o.Model = "smollm2-135m",
    drafter: o.Drafter = None,
    arms: Annotated[
        str, typer.Option(help="Arms separated by `;`: ar, static:STEPS,TOPK,NODES, margin, tree, adaptivespec, or name:key=value,...")
    ] = DEFAULT_ARMS,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with a field prompt, question or messages; default: 24 packaged prompts.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    max_tokens: o.MaxTokens = 64,
    temperature: o.Temperature = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling and of the bootstrap.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds over all prompts.")] = 1,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    context_length: o.ContextLength = None,
    aux_layers: o.AuxLayers = "input",
    json: Annotated[Path | None, typer.Option("--json", help="Also write everything measured to this file.")] = None,
) -> None:
    """Compare arms on the same prompts, one request at a time, interleaved so that ratios are fair.

    Examples:

        adaptivespec bench

        adaptivespec bench --arms 'ar; static:5,4,8; adaptivespec:margin=0.5,low=3/4/8,high=7/4/16' --repeats 3 --json out.json

        adaptivespec bench -m qwen3-8b --prompts questions.jsonl --max-tokens 512    # on a GPU machine
    """
    chosen = parse_arms(arms)
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    from ..evaluation.prompts import load_prompts

    messages = load_prompts(prompts, limit)
    if json is not None:
        check_writable(json)
    import tokenizers
    import torch
    import transformers

    from ..engine.llm import LLM
    from ..evaluation.bench import describe, run_bench

    transformers.PreTrainedTokenizerFast  # noqa: B018  the imports that tokenizers need belong to the baseline
    after_imports = rss_bytes()
    llm = LLM(
        model,
        drafter=drafter,
        speculative=chosen[0].speculative,
        shapes_for=[arm.speculative for arm in chosen],
        dtype=dtype,
        device=device,
        context_length=context_length,
        aux_layers=aux_layers,
        max_running_requests=1,
    )
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("answers", total=repeats * len(messages) * len(chosen))
        results = run_bench(
            llm, chosen, as_prompts(llm, messages), params, repeats, lambda arm: progress.update(task, advance=1, description=arm.label)
        )
    baseline = next((r for r in results if r.arm.speculative.policy == "off"), None)
    rows = {r.arm.label: describe(r, baseline, seed) for r in results}
    finished = len(results[0].answers)
    complete = finished == repeats * len(messages)
    report = {
        "command": shlex.join(["adaptivespec", *sys.argv[1:]]),
        "machine": {
            "platform": platform.platform(),
            "processor": processor_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": str(llm.model.decoder.device),
        },
        "versions": {
            "adaptivespec": version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "model": str(llm.model.source.path),
        "dtype": str(llm.model.decoder.dtype).removeprefix("torch."),
        "prompts": len(messages),
        "repeats": repeats,
        "answers_per_arm": finished,
        "complete": complete,
        "rss_after_imports_bytes": after_imports,
        "peak_rss_bytes": peak_rss_bytes(),
        "weights_bytes": llm.model.decoder.num_bytes,
        "kv_cache_bytes": llm.runner.cache.data.numel() * llm.runner.cache.data.element_size(),
        "arms": rows,
    }
    try:
        Console().print(comparison_table(rows))
    finally:  # whoever reads the table may have left, as `| head` does; the file is written all the same
        if json is not None:
            write(json, json_module.dumps(report, indent=2))
    if finished < 10:
        console.print(f"only {finished} answers per arm: too few to tell arms apart", style="yellow")
    if not complete:
        console.print(f"interrupted: {finished} of {repeats * len(messages)} answers per arm", style="red")
        raise typer.Exit(130)


def as_prompts(llm: Any, messages: list[list[dict[str, str]]]) -> list[Any]:
    """Chat messages for models with a chat template, the bare text of the last message for others."""
    return messages if llm.tokenizer.chat_template else [m[-1]["content"] for m in messages]


def check_writable(path: Path) -> None:
    """Refuse a result file that could not be written, before any work."""
    path = path.resolve()
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(f"cannot write {path}: {'it is a folder' if path.is_dir() else 'its folder is missing or read-only'}")


def write(path: Path, text: str) -> None:
    """Write beside the target, then rename, so that a full disk never leaves half a file; devices and pipes are written to directly."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def version() -> str:
    """The installed version."""
    from .. import __version__

    return __version__


def processor_name() -> str:
    """The CPU's own name where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def rss_bytes() -> int:
    """Resident memory now; the peak where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_rss_bytes()


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far (kibibytes on Linux, bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
