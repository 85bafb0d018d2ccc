"""The report: one page with everything inside, figures that are PNGs, the command around them."""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fake_run import FOUR, fake_answers, fake_run, write_run

from adaptivespec.cli.main import run as command
from adaptivespec.evaluation.analysis import analyse
from adaptivespec.evaluation.figures import DARK, LIGHT, figures, png
from adaptivespec.evaluation.findings import Interval
from adaptivespec.evaluation.report import number, page, percent, points, signed

NAMES = ["accuracy-by-task", "accuracy-and-speed", "accept-length", "ablation"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = fake_run(FOUR, {"gsm8k": 40, "math500": 30})
    return write_run(tmp_path_factory.mktemp("runs") / "run", run, fake_answers(run))


class Outside(HTMLParser):
    """Collects whatever a page would fetch, and checks that tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "srcset", "href")]
        assert tag not in ("script", "link", "iframe", "b")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_from_outside(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["report", str(folder)]) == 0
    text = (folder / "report.html").read_text()
    outside = Outside()
    outside.feed(text)
    assert outside.open == []
    assert len(outside.fetched) == 2 * len(NAMES)
    assert all(value.startswith("data:image/png;base64,") for value in outside.fetched)
    assert not re.search(r"url\(|@import|https?://", text)
    assert "prefers-color-scheme: dark" in text
    for name in NAMES:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for said in ("adaptivespec eval --arms &#39;a; b&#39;", "not in a checkout", "Interaction", "static:3,4,4", "2030-01-01"):
        assert said in text
    assert "&#39;&lt;b&gt;&#39;" in text  # a promoted token, not a tag
    assert "Not finished" not in text
    printed = capsys.readouterr()
    assert all(arm in printed.out for arm in ("static:3,4,4", "adaptivespec", "gsm8k", "math500"))
    assert max(map(len, printed.out.splitlines())) <= 80
    assert "4 figures" in printed.err


def test_json_has_all_numbers_and_writes_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = write_run(tmp_path / "copy", json.loads((folder / "run.json").read_text()), [])
    (copy / "answers.jsonl").write_bytes((folder / "answers.jsonl").read_bytes())
    before = sorted(copy.iterdir())
    assert command(["report", str(copy), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    run = json.loads((folder / "run.json").read_text())
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert said == json.loads(json.dumps(dataclasses.asdict(analyse(run, rows))))
    assert sorted(copy.iterdir()) == before


@pytest.mark.parametrize("answers", [0, 1, 57])
def test_an_unfinished_run_says_what_is_missing(tmp_path: Path, answers: int, capsys: pytest.CaptureFixture[str]) -> None:
    run = fake_run(FOUR, {"gsm8k": 20, "math500": 5})
    write_run(tmp_path, run, fake_answers(run)[:answers])
    out = tmp_path / "page.html"
    assert command(["report", str(tmp_path), "--out", str(out)]) == 0
    assert f"{125 - answers} answers are missing" in out.read_text()
    assert f"not finished: {125 - answers} answers are missing" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("arms", ["margin; adaptivespec", "ar", "static; adaptivespec:margin=0.3; adaptivespec:margin=0.7", "ar; ar+tree"])
def test_runs_without_a_reference_or_plain_decoding(tmp_path: Path, arms: str) -> None:
    run = fake_run(arms, {"humaneval": 12})
    write_run(tmp_path, run, fake_answers(run))
    assert command(["report", str(tmp_path)]) == 0
    assert "ablation" not in figures(analyse(run, fake_answers(run)))
    assert "kappa 0.3" not in (tmp_path / "report.html").read_text()  # only the figure names it


def test_figures_are_drawn_for_light_and_for_dark(folder: Path) -> None:
    run = json.loads((folder / "run.json").read_text())
    drawn = figures(analyse(run, fake_answers(run)))
    assert list(drawn) == NAMES
    light, dark = png(drawn["ablation"]), png(drawn["ablation"], DARK)
    assert light != dark
    assert struct.unpack(">II", light[16:24]) == struct.unpack(">II", dark[16:24])
    for theme in (LIGHT, DARK):  # text against its background, WCAG's ratio
        assert contrast(theme.text, theme.background) > 10
        assert all(contrast(colour, theme.background) > 2 for colour in theme.series)


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_run_that_was_taken_up_with_other_versions_says_so(folder: Path) -> None:
    run: dict[str, Any] = json.loads((folder / "run.json").read_text())
    analysis = analyse(run, [])
    assert "other versions" not in page(run, analysis, {})
    run["sessions"].append({**run["sessions"][0], "versions": {"adaptivespec": "1"}})
    text = page(run, analysis, {})
    assert "other versions" in text
    assert "Went on" in text


def test_numbers_as_they_are_shown() -> None:
    share = Interval(0.45, 0.3625, 0.541)
    assert [percent(share), points(share), number(share), signed(Interval(0.1))] == [
        "45.0 (36.2 to 54.1)", "+45.0 (+36.2 to +54.1)", "0.45 (0.36 to 0.54)", "+0.100"
    ]  # fmt: skip


def test_what_is_wrong_is_one_line(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["report", str(tmp_path / "none")]) == 2
    assert "holds no evaluation: cannot read run.json (No such file or directory)" in capsys.readouterr().err
    assert command(["report", str(folder), "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert "its folder is missing or read-only" in capsys.readouterr().err
    monkeypatch.setattr("adaptivespec.evaluation.figures.importlib.util.find_spec", lambda name: None)
    assert command(["report", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "figures need the library matplotlib: pip install 'adaptivespec[eval]'" in error
    assert error.count("\n") == 1
