"""A process of its own with `sglang.Engine`: generates for the prompts on its command line and prints the answers as one line of JSON."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Arguments: the engine's settings, the prompts and the sampling parameters, each as JSON."""
    import sglang

    settings, prompts, params = map(json.loads, sys.argv[1:4])
    engine = sglang.Engine(**settings)
    print("answers:", json.dumps(engine.generate(prompts, params), default=str), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
