# Every target sets itself up: a virtual environment in .venv, nothing global.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.ready-dev
PEERS := .peers/.ready

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint format bench faults soak dev clean

MINUTES ?= 60

# The main job: an agent that is killed in the middle and finishes all the same.
demo: $(READY)
	$(BIN)/python -m examples.licence_report.demo

test: lint $(PEERS)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive rebuno_sync
	$(BIN)/python -m tests.audit

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(DEV) $(PEERS)
	$(BIN)/python -m benchmarks

# Runs in which processes are killed, connections cut, disks filled, clocks set.
faults: $(DEV)
	$(BIN)/python -m tests.faults

# A bounded load for an hour, which must not make anything grow.
soak: $(DEV)
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES)

# A kernel to develop against, on a file in the working directory.
dev: $(READY)
	$(BIN)/rebuno-sync dev --db rebuno.sqlite3

$(READY): setup.cfg setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[kernel]'
	touch $(READY)

$(DEV): $(READY)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(DEV)

# The official SDK, to test against; tests that need it say so when it cannot be had.
$(PEERS): tests/peers.py | $(DEV)
	mkdir -p .peers
	$(BIN)/python -m tests.peers && touch $(PEERS) || echo "the official SDK is not to be had now"

clean:
	rm -rf $(VENV) .peers .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
