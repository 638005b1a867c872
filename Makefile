# Two environments. The light one needs Python 3.11: megatron-core 0.16.1 has no wheel for later ones.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The other one holds megatron.training, which comes with the wheels of megatron-core 0.17 and later, for Python 3.12.
PYTHON312 ?= $(shell for p in python3.12 $$HOME/.pyenv/versions/3.12.*/bin/python; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo $$p && break; done)
VENV312 ?= $(VENV)-megatron
BIN312 := $(VENV312)/bin
READY312 := $(VENV312)/.ready

# The layers, see tests/layers.py. Each worker of pytest has two cores for the whole jobs that it starts.
QUICK := 'not long and not exhaustive'
REST := 'long and not exhaustive'
MEGATRON := $(addprefix tests/megatron/test_,arguments.py trackers.py conformance.py) tests/chaos/test_pretrain*.py
WORKERS ?= $(shell expr $$(nproc) / 2)
PARALLEL := $(if $(filter-out 0 1,$(WORKERS)),--numprocesses=$(WORKERS) --dist=loadfile)
# What starts no whole job has one core.
SMALL := --numprocesses=$$(nproc) --dist=loadfile tests/core tests/simulation tests/megatron tests/deepspeed

# Where it is set, each process of a whole job would compile all of it anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-megatron demo test test-light test-megatron test-rest test-all test-strict simulate test-exhaustive lint docs bench clean

help:  ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## Create .venv with everything pinned by constraints.txt (CPU torch)

# torch comes first and pinned: left to the dependencies, it drags in gigabytes of CUDA packages.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[megatron,deepspeed,dev]'
	@touch $@

setup-megatron: $(READY312)  ## Create .venv-megatron with megatron.training (Python 3.12, 5 GB: torch's CUDA build)

# uv, since pip takes minutes to unpack what uv does in seconds.
$(READY312): pyproject.toml constraints-py312.txt $(READY)
	@test -n "$(PYTHON312)" || { echo "Python 3.12 not found: make $(MAKECMDGOALS) PYTHON312=/path/to/python3.12," \
		"or test the rest alone: make test-light" >&2; exit 1; }
	$(PYTHON312) -m venv $(VENV312)
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN312)/python -r constraints-py312.txt
	$(BIN)/uv pip install --quiet --python $(BIN312)/python --no-deps -e .
	@touch $@

demo: setup  ## Kill a worker of a small Megatron job and watch it go on
	$(BIN)/python -m recipes.demo

lint: setup  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.names
	$(BIN)/mypy

test: test-light test-megatron  ## Check style and types; all but most whole jobs, in both environments (15 minutes on 4 cores)

test-light: lint  ## Of that, what needs no megatron.training
	$(BIN)/python -m pytest $(SMALL) -m $(QUICK)
	$(BIN)/python -m pytest $(PARALLEL) -m $(QUICK) tests/chaos tests/cluster tests/core/house/test_layers.py

test-megatron: setup-megatron  ## Of that, what Megatron-LM's own training loop is tested with
	$(BIN312)/python -m pytest $(PARALLEL) -m $(QUICK) $(MEGATRON)

test-rest: setup setup-megatron  ## The other whole jobs
	$(BIN)/python -m pytest $(PARALLEL) -m $(REST)
	$(BIN312)/python -m pytest $(PARALLEL) -m $(REST) $(MEGATRON)

test-all: test test-rest  ## Both: an hour on 2 cores

simulate: setup  ## Try SCHEDULES of failures (a million) on the state machines, without a process
	$(BIN)/python -m tests.simulation --schedules $(or $(SCHEDULES),1000000)

test-strict: setup setup-megatron  ## The quick whole jobs over a backend that has NCCL's rules (docs/communicators.md)
	FT_COMM=strict $(BIN)/python -m pytest $(PARALLEL) -m $(QUICK) tests/chaos
	FT_COMM=strict $(BIN312)/python -m pytest $(PARALLEL) -m $(QUICK) tests/chaos/test_pretrain*.py

test-exhaustive: setup  ## More layouts and seeds of what `make test-all` runs
	$(BIN)/python -m pytest -m exhaustive

docs: setup  ## Build the pages of docs/, with the API from the docstrings: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: setup  ## Measure what the README's figures come from
	$(BIN)/python -m benchmarks

clean:  ## Remove .venv and caches
	rm -rf $(VENV) $(VENV312) .pytest_cache .ruff_cache .mypy_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
