#!/usr/bin/env bash
# What the tests of the SGLang plug-in cannot run on a CPU, in one command on a GPU machine; see docs/sglang.md. PYTHON names the interpreter.
PYTHONPATH="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" -m gpu_validation "$@"
