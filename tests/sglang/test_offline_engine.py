"""`sglang.Engine` instead of a server, and the algorithm EAGLE: a head of the first generation, with random weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bed_models import KNOWN, BedModels, make_eagle_head
from reference import Reference
from servers import ANSWER_LIMIT, FLAGS, ROTATION, START_LIMIT, child_environment


def test_offline_engine(bed: BedModels, plain: Reference, tmp_path: Path) -> None:
    settings = {name.replace("-", "_"): value for name, value in FLAGS.items() if name not in ("host", "port")}
    settings |= {
        "model_path": str(bed.target),
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(make_eagle_head(tmp_path / "eagle", bed.target)),
    }
    params = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
    command = [sys.executable, str(Path(__file__).with_name("engine_child.py")), *map(json.dumps, (settings, KNOWN, params))]
    environment = child_environment({"margin": None}, CPU_BED_SHAPES=ROTATION)
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=START_LIMIT + ANSWER_LIMIT, start_new_session=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("answers:")]
    assert lines, done.stderr[-4000:]
    answers = json.loads(lines[0].removeprefix("answers:"))
    assert len(answers) == len(KNOWN)
    for prompt, answer in zip(KNOWN, answers, strict=True):
        plain.assert_same(prompt, answer["output_ids"], plain.answer(prompt)["output_ids"])
        assert len(answer["meta_info"]["adaptivespec"]["shapes"]) > 3
