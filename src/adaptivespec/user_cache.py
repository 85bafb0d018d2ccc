"""Where files that can be made again are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/adaptivespec`, or `~/.cache/adaptivespec`; it need not exist. A relative variable is ignored."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "adaptivespec"
