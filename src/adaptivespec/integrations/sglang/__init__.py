"""The SGLang plug-in: `register` is the entry point that SGLang calls in every process."""

from __future__ import annotations

import os


def register() -> None:
    """Hook the method into SGLang when the environment variable ADAPTIVESPEC holds settings; do nothing at all otherwise.

    Raises:
        SystemExit: bad settings, or an SGLang whose inside is not the one this plug-in knows. SGLang only logs exceptions of plug-ins
            and would serve on without the method; SystemExit it lets through, in every process.
    """
    if not os.environ.get("ADAPTIVESPEC", "").strip():
        return
    from .plugin import start

    start()
