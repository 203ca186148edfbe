# Two commands do everything from a bare clone: `make demo` runs the main job, `make test` passes the tests.
# A line that begins with a dash is allowed to fail; nothing here needs root except setup-system.

PYTHON ?= python3
BIN := .venv/bin
RUN := $(BIN)/resihp
HOME_OF_DEMO := .resihp-demo

.PHONY: help setup setup-system demo test lint bench soak clean

help:
	@echo "make demo     train on 8 workers of 4 virtual nodes, lose two of them, get one back, show what happened"
	@echo "make test     all tests (sets itself up)"
	@echo "make lint     ruff and mypy"
	@echo "make bench    recovery, overhead, changes of layout and steady state, each against its baseline"

setup: .venv/complete

.venv/complete: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "resihp needs Python 3.11 or later; try: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' \
	  || { echo "$(PYTHON) cannot make virtual environments; try: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	@touch $@

# What only tests need from the system. Nothing yet: everything below runs on loopback with PyPI packages.
setup-system:
	@echo "system packages: none needed yet (Slurm and PostgreSQL come with the parts that use them)" >&2

demo: setup
	rm -rf $(HOME_OF_DEMO)
	RESIHP_HOME=$(HOME_OF_DEMO) $(RUN) run --local --nodes 4 --gpus-per-node 2 --tp 2 --pp 2 \
	  --fault crash:rank=5@iteration=10,phase=backward --fault kill:rank=1@iteration=30,phase=forward \
	  -- $(BIN)/python examples/pretrain_gpt.py --layers 6 --iterations 45
	RESIHP_HOME=$(HOME_OF_DEMO) $(RUN) history failures
	RESIHP_HOME=$(HOME_OF_DEMO) $(RUN) history plans
	RESIHP_HOME=$(HOME_OF_DEMO) $(RUN) history reconfigurations
	RESIHP_HOME=$(HOME_OF_DEMO) $(RUN) status

test: setup setup-system
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/reconfigure.py
	$(BIN)/python benchmarks/steady.py

soak: setup
	RESIHP_FUZZ_SEEDS=50000 $(BIN)/python -m pytest tests/resihp/controller/test_fuzz.py --timeout 7200
	RESIHP_CHECKED_PLANS=10000 $(BIN)/python -m pytest tests/resihp/pipeline --timeout 3600
	RESIHP_STRICT_ORDER=1 $(BIN)/python -m pytest tests/resihp/executor tests/integration --timeout 600
	RESIHP_CHAINS=200 $(BIN)/python -m pytest tests/resihp/executor/test_any_layout.py --timeout 3600

clean:
	rm -rf .venv .resihp $(HOME_OF_DEMO) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
