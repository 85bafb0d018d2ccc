"""Starts the stock server many times from one process that imported SGLang once; every start is a fork.

Reads a list of cases as JSON on the command line, each with `argv` (flags, or for `program` adaptivespec its arguments), `variables`
(environment) and `program`; prints one line of JSON per case, with the exit code and all it said.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback
from typing import Any

PROGRAMS = {"server": "sglang.launch_server", "adaptivespec": "adaptivespec", "hooks": ""}


def run(case: dict[str, Any]) -> None:
    """The start itself, in the fork."""
    os.environ.update(case.get("variables", {}))
    if case["program"] == "hooks":
        from sglang.srt.plugins import load_plugins
        from sglang.srt.plugins.hook_registry import HookRegistry

        load_plugins()
        print("hooked:", json.dumps(sorted(HookRegistry._hooks)))
        return
    if missing := os.environ.get("CPU_BED_MISSING") if case["program"] == "adaptivespec" else None:
        import cpu_bed

        cpu_bed.rename(missing)  # the command loads no plug-ins of SGLang, hence not the bed's
    sys.argv = [case["program"], *case["argv"]]
    runpy.run_module(PROGRAMS[case["program"]], run_name="__main__", alter_sys=True)


def forked(case: dict[str, Any]) -> dict[str, Any]:
    """Run a case in a fork of its own."""
    with tempfile.TemporaryFile("w+b") as said:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            code = 1
            try:
                run(case)
                code = 0
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
                if isinstance(error.code, str):  # as Python does on its way out
                    print(error.code, file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return {"code": os.waitstatus_to_exitcode(status), "said": said.read().decode(errors="replace")}


def main() -> None:
    """Import what a server imports, then run the cases."""
    import sglang.srt.entrypoints.http_server
    import sglang.srt.speculative.eagle_worker_v2  # noqa: F401

    for case in json.loads(sys.argv[1]):
        print("case:", json.dumps(forked(case)), flush=True)


if __name__ == "__main__":
    main()
