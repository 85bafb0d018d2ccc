"""Scoring: answers judged by hand, right and wrong, and the data sets' own solutions."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest

from adaptivespec.errors import UserError
from adaptivespec.evaluation import scoring
from adaptivespec.evaluation.scoring import CodeTest, extract_code, last_boxed, read_number, score
from adaptivespec.evaluation.tasks import Question, load_task

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

NUMBERS = [
    # reference, answer, right
    ("18", r"She makes \boxed{18} dollars.", True),
    ("18", r"\boxed{17} is wrong, so \boxed{18}", True),
    ("18", r"\boxed{18} is wrong, so \boxed{17}", False),
    ("18", r"First 18, then \boxed{9}. That leaves 18.", False),
    ("18", r"\boxed{x = 18}", True),
    ("18", r"\boxed{\$18}", True),
    ("18", r"\boxed{\$18.00}", True),
    ("18", r"$\boxed{18 \text{ dollars}}$", True),
    ("18", r"\boxed{\text{Janet makes } 18}", True),
    ("18", r"\boxed{9 \times 2 = 18}", True),
    ("18", r"\boxed{\boxed{18}}", True),
    ("18", r"\boxed{-18}", False),
    ("18", r"\boxed{18.5}", False),
    ("18", r"\boxed{180}", False),
    ("18", r"\boxed{1.8e1}", True),
    ("18", r"\boxed{eighteen}, that is 18", False),
    ("18", r"so \boxed{} is 18", True),
    ("18", r"it is \boxed{18", True),
    ("18", "9 * 2 = 18\n#### 18", True),
    ("18", "9 * 2 = 18\n#### 18 dollars for 2 eggs", True),
    ("18", "#### 17\n#### 18", True),
    ("18", "#### $18.", True),
    ("18", "#### none, but 18", True),
    ("18", "#### unknown\n18", False),
    ("18", "The answer is 18.", True),
    ("18", "The answer is **18**.", True),
    ("18", "She has 16-3-4=9, so 9*2=$18!", True),
    ("18", "The answer is 18 apples, not 20", False),
    ("18", "No idea.", False),
    ("18", "", False),
    ("70000", r"\boxed{70,000}", True),
    ("70000", r"\boxed{70{,}000}", True),
    ("70000", r"\boxed{70\,000}", True),
    ("70000", "a profit of $70,000.00", True),
    ("70,000", "70000", True),
    ("70000", "70,00", False),
    ("70000", "options: 7,70000", True),
    ("-5", r"\boxed{-5}", True),
    ("-5", r"\boxed{−5}", True),
    ("-5", "a change of -$5", True),
    ("-5", "a change of $-5", True),
    ("5", "15-10=5", True),
    ("5", "from 3-5", True),
    ("-5", "from 3-5", False),
    ("10", "5–10", True),
    ("50", r"\boxed{50\%}", True),
    ("50", "50%", True),
    ("0.5", r"\boxed{\frac{1}{2}}", True),
    ("0.5", r"\boxed{\dfrac12}", True),
    ("0.5", "1/2", True),
    ("0.5", ".5", True),
    ("-0.5", r"\boxed{-\frac{1}{2}}", True),
    ("2.5", r"\boxed{2\frac{1}{2}}", True),
    ("2.5", "2 1/2 hours", True),
    ("2.5", "5 / 2", True),
    ("0.33", r"\boxed{\frac{1}{3}}", False),
    ("1", r"\boxed{\frac{1}{0}}", False),
    ("9", "9" * 5000, False),
    ("3", "€3", True),
]

LATEX = [
    (r"\frac{14}{3}", r"\boxed{\frac{14}{3}}", True),
    (r"\frac{14}{3}", r"\boxed{\dfrac{14}{3}}", True),
    (r"\frac{14}{3}", r"\boxed{\tfrac{28}{6}}", True),
    (r"\frac{14}{3}", r"\boxed{14/3}", True),
    (r"\frac{14}{3}", r"\boxed{4\frac{2}{3}}", True),
    (r"\frac{14}{3}", r"\boxed{\frac{3}{14}}", False),
    (r"\frac{14}{3}", r"\boxed{4.67}", False),
    (r"\frac{14}{3}", r"\boxed{\frac{14}{3}", False),
    (r"\frac{14}{3}", r"the answer is $\frac{14}{3}$", False),
    (r"\frac{14}{3}", r"\boxed{1}, or rather \boxed{\frac{14}{3}}.", True),
    (r"\frac{14}{3}", r"\boxed{\frac{14}{3}}, or rather \boxed{1}.", False),
    (r"\frac{14}{3}", r"\boxed{\frac{14}{3}}, or rather \boxed{1", True),
    (r"\frac{14}{3}", r"\fbox{$\frac{14}{3}$}", True),
    (r"\frac{14}{3}", r"\boxed{\sqrt{\frac{196}{9}}}", True),
    ("5", r"\boxed{5 \text{ cm}}", True),
    ("5", r"\boxed{5\ \mathrm{cm}^2}", True),
    ("5", r"\boxed{x = 5}", True),
    ("5", r"\boxed{5.}", True),
    ("5", r"\boxed{5.0}", True),
    ("5", r"\boxed{-5}", False),
    ("5", r"\boxed{}", False),
    ("5", r"\boxed{?!}", False),
    ("10\\%", r"\boxed{10}", True),
    ("90^\\circ", r"\boxed{90}", True),
    ("1,000", r"\boxed{1000}", True),
    ("1000", r"\boxed{1{,}000}", True),
    (r"\$18.90", r"\boxed{18.90}", True),
    (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \pi/2)}", True),
    (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{\left(3,\dfrac{\pi}{2}\right)}", True),
    (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(\frac{\pi}{2}, 3)}", False),
    (r"\{1, 2\}", r"\boxed{\{2, 1\}}", True),
    (r"1, 2", r"\boxed{2, 1}", True),
    (r"\{1, 2\}", r"\boxed{\{1, 2, 3\}}", False),
    (r"[2, 5)", r"\boxed{x \in [2, 5)}", True),
    (r"[2, 5)", r"\boxed{[2, 5]}", False),
    (r"(-\infty, 2) \cup (3, \infty)", r"\boxed{(-\infty,2)\cup(3,\infty)}", True),
    (r"(-\infty, 2) \cup (3, \infty)", r"\boxed{(-\infty,2]\cup(3,\infty)}", False),
    (r"x^2 + 2x + 1", r"\boxed{(x+1)^2}", True),
    (r"x^2 + 2x + 1", r"\boxed{(x-1)^2}", False),
    ("y = 2x + 3", r"\boxed{2x + 3}", True),
    (r"6 + 9i", r"\boxed{9i + 6}", True),
    (r"11\sqrt2", r"\boxed{11\sqrt{2}}", True),
    (r"1 \pm \sqrt{2}", r"\boxed{1+\sqrt{2}, 1-\sqrt{2}}", True),
    (r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", r"\boxed{\begin{pmatrix}1\\-2\end{pmatrix}}", True),
    (r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", False),
    (r"\text{Evelyn}", r"\boxed{Evelyn}", True),
    (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", True),
    (r"\text{Evelyn}", r"\boxed{\text{Carla}}", False),
    (r"\text{(C)}", r"\boxed{C}", True),
    (r"\text{(C)}", r"\boxed{\text{(B)}}", False),
    (r"\text{June 20}", r"\boxed{June 20}", True),
    (r"2516_8", r"\boxed{2516_8}", True),
    (r"p - q", r"\boxed{p-q}", True),
    (r"p - q", r"\boxed{q-p}", False),
]


def question(task: str, reference: str, code: CodeTest | None = None) -> Question:
    return Question(task, "1", [], reference, code)


@pytest.mark.parametrize(("reference", "answer", "right"), NUMBERS)
def test_numbers(reference: str, answer: str, right: bool) -> None:
    result = score(question("gsm8k", reference), answer)
    assert result.correct is right, result
    assert "\n" not in result.detail


@pytest.mark.parametrize(("reference", "answer", "right"), LATEX)
def test_latex(reference: str, answer: str, right: bool) -> None:
    result = score(question("math500", reference), answer)
    assert result.correct is right, result
    assert result.extracted == (last_boxed(answer) or None)


def test_what_was_judged_is_shown() -> None:
    result = score(question("gsm8k", "18"), r"so \boxed{\$1{,}8}")
    assert (result.extracted, result.detail) == (r"\$1{,}8", "boxed: 8 != 18")
    assert score(question("gsm8k", "18"), "it is 18.").extracted == "18"
    assert score(question("gsm8k", "18"), "nothing").extracted is None
    assert score(question("math500", "1"), "1").detail == "no balanced \\boxed{}"


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{\left\{ \frac{1}{2} \right\}}", r"\left\{ \frac{1}{2} \right\}"),
        (r"\boxed {1}", "1"),
        (r"} \boxed{1} {", "1"),
        (r"{ \boxed{1}", "1"),
        (r"\boxed{1 \boxed{2}", "2"),
        (r"\boxed{\text{a}\text{b}}", r"\text{a}\text{b}"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        (r"\boxed 1", None),
        ("", None),
    ],
)
def test_boxes(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside


def test_endless_answers_are_read_at_once() -> None:
    began = time.monotonic()
    for text in (r"\boxed{" * 20_000, "1," * 50_000, "-" * 100_000, "#" * 100_000, "```\n" * 25_000, r"\frac{" * 20_000, "1" * 100_000):
        last_boxed(text)
        read_number(text)
        extract_code(text, "f")
        score(question("gsm8k", "1"), text)
    assert time.monotonic() - began < 30


def test_numbers_are_exact() -> None:
    assert read_number("0.1") == Fraction(1, 10)
    assert read_number("3 of 4", first=True) == 3
    assert read_number("1e99") == 10**99
    assert read_number("1e999999999") == 999999999  # not that power, which would fill the memory
    assert read_number("none") is None


def test_a_comparison_that_never_ends_is_killed_in_any_thread() -> None:
    hard = question("math500", "5")
    results = []
    began = time.monotonic()
    thread = threading.Thread(target=lambda: results.append(score(hard, r"\boxed{\sum_{n=1}^{10^{10}} \frac{1}{n^2 + 9^{9^{9^{9}}}}}")))
    thread.start()
    thread.join()
    assert not results[0].correct
    assert time.monotonic() - began < 120
    with ThreadPoolExecutor(4) as pool:
        pairs = [(f"\\boxed{{\\frac{{10}}{{{n + 1}}}}}", n == 1) for n in range(8)]
        assert list(pool.map(lambda pair: score(hard, pair[0]).correct, pairs)) == [right for _, right in pairs]


def test_without_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    scoring._worker.close()
    with monkeypatch.context() as patch:
        patch.setattr(scoring.importlib.util, "find_spec", lambda name: None)
        assert score(question("math500", "5"), r"\boxed{5}").correct
        with pytest.raises(UserError, match="needs the library math-verify: pip install"):
            score(question("math500", "5"), r"\boxed{6}")
    assert score(question("math500", "5"), r"\boxed{\frac{10}{2}}").correct


PROMPT = '''import math


def helper(x):
    return math.floor(x)


def add(a: int, b: int) -> int:
    """ The sum, e.g.
    >>> add(1, 2)
    3
    """
'''
CODE = CodeTest(
    PROMPT, "add", "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4\n"
)
WHOLE = "def add(a, b):\n    return helper(a) + math.floor(b)"
BLOCK = f"```python\n{WHOLE}\n```"

ANSWERS = [
    (BLOCK, True),
    (f"Sure!\n\n{BLOCK}\n\nIt adds.", True),
    (f"```py\n{PROMPT}    return a + b\n```", True),
    (f"```\n{WHOLE}\n```", True),
    (f"1. Like this:\n\n   {BLOCK.replace(chr(10), chr(10) + '   ')}", False),  # indented with its list: not Python as it stands
    (f"```python\n{WHOLE}", True),
    (f"```python\n{WHOLE}\n\n\nprint(add(1,", True),
    (f"```python\n{WHOLE}\n\nprint(add(1,\n```", False),
    (f"```bash\npip install x\n```\n{BLOCK}\n```\n>>> add(1, 2)\n```", True),
    ("```python\ndef add(a, b): return 0\n```\nNo:\n" + BLOCK, True),
    (WHOLE, True),
    (f"{WHOLE}\n\nThis adds both numbers, doesn't it?", True),
    (f"The function:\n\n{WHOLE}\n\nIt adds.", True),
    (f"from __future__ import annotations\n{WHOLE}", True),
    ("    return a + b\n", True),
    ("return a + b", True),
    ("\n    c = a\n    return c + b\n\nThis adds them.", True),
    ("if a > 9:\n        return a + b\n    return b + a", True),
    ("if a > 9:\n    return a + b\nreturn b + a", True),
    ("Here is the body:\n\n    return a + b", True),
    ("```python\nreturn a + b\n```", True),
    ("```python\n    return a + b\n```", True),
    ("```python\nc = a + b\nreturn c\n```", True),
    ("add = lambda a, b: a + b", True),
    ("```python\nadd = lambda a, b: a + b\n```", True),
    (f"```python\n{WHOLE}\nif __name__ == '__main__':\n    add(input(), 1)\n```", True),
    (f"```python\n{WHOLE}\nassert add(1, 1) == 3\n```", False),
    ("```python\ndef add(a, b):\n    return a - b\n```", False),
    ("```python\ndef add(a, b):\n    return 3\n```", False),
    ("```python\ndef plus(a, b):\n    return a + b\n```", False),
    ("```python\ndef add(a, b):\n    import sys; sys.exit(0)\n```", False),
    ("```python\nimport os\nos._exit(0)\n```", False),
    ("```python\ndef add(a, b):\n    return a +\n```", False),
    ("```python\n\n```", False),
    ("I can't do that.", False),
    ("", False),
    ("\0", False),
]


@pytest.mark.parametrize(("answer", "right"), ANSWERS)
def test_code(answer: str, right: bool) -> None:
    result = score(question("humaneval", "", CODE), answer)
    assert result.correct is right, result
    assert (result.extracted is None) == (not answer.replace("python", "").strip("`\n"))


def test_code_says_why() -> None:
    assert score(question("humaneval", "", CODE), "    return 3").detail == "AssertionError"
    assert score(question("humaneval", "", CODE), "    retrun 3").detail == "SyntaxError: no code that compiles"
    assert score(question("humaneval", "", CODE), "").detail == "no code"
    assert score(question("humaneval", "", CODE), "    return c").detail.startswith("NameError: name 'c' is not defined")


@pytest.mark.parametrize(
    ("task", "file", "field"), [("gsm8k", "gsm8k_test_first660", "answer"), ("math500", "math500_even250", "solution")]
)
def test_the_solutions_of_the_data_sets_are_right(task: str, file: str, field: str) -> None:
    path = DATA / f"{file}.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path}")
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    questions = load_task(task, path)
    assert [q.id for q, row in zip(questions, rows, strict=True) if not score(q, row[field]).correct] == []
    assert [q.id for q in questions if not score(q, f"\\boxed{{{q.reference}}}").correct] == []
    if task == "math500":  # the library itself, not only equality of texts
        assert [q.id for q in questions if not scoring._worker.compare(q.reference, q.reference)[0]] == []


def test_the_solutions_of_humaneval_pass_and_empty_ones_fail() -> None:
    """A spread of the 164, so that it takes seconds: among them those with helpers in the prompt (10, 32, 38, 50)."""
    questions = [q for i, q in enumerate(load_task("humaneval")) if i % 16 == 0 or i in (10, 32, 38, 50)]
    for q in questions:
        assert q.code is not None
        assert score(q, f"```python\n{q.code.prompt}{q.reference}```").correct, q.id
        assert score(q, q.reference).correct, q.id
        assert not score(q, "    pass").correct, q.id
