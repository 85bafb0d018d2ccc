"""What the tests of the SGLang plug-in cannot run on a CPU: CUDA graphs, overlap scheduling, tensor parallelism, pages.

    scripts/gpu_validation.sh --preset llama-3.1-8b-instruct --out validation

Starts one SGLang server after the other, without speculation, with stock EAGLE-3 and with the plug-in (strict and margin), asks them the
same questions, and writes OUT/report.md and OUT/report.json. A server that was measured is not started again: after an interruption the
same command goes on. Exit code 1 when a check failed. Needs sglang and adaptivespec in the environment of this interpreter, nothing else.

`--dry-run` prints the plan. `--cpu` runs what of it a CPU can, with the stand-in kernels of tests/sglang; with `--tiny` on models that
are made on the fly, which is how this script itself is tried out.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .inputs import load_questions, prepared_head, tiny_models
from .measure import Options, run_cell
from .plan import Cell, make_plan, wanted
from .report import gpu_names, machine, markdown
from .server import OVERWRITE, Server, command_of, common_flags, environment_of


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("gpu_validation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", help="a model of `adaptivespec models` with its public head: llama-3.1-8b-instruct, qwen3-8b, ...")
    parser.add_argument("--model", help="the target: a folder or a hub id")
    parser.add_argument("--head", help="its EAGLE-3 head: a folder or a hub id")
    parser.add_argument("--out", type=Path, default=Path("validation"), help="folder of results; default %(default)s")
    parser.add_argument("--only", default="", help="regular expression: only these servers, and their references")
    parser.add_argument("--retry", action="store_true", help="measure servers again that failed a check")
    parser.add_argument("--margin", type=float, default=0.2, help="kappa of the margin servers; default %(default)s, as in the paper")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context-length", type=int, default=4096)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--prompts", type=Path, help="a JSON-lines file with fields `prompt`, taken as they are")
    parser.add_argument("--tokens", type=int, default=128, help="length of an answer; default %(default)s")
    parser.add_argument("--requests", type=int, default=200, help="of the load; default %(default)s")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--tie", type=float, default=0.3, help="nats that make a near-tie; default %(default)s, for bf16")
    parser.add_argument("--start-limit", type=float, default=1800, help="seconds that a start, or an answer, may take; default %(default)s")
    parser.add_argument("--flag", action="append", default=[], help="a further flag of every server: --flag mem-fraction-static=0.8")
    parser.add_argument("--gpus", type=int, help="how many may be used; default: all there are")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    parser.add_argument("--cpu", action="store_true", help="what a CPU can run, with the stand-ins of tests/sglang")
    parser.add_argument("--tiny", action="store_true", help="with --cpu: models made on the fly")
    args = parser.parse_args(argv)
    if args.tiny and not args.cpu:
        parser.error("--tiny needs --cpu")
    if args.tiny:
        args.dtype, args.context_length = "float32", 512
        args.model, args.head, args.prompts = tiny_models(args.out / "models")
    elif args.preset:
        from adaptivespec.models.catalogue import PRESETS

        if args.preset not in PRESETS or PRESETS[args.preset].drafter.startswith("heads/"):
            parser.error(f"no preset {args.preset!r} with a public head")
        args.model, args.head = args.model or PRESETS[args.preset].repo_id, args.head or PRESETS[args.preset].drafter
    if not (args.model and args.head):
        parser.error("name a --preset, or --model and --head")
    return args


def check_hooks(cpu: bool) -> dict[str, Any]:
    """What `adaptivespec check sglang` says."""
    command = [sys.executable, "-m", "adaptivespec", "check", "sglang", "--json"]
    done = subprocess.run(command, env=environment_of(Cell("", ""), cpu), capture_output=True, text=True, check=False)
    try:
        said: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        return {"ok": False, "detail": (done.stderr or done.stdout).strip()[-400:]}
    wrong = [row["target"] for row in said["hooks"] if not row["ok"]]
    return {"ok": said["ok"], "version": said["version"], "places": len(said["hooks"]), "wrong": wrong}


def results_so_far(folder: Path, plan: Sequence[Cell], again: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Results of the same cells that an earlier run left, without those of `again` that failed a check."""
    for cell in plan:
        file = folder / f"{cell.name.replace('/', '.')}.json"
        if file.is_file():
            result = json.loads(file.read_text())
            good = all(check["ok"] for check in result["checks"])
            if result["cell"] == json.loads(json.dumps(asdict(cell))) and (good or cell.name not in again):
                yield cell.name, result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the plan; the exit code."""
    args = parse_arguments(argv)
    gpus = len(gpu_names()) if args.gpus is None else args.gpus
    everything = make_plan(gpus, args.cpu, args.margin)
    plan = wanted(everything, args.only)
    common = common_flags(args)
    if args.dry_run:
        print("# where the head's config.json says LlamaForCausalLM, servers get a copy that says LlamaForCausalLMEagle3")
        for cell in plan:
            settings = "" if cell.settings is None else f"ADAPTIVESPEC={shlex.quote(json.dumps(cell.settings))} "
            print(f"# {cell.name}" + (f", its text is that of {cell.reference}" if cell.reference else ""))
            print(f"{OVERWRITE}=1 {settings}{shlex.join(command_of(cell, common, args.model, args.head))}")
        return 0
    if not args.cpu and not gpus:
        print(
            "gpu_validation: no GPU here (nvidia-smi finds none); --dry-run prints the plan, --cpu --tiny tries the script out",
            file=sys.stderr,
        )
        return 2
    cells_folder = args.out / "cells"
    cells_folder.mkdir(parents=True, exist_ok=True)
    hooks = check_hooks(args.cpu)
    if not hooks["ok"]:
        print(f"gpu_validation: adaptivespec check sglang: {hooks.get('detail') or hooks['wrong']}", file=sys.stderr)
        return 1
    head = prepared_head(args.head, args.out / "head")
    questions = load_questions(args.model, args.questions, args.prompts)
    exact = args.dtype == "float32"
    options = Options(
        tokens=args.tokens,
        requests=args.requests,
        concurrency=args.concurrency,
        tie=1e-3 if exact else args.tie,
        slack=1e-3 if exact else args.tie,
        scored=8,
        limit=args.start_limit,
    )
    given = {
        name: str(getattr(args, name))
        for name in ("model", "head", "dtype", "context_length", "questions", "tokens", "requests", "concurrency", "flag")
    }
    setup = args.out / "setup.json"
    if setup.is_file() and json.loads(setup.read_text()) != given:
        print(f"gpu_validation: {args.out} holds results of other settings (setup.json); name another --out", file=sys.stderr)
        return 2
    setup.write_text(json.dumps(given, indent=2))
    again = [cell.name for cell in plan] if args.retry else []
    results = dict(results_so_far(cells_folder, everything, again))
    report: dict[str, Any] = {
        "command": shlex.join(["scripts/gpu_validation.sh", *(sys.argv[1:] if argv is None else argv)]),
        "model": args.model,
        "head": args.head,
        "questions": len(questions),
        "tokens": args.tokens,
        "machine": machine(),
        "hooks": hooks,
        "plan": [cell.name for cell in everything],
    }
    for number, cell in enumerate(plan, start=1):
        file = cells_folder / cell.name.replace("/", ".")
        if cell.name not in results:
            print(f"[{number}/{len(plan)}] {cell.name} ...", flush=True)
            server = Server(
                command_of(cell, common, args.model, head),
                environment_of(cell, args.cpu),
                file.with_name(file.name + ".log"),
                options.limit,
            )
            results[cell.name] = run_cell(cell, server, questions, options, results)
            finished = file.with_name(file.name + ".json")
            finished.with_suffix(".part").write_text(json.dumps(results[cell.name]))
            finished.with_suffix(".part").replace(finished)
        for check in results[cell.name]["checks"]:
            if not check["ok"]:
                print(f"    failed: {check['check']}: {check['detail']}", flush=True)
        kept = {name: {key: value for key, value in result.items() if key != "answers"} for name, result in results.items()}
        (args.out / "report.json").write_text(json.dumps(report | {"cells": kept}, indent=2))
        (args.out / "report.md").write_text(markdown(report | {"cells": results}))
    failed = sum(not check["ok"] for cell in plan for check in results[cell.name]["checks"])
    print(f"{len(plan)} servers, {failed} checks failed: {args.out / 'report.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
