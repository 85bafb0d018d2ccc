"""The report as Markdown: numbers between markers, figures beside it, what a reader should hold against it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fake_run import FOUR, fake_answer, fake_answers, fake_run, write_run

from adaptivespec.cli.main import run as command
from adaptivespec.errors import UserError
from adaptivespec.evaluation import figures, report
from adaptivespec.evaluation.analysis import analyse
from adaptivespec.evaluation.markdown import BEGIN, END, markdown, splice, troubles

SHAPES = {"seen": [[3, 4, 4], [7, 1, 8]], "steps": [0] * 7 + [1] * 4}


def quality(**tasks: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    run = fake_run(FOUR, tasks or {"gsm8k": 40, "math500": 30})
    return run, [{**row, "shapes": SHAPES} if row["arm"] in ("tree", "adaptivespec") else row for row in fake_answers(run)]


def timed() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    run = fake_run(f"{FOUR}; static:6,8,16", {"gsm8k": 5, "math500": 4}, batch=1)
    run["settings"]["interleave"] = True
    return run, fake_answers(run, 1)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return write_run(tmp_path / "answers", *quality()), write_run(tmp_path / "speed", *timed())


def assert_tables_are_whole(text: str) -> None:
    """Every row has as many cells as its header."""
    width = 0
    for line in text.replace("\\|", "").splitlines():
        if not line.startswith("|"):
            width = 0
            continue
        assert line.endswith("|")
        assert line.count("|") == (width or line.count("|"))
        width = line.count("|")


def test_a_page_from_two_runs(folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers, speed = folders
    page = tmp_path / "results.md"
    page.write_text(f"# Mine\n\nBefore.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n")
    assert command(["report", str(answers), "--speed", str(speed), "--markdown", str(page)]) == 0
    text = page.read_text()
    assert text.startswith(f"# Mine\n\nBefore.\n\n{BEGIN}\n")
    assert text.endswith(f"{END}\n\nAfter.\n")
    assert "\nold\n" not in text
    linked = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert linked == [f"results/{name}.png" for name in (
        "accuracy-by-task", "accuracy-and-speed", "ablation", "accept-length", "shape-over-time"
    )]  # fmt: skip
    for each in linked:
        assert (tmp_path / each).read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / each).stat().st_size < 100_000
    assert "## Speed at batch 1" in text
    assert "Arms took turns at every question." in text
    assert "`static:6,8,16`" in text  # only the run for speed has it
    assert "on 70 questions; tokens per second" in text
    assert "'<b>'" in text
    assert_tables_are_whole(text)
    assert "Uprights: strict arms" in text  # static:6,8,16
    assert "Speed was measured on fewer than 30 questions of gsm8k, math500" in text
    assert str(tmp_path) not in text  # paths of one machine say nothing elsewhere
    printed = capsys.readouterr()
    assert "written: " in printed.err
    assert printed.out.count("static:6,8,16") == 3
    assert "static:6,8,16" in (answers / "report.html").read_text()
    again = page.read_text()
    assert command(["report", str(answers), "--speed", str(speed), "--markdown", str(page)]) == 0
    assert page.read_text() == again


def test_speed_of_one_task_is_not_shown_as_anothers(tmp_path: Path) -> None:
    accuracy, pace = analyse(*quality()), fake_run(FOUR, {"gsm8k": 5}, batch=1)
    speed = analyse(pace, fake_answers(pace, 1))
    assert figures._speed(speed, "gsm8k", "margin") is not None
    assert figures._speed(speed, "math500", "margin") is None
    assert figures._speed(speed, "all", "margin") is None
    assert set(figures.figures(accuracy, speed)) == set(figures.figures(accuracy))
    for draw in figures.figures(accuracy, speed).values():
        assert figures.png(draw).startswith(b"\x89PNG")


def test_an_unfinished_measurement_of_speed_says_so() -> None:
    run, answers = timed()
    text = markdown((quality()[0], analyse(*quality())), (run, analyse(run, answers[:-3])), {}, "adaptivespec report here")
    assert "**Not finished: 3 answers of the run that measured speed are missing.**" in text


def test_a_bar_in_a_label_ends_no_cell() -> None:
    run = fake_run("ar; goodput_shapes:shapes=1/4/4|5/4/8", {"gsm8k": 4})
    text = markdown((run, analyse(run, fake_answers(run))), None, {}, "adaptivespec report here")
    assert "goodput_shapes" in text
    assert_tables_are_whole(text)


def test_every_number_of_a_table_is_the_analysis() -> None:
    run, answers = quality(gsm8k=40)
    analysis = analyse(run, answers)
    text = markdown((run, analysis), None, {}, "adaptivespec report here")
    for cell in analysis.cells:
        [row] = [line for line in text.splitlines() if line.startswith(f"| `{cell.arm}` | 40 |")]
        assert f" {100 * cell.accuracy.value:.1f} (" in row
        if cell.versus:
            assert f"| {cell.versus.only_this} / {cell.versus.only_reference} | {cell.versus.p:.3f} |" in row
    assert "![" not in text
    assert "Arms ran one after the other" in text


def test_what_went_badly_is_found() -> None:
    run = fake_run("ar; static; margin; tree", {"gsm8k": 40})

    def verdict(arm: str, i: int) -> bool:
        return i % 2 == 0 and not (arm == "margin" and i < 30) and not (arm == "tree" and i == 4)

    seconds = {"ar": 1.0, "static": 0.5, "margin": 0.4, "tree": 1.2}
    answers = [
        fake_answer(
            arm, "gsm8k", i, verdict(arm, i), seconds=s + 0.01 * (i % 3), finish_reason="length" if arm == "margin" and i < 4 else "stop"
        )
        for arm, s in seconds.items()
        for i in range(40)
    ]
    for row in answers:
        row["text"] = "One. Two. " + "And so on and on, as ever and ever again. " * (9 if row["id"] != "gsm8k/0" else 3)
    next(row for row in answers if (row["arm"], row["id"]) == ("tree", "gsm8k/4"))["text"] += "!"
    analysis = analyse(run, answers)
    found = "\n".join(troubles(analysis, analysis))
    assert (
        "gsm8k: more than 5% of answers were cut off by the token limit: `margin` 10.0 % (4, of which 3 repeated themselves without end)."
        in found
    )
    assert "gsm8k, `margin`: worse than `static`, -37.5 (" in found
    assert "`tree`: slower than plain decoding, 0.8" in found
    assert "`tree` is lossless, and yet 1 of 40 texts differ from `static`'s: near-ties" in found
    assert "it is a fault" in "\n".join(troubles(analysis, analysis, exact=True))
    assert "`ar` is lossless" not in found
    assert "Samples are small" in found
    assert troubles(analyse(run, []), analyse(run, [])) == []


def test_splice() -> None:
    assert splice(None, "new\n") == splice(" \n", "new") == f"# Results\n\n{BEGIN}\nnew\n{END}\n"
    assert splice(f"a {BEGIN} b {END} c", "new") == f"a {BEGIN}\nnew\n{END} c"
    for bad in ("text", BEGIN, f"{END} {BEGIN}"):
        with pytest.raises(UserError, match="no lines"):
            splice(bad, "new")


def test_what_does_not_fit_is_one_line(folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers, speed = folders

    def refused(*arguments: str) -> str:
        assert command(["report", str(answers), *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    mine = tmp_path / "mine.md"
    mine.write_text("my own notes")
    assert "mine.md: no lines '<!-- numbers: begin -->'" in refused("--markdown", str(mine))
    assert mine.read_text() == "my own notes"
    assert "expected a file such as " in refused("--markdown", str(tmp_path / "results"))
    assert not (tmp_path / "results").exists()
    assert "its folder is missing or read-only" in refused("--markdown", str(tmp_path / "no" / "page.md"))
    assert "--json prints the numbers of one run and writes nothing" in refused("--json", "--markdown", str(mine))
    assert "holds no evaluation" in refused("--speed", str(tmp_path / "nothing"))
    other = json.loads((speed / "run.json").read_text())
    other["settings"]["model"] = "another"
    (speed / "run.json").write_text(json.dumps(other))
    assert "is no run of the same engine and arms: model 'tiny', not 'another'" in refused("--speed", str(speed))


def test_rules_of_others_are_not_called_strict() -> None:
    run = fake_run("static:3,4,4; typical; window", {"gsm8k": 40})
    answers = [
        fake_answer(arm, "gsm8k", i, i % 2 == 0 and arm != "typical", tokens=8) for arm in run["settings"]["arms"] for i in range(40)
    ]
    for row in answers:
        row["text"] += row["arm"]
    analysis = analyse(run, answers)
    assert analysis.kappas == {"static:3,4,4": 1.0}
    found = "\n".join(troubles(analysis, analysis, exact=True))
    assert "lossless" not in found
    assert "`typical`: worse than" in found


def test_losses_that_the_sample_cannot_show() -> None:
    run = fake_run("static; margin", {"gsm8k": 60})
    answers = [fake_answer(arm, "gsm8k", i, (i < 4) if arm == "static" else 3 <= i < 7) for arm in ("static", "margin") for i in range(60)]
    analysis = analyse(run, answers)
    text = markdown((run, analysis), None, {}, "adaptivespec report here")
    [row] = [line for line in text.splitlines() if line.startswith("| `margin` | 60 |")]
    assert "| 3 / 3 | 1.000 | none |" in row
    assert "might go unnoticed: gsm8k `margin`." in text


def test_longer_answers_take_longer() -> None:
    run, speed = (fake_run("static; margin", {"gsm8k": 4}, batch=batch) for batch in (4, 1))
    tokens = {"static": 10, "margin": 15}
    whole = [fake_answer(arm, "gsm8k", i, True, tokens=count) for arm, count in tokens.items() for i in range(4)]
    begun = [fake_answer(arm, "gsm8k", i, True, tokens=8, seconds=s) for arm, s in {"static": 2.0, "margin": 1.0}.items() for i in range(4)]
    text = markdown((run, analyse(run, whole)), (speed, analyse(speed, begun)), {}, "adaptivespec report here")
    assert " | 15 | 1.50 (1.50 to 1.50) | " in text
    assert "| `margin` | 8.0 | - | 2.00 (2.00 to 2.00) | 1.33 |" in text
    html = report.page(run, analyse(run, whole), {}, (speed, analyse(speed, begun)))
    assert "<td>2.00 (2.00 to 2.00)</td><td>1.33</td></tr>" in html
    assert html.count("<td>-</td><td>-</td></tr>") == 1  # the reference
    silent = [{**row, "tokens": 0} for row in whole]  # a server that counts no tokens
    text = markdown((run, analyse(run, silent)), (speed, analyse(speed, begun)), {}, "adaptivespec report here")
    assert "| `margin` | 8.0 | - | 2.00 (2.00 to 2.00) | - |" in text


def test_provenance_names_weights_drafter_and_kernels() -> None:
    run, answers = quality(gsm8k=4)
    run["settings"]["drafter"] = "/srv/head"
    run["sessions"][-1] |= {"model": "/srv/weights-q4.gguf", "kernels": "native"}
    text = markdown((run, analyse(run, answers)), None, {}, "adaptivespec report here")
    assert " (weights-q4.gguf), drafter head, " in text
    assert ", kernels native, " in text
    run["sessions"][-1]["machine"] = {"platform": "Linux-6.1.2-somebodys-build-x86_64", "cores": 2}
    assert "; platform: Linux-6.1.2; cores: 2." in markdown((run, analyse(run, answers)), None, {}, "adaptivespec report here")
