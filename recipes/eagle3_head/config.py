"""Hyper-parameters of every stage, and where a run keeps its files."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adaptivespec.errors import UserError


@dataclass(frozen=True)
class PromptConfig:
    """Which prompts, how many and in which proportion (general includes short chat)."""

    total: int = 9000
    general_share: float = 0.4
    maths_share: float = 0.3
    max_tokens: int = 256  # with the chat template; longer ones are dropped
    heldout_each: int = 40  # held-out maths and code prompts, beside the 40 written general ones
    seed: int = 0


@dataclass(frozen=True)
class AnswerConfig:
    """How the target answers.

    Temperature 0 dominates because heads are mostly used there; some sampled answers show the head states off the greedy path.
    """

    max_new_tokens: int = 256
    batch_size: int = 96
    greedy_share: float = 0.7
    temperature_else: float = 0.7
    chunk_answers: int = 128  # answers per file: what a kill can cost at most
    disk_limit_gb: float = 20.0
    max_answer_tokens: int = 1_500_000
    seed: int = 0

    def temperature(self, index: int) -> float:
        """The temperature of prompt `index`: a function of the index alone, so that a resumed run agrees with an uninterrupted one."""
        fraction = (index * 0.6180339887) % 1.0
        return 0.0 if fraction < self.greedy_share else self.temperature_else


@dataclass(frozen=True)
class HeadConfig:
    """The head's shape. Every draft level reads all of it but fc, so width is paid for at each level."""

    intermediate_size: int = 1536
    draft_vocab_size: int = 8192


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation. The schedule is warm-up, constant, linear decay, so that a run can be prolonged until its decay has begun."""

    steps: int = 3000
    decay_steps: int = 1000
    warmup_steps: int = 60
    batch_size: int = 8  # answers per step
    unroll: int = 4  # training-time test: draft steps that are trained on the head's own hidden states
    unroll_weight: float = 0.8  # weight of unroll step i is this to the power i
    later_rows: float = 0.5  # share of the rows whose output layer is trained at unroll steps after the first, to save time
    learning_rate: float = 1.5e-3
    lm_head_rate: float = 0.2  # relative: the rows start as the target's own, and overfit first
    weight_decay: float = 0.05
    momentum: float = 0.95  # of Muon, which trains the matrices
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW, which trains the output rows and the norms
    clip: float = 1.0
    hard_weight: float = 0.3  # share of one-hot argmax labels in the targets; the rest is the target's distribution
    feature_noise: float = 0.1  # uniform noise on the features of training rows, in standard deviations: against overfitting
    ema: float = 0.99
    checkpoint_steps: int = 100
    evaluate_steps: int = 250
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """The files of one run; everything else is recomputed from them."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> Run:
        """Make the folder. It ignores itself in git: training data doesn't belong into a repository."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / ".gitignore", "*\n")
        return cls(folder)

    @property
    def prompts(self) -> Path:
        """Stage 1: training prompts."""
        return self.folder / "prompts.jsonl"

    @property
    def heldout(self) -> Path:
        """Stage 1: held-out prompts with their kind."""
        return self.folder / "heldout.jsonl"

    @property
    def answers(self) -> Path:
        """Stage 2: chunks of training answers."""
        return self.folder / "answers"

    @property
    def heldout_answers(self) -> Path:
        """Stage 2: chunks of held-out answers, all greedy."""
        return self.folder / "heldout_answers"

    @property
    def checkpoint(self) -> Path:
        """Stage 3: everything needed to go on."""
        return self.folder / "checkpoint.pt"

    @property
    def log(self) -> Path:
        """Stage 3: losses and evaluations, JSON lines."""
        return self.folder / "train_log.jsonl"


def command(main: Callable[[], None]) -> Callable[[], None]:
    """A stage's main: what a user can mend (a file that is missing, a model that does not fit) is one line, Ctrl-C none."""

    @functools.wraps(main)
    def run() -> None:
        try:
            main()
        except UserError as error:
            raise SystemExit(f"error: {error}") from None
        except FileNotFoundError as error:
            raise SystemExit(f"error: {error.filename} is not there; the stages' order is in recipes/eagle3_head/README.md") from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None

    return run


def write_atomic(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, never half of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # several processes may write the same file
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def read_rows(path: Path) -> list[Any]:
    """The objects of a JSON-lines file. Lines end at newlines alone: JSON leaves U+2028 and its like as they are inside strings."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def config_json(config: object) -> str:
    """A dataclass as JSON, kept beside what was made with it."""
    return json.dumps(asdict(config), indent=1)  # type: ignore[call-overload]
