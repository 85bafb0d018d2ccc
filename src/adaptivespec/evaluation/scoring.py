"""Judging answers: numbers (GSM8K), LaTeX (MATH-500, by the math-verify library) and code (HumanEval, by its own tests in the sandbox)."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from ..errors import UserError
from .sandbox import run_python

if TYPE_CHECKING:
    from .tasks import Question

MATH_SECONDS = 5.0
"""CPU time for one comparison: sympy may never end, and a busy machine must not change a score."""

MATH_BYTES = 2 << 30


@dataclass(frozen=True)
class Score:
    """The verdict on one answer.

    Attributes:
        correct: whether it counts.
        extracted: the part of the text that was judged; None when there was none.
        detail: why, in a line.
    """

    correct: bool
    extracted: str | None
    detail: str


@dataclass(frozen=True)
class CodeTest:
    """HumanEval's own fields.

    Attributes:
        prompt: imports, helpers, and the function's head with its docstring.
        entry_point: the function's name.
        test: defines `check(candidate)`, which asserts.
    """

    prompt: str
    entry_point: str
    test: str


def score(question: Question, text: str) -> Score:
    """Judge the text that a model gave as its answer.

    A function that was asked for runs with a limit of 10 s and 1 GiB; see `sandbox.run_python`. Safe to call from several threads.

    Raises:
        UserError: math-verify is missing, or the system has no sandbox.
    """
    if question.code is not None:
        return _score_code(question.code, text)
    if question.task == "gsm8k":
        return _score_number(question.reference, text)
    return _score_math(question.reference, text)


# Boxes.

_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` (or `\fbox`) with balanced braces holds; of nested ones the innermost. None without one."""
    stack: list[int | None] = []  # open braces: where a box begins inside, None for others
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        if match["box"]:
            stack.append(match.end())
        elif match["open"]:
            stack.append(None)
        elif match["close"] and stack:
            begin = stack.pop()
            if begin is not None and (last is None or begin > last[0]):
                last = begin, match.start()
    return None if last is None else text[slice(*last)].strip()


# Numbers.

_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,2}(?!\w))?"
_NUMBER = re.compile(
    # A minus behind a word or a closing bracket subtracts: 10-5 ends in 5.
    rf"(?P<sign>(?:(?<![\w)\]}}])-)?(?:[$€£]-?)?)(?P<whole>{_DIGITS})(?:\s?/\s?(?P<below>\d+)| (?P<part>\d+)/(?P<parts>\d+))?"
)
_REWRITES = [
    (re.compile(r"\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r" \1/\2"),
    (re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)"), r" \1/\2"),
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\[,!;:]"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"[\u2212\u2013]"), "-"),
    (re.compile(r"(?<![\w)\]}])-\s+(?=\d+/)"), "-"),  # -\frac{1}{2}, after the first rewrite
]
_MAX_DIGITS = 60


def read_number(text: str, first: bool = False) -> Fraction | None:
    r"""The last number in a text, exactly (or the first): 1,234.50, -$3, 50%, 3/4, 2 1/2, \frac{1}{2}. None without one.

    A percent sign and units are passed over: 50% is 50, as in GSM8K's answers.
    """
    for pattern, to in _REWRITES:
        text = pattern.sub(to, text)
    matches = list(_NUMBER.finditer(text))
    if not matches or len(matches[0 if first else -1].group()) > _MAX_DIGITS:  # a model that repeats itself, not a number
        return None
    match = matches[0 if first else -1]
    value = Fraction(match["whole"].replace(",", ""))
    try:
        if match["below"]:
            value /= int(match["below"])
        elif match["part"]:
            value += Fraction(int(match["part"]), int(match["parts"]))
    except ZeroDivisionError:
        return None
    return -value if "-" in match["sign"] else value


def _score_number(reference: str, text: str) -> Score:
    r"""Numeric comparison of the last `\boxed{}`, else of what follows the last `####`, else of the last number."""
    expected = read_number(reference)
    boxed, marked = last_boxed(text), re.findall(r"####\s*(\S.*)", text)
    if boxed:
        found, extracted, where = read_number(boxed), boxed, "boxed"
    elif marked:
        found, extracted, where = read_number(marked[-1], first=True), marked[-1].strip(), "after ####"
    else:
        found = read_number(text)
        extracted, where = ("" if found is None else str(found)), "last number"
    if found is None:
        return Score(False, extracted or None, "no number")
    return Score(found == expected, extracted, f"{where}: {found} {'=' if found == expected else '!='} {expected}")


# LaTeX.


def _score_math(reference: str, text: str) -> Score:
    answer = last_boxed(text)
    if not answer:
        return Score(False, None, "no balanced \\boxed{}")
    if _normalised(answer) == _normalised(reference):
        return Score(True, answer, "same text")
    correct, detail = _worker.compare(reference, answer)
    return Score(correct, answer, detail)


_SPELLINGS = [
    (re.compile(r"\\(?:left|right|displaystyle|[!,;: ])|[\s$~]|\^\{?\\circ\}?"), ""),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\%|%|\.$"), ""),
]


def _normalised(latex: str) -> str:
    """The same string for spellings that differ in layout alone: for what no parser reads, such as a name or a date."""
    for pattern, to in _SPELLINGS:
        latex = pattern.sub(to, latex)
    return latex


class _MathWorker:
    """One process that compares LaTeX, started when first needed and again whenever a comparison had to be killed.

    math-verify's own time limit is a signal handler: in the main thread only, and between Python instructions only. In a process of its
    own the system's limits end anything. A child of a fork starts its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def compare(self, reference: str, answer: str) -> tuple[bool, str]:
        """Whether two expressions are equal, and how that was found. Raises UserError without math-verify."""
        with self._lock:
            if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                self._process, self._owner = self._start(), os.getpid()
            said = self._ask(self._process, [reference, answer])
            if said is None:
                self._process = None
                return False, f"math-verify found no answer within {MATH_SECONDS:g} s and {MATH_BYTES >> 30} GiB"
            return said, f"{'equal' if said else 'different'} by math-verify"

    def close(self) -> None:
        """End the process. A later comparison starts another."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
        self._process = None

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("comparing LaTeX answers needs the library math-verify: pip install 'adaptivespec[eval]'")
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # the terminal's Ctrl-C is for the caller to act on
        )
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise UserError("math-verify does not start: try `python -c 'import math_verify'`")
        return process

    @staticmethod
    def _ask(process: subprocess.Popen[str], pair: list[str]) -> bool | None:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(pair) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass
        line = process.stdout.readline()
        if not line:
            process.wait()
            process.stdout.close()
            return None
        return bool(json.loads(line))


_worker = _MathWorker()
atexit.register(_worker.close)


def _serve() -> None:
    """The worker's side: a pair of JSON strings a line in, true or false out. The system ends it when a pair takes too long."""
    import resource

    from math_verify import LatexExtractionConfig, parse, verify

    # LaTeX alone: the other extractor evaluates Python expressions.
    config = [LatexExtractionConfig(boxed_match_priority=0)]
    resource.setrlimit(resource.RLIMIT_AS, (MATH_BYTES, MATH_BYTES))
    answers, sys.stdout = sys.stdout, sys.stderr
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, MATH_SECONDS)  # unhandled, its signal ends the process
        gold, answer = (parse(f"\\boxed{{{latex}}}", config, parsing_timeout=None) for latex in json.loads(line))
        equal = verify(gold, answer, timeout_seconds=None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(bool(equal)), file=answers, flush=True)


# Code.

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n`]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)

_FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)

# Runs in the sandbox, since even compiling can take a process down. What follows the code, such as an explanation, is cut line by line
# until the rest compiles. The module is not `__main__`, so that examples under that condition stay unused, as in the official harness.
_JUDGE = """
import sys, types, warnings

def compiled(candidates, cut_short):
    longest = max(len(body) for _, body in candidates)
    for cut in range(longest if cut_short else 1):
        for head, body in candidates:
            if cut < len(body):
                try:
                    return compile("\\n".join([head, *body[: len(body) - cut], ""]), "<answer>", "exec")
                except (SyntaxError, ValueError):
                    pass
    raise SyntaxError("no code that compiles")

def judge(candidates, cut_short, test, entry_point):
    warnings.simplefilter("ignore")
    answer = types.ModuleType("answer")
    sys.modules["answer"] = answer
    exec(compiled(candidates, cut_short), answer.__dict__)
    exec(compile(f"{test}\\ncheck({entry_point})\\n", "<test>", "exec"), answer.__dict__)

"""


def extract_code(text: str, entry_point: str) -> tuple[str, bool]:
    """The code in an answer, and whether something else may follow it.

    It is the last fenced block that defines the function, else the last one at all; in an answer without blocks, the text from the first
    line that can begin a module, or all of it when the function is not defined there.
    """
    defines = re.compile(rf"^(?:async )?def {re.escape(entry_point)}\b", re.MULTILINE)
    blocks = list(_FENCE.finditer(text))
    if blocks:
        block = next((match for match in reversed(blocks) if defines.search(match[2])), blocks[-1])
        return block[2], block.end(2) == block.end()  # without its closing line it was cut off
    if defines.search(text):
        begin = re.search(r"^(?:async def|def|import|from|class|@)\b|^@", text, re.MULTILINE)
        return text[begin.start() if begin else 0 :], True
    return text, True


def _score_code(code: CodeTest, text: str) -> Score:
    body, cut_short = extract_code(text, code.entry_point)
    if not body.strip():
        return Score(False, None, "no code")
    if re.search(rf"^(?:async )?def {re.escape(code.entry_point)}\b", body, re.MULTILINE):
        # Such an import must be a module's first statement. The prompt keeps what the answer may have left out: imports and helpers.
        future, rest = re.findall(_FUTURE, body), re.sub(_FUTURE, "", body)
        candidates = [("\n".join([*future, code.prompt]), rest)]
    else:  # the function's body alone: as it is, without the indentation of its first line, without any, behind a line of prose
        indented = re.search(r"^[ \t]+\S", body, re.MULTILINE)
        bodies = [
            body,
            "    " + body.lstrip(),
            textwrap.indent(textwrap.dedent(body), "    "),
            body[indented.start() :] if indented else body,
        ]
        candidates = [(code.prompt.rstrip(), each) for each in dict.fromkeys(bodies)]
    arguments = ([(head, each.split("\n")) for head, each in candidates], cut_short, code.test, code.entry_point)
    outcome = run_python(f"{_JUDGE}judge(*{arguments!r})\n")
    return Score(outcome.passed, body, outcome.reason)


if __name__ == "__main__":
    _serve()
