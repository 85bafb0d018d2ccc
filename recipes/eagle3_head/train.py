"""Stage 3: training. `python -m recipes.eagle3_head.train`

Checkpoints are atomic and hold everything the next step depends on, so a run killed at any moment goes on from its last checkpoint and
ends exactly where it would have ended. The schedule (warm-up, constant, linear decay) lets a run be prolonged with --steps until the
decay has begun, and each pass over the data picks up chunks that were written since the last one.

Several processes (torchrun --nproc-per-node 2 -m recipes.eagle3_head.train) share each batch. On a busy CPU two processes of one
thread are faster than one of two threads, which wait for each other after every small operation.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import load_file

from adaptivespec.models.architecture import ModelConfig
from adaptivespec.models.rotary import Rotary

from .config import HeadConfig, Run, TrainConfig, command, read_rows
from .export import check_exportable
from .head import Batch, Head, soft_cross_entropy
from .metrics import ChainAccuracy
from .store import Answer, chunk_files, read_answers


def draft_vocabulary(
    answers: Sequence[Answer], vocab_size: int, size: int, always: set[int], prompts: Sequence[list[int]] = ()
) -> torch.Tensor:
    """The most frequent tokens of the answers, sorted by id; `always` are included.

    Prompt tokens count a third, because what an answer copies (names, identifiers) comes from there. A low id counts a little, because
    byte-pair merges are numbered by frequency. With 250k answer tokens both together covered about 1 % more of the held-out answers.
    """
    counts = 4 * (1 - torch.arange(vocab_size, dtype=torch.float64) / vocab_size)
    for answer in answers:
        counts += torch.bincount(answer.tokens[answer.prompt_length :].long(), minlength=vocab_size)
    for ids in prompts:
        counts += 0.3 * torch.bincount(torch.tensor(ids), minlength=vocab_size)
    counts[sorted(always)] = float("inf")
    return counts.topk(min(size, vocab_size))[1].sort()[0]


def read_weights(path: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """fp32 weights that read raw features, and the draft vocabulary [K], of an exported head's folder or of a run's checkpoint.

    Raises:
        SystemExit: the path is neither.
    """
    if path.is_dir() and (file := path / "model.safetensors").is_file():
        tensors = load_file(file)
        vocabulary = torch.arange(len(tensors["d2t"])) + tensors.pop("d2t")
        del tensors["t2d"]
        return {name: value.float() for name, value in tensors.items()}, vocabulary
    if not path.is_file():
        raise SystemExit(f"--warm-start {path}: neither the folder of an exported head nor a checkpoint.pt")
    state = torch.load(path, weights_only=True)
    weights = dict(state["average"])
    weights["fc.weight"] = weights["fc.weight"] / state["head"]["feature_scale"]
    return weights, state["vocabulary"]


class Trainer:
    """Everything a run needs in memory.

    Args:
        target: the target's architecture.
        tables: its embedding [V, H], output rows [V, H] and final norm [H], in the compute dtype.
        run: folders.
        config, head_config: hyper-parameters.
        eos: ids that the draft vocabulary always holds.
        prompts: token ids of further prompts, for the vocabulary only.
        warm_start: an exported head, or another run's checkpoint, whose weights a new run begins with (its vocabulary may differ).
    """

    def __init__(
        self,
        target: ModelConfig,
        tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        run: Run,
        config: TrainConfig,
        head_config: HeadConfig,
        eos: set[int],
        device: torch.device | str = "cpu",
        prompts: Sequence[list[int]] = (),
        warm_start: Path | None = None,
    ) -> None:
        self.run, self.config, self.device = run, config, torch.device(device)
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.embedding, rows, norm = tables
        self.rotary = Rotary(target, self.embedding.dtype, self.device)
        state = torch.load(run.checkpoint, weights_only=True) if run.checkpoint.exists() else None
        self.head = Head(target, replace(head_config, **state["head_config"]) if state else head_config)
        if state:
            self.vocabulary = state["vocabulary"]
        else:
            answers = list(read_answers(chunk_files(run.answers)))
            if not answers:
                raise SystemExit(f"no answers in {run.answers}: run the answers stage first")
            self.vocabulary = draft_vocabulary(answers, target.vocab_size, head_config.draft_vocab_size, eos, prompts)
            sample = random.Random(config.seed).sample(answers, min(200, len(answers)))
            features = torch.cat([a.features[a.prompt_length - 1 :] for a in sample])
            self.head.initialise(features, rows[self.vocabulary].float().cpu(), norm.float().cpu(), config.seed)
            if warm_start:
                self._warm_start(*read_weights(warm_start))
        self.head.to(self.device)
        self.draft_rows = rows[self.vocabulary].contiguous()
        self.in_vocabulary = torch.zeros(target.vocab_size, dtype=torch.bool)
        self.in_vocabulary[self.vocabulary] = True
        self.in_vocabulary = self.in_vocabulary.to(self.device)
        matrices = [p for n, p in self.head.named_parameters() if p.dim() == 2 and n != "lm_head.weight"]
        vectors = [p for p in self.head.parameters() if p.dim() == 1]
        rows_and_vectors: list[dict[str, Any]] = [
            {"params": [self.head.lm_head.weight], "rate": config.lm_head_rate},
            {"params": vectors, "rate": 1.0},
        ]
        # Muon learns more from the same tokens than AdamW does, and its steps have AdamW's size, so that both follow one schedule.
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                [{"params": matrices, "rate": 1.0}],
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(rows_and_vectors, lr=config.learning_rate, betas=config.betas, weight_decay=0.0, fused=True),
        ]
        self.average = {name: p.detach().clone() for name, p in self.head.named_parameters()}
        self.step, self.seconds, self.tokens_seen = 0, 0.0, 0
        self.loss_average: float | None = None
        self.epoch, self.position, self.files = -1, 0, list[str]()
        self.batches: list[list[Answer]] = []
        if state:
            self._restore(state)

    def _warm_start(self, weights: dict[str, torch.Tensor], vocabulary: torch.Tensor) -> None:
        """Take over weights that read raw features; output rows by token, so that tokens new to the vocabulary keep the target's rows."""
        old = weights.pop("lm_head.weight")
        with torch.no_grad():
            for name, parameter in self.head.named_parameters():
                if name == "fc.weight":
                    parameter.copy_(weights[name] * self.head.feature_scale)
                elif name in weights:
                    parameter.copy_(weights[name])
            place = torch.full((self.head.target.vocab_size,), -1)
            place[vocabulary] = torch.arange(len(old))
            source = place[self.vocabulary]
            self.head.lm_head.weight[source >= 0] = old[source[source >= 0]]

    # Checkpoints

    def save(self) -> None:
        """Write the checkpoint (one process does); until the rename the old one stays."""
        if self.rank:
            return
        state = {
            "head": self.head.state_dict(),
            "average": self.average,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "vocabulary": self.vocabulary,
            "head_config": asdict(self.head.config),
            "train_config": asdict(self.config),
            "counters": [self.step, self.epoch, self.position, self.tokens_seen],
            "seconds": self.seconds,
            "loss_average": self.loss_average,
            "files": self.files,
        }
        partial = self.run.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.run.checkpoint)

    def _restore(self, state: dict[str, Any]) -> None:
        if "optimizers" not in state:
            raise SystemExit(f"{self.run.checkpoint} is an older recipe's: begin a new run with --warm-start {self.run.checkpoint}")
        self.head.load_state_dict(state["head"])
        self.average = {name: value.to(self.device) for name, value in state["average"].items()}
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.epoch, self.position, self.tokens_seen = state["counters"]
        self.seconds, self.loss_average, self.files = state["seconds"], state["loss_average"], state["files"]
        if self.epoch >= 0:
            self._load_epoch()

    # Data

    def _load_epoch(self) -> None:
        """The batches of the current pass: a function of seed, epoch and the pass's list of files."""
        answers = list(read_answers([self.run.answers / name for name in self.files]))
        rng = random.Random(f"{self.config.seed}:{self.epoch}")
        rng.shuffle(answers)
        size, batches = self.config.batch_size, []
        for i in range(0, len(answers), 32 * size):  # like lengths together, or padding costs a third of the time
            group = sorted(answers[i : i + 32 * size], key=lambda a: len(a.hidden))
            batches += [group[j : j + size] for j in range(0, len(group), size)]
        rng.shuffle(batches)
        self.batches = batches

    def _next_batch(self) -> list[Answer]:
        if self.position >= len(self.batches):
            self.epoch, self.position = self.epoch + 1, 0
            self.files = [path.name for path in chunk_files(self.run.answers)]
            self._load_epoch()
        self.position += 1
        return self.batches[self.position - 1]

    # Steps

    def rate(self) -> float:
        """The learning rate's factor at this step."""
        c = self.config
        return min((self.step + 1) / c.warmup_steps, 1.0, max((c.steps - self.step) / max(c.decay_steps, 1), 0.02))

    def train_step(self, watch: bool = False) -> tuple[float, list[float]]:
        """One optimiser step -> loss and, with `watch`, the accuracy of each unroll step on the batch."""
        c, head = self.config, self.head
        batch = Batch.collate(self._next_batch()[self.rank :: self.world], self.device)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = c.learning_rate * group["rate"] * self.rate()
        noise = None
        generator = torch.Generator().manual_seed((c.seed * 1_000_003 + self.step) * 64 + self.rank)
        if c.feature_noise:
            noise = torch.rand(batch.features.shape, generator=generator, dtype=torch.bfloat16).to(self.device, self.embedding.dtype)
            noise = noise.sub_(0.5).mul_(2 * c.feature_noise)
        targets = self._targets(batch)
        starts = batch.hidden.shape[1]
        weights = head.cast(self.embedding.dtype)
        loss = torch.zeros((), device=self.device)
        accuracy = []
        for i, states in enumerate(head.unroll(weights, batch, self.embedding, self.rotary, c.unroll, noise)):
            # Where the target left the draft vocabulary there is nothing to learn; in expectation this weighs a row by the
            # probability that the target stays inside.
            keep = batch.valid(i) & self.in_vocabulary[batch.labels(i)]
            b, j = keep.nonzero(as_tuple=True)
            if len(b) == 0:
                break
            rows = b * starts + j + i
            if i and c.later_rows < 1:
                chosen = torch.randperm(len(b), generator=generator)[: max(1, round(c.later_rows * len(b)))].to(self.device)
                b, j, rows = b[chosen], j[chosen], rows[chosen]
            kept = states[b, j]
            loss = loss + soft_cross_entropy(kept, weights["lm_head.weight"], targets, rows, c.unroll_weight**i / len(b))
            if watch:
                with torch.no_grad():
                    guess = self.vocabulary.to(self.device)[(kept @ weights["lm_head.weight"].T).max(-1)[1]]
                    accuracy.append((guess == batch.labels(i)[b, j]).float().mean().item())
        loss.backward()  # type: ignore[no-untyped-call]
        seen = self._share_gradients(int(batch.lengths.sum()))
        torch.nn.utils.clip_grad_norm_(head.parameters(), c.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        decay = min(c.ema, (1 + self.step) / (10 + self.step))
        averaged, current = list(self.average.values()), [p.detach() for p in head.parameters()]
        torch._foreach_lerp_(averaged, current, 1 - decay)
        self.step += 1
        self.tokens_seen += seen
        return loss.item(), accuracy

    def _share_gradients(self, seen: int) -> int:
        """Average the gradients over all processes, so that they stay equal; returns the tokens that all of them saw."""
        if self.world == 1:
            return seen
        parameters = list(self.head.parameters())
        flat = torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros_like(p).flatten() for p in parameters])
        flat.div_(self.world)
        dist.all_reduce(flat)
        for p, grad in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
            p.grad = grad.view_as(p)
        total = torch.tensor(seen)
        dist.all_reduce(total)
        return int(total)

    @torch.no_grad()
    def _targets(self, batch: Batch) -> torch.Tensor:
        """[B * A, draft vocabulary]: the target's distribution inside the draft vocabulary, mixed with its argmax."""
        logits = batch.hidden.flatten(0, 1) @ self.draft_rows.T
        targets = torch.empty_like(logits)
        for i in range(0, len(logits), 128):
            targets[i : i + 128] = torch.softmax(logits[i : i + 128].float(), -1)
        if hard := self.config.hard_weight:
            best = logits.max(-1)[1]
            targets.mul_(1 - hard)
            targets[torch.arange(len(best), device=self.device), best] += hard
        return targets

    @torch.no_grad()
    def evaluate(self, answers: list[Answer], steps: int = 7, averaged: bool = True) -> ChainAccuracy:
        """Accuracy on held-out answers, of the averaged weights unless told otherwise."""
        source = self.average if averaged else {name: p.detach() for name, p in self.head.named_parameters()}
        return evaluate_head(self.head, source, answers, self.embedding, self.rotary, self.vocabulary, steps)


@torch.no_grad()
def evaluate_head(
    head: Head,
    parameters: dict[str, torch.Tensor],
    answers: list[Answer],
    embedding: torch.Tensor,
    rotary: Rotary,
    vocabulary: torch.Tensor,
    steps: int = 7,
) -> ChainAccuracy:
    """Unroll along held-out answers and compare with the tokens that the target chose."""
    metrics = ChainAccuracy(steps)
    weights = {name: value.to(embedding.dtype) for name, value in parameters.items()}
    vocabulary = vocabulary.to(embedding.device)
    answers = sorted(answers, key=lambda a: len(a.hidden))
    for at in range(0, len(answers), 8):
        batch = Batch.collate(answers[at : at + 8], embedding.device)
        count, starts = batch.hidden.shape[:2]
        correct = torch.zeros(count, starts, steps, dtype=torch.bool)
        for i, states in enumerate(head.unroll(weights, batch, embedding, rotary, steps)):
            guess = vocabulary[(states @ weights["lm_head.weight"].T).max(-1)[1]]
            correct[:, : starts - i, i] = (guess == batch.labels(i)).cpu()
        for b, length in enumerate(batch.lengths.tolist()):
            metrics.add(correct[b, :length])
    return metrics


def load_heldout(run: Run) -> dict[str, list[Answer]]:
    """Held-out answers by kind."""
    kinds = [row["kind"] for row in read_rows(run.heldout)] if run.heldout.exists() else []
    out: dict[str, list[Answer]] = defaultdict(list)
    for answer in read_answers(chunk_files(run.heldout_answers)):
        out[kinds[answer.index]].append(answer)
    return dict(out)


def train(trainer: Trainer, heldout: dict[str, list[Answer]], until: int | None = None, quiet: bool = False) -> None:
    """Train to config.steps (or stop at step `until`), with checkpoints, evaluations and a log."""
    c = trainer.config
    last = min(c.steps, until or c.steps)
    first = trainer.rank == 0  # the process that writes
    quiet = quiet or not first
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, console=Console(quiet=quiet), refresh_per_second=1) as progress,
        trainer.run.log.open("a", encoding="utf-8") as log,
    ):
        bar = progress.add_task("training", total=c.steps, completed=trainer.step)
        while trainer.step < last:
            started = time.monotonic()
            loss, accuracy = trainer.train_step(watch=(trainer.step + 1) % 20 == 0)
            trainer.seconds += time.monotonic() - started
            trainer.loss_average = loss if trainer.loss_average is None else 0.97 * trainer.loss_average + 0.03 * loss
            finished = trainer.step == last
            if first and (trainer.step % 20 == 0 or finished):
                row: dict[str, object] = {
                    "step": trainer.step,
                    "loss": round(trainer.loss_average, 4),
                    "batch_accuracy": [round(x, 3) for x in accuracy],
                    "seconds": round(trainer.seconds),
                    "tokens_seen": trainer.tokens_seen,
                    "epoch": trainer.epoch,
                    "chunks": len(trainer.files),
                }
                log.write(json.dumps(row) + "\n")
                log.flush()
                speed = trainer.tokens_seen / max(trainer.seconds, 1e-9)
                progress.update(
                    bar, completed=trainer.step, description=f"loss {trainer.loss_average:.3f} epoch {trainer.epoch} {speed:.0f} tok/s"
                )
            if first and heldout and (trainer.step % c.evaluate_steps == 0 or finished):
                result = {kind: trainer.evaluate(answers).summary() for kind, answers in heldout.items()}
                log.write(json.dumps({"step": trainer.step, "tokens_seen": trainer.tokens_seen, "heldout": result}) + "\n")
                log.flush()
                progress.console.print(f"step {trainer.step}: " + json.dumps(result))
            if trainer.step % c.checkpoint_steps == 0 or finished:  # after the evaluation, which a kill in between would otherwise lose
                trainer.save()


@command
def main() -> None:
    """Train, or go on training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = TrainConfig()
    parser.add_argument("--out", type=Path, default=Path("runs/eagle3-smollm2-135m"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--warm-start", type=Path, help="an exported head or a checkpoint to begin a new run from")
    parser.add_argument("--until", type=int, help="stop at this step without changing the schedule")
    for name in ("steps", "decay_steps", "batch_size", "unroll", "checkpoint_steps", "evaluate_steps", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    for name in ("learning_rate", "lm_head_rate", "weight_decay", "hard_weight", "feature_noise", "later_rows", "ema"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(defaults, name))
    for name in ("intermediate_size", "draft_vocab_size"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(HeadConfig(), name))
    args = vars(parser.parse_args())
    torch.set_num_threads(args["threads"])
    if "WORLD_SIZE" in os.environ:  # torchrun, or by hand: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
        dist.init_process_group("nccl" if args["device"].startswith("cuda") else "gloo")
    from adaptivespec.models.catalogue import resolve_model
    from adaptivespec.models.loading import load_model, open_checkpoint
    from adaptivespec.models.tokenizer import encode_chat

    run = Run.create(args["out"])
    check_exportable(open_checkpoint(resolve_model(args["model"]).path)[0])
    config = TrainConfig(**{name: args[name] for name in args if name in TrainConfig.__dataclass_fields__})
    head_config = HeadConfig(args["intermediate_size"], args["draft_vocab_size"])
    model = load_model(args["model"], args["dtype"], args["device"])
    decoder = model.decoder
    rows = decoder.embedding
    if not model.config.tie_word_embeddings:
        rows = open_checkpoint(model.source.path)[1].load("lm_head.weight", decoder.dtype).to(decoder.device)
    prompts: list[list[int]] = []
    if not run.checkpoint.exists():
        tokenizer = model.load_tokenizer()
        texts = [row["prompt"] for row in read_rows(run.prompts)]
        prompts = [encode_chat(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    tables = (decoder.embedding, rows, decoder.norm.weight)
    target, device, eos = model.config, decoder.device, set(model.config.eos_token_ids)
    del decoder, model, rows  # the layers aren't needed any more
    trainer = Trainer(target, tables, run, config, head_config, eos, device, prompts, args["warm_start"])
    covered = [trainer.in_vocabulary.cpu()[a.tokens[a.prompt_length :].long()] for a in read_answers(chunk_files(run.heldout_answers))]
    if covered:
        print(f"the draft vocabulary covers {torch.cat(covered).float().mean():.4f} of the held-out answer tokens")
    print(f"{sum(p.numel() for p in trainer.head.parameters()) / 1e6:.2f}M parameters; at step {trainer.step} of {config.steps}")
    train(trainer, load_heldout(run), args["until"])


if __name__ == "__main__":
    main()
