"""A running OpenAI-compatible server (SGLang, vLLM, ...): what it serves and says of itself, and what a request to it looks like."""

from __future__ import annotations

import importlib.util
import json
import os
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..config import SamplingParams
from ..errors import UserError, nearest
from .prompts import Messages
from .server_arms import Wish

if TYPE_CHECKING:
    import openai

PREFIX = "openai="
CONNECT_SECONDS = 10.0
EXTRA_SAMPLING = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos")
"""Settings that OpenAI's API does not have; SGLang and vLLM take them under these names."""


@dataclass(frozen=True)
class Server:
    """Where requests go.

    Attributes:
        url: with its path, usually `/v1`.
        model: the name that requests ask for.
        owner: what the server calls itself in its list of models, such as `sglang` or `vllm`; None without.
        context_length: longest prompt plus answer in tokens, where the server says so.
    """

    url: str
    model: str
    owner: str | None = None
    context_length: int | None = None


def require_openai() -> None:
    """Raise UserError where the client library is not installed."""
    if importlib.util.find_spec("openai") is None:
        raise UserError("asking a server needs the library openai: pip install 'adaptivespec[eval]'")


def parse_engine(text: str) -> str:
    """The base URL in `openai=URL`, with `/v1` where it has no path. Raises UserError for another form."""
    wanted = "--engine: expected openai=URL, such as openai=http://localhost:30000/v1"
    url = text.removeprefix(PREFIX).strip().rstrip("/")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UserError(f"{wanted}, not {text!r}") from None
    if not text.startswith(PREFIX) or parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise UserError(f"{wanted}, not {text!r}")
    if "," in url:
        raise UserError("--engine: one server a run; ask the next one with the same --out and another arm server:LABEL")
    if "@" in parts.netloc:
        raise UserError("--engine: no credentials in the URL, it is noted in run.json; the key is read from OPENAI_API_KEY")
    return url if parts.path else f"{url}/v1"


def api_key() -> str:
    """OPENAI_API_KEY; `none` without, which local servers accept."""
    return os.environ.get("OPENAI_API_KEY") or "none"


def connect(url: str, model: str | None) -> Server:
    """Ask a server what it serves.

    Args:
        url: from `parse_engine`.
        model: the name to ask for; None for the only one.

    Raises:
        UserError: nobody answers, something else does, or the model is not served (the message lists those that are).
    """
    import openai

    try:
        with openai.OpenAI(base_url=url, api_key=api_key(), timeout=CONNECT_SECONDS, max_retries=1) as client:
            served = _models(client.models.with_raw_response.list().text)
    except openai.APIError as error:
        raise UserError(f"cannot ask {url} for its models: {reason(error)}") from None
    if served is None:
        raise UserError(f"{url} does not answer as an OpenAI-compatible server")
    names = ", ".join(served) or "nothing"
    if model is None:
        if len(served) != 1:
            raise UserError(f"{url} serves {names}: choose one with --model")
        [model] = served
    if model not in served:
        raise UserError(f"{url} does not serve {model!r}{nearest(model, served)}; it serves {names}")
    length = served[model].get("max_model_len")
    return Server(url, model, served[model].get("owned_by"), length if isinstance(length, int) else None)


def _models(text: str) -> dict[str, dict[str, Any]] | None:
    try:
        return {row["id"]: row for row in json.loads(text)["data"]}
    except (ValueError, KeyError, TypeError):
        return None


def reason(error: openai.APIError) -> str:
    """An error of the client library in one short line."""
    import openai

    if isinstance(error, openai.APITimeoutError):
        return "no answer in time"
    if isinstance(error, openai.APIConnectionError):
        return f"no connection ({error.__cause__ or error})"
    body = error.body if isinstance(error.body, Mapping) else {}
    said = " ".join(str(body.get("message") or error.message).split())
    status = f"status {error.status_code}: " if isinstance(error, openai.APIStatusError) else ""
    return status + (said if len(said) <= 300 else said[:297] + "...")


def self_description(server: Server) -> dict[str, Any]:
    """What a server tells about itself, for run.json: version and speculative flags, as far as it has SGLang's or vLLM's pages for that."""
    root = server.url.removesuffix("/v1")
    said: dict[str, Any] = {}
    for page in ("version", "server_info", "get_server_info"):
        answer = _get(f"{root}/{page}")
        said |= {name: answer[name] for name in answer if name in ("version", "model_path", "dtype") or name.startswith("speculative_")}
    return {"url": server.url, "owned_by": server.owner, **said}


def _get(url: str) -> dict[str, Any]:
    """A page's JSON object; empty for anything else."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key()}"})
    try:
        with urllib.request.urlopen(request, timeout=CONNECT_SECONDS) as response:
            values = json.loads(response.read(1 << 20))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def request_fields(server: Server, messages: Messages, params: SamplingParams, wish: Wish | None) -> dict[str, Any]:
    """Arguments of the client's `chat.completions.create`. Settings that change nothing are left out: some servers know few."""
    fields: dict[str, Any] = {
        "model": server.model,
        "messages": messages,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
    }
    standard: Sequence[str] = ("top_p", "presence_penalty", "frequency_penalty")
    fields |= _changed(params, standard)
    if params.temperature > 0:
        fields["seed"] = params.seed
    if params.stop:
        fields["stop"] = list(params.stop)
    extra = _changed(params, EXTRA_SAMPLING)
    if server.owner == "sglang":
        extra["return_spec_tokens_details"] = True
    if wish is not None:
        extra["speculative"] = wish
    return {**fields, "extra_body": extra} if extra else fields


def _changed(params: SamplingParams, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(params, name)) != type(params).model_fields[name].default}
