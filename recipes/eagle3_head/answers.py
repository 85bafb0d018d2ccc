"""Stage 2: the target's own answers. `python -m recipes.eagle3_head.answers`

A head learns to imitate one model, so its training text is that model's own (self-distillation). Prompts are decoded in a batch whose
slots are refilled as answers end. The three feature layers and the final hidden state of every row are kept while decoding, which
saves a second pass. Chunks are written atomically: a killed run goes on where its last complete chunk ended, and because temperatures
and random numbers depend on a prompt's index and position only, it gives the answers the uninterrupted run would have given.
"""

from __future__ import annotations

import argparse
import random
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from adaptivespec.models.decoder import Decoder
from adaptivespec.models.kv_cache import Block

from .config import AnswerConfig, PromptConfig, Run, command, config_json, read_rows, write_atomic
from .store import Answer, answered, chunk_bytes, write_chunk

LOOP_TAIL, LOOP_PERIOD = 64, 24  # an answer whose last 64 tokens repeat with a period of at most 24 is ended


def is_looping(tokens: list[int]) -> bool:
    """Small models fall into loops at temperature 0. A few rounds are what decoding meets; more would only fill the data set."""
    tail = tokens[-LOOP_TAIL:]
    return len(tail) == LOOP_TAIL and any(tail[period:] == tail[:-period] for period in range(1, LOOP_PERIOD + 1))


def sample(logits: torch.Tensor, temperatures: list[float], keys: list[str]) -> list[int]:
    """One token per row of logits [B, V]: the argmax at temperature 0, otherwise by inverse CDF with a number drawn from the row's key."""
    choice = logits.max(-1)[1]
    rows = [i for i, temperature in enumerate(temperatures) if temperature > 0]
    if rows:
        scaled = logits[rows].float() / torch.tensor([temperatures[i] for i in rows], device=logits.device)[:, None]
        cumulative = torch.softmax(scaled, -1).cumsum(-1)
        draws = torch.tensor([random.Random(keys[i]).random() for i in rows], device=logits.device)[:, None]
        drawn = torch.searchsorted(cumulative, draws * cumulative[:, -1:])[:, 0]
        choice[rows] = drawn.clamp(max=logits.shape[1] - 1)
    return choice.tolist()


@dataclass
class Slot:
    """A prompt being answered."""

    index: int
    tokens: list[int]
    prompt_length: int
    temperature: float


class Answerer:
    """Batched decoding with continuous refill.

    Args:
        decoder: the target.
        eos: ids that end an answer (kept in the data: a head must learn to stop).
        config: sizes, temperatures, seed.
        max_prompt: longest prompt in tokens.
    """

    def __init__(self, decoder: Decoder, eos: set[int], config: AnswerConfig, max_prompt: int) -> None:
        self.decoder, self.eos, self.config = decoder, eos, config
        length, batch = max_prompt + config.max_new_tokens, config.batch_size
        hidden = decoder.config.hidden_size
        self.cache = decoder.new_cache(batch, length)
        self.features = torch.zeros(batch, length, 3 * hidden, dtype=decoder.dtype)
        self.hidden = torch.zeros(batch, length, hidden, dtype=decoder.dtype)
        self.slots: list[Slot | None] = [None] * batch

    def run(self, prompts: deque[tuple[int, list[int]]], on_answer: Callable[[Answer], None], keep_going: Callable[[], bool]) -> None:
        """Answer (index, token ids) prompts until there are none or `keep_going` says no; what is unfinished then is dropped."""
        while keep_going():
            free = [i for i, slot in enumerate(self.slots) if slot is None]
            # Prefilling a few prompts at once costs little more than one; idle slots meanwhile cost a row each.
            if prompts and (len(free) >= 8 or len(free) == len(self.slots)):
                for start in range(0, len(free), 8):
                    group = free[start : start + 8][: len(prompts)]
                    if group:
                        self._prefill(group, [prompts.popleft() for _ in group], on_answer)
            if all(slot is None for slot in self.slots):
                if not prompts:
                    return
                continue
            self._step(on_answer)

    def _prefill(self, slots: list[int], prompts: list[tuple[int, list[int]]], on_answer: Callable[[Answer], None]) -> None:
        decoder, counts = self.decoder, [len(tokens) for _, tokens in prompts]
        width = max(counts)
        visible = torch.ones(width, width, dtype=torch.bool, device=decoder.device).tril().expand(len(slots), width, width)
        zeros = [0] * len(slots)
        block = Block(slots, zeros, zeros, counts, visible)
        tokens = torch.tensor([t for _, ids in prompts for t in ids], device=decoder.device)
        positions = torch.cat([torch.arange(count, device=decoder.device) for count in counts])
        hidden, features = decoder.forward(tokens, positions, self.cache, block, aux_layers=decoder.config.aux_layers)
        assert features is not None
        for slot, rows, (index, ids) in zip(slots, torch.split(features.cpu(), counts), prompts, strict=True):
            self.features[slot, : len(rows)] = rows
            self.slots[slot] = Slot(index, list(ids), len(ids), self.config.temperature(index))
        last = torch.tensor(counts, device=decoder.device).cumsum(0) - 1
        self._append(slots, decoder.logits(hidden[last]), on_answer)

    def _step(self, on_answer: Callable[[Answer], None]) -> None:
        decoder = self.decoder
        # Free slots run along on row 0, so that the slots stay neighbours and attention reads the cache without a copy.
        starts = [len(slot.tokens) - 1 if slot else 0 for slot in self.slots]
        everyone = list(range(len(self.slots)))
        block = Block(everyone, starts, starts, [1] * len(everyone), None)
        tokens = torch.tensor([slot.tokens[-1] if slot else 0 for slot in self.slots], device=decoder.device)
        hidden, features = decoder.forward(
            tokens, torch.tensor(starts, device=decoder.device), self.cache, block, aux_layers=decoder.config.aux_layers
        )
        assert features is not None
        self.features[everyone, starts] = features.cpu()
        self.hidden[everyone, starts] = hidden.cpu()
        active = [i for i in everyone if self.slots[i]]
        self._append(active, decoder.logits(hidden if len(active) == len(everyone) else hidden[active]), on_answer)

    def _append(self, slots: list[int], logits: torch.Tensor, on_answer: Callable[[Answer], None]) -> None:
        running = [slot for i in slots if (slot := self.slots[i]) is not None]
        keys = [f"{self.config.seed}:{slot.index}:{len(slot.tokens)}" for slot in running]
        for i, slot, token in zip(slots, running, sample(logits, [s.temperature for s in running], keys), strict=True):
            slot.tokens.append(token)
            n, p = len(slot.tokens), slot.prompt_length
            if token in self.eos or n - p >= self.config.max_new_tokens or (n % 8 == 0 and is_looping(slot.tokens[p:])):
                self.slots[i] = None
                if n - p >= 2:  # the first answer token is the head's input, not its output
                    rows, states = self.features[i, : n - 1].clone(), self.hidden[i, p : n - 1].clone()
                    on_answer(Answer(slot.index, torch.tensor(slot.tokens, dtype=torch.int32), p, rows, states))


def answer_file(
    decoder: Decoder,
    eos: set[int],
    prompts: list[list[int]],
    folder: Path,
    config: AnswerConfig,
    max_prompt: int,
    minutes: float = float("inf"),
    shard: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
) -> int:
    """Answer all prompts (token ids by index) that the folder has no answer to; returns answer tokens in the folder.

    Stops at the token limit, the disk limit or after some minutes; call again to go on. Shard (i, n) answers every n-th prompt and
    knows its own tokens only: n processes of one thread each are faster than one of n threads when others use the machine too.
    """
    own, of = shard
    done = {i: count for i, count in answered(folder).items() if i % of == own}
    total = before = sum(done.values())
    todo = deque((i, ids) for i, ids in enumerate(prompts) if i % of == own and i not in done and len(ids) <= max_prompt)
    size = chunk_bytes(folder)
    limit, most, started = config.disk_limit_gb * 1e9, config.max_answer_tokens / of, time.monotonic()
    buffer: list[Answer] = []
    bar = progress.add_task("answer tokens", total=int(most), completed=total) if progress else None

    def flush() -> None:
        nonlocal size
        if buffer:
            write_chunk(folder, buffer, own)
            buffer.clear()
            size = chunk_bytes(folder)
            if progress and not progress.console.is_terminal:  # a log file shows no bar
                speed = (total - before) / (time.monotonic() - started)
                progress.console.print(f"{total} answer tokens, {speed:.0f} a second, {size / 1e9:.1f} GB")

    def on_answer(answer: Answer) -> None:
        nonlocal total
        buffer.append(answer)
        total += answer.num_answer_tokens
        if len(buffer) >= config.chunk_answers:
            flush()
        if progress and bar is not None:
            progress.update(bar, completed=total)

    def keep_going() -> bool:
        return total < most and size < limit and time.monotonic() - started < 60 * minutes

    try:
        Answerer(decoder, eos, config, max_prompt).run(todo, on_answer, keep_going)
    except KeyboardInterrupt:  # asked to stop: keep what is finished
        flush()
        raise
    flush()
    return total


@command
def main() -> None:
    """Answer heldout.jsonl, then prompts.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/eagle3-smollm2-135m"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch-size", type=int, default=AnswerConfig.batch_size)
    parser.add_argument("--max-answer-tokens", type=int, default=AnswerConfig.max_answer_tokens)
    parser.add_argument("--disk-limit-gb", type=float, default=AnswerConfig.disk_limit_gb)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this long; run again to go on")
    parser.add_argument("--shard", default="0/1", help="i/n: answer every n-th prompt, from the i-th on")
    parser.add_argument("--max-prompt", type=int, default=PromptConfig.max_tokens, help="longest prompt in tokens")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from adaptivespec.models.loading import load_model
    from adaptivespec.models.tokenizer import encode_chat

    model = load_model(args.model, args.dtype, args.device)
    tokenizer = model.load_tokenizer()
    config = AnswerConfig(batch_size=args.batch_size, max_answer_tokens=args.max_answer_tokens, disk_limit_gb=args.disk_limit_gb)
    own, of = (int(x) for x in args.shard.split("/"))
    shard = (own, of)
    run = Run.create(args.out)
    write_atomic(run.folder / "answers_config.json", config_json(config))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    for source, folder in ((run.heldout, run.heldout_answers), (run.prompts, run.answers)):
        rows = read_rows(source)
        prompts = [encode_chat(tokenizer, [{"role": "user", "content": row["prompt"]}]) for row in rows]
        used = AnswerConfig(**{**config.__dict__, "greedy_share": 1.0, "batch_size": 32}) if source == run.heldout else config
        with Progress(*columns, refresh_per_second=1) as progress:
            eos = set(model.config.eos_token_ids)
            total = answer_file(model.decoder, eos, prompts, folder, used, args.max_prompt, args.minutes, shard, progress)
        print(f"{folder}: {len(answered(folder))} answers, {total} tokens")


if __name__ == "__main__":
    main()
