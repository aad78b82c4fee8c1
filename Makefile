# Everything a developer types. `make demo` and `make test` each work alone on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# One thread: a sum over two threads has other bits than a sum over one. Bytecode is kept, whatever the shell says: it
# saves half a second in each of the some hundred processes that tests start.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Test processes at a time, as many as cores: 2 at least, 6 at most. On two cores a third takes 100 CPU seconds more. A
# file stays in one, for what its tests share. Long files run first: tests/conftest.py.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((n < 2 ? 2 : n > 6 ? 6 : n)))
SHARED := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# The folder of the documentation's versions.
SITE ?= build/site
# What make check runs: where a step becomes a program and where that is judged, but for what trains or draws long.
CHECKED := $(addprefix tests/,ir plan lowering passes verify cost capture)
TRAINING := $(addprefix --ignore=tests/,ir/test_as_strided.py capture/test_ambient.py plan/test_whole_leaves.py passes/test_recompute.py cost/test_memory.py)

.PHONY: help demo check test test-newest test-oldest docs docs-site lint format acceptance bench bench-pipelining bench-tensor bench-disk test-gpu bench-gpu clean

help:
	@echo "make demo        train a small GPT on two local ranks with zero=3 (about three minutes);"
	@echo "                 ARGS='--kill-at 120 --check' kills a rank on the way and compares"
	@echo "make check       the tests of the compiler that start no process, in under a minute"
	@echo "make test        the test suite, on the CPU"
	@echo "make test-newest  the same with the newest packages that pip finds; make test-oldest: with those of tests/oldest.txt"
	@echo "make docs        the documentation site, in build/docs/index.html: a warning is an error"
	@echo "make docs-site   the same as a version of build/site, with a switch between its versions (SITE=folder)"
	@echo "make lint        ruff (format, rules), mypy, pyright on the public API, and import-linter (the order of the folders)"
	@echo "make format      let ruff rewrite the files"
	@echo "make acceptance  the long checks, minutes each: hours in all, but a run that was cut goes on (ARGS='--jobs 2')"
	@echo "make bench       fzero and its peers side by side on the CPU (about half an hour; ARGS=--help)"
	@echo "make bench-pipelining  pipelines beside torch.distributed.pipelining (about fifteen minutes; ARGS=--quick)"
	@echo "make bench-tensor  tensor parallelism beside torch's DTensor and FSDP2 (up to an hour; ARGS=--quick)"
	@echo "make bench-disk  the disk lane beside fio and DeepSpeed's aio op (minutes; ARGS='--folder /local_nvme')"
	@echo "make test-gpu    the tests that need a CUDA device"
	@echo "make bench-gpu   the same on one CUDA device, and shares of larger worlds"

# Stamps: a second call installs nothing, unless pyproject.toml or constraints.txt changed.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 15) else f"fzero needs Python 3.11 to 3.14; {sys.executable} is {v[0]}.{v[1]}. Try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[examples]"
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[examples,test,dev]"
	@touch $(VENV)/.demo $@

$(VENV)/.bench: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[examples,bench,hf]"
	@touch $(VENV)/.demo $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[docs,hf]"
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/python examples/train_gpt.py $(ARGS)

check: $(VENV)/.dev
	$(PYTEST) $(SHARED) -q -m "not gpu and not acceptance and not processes" $(CHECKED) $(TRAINING) $(ARGS)

test: $(VENV)/.dev
	$(PYTEST) $(SHARED) --durations=20 --cpu --ignore=tests/acceptance $(ARGS)

test-newest:
	$(MAKE) test VENV=.venv-newest PIP=".venv-newest/bin/python -m pip --disable-pip-version-check install --quiet --upgrade"

test-oldest:
	$(MAKE) test VENV=.venv-oldest PIP=".venv-oldest/bin/python -m pip --disable-pip-version-check install --quiet -c tests/oldest.txt"

docs: $(VENV)/.docs
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs $(ARGS)

docs-site: docs
	$(BIN)/python docs/_ext/site_versions.py build/docs $(SITE)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

acceptance: $(VENV)/.dev
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m tests.acceptance $(ARGS)

test-gpu: $(VENV)/.dev
	@$(BIN)/python -c 'import torch, sys; sys.exit(None if torch.cuda.is_available() else "make test-gpu: no CUDA device here")'
	$(PYTEST) -m gpu $(ARGS)

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.run $(ARGS)

bench-pipelining: $(VENV)/.bench
	$(BIN)/python -m benchmarks.pipelining $(ARGS)

bench-tensor: $(VENV)/.bench
	$(BIN)/python -m benchmarks.tensor $(ARGS)

bench-disk: $(VENV)/.bench
	$(BIN)/python -m benchmarks.disk $(ARGS)

bench-gpu: $(VENV)/.bench
	$(BIN)/python -m benchmarks.gpu $(ARGS)

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache
