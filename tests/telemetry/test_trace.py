"""The trace file: it reproduces the records, docs/trace.md describes exactly its fields, and a full disk costs no answer."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from adaptivespec import LLM, SamplingParams, SpeculativeConfig
from adaptivespec.errors import UserError
from adaptivespec.method.records import StepRecord
from adaptivespec.method.tree import TreeShape
from adaptivespec.telemetry.stats import summarise
from adaptivespec.telemetry.trace import SCHEMA, TraceWriter
from tiny_heads import make_tiny_head
from tiny_models import make_tiny_model

DOCS = (Path(__file__).parents[2] / "docs" / "trace.md").read_text(encoding="utf-8")
PROMPTS = [[5, 9, 33], [77], [12, 100, 4, 8], [50, 51]]
PARAMS = [
    SamplingParams(max_tokens=20),
    SamplingParams(max_tokens=9, temperature=0.8, seed=3, n=2, logprobs=1),
    SamplingParams(max_tokens=14, ignore_eos=True),
    SamplingParams(max_tokens=1),
]
WISHES: list[Any] = [
    None,
    {"margin": 0.05, "guards": "none"},
    False,
    {"policy": "static", "num_steps": 2, "topk": 2, "num_draft_tokens": 4},
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("trace")
    return make_tiny_model("llama", folder / "model"), make_tiny_head(folder / "head")


def engine(files: tuple[Path, Path], trace: Path | str | None) -> LLM:
    return LLM(files[0], drafter=files[1], dtype="fp32", max_running_requests=3, trace=trace)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_trace_of_mixed_requests_reproduces_their_records(files: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    llm = engine(files, path)
    outputs = llm.generate(PROMPTS, PARAMS, speculative=WISHES)
    [aborted] = llm.submit([7], SamplingParams(max_tokens=50, ignore_eos=True))
    llm.step()
    llm.step()
    llm.abort(aborted)
    outputs.append(llm.output(aborted))
    first, *lines = read(path)
    assert first == {"type": "trace", "schema": SCHEMA}
    assert len(outputs) == 6
    for number, output in enumerate(outputs):
        request, *steps, finish = [line for line in lines if line["request"] == number]
        assert [request["index"], request["prompt_tokens"]] == [output.index, len(output.prompt_token_ids)]
        assert SamplingParams(**request["params"]) == output.params
        assert SpeculativeConfig.model_validate(request["speculative"]).model_dump() == output.speculative.model_dump()
        assert [step["step"] for step in steps] == list(range(len(output.records)))
        assert [record(step) for step in steps] == output.records
        assert (finish["finish_reason"], finish["token_ids"]) == (output.finish_reason, output.token_ids)
        emitted = [token for step in steps for token in (*(step["tokens"][node] for node in step["path"]), step["bonus"])]
        assert [*output.token_ids[:1], *emitted][: len(output.token_ids)] == output.token_ids
    assert {line["finish_reason"] for line in lines if line["type"] == "finish"} >= {"length", "abort"}


def record(step: dict[str, Any]) -> StepRecord:
    values = {name: value for name, value in step.items() if name not in ("type", "request", "step", "shape")}
    return StepRecord(shape=TreeShape(*step["shape"]), **values)


def test_every_field_is_documented_and_every_documented_field_occurs(files: tuple[Path, Path], tmp_path: Path) -> None:
    engine(files, tmp_path / "trace.jsonl").generate(PROMPTS, PARAMS, speculative=WISHES)
    lines = read(tmp_path / "trace.jsonl")
    sections = {
        name: set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
        for name, text in re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", DOCS, re.M | re.S)
    }
    documented = {name: fields for name, fields in sections.items() if fields}
    assert documented.keys() == {"trace", "request", "step", "finish"} == {line["type"] for line in lines}
    for line in lines:
        assert line.keys() == documented[line["type"]]
        if line["type"] == "request":
            assert line["params"].keys() == set(SamplingParams.model_fields)
            assert line["speculative"].keys() == set(SpeculativeConfig.model_fields)
    nullable = {name for line in lines if line["type"] != "request" for name, value in line.items() if value is None}
    assert nullable == {"confidence"} == set(re.findall(r"^\| `(\w+)` \| [^|]* or null \|", DOCS, re.M))
    assert SCHEMA in DOCS
    off = next(line for line in lines if line["type"] == "step" and line["confidence"] is None)
    assert json.dumps(off["shape"], separators=(",", ":")) in DOCS
    assert list(asdict(TreeShape.off()).values()) == off["shape"]


def test_the_documented_example_computes_accept_length(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    outputs = engine(files, "trace.jsonl").generate(PROMPTS, PARAMS, speculative=WISHES)
    [example] = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    exec(example, {})
    assert float(capsys.readouterr().out) == summarise(r for output in outputs for r in output.records).accept_length


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_warns_and_loses_no_answer(files: tuple[Path, Path]) -> None:
    expected = engine(files, None).generate(PROMPTS[0], PARAMS[0])
    with pytest.warns(UserWarning, match="the trace ends here: No space left on device") as caught:
        outputs = engine(files, "/dev/full").generate(PROMPTS[0], PARAMS[0])
    assert len(caught) == 1
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]


def test_a_trace_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write the trace .*: Is a directory"):
        TraceWriter(tmp_path)
    with pytest.raises(UserError, match=r"cannot write the trace .*: No such file or directory"):
        TraceWriter(tmp_path / "no" / "trace.jsonl")
