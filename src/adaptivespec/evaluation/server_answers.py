"""Questions to a server, so many at a time: requests, their share of the time, and the rows that come of them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from ..config import SamplingParams
from ..errors import UserError
from .runs import Asked
from .server import CONNECT_SECONDS, Server, api_key, reason, request_fields
from .server_arms import ServerArm, Wish, not_obeyed
from .server_metrics import speculative_metrics
from .tasks import Question

RETRIES = 6
"""Of a request that meets no connection, status 429 or 5xx: after about 0.5, 1, 2, 4, 8 and 8 seconds, or when the server says."""

MAX_REQUESTS = 1000
"""Most requests in flight: the client library's limit of connections."""

ENDS = ("stop", "length")
"""Ends of an answer that counts; others, such as an abort, are errors."""


class SharedClock:
    """Splits time evenly among those who run at each moment: the shares of all add up to the time in which anybody ran.

    So tokens / seconds summed over answers is the throughput at that concurrency, and a batch's answers can be resampled one by one, as
    with the engine of this process.
    """

    def __init__(self) -> None:
        self._running, self._elapsed, self._at = 0, 0.0, 0.0

    def enter(self) -> float:
        """One more runs. Returns what `leave` wants."""
        self._advance()
        self._running += 1
        return self._elapsed

    def leave(self, entered: float) -> float:
        """One less runs. Returns its share in seconds."""
        self._advance()
        self._running -= 1
        return self._elapsed - entered

    def _advance(self) -> None:
        now = time.perf_counter()
        if self._running:
            self._elapsed += (now - self._at) / self._running
        self._at = now


class ServerAnswerer:
    """A `runs.Answerer` that asks a server, from a thread of its own. Use it as a context: leaving drops open requests.

    Args:
        server: whom to ask.
        arms: what may be asked for.
        batch: requests in flight, at most MAX_REQUESTS.
        timeout: seconds for one answer, retries included.
    """

    def __init__(self, server: Server, arms: Sequence[ServerArm], batch: int, timeout: float) -> None:
        import openai

        self._server, self._arms, self._timeout = server, {arm.label: arm for arm in arms}, timeout
        self._client = openai.AsyncOpenAI(
            base_url=server.url,
            api_key=api_key(),
            max_retries=RETRIES,
            timeout=openai.Timeout(timeout, connect=CONNECT_SECONDS),
        )
        self._open: dict[int, Future[dict[str, Any]]] = {}
        self._gate, self._clock, self._news = asyncio.Semaphore(batch), SharedClock(), threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def probe(self, question: Question, params: SamplingParams) -> None:
        """One token under every arm, before any work. Raises UserError for what the server refuses, or settings it does not obey."""
        one = params.updated({"max_tokens": 1, "min_tokens": 0})
        for arm in self._arms.values():
            for wish in arm.wishes or (None,):
                asyncio.run_coroutine_threadsafe(self._answer(arm.label, question, one, wish), self._loop).result()

    def ask(self, label: str, asked: Asked, number: int) -> None:
        """See `Answerer.ask`."""
        wish = self._arms[label].wish(asked.first + number)
        answer = self._answer(label, asked.questions[number], asked.params_for(number), wish)
        self._open[number] = asyncio.run_coroutine_threadsafe(answer, self._loop)
        self._open[number].add_done_callback(lambda _: self._news.set())

    def step(self) -> None:
        """Wait until something is finished, but no longer than half a second: the caller has other worries too."""
        self._news.wait(0.5)
        self._news.clear()
        for future in self._open.values():
            if future.done():
                future.result()

    def finished(self) -> dict[int, dict[str, Any]]:
        """See `Answerer.finished`."""
        ready = {number: future for number, future in self._open.items() if future.done()}
        return {number: future.result() for number, future in ready.items() if not future.cancelled() and future.exception() is None}

    def forget(self, number: int) -> None:
        """See `Answerer.forget`."""
        del self._open[number]

    def abort(self) -> None:
        """Drop open requests; their connections close, which tells the server."""
        for future in self._open.values():
            future.cancel()
        self._open.clear()

    async def _answer(self, label: str, question: Question, params: SamplingParams, wish: Wish | None) -> dict[str, Any]:
        async with self._gate:
            began, entered = time.perf_counter(), self._clock.enter()
            try:
                answer = await self._request(question, params, wish)
            finally:
                share, latency = self._clock.leave(entered), time.perf_counter() - began
        if wish is not None and (said := not_obeyed(wish, answer.get("speculative"))):
            raise UserError(f"arm {label!r}: the server does not obey a request's settings ({said}); an arm server:LABEL sends none")
        return answer_row(label, question, params, answer, share, latency)

    async def _request(self, question: Question, params: SamplingParams, wish: Wish | None) -> dict[str, Any]:
        import openai

        fields = request_fields(self._server, question.messages, params, wish)
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._client.chat.completions.with_raw_response.create(**fields)
        except TimeoutError:
            raise UserError(f"{question.id}: no answer within {self._timeout:g} seconds; see --timeout") from None
        except openai.APIError as error:
            raise UserError(f"{question.id}: {self._server.url}: {reason(error)}") from None
        try:
            answer = json.loads(response.text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise UserError(f"{question.id}: the server's answer is no JSON object")
        return answer

    async def _close(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(CONNECT_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CONNECT_SECONDS)
        self._loop.close()


def answer_row(
    label: str, question: Question, params: SamplingParams, answer: Mapping[str, Any], share: float, latency: float
) -> dict[str, Any]:
    """Everything about a server's answer but the verdict, see docs/evaluation.md. None stands for what it does not say.

    Raises:
        UserError: no text, no usage, or an answer that was not brought to its end.
    """
    try:
        choice, usage = answer["choices"][0], answer["usage"]
        text, end = choice["message"].get("content") or "", choice["finish_reason"]
        tokens, prompt_tokens = int(usage["completion_tokens"]), usage.get("prompt_tokens")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise UserError(f"{question.id}: the server's answer lacks choices, their finish_reason, or usage.completion_tokens") from None
    if end not in ENDS:
        raise UserError(f"{question.id}: the server ended the answer with finish_reason {end!r}")
    metrics = speculative_metrics(answer, tokens)
    return {
        "arm": label,
        "task": question.task,
        "id": question.id,
        "text": text,
        "prompt_tokens": prompt_tokens,
        "tokens": tokens,
        "finish_reason": end,
        "promoted": None,
        "metrics": {} if metrics is None else {"speculative_decoding": metrics},
        "steps": None if metrics is None else metrics["num_spec_steps"],
        "spent": None if metrics is None else metrics.get("spent_budget"),
        "seconds": share,
        "latency": latency,
        "seed": params.seed,
    }
