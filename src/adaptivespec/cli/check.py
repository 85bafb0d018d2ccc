"""`adaptivespec check`: whether another engine is one that a plug-in of ours fits, without loading a model."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .options import to_json
from .serve import ENGINES, require_engine


def check(
    engine: Annotated[str, typer.Argument(help=f"Which engine: {', '.join(ENGINES)}.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Look at every place where the plug-in touches the installed engine; exit code 1 when one is not as expected.

    Settings in the environment variable ADAPTIVESPEC are checked too. No model is loaded and no server started.

    Examples:

        adaptivespec check sglang

        adaptivespec check sglang --json
    """
    require_engine(engine)
    from ..integrations.sglang import hooks
    from ..integrations.sglang.settings import ENVIRONMENT, load_settings

    settings = load_settings() if os.environ.get(ENVIRONMENT, "").strip() else None
    version = hooks.installed_version()
    hooks.require_found()
    findings = hooks.inspect_all()
    tested = version in hooks.TESTED
    wrong = [finding for finding in findings if finding.problem]
    if json:
        rows = [{**asdict(finding.touch), "ok": not finding.problem, "problem": finding.problem} for finding in findings]
        settled = settings.model_dump(exclude_unset=True) if settings is not None else None
        typer.echo(
            to_json(
                {"engine": engine, "version": version, "tested": tested, "ok": not wrong and tested, "settings": settled, "hooks": rows}
            )
        )
    else:
        console = Console()
        table = Table("", "place", "for")
        table.columns[1].overflow = "fold"
        for finding in findings:
            mark, state = ("no", finding.problem) if finding.problem else ("ok", finding.touch.purpose)
            style = "red" if finding.problem else None
            table.add_row(mark, Text(finding.touch.target.removeprefix("sglang.")), Text(state), style=style)
        console.print(table)
        standing = "tested with the plug-in" if tested else f"[red]not tested[/red] (tested: {', '.join(hooks.TESTED)})"
        console.print(f"SGLang {version}, {standing}: {len(findings) - len(wrong)} of {len(findings)} places verified")
    if wrong or not tested:
        raise typer.Exit(1)
