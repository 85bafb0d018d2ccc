"""Bad input: one clear line on standard error, exit code 2, before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adaptivespec.cli.main import run
from adaptivespec.evaluation.prompts import load_prompts
from tiny_heads import make_tiny_head
from tiny_models import make_tiny_model, write_gguf


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "hi", "-m", "smollm2-135n"], "no model 'smollm2-135n': not a short name, a file, a folder or a hub id (owner/name); "
         "did you mean 'smollm2-135m'?"),
        (["generate", "hi", "--margin", "0"], "margin: Input should be greater than 0, not '0'"),
        (["generate", "hi", "--kappa", "1.5"], "margin: Input should be less than or equal to 1, not '1.5'"),
        (["generate", "hi", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "9"],
         "shape 3,1,9: topk 1 is a chain, so num_draft_tokens must be num_steps + 1 = 4"),
        (["generate", "hi", "--speculative-config", '{"margn": 0.2}'], "unknown setting 'margn'; did you mean 'margin'?"),
        (["generate", "hi", "--speculative-config", "{]"], "not valid JSON"),
        (["generate", "hi", "--speculative-config", "/no/such.json"], "neither a JSON object nor a readable file"),
        (["generate", "hi", "--speculative-algorithm", "EAGEL3"], "unknown speculative algorithm 'EAGEL3'; did you mean 'EAGLE3'?"),
        (["generate", "hi", "--speculative-algorithm", "STANDALONE"], "algorithm STANDALONE needs a draft model (STANDALONE): name one"),
        (["generate", "hi", "--drafter", "none", "--policy", "static"], "policy static needs a drafter"),
        (["generate", "hi", "--speculative-algorithm", "none", "--policy", "static"], "policy static needs a drafter"),
        (["generate", "hi", "--speculative-algorithm", "none", "--margin", "0.4"], "margin has no effect with policy off"),
        (["generate", "hi", "--prompt-lookup-max", "3"], "prompt_lookup_max has no effect without the drafter ngram; leave it out"),
        (["generate", "hi", "--drafter", "ngram", "--prompt-lookup-min", "9"], "prompt_lookup_min 9 is more than prompt_lookup_max 4"),
        (["generate", "hi", "--n", "2"], "all answers at temperature 0 are the same; set a temperature, or n 1"),
        (["generate", "hi", "--n", "0"], "n: Input should be greater than or equal to 1"),
        (["generate", "hi", "--top-p", "0"], "top_p: Input should be greater than 0"),
        (["generate", "hi", "--min-p", "2"], "min_p: Input should be less than or equal to 1"),
        (["generate", "hi", "--frequency-penalty", "9"], "frequency_penalty: Input should be less than or equal to 2"),
        (["generate", "hi", "--min-tokens", "9", "--max-tokens", "8"], "min_tokens 9 is more than max_tokens 8"),
        (["generate", "hi", "--stop", ""], "stop.0: String should have at least 1 character"),
        (["generate", "hi", "--logprobs", "2"], "--logprobs needs --json"),
        (["generate", "hi", "--trace", "/"], "cannot write /: it is a folder"),
        (["generate", "hi", "--trace", "/no/such/trace.jsonl"], "cannot write /no/such/trace.jsonl: its folder is missing or read-only"),
        (["generate", "hi", "--top-kk", "3"], "no such option --top-kk; did you mean --top-k?"),
        (["chat", "--trace", "/"], "cannot write /: it is a folder"),
        (["chat", "--temperatur", "1"], "no such option --temperatur; did you mean --temperature?"),
        (["chat", "-m", "smollm2-135n"], "no model 'smollm2-135n'"),
        (["chat", "--drafter", "nosuch"], "no drafter 'nosuch'"),
        (["generate", "hi", "--policy", "adaptiv"], "unknown policy 'adaptiv'; did you mean 'adaptive'?"),
        (["generate", "hi", "--guards", "none", "--budget", "2"], "guards=none switches every guard off"),
        (["generate", "  "], "the prompt is empty"),
        (["generate", "hi", "--max-tokns", "3"], "no such option --max-tokns; did you mean --max-tokens?"),
        (["generate", "hi", "--dtype", "bf61"], "unknown dtype 'bf61'; did you mean 'bf16'?"),
        (["generate", "hi", "--low", "3,4,4"],
         "no such option --low; set low with --speculative-config (generate, chat) or in an arm (bench)"),
        (["generate", "hi", "--topk", "2"], "no such option --topk; did you mean --speculative-eagle-topk?"),
        (["generat", "hi"], "No such command 'generat'"),
        (["bench", "--arms", "ar; adaptivspec"], "unknown arm 'adaptivspec'; did you mean 'adaptivespec'?"),
        (["bench", "--arms", "static:3,4"], "arm 'static:3,4': expected num_steps,topk,num_draft_tokens"),
        (["bench", "--arms", "tree:3,4,4"], "only static and margin take a shape"),
        (["bench", "--arms", "margin:kapa=0.3"], "arm 'margin:kapa=0.3': unknown setting 'kapa'"),
        (["bench", "--arms", "ar:margin=0.3"], "margin has no effect with policy off; leave it out"),
        (["bench", "--arms", "tree:num_steps=9"], "num_steps has no effect with policy adaptive; leave it out"),
        (["bench", "--arms", "margin:margin=0.3,margin=0.5"], "margin is given twice"),
        (["bench", "--arms", "static:³,4,4"], "expected num_steps,topk,num_draft_tokens"),
        (["generate", "hi", "--policy", "adaptive", "--speculative-num-steps", "9"], "num_steps has no effect with policy adaptive"),
        (["generate", "hi", "--speculative-config", '{"kappa": 0.3, "margin": 0.4}'], "margin is given twice, as 'margin' too"),
        (["generate", "hi", "--speculative-config", '{"num_steps": true}'], "num_steps: expected a number, not True"),
        (["generate", "hi", "--speculative-config", "/bin/true"], "neither a JSON object nor a readable file (not text)"),
        (["generate", "hi", "--device", "foo"], "device 'foo' is not supported; known: auto, cpu, cuda"),
        (["generate", "hi", "--device", "cuda:7"], "device 'cuda:7' is not there"),
        (["generate", "hi", "--temperature", "1e300"], "temperature"),
        (["bench", "--arms", "ar; ar"], "arm 'ar' is given twice"),
        (["bench", "--arms", " ; "], "no arms given"),
        (["bench", "--arms", "static:3,1,9"], "shape 3,1,9: topk 1 is a chain"),
        (["bench", "--arms", "adaptivespec:low=3/4/4,high=7/1/9"], "topk 1 is a chain"),
        (["bench", "--prompts", "/no/such.jsonl"], "cannot read prompts from /no/such.jsonl"),
        (["bench", "--tasks", "gsm8"], "unknown task 'gsm8'; did you mean 'gsm8k'?"),
        (["bench", "--tasks", "humaneval", "--prompts", "p.jsonl"], "--prompts and --tasks exclude each other"),
        (["bench", "--data", "gsm8k=x.jsonl"], "--data has no effect without --tasks"),
        (["bench", "--json", "/no/such/folder/out.json"], "cannot write /no/such/folder/out.json"),
        (["bench", "--repeats", "0"], "--repeats"),
        (["bench", "--batch", "0"], "--batch: expected a size such as 4, or several such as 1,2,4,8 (at most 1024), not '0'"),
        (["bench", "--batch", "1,x"], "--batch: expected a size such as 4"),
        (["bench", "--batch", "2,2"], "--batch: the same size is given twice in '2,2'"),
        (["bench", "--batch", "1,5", "--limit", "4"], "--batch 5 needs at least as many prompts, and there are 4"),
        (["bench", "--arms", "ar+static:5,4"], "arm 'static:5,4': expected num_steps,topk,num_draft_tokens"),
        (["bench", "--arms", "ar+adaptivspec"], "unknown arm 'adaptivspec'; did you mean 'adaptivespec'?"),
        (["bench", "--arms", "ar+"], "unknown arm ''"),
        (["bench", "--arms", "ar, static:3,4,4"], "unknown arm 'ar,static'; arms are separated by `;`"),
        (["bench", "--arms", "ar+tree+margin", "--limit", "2"], "arm 'ar+tree+margin' mixes 3 settings, and there are 2 prompts"),
        (["bench", "--arms", "ar; hf-asisted"], "unknown arm 'hf-asisted'; did you mean 'hf-assisted'?"),
        (["bench", "--arms", "ar; hf:top_k=3"], "arm 'hf:top_k=3': hf is another engine, which takes no settings and mixes with none"),
        (["bench", "--arms", "ar; hf", "--batch", "1,4"], "arm hf decodes one request at a time: it cannot be compared with batch 4"),
        (["bench", "--arms", "ar; hf-lookup", "--presence-penalty", "1", "--stop", "x"], "no equal of presence_penalty, stop"),
        (["bench", "--arms", "ar; hf-assisted", "--drafter", "ngram"], "arm hf-assisted needs a smaller model as the drafter"),
        (["eval", "--arms", "ar; hf", "--out", "x"], "arm 'hf': hf is another engine, which only bench compares with"),
        (["bench", "--trace", "/no/such/trace.jsonl"], "cannot write /no/such/trace.jsonl"),
        (["bench", "--trace", "/no/such/trace.jsonl", "--batch", "1,2"], "cannot write /no/such/trace-1.jsonl"),
        (["bench", "--trace", "same.json", "--json", "same.json"], "--json and --trace are the same file, same.json"),
        (["bench", "--cost-table", "h100-8c"], "cannot read a cost table from h100-8c: No such file or directory; did you mean 'h100-8b'?"),
        (["bench", "--cost-table", "/dev/null"], "cost table /dev/null: "),
        (["bench", "--arms", "goodput:num_steps=0"], "arm 'goodput:num_steps=0': num_steps: Input should be greater than or equal to 1"),
        (["bench", "--arms", "goodput:probe=0"], "probe: Input should be greater than or equal to 1"),
        (["bench", "--arms", "tree:probe=4"], "probe has no effect with policy adaptive; leave it out"),
        (["bench", "--arms", "goodput_shapes:shapes=3/1/4|3/4"], "shapes"),
        (["bench", "--arms", "goodput_shapes:shapes=3/1/9"], "shape 3,1,9: topk 1 is a chain"),
        (["bench", "--arms", "goodput:shapes=3/1/4"], "shapes has no effect with policy goodput; leave it out"),
        (["generate", "hi", "--policy", "goodput", "--drafter", "none"], "policy goodput needs a drafter"),
        (["calibrate", "--drafter", "none"], "calibrate measures drafting: it needs a drafter"),
        (["calibrate", "--batch", "0"], "--batch: expected a size such as 4"),
        (["calibrate", "--rounds", "0"], "--rounds"),
        (["calibrate", "-m", "smollm2-135n"], "no model 'smollm2-135n'"),
        (["bench", "--top-p", "7"], "top_p: Input should be less than or equal to 1"),
        (["bench", "--drafter", "none"], "policy static needs a drafter"),
        (["bench", "--speculative-algorithm", "none"], "policy static needs a drafter"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)  # fmt: skip
def test_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adaptivespec.models.loading.Decoder", lambda *_: pytest.fail("the weights were read"))
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert error.startswith("error: ")


def test_a_gguf_cut_in_half(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = write_gguf(target, tmp_path / "whole.gguf")
    half = tmp_path / "half.gguf"
    half.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    assert run(["generate", "hi", "-m", str(half)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "half.gguf" in error


def test_a_head_of_another_model(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = make_tiny_head(tmp_path / "head", hidden=32)
    assert run(["generate", "hi", "-m", str(target), "--drafter", str(head), "--dtype", "fp32"]) == 2
    assert "is a head for a target of hidden size 32; this target's is 64" in capsys.readouterr().err


def test_a_prompt_longer_than_the_context(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "x" * 700, "--raw", "-m", str(target), "--dtype", "fp32"]) == 2
    assert "the prompt has 700 tokens; the context of 512 must hold it and at least one more" in capsys.readouterr().err
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "ok"}) + "\n" + json.dumps({"prompt": "x" * 700}) + "\n")
    assert run(["bench", "--arms", "ar", "--prompts", str(prompts), "-m", str(target), "--dtype", "fp32"]) == 2
    assert "tokens; the context of 512" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [("nonsense", "line 2: not JSON"), ('{"text": "x"}', "line 2: needs a field prompt or question"), ("[1]", "line 2: needs"),
     ('{"messages": []}', "line 2: needs"), ('{"turns": []}', "line 2: needs"), ('{"prompt": 3}', "line 2: needs")],
)  # fmt: skip
def test_prompt_files_that_are_wrong(line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "fine"}\n' + line + "\n")
    assert run(["bench", "--prompts", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_prompt_files_of_other_systems(tmp_path: Path) -> None:
    """A byte-order mark, CRLF, blank lines and Unicode line separators inside strings."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes("\ufeff".encode() + '{"prompt": "a\u2028b"}\r\n\r\n{"question": "c\u0085"}\r\n'.encode())
    assert [p.messages[0]["content"] for p in load_prompts(path)] == ["a\u2028b", "c\u0085"]


def test_a_prompt_too_long_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_model("llama", tmp_path)
    capsys.readouterr()
    assert run(["generate", "a" * 600, "--raw", "-m", str(folder), "--drafter", "none"]) == 2
    assert capsys.readouterr().err == "error: the prompt has 600 tokens; the context of 512 must hold it and at least one more\n"
