"""The server through the `openai` client: whatever it is asked, plain SGLang's answer to the same request comes back."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from bed_models import KNOWN, UNKNOWN
from reference import Reference
from servers import ANSWER_LIMIT, Server

MODEL = "tiny"
SPECULATED = {"return_meta_info": True}


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=ANSWER_LIMIT, max_retries=0)


@pytest.fixture(scope="module")
def ours(rotating: Server) -> openai.OpenAI:
    return client_of(rotating)


@pytest.fixture(scope="module")
def theirs(plain: Reference) -> openai.OpenAI:
    return client_of(plain.server)


def chat(client: openai.OpenAI, content: str, extra: dict[str, Any] | None = None, **more: Any) -> Any:
    settings = {"temperature": 0, "max_tokens": 32, **more}
    extra = {"ignore_eos": True, **(extra or {})}
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}], extra_body=extra, **settings)


def complete(client: openai.OpenAI, prompt: str, **more: Any) -> Any:
    return client.completions.create(
        model=MODEL, prompt=prompt, extra_body={"ignore_eos": True}, temperature=0, **{"max_tokens": 32, **more}
    )


@pytest.mark.parametrize("prompt", [*KNOWN[:3], *UNKNOWN[:2]])
def test_chat(ours: openai.OpenAI, theirs: openai.OpenAI, prompt: str) -> None:
    a, b = chat(ours, prompt), chat(theirs, prompt)
    assert a.choices[0].message.content == b.choices[0].message.content
    assert a.usage.completion_tokens == b.usage.completion_tokens == 32


@pytest.mark.parametrize("prompt", KNOWN[:4])
def test_streaming(ours: openai.OpenAI, theirs: openai.OpenAI, prompt: str) -> None:
    whole = complete(theirs, prompt).choices[0].text
    pieces = [chunk.choices[0].text for chunk in complete(ours, prompt, stream=True) if chunk.choices]
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 3


@pytest.mark.parametrize("limit", range(1, 12))
def test_max_tokens(ours: openai.OpenAI, theirs: openai.OpenAI, limit: int) -> None:
    """Every limit, so that some cut the block that a step accepted."""
    a, b = (complete(client, KNOWN[0], max_tokens=limit) for client in (ours, theirs))
    assert a.usage.completion_tokens == limit
    assert a.choices[0].finish_reason == "length"
    assert a.choices[0].text == b.choices[0].text


@pytest.mark.parametrize("place", range(3, 20, 4))
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_stop_strings(ours: openai.OpenAI, theirs: openai.OpenAI, place: int, stream: bool) -> None:
    """Two characters of the known answer, wherever in an accepted block they lie."""
    text = complete(theirs, KNOWN[1]).choices[0].text
    stop = text[place : place + 2]
    if stream:
        chunks = [chunk.choices[0] for chunk in complete(ours, KNOWN[1], stop=stop, stream=True) if chunk.choices]
        answer, reason = "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason
    else:
        choice = complete(ours, KNOWN[1], stop=stop).choices[0]
        answer, reason = choice.text, choice.finish_reason
    assert answer == text[: text.index(stop)]
    assert reason == "stop"


def test_log_probabilities(ours: openai.OpenAI, theirs: openai.OpenAI) -> None:
    a, b = (chat(client, KNOWN[2], logprobs=True, top_logprobs=3).choices[0] for client in (ours, theirs))
    assert a.message.content == b.message.content
    assert len(a.logprobs.content) == len(b.logprobs.content) == 32
    for x, y in zip(a.logprobs.content, b.logprobs.content, strict=True):
        assert x.token == y.token
        assert x.logprob == pytest.approx(y.logprob, abs=1e-3)
        assert [t.logprob for t in x.top_logprobs] == pytest.approx([t.logprob for t in y.top_logprobs], abs=1e-3)


SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "size": {"type": "integer", "minimum": 10, "maximum": 99},
        "round": {"type": "boolean"},
    },
    "required": ["colour", "size", "round"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("margin", ["off", 0.2])
@pytest.mark.parametrize("prompt", [KNOWN[0], KNOWN[5], UNKNOWN[0]])
def test_json_schema(ours: openai.OpenAI, theirs: openai.OpenAI, prompt: str, margin: Any) -> None:
    wish = {"response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}, "max_tokens": 80}
    extra = {"ignore_eos": False, "custom_params": {"adaptivespec": {"margin": margin}}}
    choice = chat(ours, prompt, extra, **wish).choices[0]
    assert choice.finish_reason == "stop"
    thing = json.loads(choice.message.content)
    assert set(thing) == set(SCHEMA["required"])  # type: ignore[arg-type]
    assert thing["colour"] in ("red", "green", "blue")
    assert 10 <= thing["size"] <= 99
    assert isinstance(thing["round"], bool)
    if margin == "off":
        assert choice.message.content == chat(theirs, prompt, {"ignore_eos": False}, **wish).choices[0].message.content


def test_settings_of_a_request(ours: openai.OpenAI) -> None:
    lossy = chat(ours, UNKNOWN[1], SPECULATED | {"custom_params": {"adaptivespec": {"margin": 0.05}}}, max_tokens=48)
    said = lossy.choices[0].meta_info["adaptivespec"]
    assert (said["rule"], said["margin"]) == ("margin", 0.05)
    assert said["promoted"] > 0
    strict = chat(ours, UNKNOWN[1], SPECULATED, max_tokens=48)
    assert strict.choices[0].meta_info["adaptivespec"]["rule"] == "strict"


def test_bad_settings_are_the_clients_fault(ours: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="did you mean 'margin'"):
        chat(ours, "A", {"custom_params": {"adaptivespec": {"margn": 0.05}}})
