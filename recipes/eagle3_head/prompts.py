"""Stage 1: the prompts. `python -m recipes.eagle3_head.prompts --gsm8k gsm8k_train.jsonl`

About 40 % general (with a little chat), 30 % maths, 30 % code, shuffled so that every prefix has that mixture. Kept out: the written
held-out questions of heldout_prompts.jsonl and their template siblings, reserved GSM8K training questions and code modules (held-out
sets for maths and code), and everything that shares a run of words with a file given by --exclude, such as a test set.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import random
import re
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from . import topics as T
from .config import PromptConfig, Run, command, read_rows, write_atomic

HELDOUT_PROMPTS = Path(__file__).with_name("heldout_prompts.jsonl")
STEP_BY_STEP = "Please reason step by step, and put your final answer within \\boxed{}."
COMPLETE = (
    "Complete the following Python function. Answer with the whole function in one ```python block.\n\n",
    "Complete the following Python function. Return the full function in a Python code block.\n",
    "Finish this function:\n",
    "",
)
PACKAGES = ("networkx", "sympy", "mpmath", "rich", "yaml", "regex", "jinja2", "pydantic", "requests", "click", "numpy", "scipy", "pygments")
HELDOUT_CODE = ("statistics", "textwrap", "heapq", "mpmath", "click")  # modules whose functions are only evaluated on
OVERLAP_WORDS = 13  # a shared run of this many words counts as the same text (as in GPT-3's decontamination)

Prompt = dict[str, str]  # kind and prompt


def normalise(text: str) -> str:
    """Lower case, words and digits only."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def load_texts(path: Path) -> list[str]:
    """The prompt texts of a JSON-lines file with a field prompt, question, problem, turns or messages."""
    texts = []
    for row in read_rows(path):
        for key in ("prompt", "question", "problem"):
            if isinstance(row.get(key), str):
                texts.append(row[key])
        texts += [turn for turn in row.get("turns", []) if isinstance(turn, str)]
        texts += [message["content"] for message in row.get("messages", []) if message["role"] == "user"]
    return texts


class Exclusion:
    """Knows what may not be trained on: exact texts, long shared runs of words, and topics or templates of held-out prompts."""

    def __init__(self, heldout: Iterable[str], excluded: Iterable[str] = ()) -> None:
        self.heldout = [normalise(text) for text in heldout]
        self.texts = {normalise(text) for text in excluded} | set(self.heldout)
        self.runs = {run for text in self.texts for run in self._runs(text)}

    @staticmethod
    def _runs(text: str) -> Iterator[str]:
        words = text.split()
        for i in range(len(words) - OVERLAP_WORDS + 1):
            yield " ".join(words[i : i + OVERLAP_WORDS])

    def allows(self, prompt: str) -> bool:
        """Whether the prompt is neither excluded nor overlaps with something excluded."""
        text = normalise(prompt.removesuffix(STEP_BY_STEP))
        return text not in self.texts and not any(run in self.runs for run in self._runs(text))

    def allows_topic(self, topic: str) -> bool:
        """Whether no held-out prompt is about the topic."""
        words = normalise(re.sub(r"^(a|an|the) ", "", topic))
        return not any(f" {words} " in f" {text} " for text in self.heldout)

    def allows_template(self, template: str) -> bool:
        """Whether no held-out prompt is an instance of the template ({t} being anything)."""
        pattern = ".+".join(re.escape(normalise(part)).replace(r"\ ", " ") for part in re.split(r"\{\w+\}", template))
        compiled = re.compile(pattern.replace(".+", " ?.+ ?"))
        return not any(compiled.fullmatch(text) for text in self.heldout)


def product(templates: str, topics: Iterable[str], exclusion: Exclusion) -> list[str]:
    """Every allowed template with every allowed topic."""
    kept = [t for t in topics if exclusion.allows_topic(t)]
    return [m.replace("{t}", t) for m in T.split(templates) if exclusion.allows_template(m) for t in kept]


def general_prompts(rng: random.Random, exclusion: Exclusion) -> list[str]:
    """Questions, explanations, debates, advice, stories, e-mails, travel, people, recipes, summaries, rewriting, lists, comparisons.

    Families are sampled evenly up to their size, so that the largest product doesn't crowd out the others.
    """
    s = T.split
    passages: list[str] = []
    for passage in T.PASSAGES.splitlines():
        for task in s(T.PASSAGE_TASKS):
            for _ in range(3):
                filled = passage.replace("{n}", rng.choice(s(T.NAMES))).replace("{c}", rng.choice(s(T.CITIES)))
                passages.append(f"{task}\n\n{filled}")
    rewrites = [f"{task}: {sentence}" for task in s(T.SENTENCE_TASKS) for sentence in s(T.SENTENCES)]
    emails = [
        f"{verb} {kind} to {who} {errand}."
        for verb, kind in (("Write", "a short email"), ("Write", "a formal letter"), ("Draft", "a friendly message"))
        for who in s(T.RECIPIENTS)
        for errand in s(T.ERRANDS)
    ]
    concepts = s(T.SCIENCE) + s(T.TECHNOLOGY) + s(T.SOCIETY)
    lists = product("|".join(s(T.LIST_TASKS)), s(T.LISTS), exclusion)
    families = {
        "science": product(T.EXPLAIN, s(T.SCIENCE), exclusion),
        "technology": product(T.EXPLAIN, s(T.TECHNOLOGY), exclusion),
        "society": product(T.EXPLAIN, s(T.SOCIETY), exclusion),
        "debate": product(T.DEBATE, s(T.SOCIETY), exclusion),
        "advice": product(T.ADVICE, s(T.SKILLS), exclusion),
        "creative": product(T.CREATIVE, s(T.THINGS), exclusion),
        "odd": product(
            "Write a poem about {t}.|Write a joke about {t}.|Write a story for children that explains {t}.", concepts, exclusion
        ),
        "travel": product(T.TRAVEL, s(T.PLACES), exclusion),
        "city": product(T.CITY, s(T.CITIES), exclusion),
        "people": product(T.BIOGRAPHY, s(T.PEOPLE), exclusion),
        "cooking": product(T.COOKING, s(T.RECIPES), exclusion),
        "compare": product(T.COMPARE_TASKS, s(T.COMPARE), exclusion),
        "lists": lists,
        "email": emails,
        "passages": passages,
        "rewrites": rewrites,
        "chat": s(T.CHAT),
    }
    return interleave(rng, list(families.values()))


def interleave(rng: random.Random, families: list[list[str]]) -> list[str]:
    """Shuffle each family, then take turns: the first n have as even a mixture as the families' sizes allow."""
    families = [rng.sample(family, len(family)) for family in families]
    out = []
    for i in range(max(map(len, families))):
        out += [family[i] for family in families if i < len(family)]
    return out


def maths_prompts(rng: random.Random, gsm8k: Path, reserved: int) -> tuple[list[str], list[str]]:
    """GSM8K's training questions, four of five with the usual suffix -> (training, held out)."""
    questions = load_texts(gsm8k)
    rng.shuffle(questions)
    suffixes = ("", f"\n{STEP_BY_STEP}", *[f"\n\n{STEP_BY_STEP}"] * 3)
    texts = [question + suffixes[i % 5] for i, question in enumerate(questions)]
    return texts[reserved:], texts[:reserved]


def source_files() -> list[tuple[str, Path]]:
    """(module, file) of the standard library and some well-documented packages, tests left out."""
    files: list[tuple[str, Path]] = []
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(stdlib.glob("*.py")) + sorted(p for p in stdlib.glob("[a-z]*/*.py") if "site-packages" not in p.parts):
        files.append((path.relative_to(stdlib).parts[0].removesuffix(".py"), path))
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or []) if spec else []:
            files += [(package, path) for path in sorted(Path(root).rglob("*.py"))]
    return [(module, path) for module, path in files if not any(part.startswith("test") or part == "idlelib" for part in path.parts)]


def documented_functions(path: Path, limit: int = 8) -> list[tuple[str, str, str]]:
    """(name, arguments, docstring) of functions whose docstring is long enough to be a task and short enough to be a prompt."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
            text = ast.get_docstring(node) or ""
            if 40 <= len(text) <= 700:
                node.args.args = [a for a in node.args.args if a.arg not in ("self", "cls")]
                found.append((node.name, ast.unparse(node.args), text))
    return found[:limit]


def code_prompts(rng: random.Random, exclusion: Exclusion, reserved: int) -> tuple[list[str], list[str]]:
    """Completion from signature and docstring, descriptions, small exercises -> (training, held out by module)."""

    def complete(name: str, arguments: str, text: str) -> str:
        body = textwrap.indent(text, "    ").strip()
        code = f'def {name}({arguments}):\n    """{body}\n    """\n'
        return f"{rng.choice(COMPLETE)}```python\n{code}```"

    def describe(name: str, arguments: str, text: str) -> str:
        return f"Write a Python function `{name}({arguments})`. Description: {text}"

    def explain(name: str, arguments: str, text: str) -> str:
        return f'What might this Python function be used for? Give an example call.\n\ndef {name}({arguments}):\n    """{text}"""'

    styles: Sequence[Callable[[str, str, str], str]] = [*[complete] * 5, describe, describe, explain]
    train: list[str] = []
    heldout: list[str] = []
    seen: set[str] = set()
    for module, path in source_files():
        for name, arguments, text in documented_functions(path):
            if name in seen:
                continue
            seen.add(name)
            (heldout if module in HELDOUT_CODE else train).append(rng.choice(styles)(name, arguments, text))
    exercises = product("|".join(T.split(T.PROGRAM_TASKS)), T.split(T.PROGRAMS), exclusion)
    for quantity in T.split(T.QUANTITIES):
        for collection in T.split(T.COLLECTIONS):
            exercises.append(complete(rng.choice(("f", "solve", "compute")), "x", f"Return the {quantity} of {collection}."))
    rng.shuffle(heldout)
    return interleave(rng, [train, exercises]), heldout[:reserved]


def build(
    config: PromptConfig, gsm8k: Path, excluded: Iterable[str] = (), fits: Callable[[str], bool] = lambda text: True
) -> tuple[list[Prompt], list[Prompt]]:
    """All prompts.

    Args:
        config: sizes and shares.
        gsm8k: GSM8K's training file (JSON lines with `question`).
        excluded: texts that may not be trained on, such as test questions.
        fits: whether a prompt is short enough.

    Returns:
        Training prompts (shuffled) and held-out prompts, each with `kind` and `prompt`.
    """
    rng = random.Random(config.seed)
    general_heldout = load_texts(HELDOUT_PROMPTS)
    maths, maths_heldout = maths_prompts(rng, gsm8k, config.heldout_each)
    base = Exclusion(general_heldout)
    code, code_heldout = code_prompts(rng, base, config.heldout_each)
    general = general_prompts(rng, base)
    heldout = [
        {"kind": kind, "prompt": text}
        for kind, texts in (("general", general_heldout), ("maths", maths_heldout), ("code", code_heldout))
        for text in texts
    ]
    exclusion = Exclusion(general_heldout, [*excluded, *(row["prompt"].removesuffix(STEP_BY_STEP) for row in heldout)])
    shares = {"general": config.general_share, "maths": config.maths_share, "code": 1 - config.general_share - config.maths_share}
    out: list[Prompt] = []
    seen: set[str] = set()
    for kind, texts in (("general", general), ("maths", maths), ("code", code)):
        wanted = round(config.total * shares[kind])
        for text in texts:
            if wanted and text not in seen and exclusion.allows(text) and fits(text):
                seen.add(text)
                out.append({"kind": kind, "prompt": text})
                wanted -= 1
    rng.shuffle(out)
    return out, [row for row in heldout if fits(row["prompt"])]


@command
def main() -> None:
    """Write prompts.jsonl and heldout.jsonl into the run's folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, required=True, help="GSM8K's training questions, JSON lines")
    parser.add_argument("--exclude", type=Path, nargs="*", default=[], help="JSON-lines files of test sets to keep out")
    parser.add_argument("--out", type=Path, default=Path("runs/eagle3-smollm2-135m"))
    parser.add_argument("--total", type=int, default=PromptConfig.total)
    parser.add_argument("--general-share", type=float, default=PromptConfig.general_share, help="questions, chat, summaries, stories")
    parser.add_argument("--maths-share", type=float, default=PromptConfig.maths_share, help="the rest is code")
    parser.add_argument("--seed", type=int, default=PromptConfig.seed)
    args = parser.parse_args()
    if min(args.general_share, args.maths_share) < 0 or args.general_share + args.maths_share > 1:
        parser.error("--general-share and --maths-share are shares: 0 or more, together at most 1")
    config = PromptConfig(args.total, args.general_share, args.maths_share, seed=args.seed)
    excluded = [text for path in args.exclude for text in load_texts(path)]
    # Four characters per token is generous for English; the answers stage checks real lengths.
    train, heldout = build(config, args.gsm8k, excluded, lambda text: len(text) <= 4 * config.max_tokens)
    run = Run.create(args.out)
    for path, rows in ((run.prompts, train), (run.heldout, heldout)):
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
        print(path, len(rows), dict(Counter(row["kind"] for row in rows)))


if __name__ == "__main__":
    main()
