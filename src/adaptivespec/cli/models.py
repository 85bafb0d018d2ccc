"""`adaptivespec models`: what can be loaded by name."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .options import to_json


def models(json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """List the short names of models and their drafters.

    Any other Llama 3.x, Qwen2 or Qwen3 model works by folder, .gguf file or hub id.

    Examples:

        adaptivespec models

        adaptivespec models --json
    """
    from ..models.catalogue import PRESETS

    rows = [{"name": p.name, "model": p.repo_id, "drafter": p.drafter, "about": p.description} for p in PRESETS.values()]
    if json:
        typer.echo(to_json(rows))
        return
    table = Table()
    for name in ("name", "model", "drafter", "about"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)
    Console().print("Any other Llama 3.x, Qwen2 or Qwen3 model: give a folder, a .gguf file or a hub id.", style="dim")
