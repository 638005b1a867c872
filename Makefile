# PYTHON needs to be 3.11: megatron-core 0.16.1 has no wheel for later ones.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench clean

help:  ## List these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## Create .venv with everything pinned by constraints.txt (CPU torch)

# torch comes first and pinned: left to the dependencies, it drags in gigabytes of CUDA packages.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[megatron,deepspeed,dev]'
	@touch $@

demo: setup  ## Kill a worker of a small Megatron job and watch it go on
	$(BIN)/python -m recipes.demo

lint: setup  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint  ## Check style and types, then run every test
	$(BIN)/python -m pytest

bench: setup  ## Measure what the README's figures come from
	$(BIN)/python -m benchmarks

clean:  ## Remove .venv and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
