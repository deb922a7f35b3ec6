# Two commands for a newcomer: `make demo` and `make test`. Both set up .venv by themselves, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
# hundreds of tests start Python: without bytecode each would compile the sources again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test trainer-test lint check site bench long torture verify-all slurm-test versions sizes clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

# train a GPT on Python's own source text over dp=2 x pp=2 x tp=2, draw its loss, let it write
demo: $(VENV)/installed
	$(BIN)/meshwright data stdlib --out runs/data/stdlib --vocab-size 4096
	$(BIN)/meshwright train configs/demo.toml
	$(BIN)/meshwright plot runs/demo
	$(BIN)/meshwright sample runs/demo --prompt "class" --tokens 80

# two processes, each with its own pool of ranks; a file's tests share fixtures and stay together
WORKERS ?= 2
SPLIT := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/installed
	$(BIN)/python -m pytest $(SPLIT)

# the tests that take longest, marked `long`: CI has no time for them on a slow machine
long: $(VENV)/installed
	$(BIN)/python -m pytest $(SPLIT) -m long

# quick tests of the trainer where neither package of tools/ can be imported
trainer-test: $(VENV)/installed
	$(BIN)/python -m tests.support.without_tools

# style and types
lint: $(VENV)/installed
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy

# before every commit
check: lint
	$(BIN)/python -m pytest $(SPLIT) -m "not slow" -x

# docs/ as a site in site/, to be opened from the disk or served by any web server; warnings are errors
site: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/installed
	$(BIN)/python benchmarks/side_by_side.py
	$(BIN)/python benchmarks/executor_overhead.py
	$(BIN)/python benchmarks/expert_layer.py
	$(BIN)/python benchmarks/python_calls.py
	$(BIN)/python benchmarks/bubble_measured.py
	$(BIN)/python benchmarks/guards.py

# runs that are killed, damaged, stopped, hung and poisoned, by seeded chance: `make torture SEED=7`; prints a table
SEED ?= 0
torture: $(VENV)/installed
	$(BIN)/python -m pytest -m "torture or fault" --seed $(SEED)
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile random --hypothesis-seed $(SEED)

# core tests on the oldest and the newest torch, megatron-core and others that pyproject.toml admits: GB of CUDA, once each
versions:
	$(PYTHON) tests/support/versions.py

# a real Slurm on emulated hosts: wants root and Debian's slurmctld slurmd slurm-client munge iproute2
slurm-test: $(VENV)/installed
	$(BIN)/python -m pytest -m slurm -rs

# every combination of layouts, models, schedules: three to four hours on 2 cores; `PART=3/20`: a twentieth
PART ?= 1/1
verify-all: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m all_layouts --part $(PART)

# sizes of rooms in files, lines and syntax nodes, and the spread of capabilities over files: to be looked at
sizes: $(VENV)/installed
	$(BIN)/python -m tests.support.sizes

clean:
	rm -rf $(VENV) .trainer runs build site dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
