# `make help` lists the commands. All run in a fresh clone, and install what they need into .venv.

PYTHON ?= python3
URL ?= sqlite:///$(CURDIR)/.state/demo.db
VENV := .venv
BIN := $(VENV)/bin
# Number of tests at a time, on two cores. Most tests wait for most of their time. One worker at a time runs the tests
# that compute (tests/conftest.py). The tests of `make quick` compute for a fifth of their time.
WORKERS ?= 6
QUICK_WORKERS ?= 8
SECONDS ?= 600
MINUTES ?= 90
OUT ?= .state/compare
# At least 300 cycles of each fault must be decided, and some faults hit nothing in a tenth of their cycles.
CYCLES ?= 345
CHAOS := $(patsubst %,tests/faults/test_%.py,chaos crowd majority)
# Without the tests that start a process each, or interrupt a call at each of its steps.
QUICK := tests/unit tests/backends/memory \
	$(foreach file,state_machine kernel_fork_exit finalizers interrupted_with election_edges,--ignore tests/unit/test_$(file).py) \
	$(foreach backend,memory sqlite redis,$(foreach suite,Lock With Backend,tests/conformance/test_$(backend).py::Test$(suite)))
SERVERS := redis,consul,etcd,zookeeper,postgresql,pgbouncer,chromium
SHELL := /bin/sh
.DELETE_ON_ERROR:
# The tests start thousands of processes, each of which would otherwise compile the same modules again.
unexport PYTHONDONTWRITEBYTECODE

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## /\1\t/p' Makefile | expand -t 14

demo: $(VENV)/.user ## processes elect a leader, it is killed, another takes over; URL=redis://… for another backend
	@mkdir -p .state
	$(BIN)/multilock demo --url "$(URL)"

test: $(VENV)/.dev servers ## everything that must be green: style, types, all tests on real servers
	# The tests are compiled once, else each worker would do it.
	$(MAKE) --no-print-directory --output-sync --jobs 2 lint pyright compiled
	# mypy takes only the processor time that the tests leave. A test that failed runs again alone (tests/again.py says
	# which tests do, and which never). Chaos judges which process was late, so it starts after all other tests, and runs
	# one test at a time: each keeps both cores busy.
	export MULTILOCK_REQUIRE=$(SERVERS); failed=; \
	{ nice -n 19 $(BIN)/mypy && nice -n 19 $(BIN)/mypy docs/examples; } & types=$$!; \
	$(BIN)/python -m tests.again -m "not rare" --durations=40 --durations-min=5 $(CHAOS:%=--ignore %) -n $(WORKERS) --dist worksteal || failed=1; \
	wait $$types || failed=1; \
	$(BIN)/python -m pytest --durations=20 --durations-min=5 $(CHAOS) || failed=1; \
	test -z "$$failed"

quick: $(VENV)/.dev ## in about a minute: the kernel and both faces, and the lock on memory, SQLite and a Redis
	$(BIN)/python -m pytest -m "not slow" -n $(QUICK_WORKERS) --dist worksteal $(QUICK)

lint: $(VENV)/.dev ## style, and the number of hard sentences
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.architecture.sentences

types: mypy pyright ## mypy and pyright

mypy: $(VENV)/.dev
	$(BIN)/mypy
	$(BIN)/mypy docs/examples

pyright: $(VENV)/.dev
	$(BIN)/pyright

compiled: $(VENV)/.dev
	-$(BIN)/python -m pytest --collect-only -q >/dev/null

bench: $(VENV)/.bench $(VENV)/peers/.ready servers ## the benchmarks, against the field's own locks, in one run
	$(BIN)/python -m tests.benchmarks

chaos: $(VENV)/.dev servers ## ten minutes on each backend, and ten with locks of every kind, in which everything goes wrong; crowds; majorities; outages of minutes, long ways
	for backend in redis sqlite consul etcd zookeeper postgresql; do \
		$(BIN)/python -m tests.faults.chaos --backend $$backend --seconds $(SECONDS) || exit 1; \
		$(BIN)/python -m tests.faults.chaos --backend $$backend --seconds $(SECONDS) --mixed || exit 1; \
	done
	for backend in memory redis sqlite consul etcd zookeeper; do \
		$(BIN)/python -m tests.faults.crowd --backend $$backend || exit 1; \
		test $$backend = memory || $(BIN)/python -m tests.faults.crowd --backend $$backend --permits || exit 1; \
	done
	$(BIN)/python -m tests.faults.chaos --backend etcd --seconds $(SECONDS) --outage 75
	for defect in "deadline from receipt" "plain DEL" "cached is_held" "with ends the newest" "validity from the acquire" \
		"grant by wake-up"; do \
		$(BIN)/python -m tests.faults.chaos --defect "$$defect" --seconds $(SECONDS) --must-be-seen || exit 1; \
	done
	$(BIN)/python -m tests.faults.majority --seconds $(SECONDS)
	for defect in "2 of 5 is enough" "validity from the last reply" "undo only where acknowledged"; do \
		$(BIN)/python -m tests.faults.majority --seconds $(SECONDS) --defect "$$defect" --must-be-seen || exit 1; \
	done
	MULTILOCK_REQUIRE=$(SERVERS) MULTILOCK_ROUND_TRIPS=0.02,0.1 $(BIN)/python -m pytest tests/faults/test_round_trips.py

simulation: $(VENV)/.dev ## new seeds in virtual time on all cores, counted: SECONDS=…, else until interrupted
	$(BIN)/python -m tests.simulation search $(if $(filter file default,$(origin SECONDS)),,--seconds $(SECONDS))

docs: $(VENV)/.dev ## the site, in .state/site: open index.html there
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs .state/site

share: $(VENV)/.dev ## write the man page and the completions in share/ from the parser
	$(BIN)/python -m pip install --quiet --group share
	$(BIN)/python -m tests.cli.share

mutants: $(VENV)/.dev redis ## each seeded defect must be caught by a test
	MULTILOCK_REQUIRE=redis $(BIN)/python -m tests.mutants

# Two cores run about 250 cycles a minute, and after that measure for a quarter of an hour.
compare: $(VENV)/.dev servers ## seven backends: CYCLES of each fault (controls: 30), or as many as begin in MINUTES; kept in OUT
	MULTILOCK_REQUIRE=$(SERVERS) $(BIN)/python -m tests.compare.all --cycles $(CYCLES) --control-cycles 30 --minutes $(MINUTES) --out $(OUT) $(RESUME)

interrupts: $(VENV)/.dev servers ## a comparison is interrupted a hundred times, and must leave nothing behind
	MULTILOCK_REQUIRE=$(SERVERS) $(BIN)/python -m tests.compare.interrupts

interop: $(VENV)/.dev servers ## try every lock of other programs against ours, and write docs/interoperability.md
	$(BIN)/python -m tests.interop.table

models: ## the models of Redis, Redlock, a wait on etcd and Sentinels, exhausted, and the mistakes they must find; needs g++
	tests/models/run.sh

docker: $(VENV)/.dev ## compose/ and the containers for tests, on any Docker engine; says so where there is none
	tests/docker/run.sh $(BIN)/python

conformance: $(VENV)/.dev servers ## what `make test` leaves out: the suites whole (tests/conformance/chosen.py says why), and tests marked `rare`
	MULTILOCK_CONFORMANCE=all MULTILOCK_REQUIRE=$(SERVERS) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/conformance tests/examples/test_third_party.py
	MULTILOCK_REQUIRE=$(SERVERS) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m rare

versions: $(VENV)/.dev ## the Redis tests on Redis 6.0, 8.0 and Valkey, unpacked from Debian's packages
	tests/versions.sh $(BIN)/python

lowest: $(VENV)/.pip servers ## two suites on every backend, with the lowest version of each library that is allowed
	MULTILOCK_REQUIRE=$(SERVERS) tests/lowest.sh $(BIN)/python

pythons: $(VENV)/.dev redis ## the tests of the kernel and of three backends on Python 3.13 and 3.14, unpacked likewise
	tests/pythons.sh $(BIN)/python

# Install the servers for the tests, except those that are installed already or that MULTILOCK_TEST_<NAME>_URL names.
servers: redis consul etcd zookeeper postgresql pgbouncer chromium ## install the servers for the tests (Debian, Ubuntu)
redis consul etcd zookeeper postgresql pgbouncer chromium:
	@tests/bootstrap/$@.sh >/dev/null

clean: ## forget the environment and the state of the demo
	rm -rf $(VENV) .state dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "multilock needs Python 3.11 or newer: make PYTHON=python3.12 …" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# pip before 25.1 does not support dependency groups.
$(VENV)/.pip: $(BIN)/python
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.user: $(VENV)/.pip pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[all]'
	@touch $@

$(VENV)/.dev: $(VENV)/.user
	$(BIN)/python -m pip install --quiet --group dev --group docs --group examples
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --group bench
	@touch $@

# These need older libraries than everything else here.
$(VENV)/peers/.ready: $(BIN)/python
	$(BIN)/python -m venv $(VENV)/peers
	$(VENV)/peers/bin/python -m pip install --quiet etcd3 'tenacity<8.3' 'protobuf<4' etcd3gw aioredlock mithril-locks
	@touch $@

.PHONY: help demo test quick lint types mypy pyright compiled bench compare docs share interrupts chaos simulation mutants interop models docker conformance versions lowest pythons servers redis consul etcd zookeeper postgresql pgbouncer chromium clean
