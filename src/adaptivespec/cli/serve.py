"""`adaptivespec serve`: check settings, hand them to the plug-in of an engine, and become that engine's stock server."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UserError, nearest

ENGINES = ("sglang",)
"""Engines that a plug-in serves."""


def require_engine(name: str) -> None:
    """Raise UserError for an engine without a plug-in."""
    if name not in ENGINES:
        raise UserError(f"no plug-in for engine {name!r}{nearest(name, ENGINES)}")


def serve(
    context: typer.Context,
    engine: Annotated[str, typer.Option(help=f"Which engine: {', '.join(ENGINES)}.")] = "sglang",
    speculative_config: Annotated[
        str, typer.Option(help='Settings as JSON or a file: \'{"margin": 0.2, "policy": "adaptive"}\'; default: ADAPTIVESPEC, else {}.')
    ] = "",
) -> None:
    """Start an engine's own server with AdaptiveSpec inside; its flags follow after `--`.

    The same as ADAPTIVESPEC='{...}' before the engine's own command, with settings and engine checked first. The tree's shape comes from
    the settings, so leave --speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens out.

    Examples:

        adaptivespec serve --engine sglang -- --model-path Qwen/Qwen3-8B --speculative-algorithm EAGLE3 \\
            --speculative-draft-model-path AngelSlim/Qwen3-8B_eagle3

        adaptivespec serve --speculative-config '{"policy": "static", "margin": 0.1}' -- --model-path ./my-model \\
            --speculative-algorithm EAGLE3 --speculative-draft-model-path ./my-head
    """
    require_engine(engine)
    flags = list(context.args)
    if not flags:
        raise UserError(
            "the engine's own flags are missing: adaptivespec serve --engine sglang -- --model-path ... --speculative-algorithm ..."
        )
    from ..integrations.sglang import hooks
    from ..integrations.sglang.settings import ENVIRONMENT, load_settings

    text = speculative_config or os.environ.get(ENVIRONMENT, "").strip() or "{}"
    settings = load_settings(text)
    hooks.require_version(settings.allow_untested_version)
    hooks.require_found()
    script = Path(sys.executable).with_name("sglang")
    command = [str(script), "serve"] if script.is_file() else [sys.executable, "-m", "sglang.launch_server"]
    sys.stdout.flush()
    os.execve(command[0], [*command, *flags], {**os.environ, ENVIRONMENT: text})
