"""chat over a pipe and at a prompt, on a tiny model."""

from __future__ import annotations

import builtins
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adaptivespec import LLM, SamplingParams, SpeculativeConfig
from adaptivespec.cli import conversation
from adaptivespec.cli.conversation import Conversation
from adaptivespec.cli.main import run
from adaptivespec.errors import UserError
from tiny_heads import make_tiny_head
from tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("chat")
    model = make_tiny_model("llama", folder / "model")
    return ["-m", str(model), "--drafter", str(make_tiny_head(folder / "head")), "--dtype", "fp32"]


@pytest.fixture(scope="module")
def llm(files: list[str]) -> LLM:
    return LLM(files[1], drafter=files[3], dtype="fp32", max_running_requests=1)


Piped = Callable[..., tuple[int, str, str]]


@pytest.fixture
def piped(files: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Piped:
    def chat(text: str, *flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        code = run(["chat", *files, "--max-tokens", "12", *flags])
        return code, *capsys.readouterr()

    return chat


def asked(llm: LLM, messages: list[dict[str, str]], **settings: Any) -> str:
    return llm.generate([messages], SamplingParams(**{"max_tokens": 12, **settings}))[0].text


def test_history_is_kept_and_answers_are_all_that_a_pipe_gets(llm: LLM, piped: Piped) -> None:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    first = asked(llm, messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "and?"}]
    assert piped("hi\n\n  \nand?", "--system", "be kind") == (0, f"{first}\n{asked(llm, messages)}\n", "")


def test_reset_forgets_all_but_the_system_message(llm: LLM, piped: Piped) -> None:
    answer = asked(llm, [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}])
    assert piped("hi\n/reset\nhi\n", "--system", "s") == (0, f"{answer}\n{answer}\n", "")


def test_exit_ends_at_once(piped: Piped) -> None:
    assert piped("/exit\nhi\n") == (0, "", "")
    assert piped("") == (0, "", "")


def test_help_names_every_command(piped: Piped) -> None:
    code, out, _ = piped("/help\n")
    assert code == 0
    assert all(command in out for command in conversation.COMMANDS if command != "/help")


def test_settings_change_the_next_answers(files: list[str], piped: Piped, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = ["a", "/set policy off", "b", "/set policy adaptive", "/set kappa 0.3", "/set max_new_tokens 3", "/set temperature 0.7", "c"]
    assert piped("\n".join(lines), "--trace", str(trace))[0] == 0
    requests = [line for line in map(json.loads, trace.read_text().splitlines()) if line["type"] == "request"]
    assert [r["speculative"]["policy"] for r in requests] == ["adaptive", "off", "adaptive"]
    assert [r["speculative"]["margin"] for r in requests] == [0.5, 0.5, 0.3]
    assert [r["params"]["max_tokens"] for r in requests] == [12, 12, 3]
    assert [r["params"]["temperature"] for r in requests] == [0, 0, 0.7]


def test_set_alone_shows_the_settings(piped: Piped) -> None:
    out = piped("/set margin 0.5\n/set\n")[1]
    assert "max_tokens 12" in out
    assert "margin 0.5" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set margn 1", "no setting 'margn'; did you mean 'margin'?"),
        ("/set margin 7", "margin: Input should be less than or equal to 1, not '7'"),
        ("/set num_steps 5", "num_steps has no effect with policy adaptive; leave it out"),
        ("/set high 7/1/9", "topk 1 is a chain"),
        ("/set high 60/10/64", "is larger than this LLM has room for"),
        ("/set temperature hot", "temperature: Input should be a valid number"),
        ("/set n 2", "all answers at temperature 0 are the same"),
        ("/set logprobs 2", "no setting 'logprobs'"),
        ("/set stop_token_ids 999", "stop token id 999 is outside the model's vocabulary of 128"),
        ("/set margin", "/set margin needs a value"),
        ("/rest", "no command '/rest'; did you mean '/reset'?"),
        ("x" * 600, "tokens with this message and the context holds 512: /reset starts a new one"),
    ],
)
def test_what_is_wrong_is_one_line_and_changes_nothing(llm: LLM, piped: Piped, line: str, message: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    first = asked(llm, messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "and?"}]
    code, out, err = piped(f"hi\n{line}\nand?\n")
    assert (code, out) == (0, f"{first}\n{asked(llm, messages)}\n")
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_drafter_that_is_not_there_is_not_switched_on(files: list[str], llm: LLM) -> None:
    plain = Conversation(LLM(llm.model, drafter="none"), SamplingParams())
    with pytest.raises(UserError, match="policy static needs a drafter"):
        plain.take("/set policy static")
    assert plain.speculative.policy == "off"


def test_a_path_is_a_message(llm: LLM, piped: Piped) -> None:
    assert piped("/usr/bin is what?\n") == (0, asked(llm, [{"role": "user", "content": "/usr/bin is what?"}]) + "\n", "")


def test_a_full_context_says_so(piped: Piped) -> None:
    code, _, err = piped("hi\n", "--context-length", "20", "--ignore-eos", "--max-tokens", "100")
    assert (code, err) == (0, "the context of 20 tokens is full: /reset starts a new conversation\n")


@pytest.mark.parametrize("after", [0, 1, 5])
def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(llm: LLM, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Conversation(llm, SamplingParams(max_tokens=30, ignore_eos=True))
    shown: list[str] = []

    def interrupted(_: object, piece: str, __: bool) -> None:
        if len(shown) == after:
            raise KeyboardInterrupt
        shown.append(piece)

    monkeypatch.setattr(conversation, "show", interrupted)
    assert chat.take("hi")
    whole = asked(llm, [{"role": "user", "content": "hi"}], max_tokens=30, ignore_eos=True)
    said = chat.messages[1]["content"]
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert whole.startswith(said)
    assert after <= len(said) < len(whole)
    assert llm.scheduler.free == [0]
    monkeypatch.undo()
    assert chat.take("and?")
    assert len(chat.messages) == 4


def test_ctrl_c_before_the_first_word_forgets_the_question(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Conversation(llm, SamplingParams(max_tokens=30))
    with monkeypatch.context() as patched:
        patched.setattr(llm.runner, "prefill", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        assert chat.take("hi")
    assert not chat.messages
    assert chat.take("hi")
    assert len(chat.messages) == 2


def test_at_a_prompt(files: list[str], llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C clears the line, Ctrl-D ends, and each answer comes with a remark."""
    events: Iterator[Any] = iter([KeyboardInterrupt(), "hi", EOFError()])

    def typed(prompt: str) -> str:
        assert prompt == "> "
        event = next(events)
        if isinstance(event, BaseException):
            raise event
        return str(event)

    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr(builtins, "input", typed)
    assert run(["chat", *files, "--max-tokens", "12", "--ignore-eos"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "\n" + asked(llm, [{"role": "user", "content": "hi"}], ignore_eos=True) + "\n\n"
    greeting, hint, remark = printed.err.splitlines()
    assert "/help" in greeting
    assert hint == "Ctrl-D or /exit ends"
    assert remark.startswith("12 tokens, ")
    assert remark.endswith(" promoted, cut at max_tokens")


def test_what_is_not_text_is_refused(files: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8"))
    assert run(["chat", *files]) == 2
    assert capsys.readouterr().err == "error: standard input is not UTF-8 text\n"


def test_a_model_without_a_chat_template_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_model("llama", tmp_path / "model")
    for template in folder.glob("chat_template*"):
        template.unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("adaptivespec.models.loading.Decoder", lambda *_: pytest.fail("the weights were read"))
    assert run(["chat", "-m", str(folder)]) == 2
    assert "has no chat template, so it cannot chat" in capsys.readouterr().err


def test_the_first_settings_are_those_of_the_flags(llm: LLM) -> None:
    chat = Conversation(llm, SamplingParams(max_tokens=5))
    assert (chat.params.max_tokens, chat.speculative) == (5, SpeculativeConfig())
