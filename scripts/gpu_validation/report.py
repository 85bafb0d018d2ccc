"""What was found, for people."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any


def gpu_names() -> list[str]:
    """Names of the GPUs, from nvidia-smi; none where there is none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"], capture_output=True, text=True
        )
    except OSError:
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def machine() -> dict[str, Any]:
    """Where this ran."""
    versions = {}
    for name in ("adaptivespec", "sglang", "torch", "transformers", "flashinfer-python", "sgl-kernel"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    here = Path(__file__).parent
    revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False).stdout.strip()
    return {"gpus": gpu_names(), "python": platform.python_version(), "versions": versions, "revision": revision or None}


def markdown(report: dict[str, Any]) -> str:
    """The report for people."""
    about, hooks = report["machine"], report["hooks"]
    lines = ["# SGLang plug-in: validation", "", f"    {report['command']}", ""]
    lines += [
        f"- model {report['model']}, head {report['head']}, {report['questions']} questions of {report['tokens']} tokens, temperature 0"
    ]
    lines += [f"- GPUs: {', '.join(about['gpus']) or 'none'}; " + ", ".join(f"{n} {v}" for n, v in about["versions"].items())]
    lines += [f"- hooks: {hooks['places'] - len(hooks['wrong'])} of {hooks['places']} places of SGLang {hooks['version']} verified"]
    cells = report["cells"]
    failed = [(name, check) for name, cell in cells.items() for check in cell["checks"] if not check["ok"]]
    todo = [name for name in report["plan"] if name not in cells]
    lines += [
        f"- {len(cells)} of {len(report['plan'])} servers measured; {len(failed)} checks failed"
        + (f"; to do: {', '.join(todo)}" if todo else ""),
        "",
    ]
    if failed:
        lines += ["## Failed", "", *(f"- `{name}`: {check['check']}: {check['detail']}" for name, check in failed), ""]
    measured = {name: cell for name, cell in cells.items() if "load" in cell}
    groups = [name for name in next(iter(measured.values()), {"answers": {}})["answers"]]
    lines += ["## Throughput and acceptance", ""]
    lines += [
        "tok/s are output tokens per second of wall time, prompts included; x stock is against the stock server of the same variant;",
        "accept is the accept length, the bonus included, and promoted is per 1,000 tokens, both of answers one at a time.",
        "The load of servers with the plug-in mixes settings (theirs, strict, other margins, a budget): compare it among them only.",
        "",
        "| server | " + " | ".join(f"tok/s, {group} | x stock" for group in groups) + " | tok/s, load | accept | promoted | start, s |",
        "|---|" + "---|" * (2 * len(groups) + 4),
    ]
    for name, cell in measured.items():
        stock = measured.get(f"stock/{name.partition('/')[2]}", {})
        row = [f"`{name}`"]
        for group in groups:
            speed = cell[group]["tokens_per_second"]
            row += [f"{speed:.1f}", f"{speed / stock[group]['tokens_per_second']:.2f}" if stock else "-"]
        alone = cell[groups[0]]
        accept, promoted = alone["accept_length"], alone.get("promoted")
        row += [f"{cell['load']['tokens_per_second']:.1f}", "-" if accept is None else f"{accept:.2f}"]
        row += ["-" if promoted is None else f"{1000 * promoted / alone['tokens']:.0f}", f"{cell['seconds_to_start']:.0f}"]
        lines.append("| " + " | ".join(row) + " |")
    lines += ["", "## Strict text beside stock EAGLE-3", "", "| server | " + " | ".join(groups) + " | alone beside company |"]
    lines.append("|---|" + "---|" * (len(groups) + 1))

    def words(found: dict[str, Any] | None) -> str:
        return "-" if found is None else f"{found['identical']} identical, {found['ties']} near-ties, {len(found['parted'])} elsewhere"

    for name, cell in measured.items():
        if cell["cell"]["kind"] in ("stock", "strict"):
            found = [words(cell[group].get("agreement")) for group in groups] + [words(cell["alone beside company"])]
            lines.append(f"| `{name}` | " + " | ".join(found) + " |")
    sampled = {name: cell["sampled"] for name, cell in measured.items() if "sampled" in cell}
    lines += ["", "## Seeded answers at temperature 0.8, strict, alone beside company", ""]
    lines += [f"- `{name}`: {found['identical']} of {found['answers']} identical" for name, found in sampled.items()]
    lines += ["", "## Shapes drafted, one at a time", ""]
    lines += [
        f"- `{name}`: " + ", ".join(f"{s} {n}" for s, n in cell[groups[0]]["shapes"].items())
        for name, cell in measured.items()
        if "shapes" in cell[groups[0]]
    ]
    lines += ["", "## All checks", ""]
    for name, cell in cells.items():
        lines += [f"- `{name}`"] + [
            f"  - {'ok' if c['ok'] else '**failed**'}: {c['check']}" + (f" ({c['detail']})" if c["detail"] else "") for c in cell["checks"]
        ]
    return "\n".join(lines) + "\n"
