# Two commands do everything from a bare clone: `make demo` runs the main job, `make test` passes the tests.
# A line that begins with a dash is allowed to fail; nothing here needs root except setup-system.

PYTHON ?= python3
BIN := .venv/bin
RUN := $(BIN)/resihp
HOME_OF_DEMO := .resihp-demo
# `make setup TORCH=site` uses the torch that PYTHON has and installs no other; .venv remembers it.
TORCH_OF_SITE := .venv/torch-of-site.txt
TORCH ?= $(if $(wildcard $(TORCH_OF_SITE)),site)
$(if $(filter-out site,$(TORCH)),$(error TORCH=$(TORCH) is unknown; TORCH=site uses the torch that PYTHON has))

.PHONY: help setup setup-system demo test test-pure test-integration quick lint bench gpu bounds soak clean

# Most of a test's time is processes that start: they find themselves compiled.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "make demo     train on 8 workers of 4 virtual nodes, lose two of them, get one back, show what happened"
	@echo "make test     all tests but those that take minutes each (sets itself up)"
	@echo "make quick    the pure tests, in four minutes: without torch, clusters, databases that are servers, and jobs"
	@echo "make soak     all tests, the longest of them, on all releases of Slurm: takes hours"
	@echo "make bounds   a few tests with the lowest versions of libraries that are allowed"
	@echo "make lint     ruff and mypy"
	@echo "make setup    .venv with what constraints.txt names, torch for CPUs; TORCH=site PYTHON=...: with the torch that this Python has"
	@echo "make gpu      on a machine with one: what a GPU can show, in nine minutes; says in a line what is missing where there is none"
	@echo "make bench    recovery, overhead, changes of layout, steady state, detection, planning, the ledger, each against its baseline"

setup: .venv/complete
	@if [ "$(TORCH)" = site ] && [ ! -f $(TORCH_OF_SITE) ]; then \
	  echo ".venv has a torch of its own; make clean, then make setup TORCH=site PYTHON=$(PYTHON)" >&2; exit 1; fi

.venv/complete: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	  || { echo "resihp needs Python 3.11, 3.12 or 3.13 (megatron-core has no later one); try: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' \
	  || { echo "$(PYTHON) cannot make virtual environments; try: apt-get install python3-venv" >&2; exit 1; }
ifeq ($(TORCH),site)
	@$(PYTHON) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' \
	  || { echo "$(PYTHON) has no torch; try: make setup TORCH=site PYTHON=/path/to/the/python/that/has/it" >&2; exit 1; }
	$(PYTHON) -m venv --system-site-packages .venv
	$(PYTHON) -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])' \
	  > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch-of-site.pth"
	$(PYTHON) -c 'import importlib.metadata; print("torch==" + importlib.metadata.version("torch"))' > $(TORCH_OF_SITE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(TORCH_OF_SITE) -e '.[train,examples,dev]'
else
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,examples,dev]'
endif
	@touch $@

# What only tests need from the system. They start clusters of their own and use nothing in /etc; without these programs
# they skip. Never fails: `make test` goes on.
SYSTEM_PROGRAMS := slurmctld slurmd slurmdbd munged scontrol srun mariadbd bindfs initdb chromium patchelf
SYSTEM_PACKAGES := slurmctld slurmd slurmdbd slurm-client munge mariadb-server bindfs postgresql chromium patchelf
# Other releases of Slurm, and the suite that has each.
OTHER_SLURMS := 24.11:trixie 26.05:sid
RESIHP_TEST_RELEASES ?= /opt/resihp-tests
export RESIHP_TEST_RELEASES

# What `make soak` runs on each release of Slurm.
SLURM_TESTS := tests/integration/test_slurm_*.py $(addprefix tests/integration/,test_cluster.py test_site_hook.py test_doctor.py test_init.py) tests/slurm

setup-system:
	@PATH="$$PATH:/usr/sbin:/sbin$$(printf ':%s' /usr/lib/postgresql/*/bin)"; missing=; \
	for program in $(SYSTEM_PROGRAMS); do command -v $$program >/dev/null || missing="$$missing $$program"; done; \
	if [ -z "$$missing" ]; then :; else \
	install="apt-get install -y --no-install-recommends $(SYSTEM_PACKAGES)"; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "system packages: installing $(SYSTEM_PACKAGES)" >&2; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  { apt-get update -qq; $$install -qq; } >&2 \
	  || echo "system packages: not installed; tests that need them will be skipped" >&2; \
	else \
	  echo "system packages:$$missing not found, tests that need them will be skipped; try: sudo $$install" >&2; \
	fi; fi
	-@for slurm in $(OTHER_SLURMS); do \
	  if [ -x "$(RESIHP_TEST_RELEASES)/slurm-$${slurm%:*}/bin/slurmctld" ]; then continue; fi; \
	  if [ "$$(id -u)" != 0 ]; then echo "Slurm $${slurm%:*}: not unpacked, its tests will be skipped; try: sudo make setup-system" >&2; continue; fi; \
	  tests/integration/slurm_releases.sh "$(RESIHP_TEST_RELEASES)" "$${slurm%:*}" "$${slurm#*:}" \
	  || echo "Slurm $${slurm%:*}: not unpacked, its tests will be skipped" >&2; \
	done

demo: export RESIHP_STATE = $(HOME_OF_DEMO)/state
demo: setup
	rm -rf $(HOME_OF_DEMO)
	RESIHP_HOME=$(HOME_OF_DEMO) $(RUN) run --local --nodes 4 --gpus-per-node 2 --tp 2 --pp 2 \
	  --fault crash:rank=5@iteration=10,phase=backward --fault kill:rank=1@iteration=30,phase=forward \
	  -- $(BIN)/python examples/pretrain_gpt.py --layers 6 --iterations 45
	RESIHP_HOME=$(HOME_OF_DEMO) $(RUN) history failures
	RESIHP_HOME=$(HOME_OF_DEMO) $(RUN) history plans
	RESIHP_HOME=$(HOME_OF_DEMO) $(RUN) history reconfigurations
	RESIHP_HOME=$(HOME_OF_DEMO) $(RUN) status

# Integration tests wait for most of their time, so the pure tests run beside them, at a lower priority. Tests that compare
# measured times run last, with nothing beside them.
test: setup setup-system
	@echo "the pure tests and the integration tests run side by side; each prints its results when it has ended"
	$(MAKE) --jobs=2 --output-sync=target test-pure test-integration
	$(BIN)/python -m pytest tests/integration -m "alone and not soak"

# The planner's search is compiled first, once: otherwise each worker of pytest compiles it by itself, for half a minute.
test-pure:
	$(BIN)/python -c 'from resihp.scheduler import anytime; anytime.load()'
	nice -n 5 $(BIN)/python -m pytest -n 2 --dist worksteal tests --ignore tests/integration

test-integration:
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/integration -m "not alone and not soak"

# For use between two changes: the core with a quarter of the seeds that `make test` has, the rule book, and the parts of
# the wrapper that decide. Left out: what trains, starts jobs or many processes, databases, commands and their output.
QUICK_TESTS := $(wildcard tests/test_*.py) $(addprefix tests/,resihp slurm wrapper/config wrapper/launch wrapper/slurm_tasks)
SLOW_TESTS := resihp/executor resihp/worker resihp/record/test_packing.py resihp/test_package.py \
  resihp/controller/tuning/test_fuzz_tuning.py resihp/detector/offline slurm/test_contract.py slurm/test_site_hook.py
quick: setup
	$(BIN)/python -c 'from resihp.scheduler import anytime; anytime.load()'
	RESIHP_FUZZ_SEEDS=125 RESIHP_CHECKED_PLANS=500 $(BIN)/python -m pytest -n 2 --dist worksteal $(QUICK_TESTS) \
	  $(addprefix --ignore tests/,$(SLOW_TESTS))

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/reconfigure.py
	$(BIN)/python benchmarks/steady.py
	$(BIN)/python benchmarks/overlap.py
	$(BIN)/python benchmarks/walks.py
	$(BIN)/python benchmarks/rendezvous.py
	$(BIN)/python -m benchmarks.communicators
	$(BIN)/python benchmarks/detector.py
	$(BIN)/python -m benchmarks.worlds --jobs 4
	$(BIN)/python benchmarks/prediction_cost.py
	$(BIN)/python benchmarks/trace.py
	$(BIN)/python -m benchmarks.planner
	$(BIN)/python benchmarks/idle_time.py
	$(BIN)/python benchmarks/rules.py
	$(BIN)/python benchmarks/pipelines.py warm-up
	$(BIN)/python benchmarks/pipelines.py tuner
	$(BIN)/python -m benchmarks.ledger_ingest reports
	$(BIN)/python -m benchmarks.ledger_ingest sustained
	$(BIN)/python -m benchmarks.ledger_ingest records
	$(BIN)/python -m benchmarks.ledger_size
	$(BIN)/python -m benchmarks.lemons
	$(BIN)/python -m benchmarks.ledger_queries
	$(BIN)/python -m benchmarks.fleet_numbers
	$(BIN)/python benchmarks/report.py
	$(BIN)/python benchmarks/answers.py

# A first look of nine minutes. BLOCKS="train nccl" runs these alone, MINUTES=5 bounds all together, FULL=1 measures against
# what is asked for, NCCL=.../libnccl.so.2 is for the blocks with several ranks on one GPU, which need 2.30 or later.
gpu:
	@if [ -x $(BIN)/python ]; then python=$(BIN)/python; else python=$(PYTHON); fi; \
	$$python -m benchmarks.gpu $(BLOCKS) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(FULL),--full) $(if $(NCCL),--nccl $(NCCL))

# With the lowest versions that pyproject.toml allows, in an environment of their own.
BOUNDS := .venv-bounds
BOUNDS_TESTS := $(addprefix tests/,wrapper/test_cli.py wrapper/config wrapper/output/test_render.py db/test_engine.py db/test_projection.py \
  resihp/record resihp/protocol/test_framing.py)

bounds:
	rm -rf $(BOUNDS)
	$(PYTHON) -m venv $(BOUNDS)
	$(PYTHON) -m tests.lower_bounds postgres metrics > $(BOUNDS)/lowest.txt
	$(BOUNDS)/bin/python -m pip install --quiet --disable-pip-version-check -r $(BOUNDS)/lowest.txt hypothesis pytest pytest-timeout
	$(BOUNDS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	$(BOUNDS)/bin/resihp --help > /dev/null
	RESIHP_STATE=$(BOUNDS)/state $(BOUNDS)/bin/resihp jobs --json
	$(BOUNDS)/bin/python -m pytest -q $(BOUNDS_TESTS)

soak: setup bounds
	RESIHP_FUZZ_SEEDS=50000 $(BIN)/python -m pytest -n 2 tests/resihp/controller --timeout 7200
	$(BIN)/python -m tests.mutants
	if [ "$$(id -u)" = 0 ]; then $(BIN)/python -m tests.hostile_homes; fi
	$(BIN)/python -m tests.mutants --target edges --mutants 100
	RESIHP_CHECKED_PLANS=10000 $(BIN)/python -m pytest tests/resihp/pipeline --timeout 3600
	RESIHP_STRICT_ORDER=1 $(BIN)/python -m pytest tests/resihp/executor tests/integration --timeout 600
	RESIHP_BACKEND=nccl-like $(BIN)/python -m pytest -m "soak or not soak" tests/resihp/executor $(addprefix tests/integration/test_,takeover.py reconfiguration.py survival.py bf16.py slow.py slow_link.py) --timeout 1200
	RESIHP_SOAK=1 RESIHP_CALLS_S=600 $(BIN)/python -m pytest -m "soak or not soak" $(SLURM_TESTS) $(addprefix tests/integration/test_,takeover.py reconfiguration.py survival.py bf16.py slow_shapes.py) --timeout 1200
	for slurm in $(OTHER_SLURMS); do \
	  RESIHP_TEST_SLURM=$${slurm%:*} RESIHP_SOAK=1 RESIHP_CALLS_S=600 $(BIN)/python -m pytest -m "soak or not soak" $(SLURM_TESTS) --timeout 1200 || exit 1; \
	done
	$(BIN)/python -m pytest -m soak tests/db tests/benchmarks tests/integration/test_nccl_contract.py --timeout 3600
	RESIHP_CHAINS=200 $(BIN)/python -m pytest tests/resihp/executor/test_any_layout.py --timeout 3600

clean:
	rm -rf .venv $(BOUNDS) .resihp $(HOME_OF_DEMO) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
