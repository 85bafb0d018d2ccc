"""bench, generate, models and demo on a tiny model: what they print and write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adaptivespec import __version__
from adaptivespec.cli.main import run
from adaptivespec.cli.render import draw_tree
from adaptivespec.evaluation.prompts import load_prompts
from adaptivespec.method.records import StepRecord
from adaptivespec.method.tree import TreeShape
from tiny_heads import make_tiny_head
from tiny_models import DRAFT_NOISE, make_tiny_model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("cli")
    model = make_tiny_model("llama", folder / "model")
    return ["-m", str(model), "--drafter", str(make_tiny_head(folder / "head")), "--dtype", "fp32"]


def test_bench_writes_every_number_that_it_promises(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arms = "ar; static:3,4,4; margin; tree; adaptivespec; margin:5,4,8,margin=0.05,guards=none"
    assert run(["bench", *files, "--arms", arms, "--limit", "2", "--max-tokens", "12", "--repeats", "2", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert 0 < report["rss_after_imports_bytes"] <= report["peak_rss_bytes"]
    assert {"machine", "versions", "command", "model", "dtype", "weights_bytes", "kv_cache_bytes"} <= report.keys()
    labels = [arm.replace(" ", "") for arm in arms.split("; ")]
    assert list(report["arms"]) == labels
    for label, arm in report["arms"].items():
        assert arm["tokens"] == sum(arm["answer_tokens"])
        assert arm["tokens_per_second"] == pytest.approx(arm["tokens"] / arm["seconds"])
        parts = sum(arm[f"seconds_{part}"] for part in ("prefill", "draft", "verify", "rest"))
        assert parts == pytest.approx(arm["seconds"])
        assert arm["seconds_rest"] > 0
        assert arm["speedup_vs_ar"]["low"] <= arm["speedup_vs_ar"]["ratio"] <= arm["speedup_vs_ar"]["high"]
        assert arm["accept_length"] == pytest.approx((arm["accepted"] + arm["steps"]) / arm["steps"])
        assert arm["acceptance_rate"] == (arm["accepted"] / arm["drafted"] if arm["drafted"] else 0)
        assert (arm["drafted"] == 0) == (label == "ar")
        assert len(arm["answer_tokens"]) == 4
    strict = [report["arms"][label]["answer_tokens"] for label in ("ar", "static:3,4,4", "tree")]
    assert strict[0] == strict[1] == strict[2]
    printed = capsys.readouterr().out
    assert all(label in printed for label in labels[:5])


def test_calibrate_and_modelled_seconds(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(["calibrate", *files, "--batch", "1,2", "--rounds", "1", "--json"]) == 0
    printed = capsys.readouterr()
    table, out = tmp_path / "here.json", tmp_path / "out.json"
    table.write_text(printed.out)
    assert json.loads(printed.out)["about"]["dtype"] == "float32"
    assert "kept in" in printed.err
    common = ["--limit", "3", "--max-tokens", "10", "--json", str(out)]
    for name in (str(table), "h100-8b"):
        assert run(["bench", *files, "--arms", "ar; static:3,4,4; goodput", "--batch", "1,2", "--cost-table", name, *common]) == 0
        report, shown = json.loads(out.read_text()), capsys.readouterr().out
        assert "MODELLED, not measured" in shown
        assert report["cost_table"]["name"] == name
        for batch in report["batches"]:
            for arm in batch["arms"].values():
                told = arm["modelled"]
                assert told["tokens"] == arm["tokens"] - 3
                assert told["seconds"] == pytest.approx(sum(told[f"seconds_{part}"] for part in ("draft", "verify", "rest")))
                assert told["tokens_per_second"] == pytest.approx(told["tokens"] / told["seconds"])
            assert batch["arms"]["ar"]["modelled"]["seconds_draft"] == 0
            assert batch["arms"]["ar"]["modelled"]["speedup_vs_ar"]["ratio"] == pytest.approx(1)
            assert batch["arms"]["static:3,4,4"]["answer_tokens"] == batch["arms"]["goodput"]["answer_tokens"]
    plain = report["batches"][0]["arms"]["ar"]["modelled"]
    assert plain["seconds"] == pytest.approx(plain["tokens"] * (5.8e-3 + 0.6e-3))
    assert run(["bench", *files, "--arms", "ar", "--limit", "1", "--max-tokens", "1", "--cost-table", "h100-8b"]) == 0  # no step at all
    assert run(["calibrate", *files, "--batch", "1", "--rounds", "1"]) == 0
    assert "verify x1" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert run(["calibrate", *files, "--batch", "1", "--rounds", "1", "--json"]) == 2  # measured, but nowhere to keep it
    printed = capsys.readouterr()
    assert json.loads(printed.out)["verify"]
    assert "measured, but not kept in" in printed.err


def test_bench_over_batch_sizes(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, trace = tmp_path / "out.json", tmp_path / "trace.jsonl"
    arms, common = "ar; ar+static:2,2,4+adaptivespec:margin=0.5", ["--limit", "4", "--max-tokens", "8", "--json", str(out)]
    sampling = ["--temperature", "0.7", "--top-p", "0.9", "--seed", "3"]
    assert run(["bench", *files, "--arms", arms, "--batch", "1,3", *common, *sampling, "--trace", str(trace)]) == 0
    report = json.loads(out.read_text())
    assert report["params"]["top_p"] == 0.9
    assert [run["batch"] for run in report["batches"]] == [1, 3]
    alone, together = (run["arms"] for run in report["batches"])
    label = arms.split("; ")[1]
    assert list(alone) == list(together) == ["ar", label]
    assert alone["ar"]["answer_tokens"] == together["ar"]["answer_tokens"]
    assert report["batches"][0]["kv_cache_bytes"] < report["batches"][1]["kv_cache_bytes"]
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["batch", "ar", label]
    assert [row.split()[0] for row in rows[:2]] == ["1", "3"]
    assert rows[1].count("x") == 2
    traced = [[json.loads(line) for line in (tmp_path / f"trace-{size}.jsonl").read_text().splitlines()] for size in (1, 3)]
    assert all(lines[0]["type"] == "trace" and lines[-1]["type"] == "finish" for lines in traced)


def test_bench_of_one_batch_size(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arms = ["--arms", "ar; adaptivespec", "--limit", "4", "--max-tokens", "8", "--repeats", "3"]
    assert run(["bench", *files, *arms, "--batch", "2", "--drafter", "ngram", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert (report["batch"], report["answers_per_arm"], report["complete"]) == (2, 12, True)
    assert len(report["arms"]["ar"]["call_seconds"]) == 3
    assert "verify" in capsys.readouterr().out


def test_bench_of_tasks_counts_each_apart(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gsm8k, math500, out = tmp_path / "gsm8k.jsonl", tmp_path / "math500.jsonl", tmp_path / "out.json"
    gsm8k.write_text("".join(json.dumps({"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"}) + "\n" for n in range(4)))
    math500.write_text("".join(json.dumps({"problem": f"Find ${n}^2$.", "answer": str(n * n)}) + "\n" for n in range(4)))
    tasks = ["--tasks", "gsm8k,math500", "--data", f"gsm8k={gsm8k}", "--data", f"math500={math500}", "--limit", "2"]
    assert run(["bench", *files, *tasks, "--arms", "ar; static:3,4,4", "--max-tokens", "12", "--repeats", "2", "--json", str(out)]) == 0
    for arm in json.loads(out.read_text())["arms"].values():
        assert {name: group["answers"] for name, group in arm["groups"].items()} == {"gsm8k": 4, "math500": 4}
        assert sum(group["steps"] for group in arm["groups"].values()) == arm["steps"]
        tokens = sum(group["steps"] * group["accept_length"] for group in arm["groups"].values())
        assert tokens == pytest.approx(arm["steps"] * arm["accept_length"])
    header, plain, _ = capsys.readouterr().out.splitlines()[-3:]
    assert header.split() == ["accept", "length", "gsm8k", "(4)", "math500", "(4)", "mean"]
    assert plain.split() == ["ar", "1.00", "1.00", "1.00"]


def test_prompts_of_a_file_may_name_their_group(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [{"turns": ["Hello", "And?"], "category": "chat"}, {"prompt": "2 + 2", "kind": "maths"}, {"question": "Why?"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [(p.messages[0]["content"], p.group) for p in load_prompts(file)] == [("Hello", "chat"), ("2 + 2", "maths"), ("Why?", None)]


def test_bench_beside_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, draft = make_tiny_model("llama", tmp_path / "model"), make_tiny_model("llama", tmp_path / "draft", noise=DRAFT_NOISE)
    out, peers = tmp_path / "out.json", ["hf", "hf-assisted", "hf-lookup"]
    arguments = ["-m", str(model), "--drafter", str(draft), "--dtype", "fp32", "--limit", "2", "--max-tokens", "8", "--json", str(out)]
    assert run(["bench", *arguments, "--arms", "; ".join(["ar", "static:2,1,3", *peers])]) == 0
    rows = json.loads(out.read_text())["arms"]
    assert [row["peer"] and row["peer"]["name"] for row in rows.values()] == [None, None, *peers]
    assert all(row["answer_tokens"] == rows["ar"]["answer_tokens"] for row in rows.values())
    [hf] = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("hf ")]
    assert hf[-6:] == ["1.00", "-", "-", "-", "-", "-"]
    assert run(["bench", *arguments, "--arms", "hf"]) == 0
    row = json.loads(out.read_text())["arms"]["hf"]
    assert (row["speedup_vs_ar"], row["settings"], row["drafted"]) == (None, [], None)


def test_ctrl_c_keeps_the_batch_sizes_before(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from adaptivespec.cli import bench

    measure = bench.measure

    def interrupted(*arguments: Any) -> dict[str, Any]:
        if arguments[6] == 2:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(bench, "measure", interrupted)
    out = tmp_path / "out.json"
    arguments = ["bench", *files, "--arms", "ar; tree", "--limit", "2", "--max-tokens", "4", "--json", str(out)]
    assert run([*arguments, "--batch", "1,2"]) == 130
    report = json.loads(out.read_text())
    assert ([run["batch"] for run in report["batches"]], report["complete"]) == ([1], False)
    assert "interrupted: 2 of 2 answers per arm with batch 1" in capsys.readouterr().err
    assert run([*arguments, "--batch", "2"]) == 130


def test_generate_streams_what_json_reports(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "hello", *files, "--max-tokens", "20"]
    assert run([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert run(arguments) == 0
    streamed = capsys.readouterr()
    assert streamed.out.removesuffix("\n") == result["text"]
    assert "accept length" in streamed.err
    assert len(result["token_ids"]) == 20
    assert result["speculative"]["policy"] == "adaptive"


def test_shape_flags_mean_a_static_tree(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--speculative-num-steps", "2", "--speculative-eagle-topk", "3", "--speculative-num-draft-tokens", "5", "--margin", "off"]
    assert run(["generate", "hello", *files, "--max-tokens", "20", "--json", *shape]) == 0
    speculative = json.loads(capsys.readouterr().out)["speculative"]
    assert (speculative["policy"], speculative["num_steps"], speculative["topk"], speculative["num_draft_tokens"]) == ("static", 2, 3, 5)
    assert speculative["margin"] is None


def drafted(answer: dict[str, Any]) -> int:
    return int(answer["metrics"]["speculative_decoding"]["num_draft_tokens"])


def test_plain_decoding_by_flags(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "hello", *files, "--max-tokens", "9", "--json", "--speculative-algorithm", "none"]) == 0
    assert drafted(json.loads(capsys.readouterr().out)) == 0
    assert run(["generate", "hello", "--drafter", "none", *files[:2], "--dtype", "fp32", "--max-tokens", "9", "--json"]) == 0
    assert drafted(json.loads(capsys.readouterr().out)) == 0


def test_json_has_all_that_an_answer_knows(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "hello", *files, "--max-tokens", "12", "--margin", "0.05", "--guards", "none", "--json", "--logprobs", "3"]
    assert run([*arguments, "--trace", str(tmp_path / "trace.jsonl")]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["index"], answer["finish_reason"], answer["stop_reason"]) == (0, "length", None)
    assert (answer["params"]["max_tokens"], answer["speculative"]["margin"]) == (12, 0.05)
    assert [entry["token_id"] for entry in answer["logprobs"]] == answer["token_ids"]
    assert all(len(entry["top"]) == 3 and (entry["rank"] > 3 or str(entry["token_id"]) in entry["top"]) for entry in answer["logprobs"])
    assert 0 < len(answer["promoted"]) <= answer["metrics"]["speculative_decoding"]["num_promoted_tokens"]
    timings = answer["timings"]
    assert timings["seconds"] >= sum(timings[f"seconds_{part}"] for part in ("prefill", "draft", "verify", "rest")) > 0
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert lines[-1]["token_ids"] == answer["token_ids"]


def test_several_answers_come_one_after_another(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "hello", *files, "--n", "3", "--temperature", "1", "--seed", "5", "--max-tokens", "10", "--ignore-eos"]
    assert run([*arguments, "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    assert len({answer["text"] for answer in answers}) == 3
    assert run(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out == "".join(f"answer {i} of 3:\n{answer['text']}\n" for i, answer in enumerate(answers, start=1))
    assert printed.err.startswith("30 tokens")


def test_sampling_flags_reach_the_engine(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--top-k", "9", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.1", "--presence-penalty", "0.1"]
    flags += ["--frequency-penalty", "0.2", "--temperature", "0.9", "--seed", "4", "--min-tokens", "2", "--stop", "~~~", "--stop", "^^^"]
    assert run(["generate", "hello", *files, *flags, "--ignore-eos", "--max-tokens", "6", "--json"]) == 0
    params = json.loads(capsys.readouterr().out)["params"]
    given = {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.2}
    given |= {"temperature": 0.9, "seed": 4, "min_tokens": 2, "stop": ["~~~", "^^^"], "ignore_eos": True, "max_tokens": 6}
    assert given.items() <= params.items()


def test_a_stop_string_ends_the_answer(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "hello", *files, "--max-tokens", "20", "--json", "--margin", "off"]
    assert run(arguments) == 0
    whole = json.loads(capsys.readouterr().out)["text"]
    assert run([*arguments, "--stop", whole[4:6]]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", whole[4:6])
    assert answer["text"] == whole[: whole.index(whole[4:6])]


@pytest.mark.parametrize("drafter", ["ngram", "the model itself"])
def test_other_drafters_answer_the_same_when_strict(files: list[str], drafter: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["generate", "abcabcabc", *files[:2], "--dtype", "fp32", "--max-tokens", "20", "--json"]
    name, algorithm = ("ngram", "NGRAM") if drafter == "ngram" else (files[1], "STANDALONE")
    assert run([*common, "--drafter", "none"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert run([*common, "--drafter", name, "--speculative-algorithm", algorithm, "--margin", "off"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["token_ids"] == plain["token_ids"]
    assert drafted(answer) > 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_one_line_and_the_answer_comes(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "hello", *files, "--max-tokens", "4", "--trace", "/dev/full"]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip()
    assert printed.err.splitlines()[0] == "warning: the trace ends here: No space left on device"


def test_models_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "--json"]) == 0
    assert "smollm2-135m" in [row["name"] for row in json.loads(capsys.readouterr().out)]
    assert run(["models"]) == 0
    assert "qwen3-8b" in capsys.readouterr().out
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "models", "demo"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    printed = capsys.readouterr().out
    assert "Usage" in printed
    assert "Examples:" in printed
    assert printed.count(f"adaptivespec {command}") > 1


def test_the_packaged_prompts_are_a_mixed_set() -> None:
    assert len(load_prompts()) >= 20


def test_a_drawn_tree_names_every_node() -> None:
    record = StepRecord(TreeShape(2, 2, 4), [1, 2, 3, 4], [-1, 0, 0, 1], [1, 3], [False, True], [0.0, -0.7], 9, 0.5, 0.5, 0.7, 1, 0, 0, 0)
    from rich.console import Console

    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(draw_tree(record, lambda token: f"t{token}"))
    lines = console.export_text().splitlines()
    assert "'t1' (last token)" in lines[0]
    assert any("'t4' promoted, p / p_top1 = 0.50" in line for line in lines)
    assert any("'t9' (target)" in line for line in lines)
    assert len(lines) == 5


def test_an_answer_is_written_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from adaptivespec.cli.render import show

    show(Console(), "a\tb :smile: [red]\r\n", False)
    assert capsys.readouterr().out == "a\tb :smile: [red]\r\n"
