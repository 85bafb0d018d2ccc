"""The runs behind docs/results.md, the most important first, and the page itself: one command, which goes on when it comes again.

    python benchmarks/results.py --out runs/results --markdown docs/results.md
    nohup python benchmarks/results.py --out runs/results >results.log 2>&1 &      # hours: in the background

Model and questions come from the hub, or from files: --model FILE --drafter FOLDER --data gsm8k=FILE --data math500=FILE
--data humaneval=FILE, and then no network is needed. --plan prints the commands, all of them `adaptivespec eval` and `report`;
--limit 2 tries everything on two questions of each task.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from adaptivespec.cli.main import run

SQUARE = ("static:3,4,4", "margin:margin=0.2", "tree", "adaptivespec:margin=0.2")
OTHER_KAPPAS = ("adaptivespec:margin=0.5", "adaptivespec:margin=0.8")
SWEEP = tuple(f"adaptivespec:margin={kappa}" for kappa in (0.9, 0.8, 0.5, 0.3, 0.1))
UNGUARDED = "adaptivespec:margin=0.2,guards=none"
TIMED_ONLY = ("static:5,4,8", "static:6,8,16", "goodput", "margin:6,8,16,margin=0.2", "goodput:margin=0.2")
"""Trees that 3,4,4 is weak beside, for speed only: strict answers are the same, and 3,4,4 hides what a margin brings after three tokens."""

TASKS = ("gsm8k", "math500", "humaneval")
QUESTIONS = {"gsm8k": 200, "math500": 100, "humaneval": 164}
TIMED = {"gsm8k": 14, "math500": 13, "humaneval": 13}
MAX_TOKENS = dict.fromkeys(TASKS, 1024)
"""Of 48 plain answers to the first two, those that ended took 780 tokens at most; the others went in circles, up to 2,048 too."""
TIMED_TOKENS = 128


def commands(args: argparse.Namespace) -> list[list[str]]:
    """Arguments of `adaptivespec` for every run, in order. Later arms join the folder of earlier ones."""
    answers, speed = Path(args.out) / "answers", Path(args.out) / "speed"

    def evaluate(out: Path, tasks: Sequence[str], arms: Sequence[str], limits: dict[str, int], *more: str) -> list[str]:
        if args.limit is not None:
            limits = dict.fromkeys(limits, args.limit)
        model = ["-m", args.model, *(["--drafter", args.drafter] if args.drafter else [])]
        data = [part for text in args.data if text.partition("=")[0] in tasks for part in ("--data", text)]
        wanted = ",".join(f"{task}={limits[task]}" for task in tasks)
        return ["eval", *model, "--out", str(out), "--tasks", ",".join(tasks), *data, "--limit", wanted, "--arms", "; ".join(arms), *more]

    def accuracy(tasks: Sequence[str], arms: Sequence[str]) -> list[str]:
        most = ",".join(f"{task}={MAX_TOKENS[task]}" for task in tasks)
        return evaluate(answers, tasks, arms, QUESTIONS, "--batch", "16", "--max-tokens", most, "--replaced")

    timed = ("--batch", "1", "--interleave", "--max-tokens", str(TIMED_TOKENS))
    return [
        accuracy(TASKS, SQUARE),
        evaluate(speed, TASKS, ("ar", *SQUARE, UNGUARDED, *SWEEP, *TIMED_ONLY), TIMED, *timed),
        accuracy(["gsm8k"], SWEEP),
        accuracy(["gsm8k"], [UNGUARDED]),
        accuracy(["math500", "humaneval"], OTHER_KAPPAS),
        accuracy(TASKS, ["ar"]),
    ]


def main() -> int:
    """Run what is not done yet, then the report; the exit code is that of the first command that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/results", help="folder of the runs")
    parser.add_argument("--markdown", help="the page to write, such as docs/results.md")
    parser.add_argument("--model", "-m", default="qwen2.5-coder-0.5b", help="as in adaptivespec eval")
    parser.add_argument("--drafter", help="as in adaptivespec eval; default: the short name's own head")
    parser.add_argument("--data", action="append", default=[], metavar="TASK=FILE", help="may be repeated; default: the hub")
    parser.add_argument("--limit", type=int, help="only so many questions of each task, to try")
    parser.add_argument("--plan", action="store_true", help="print the commands and run none")
    args = parser.parse_args()
    wanted = commands(args)
    report = ["report", str(Path(args.out) / "answers"), "--speed", str(Path(args.out) / "speed")]
    report += ["--markdown", args.markdown] if args.markdown else []
    if args.plan:
        print("\n".join(shlex.join(["adaptivespec", *each]) for each in (*wanted, report)))
        return 0
    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"cannot write to {args.out}: {error.strerror}")
    done = Path(args.out) / "done.txt"  # so that a finished run's model is not loaded again
    finished = done.read_text().splitlines() if done.exists() else []
    for arguments in wanted:
        command = shlex.join(["adaptivespec", *arguments])
        if command in finished:
            continue
        print(f"\n$ {command}", file=sys.stderr, flush=True)
        sys.argv = ["adaptivespec", *arguments]  # what run.json says
        if code := run(arguments):
            return code
        with done.open("a") as file:
            file.write(command + "\n")
    sys.argv = ["adaptivespec", *report]
    return run(report)


if __name__ == "__main__":
    sys.exit(main())
