"""The table of places and its check, without SGLang: a look-alike stands in."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from adaptivespec.errors import UserError
from adaptivespec.integrations.sglang import hooks
from adaptivespec.integrations.sglang.hooks import TABLE, Finding, Touch, inspect_all, require, require_version
from adaptivespec.integrations.sglang.plugin import Plugin


@pytest.fixture
def look_alike(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("look_alike")

    class Worker:
        topk: int

        def step(self, batch: object, on_publish: object = None) -> None: ...

    def sample(verify_input: object, *, flag: bool = True) -> None: ...

    module.Worker, module.sample = Worker, sample  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "look_alike", module)
    monkeypatch.setattr(hooks, "installed_version", lambda: "0.5.23")
    return module


@pytest.mark.parametrize(
    ("touch", "problem"),
    [
        (Touch("look_alike.Worker.step", "around", ("self", "batch", "on_publish"), "x"), ""),
        (Touch("look_alike.sample", "around", ("verify_input", "flag"), "x"), ""),
        (Touch("look_alike.Worker", "fields", ("topk", "step"), "x"), ""),
        (Touch("look_alike.Worker.step", "around", ("self", "batch"), "x"), "parameters are (self, batch, on_publish), not (self, batch)"),
        (Touch("look_alike.Worker.stepp", "around", ("self",), "x"), "AttributeError"),
        (Touch("no_such_module.f", "call", (), "x"), "ModuleNotFoundError"),
        (Touch("look_alike.Worker", "fields", ("topk", "gone"), "x"), "no attribute gone"),
    ],
)
def test_every_difference_is_found(look_alike: types.ModuleType, touch: Touch, problem: str) -> None:
    (finding,) = inspect_all([touch])
    assert finding.problem.startswith(problem)
    assert bool(finding.problem) == bool(problem)


def test_a_mismatch_is_one_line_that_names_the_place(look_alike: types.ModuleType) -> None:
    findings = [Finding(Touch("a.b", "call", (), "x"), ""), Finding(Touch("a.c", "call", (), "x"), "no attribute c")] * 2
    with pytest.raises(UserError) as error:
        require(findings)
    assert str(error.value).startswith("SGLang 0.5.23 is not built as expected at a.c: no attribute c (and 1 more); tested with 0.5.23;")
    assert "\n" not in str(error.value)
    require(findings[:1])


def test_only_tested_versions_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "installed_version", lambda: "0.5.24")
    with pytest.raises(UserError, match=r"SGLang 0\.5\.24 was not tested with AdaptiveSpec"):
        require_version(False)
    require_version(True)


def test_every_handler_exists_and_every_place_stands_once() -> None:
    handlers = [touch.handler for touch in TABLE if touch.handler]
    assert all(callable(getattr(Plugin, handler)) for handler in handlers)
    assert all(touch.handler for touch in TABLE if touch.kind in ("around", "resolution"))
    assert len({touch.target for touch in TABLE}) == len([touch for touch in TABLE])


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    kept = {name: value for name, value in os.environ.items() if name != "ADAPTIVESPEC"}
    return subprocess.run([sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True, check=False)


def test_without_settings_the_entry_point_does_nothing_at_all() -> None:
    code = (
        "import sys; from adaptivespec.integrations.sglang import register; before = set(sys.modules); register(); "
        "print(sorted(set(sys.modules) - before), [m for m in ('torch', 'pydantic', 'sglang') if m in sys.modules])"
    )
    assert run(code).stdout.strip() == "[] []"
    assert run(code, ADAPTIVESPEC="  ").stdout.strip() == "[] []"


def test_bad_settings_stop_the_process_past_a_handler_of_exceptions() -> None:
    """As SGLang's loader calls it: what it would only log must end the process."""
    code = "from adaptivespec.integrations.sglang import register\ntry:\n    register()\nexcept Exception:\n    pass\nprint('served on')"
    done = run(code, ADAPTIVESPEC='{"margn": 0.2}')
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.strip().splitlines()[-1] == "adaptivespec: unknown setting 'margn'; did you mean 'margin'?"
