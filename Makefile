# Everything here sets itself up from Python >= 3.10 with pip. `make test PYTHON=python3.12 VENV=.venv-3.12` tries
# another Python beside the usual one. Where pip fetches from is set in pip's own configuration.

PYTHON ?= python3
VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
VENV_BENCH ?= .venv-bench
PYTEST_ARGS ?= --numprocesses=logical --maxprocesses=4
BENCH_ARGS ?=

SOURCES := $(wildcard src tests examples benchmarks)
TORCHSNAPSHOTS := .interop/torchsnapshot-0.1.0/.stamp .interop/torchsnapshot-nightly/.stamp

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_PROGRESS_BAR := off

.PHONY: demo test test-oldest lint interop bench clean

demo: $(VENV)/.stamp .interop/torchsnapshot-0.1.0/.stamp
	$(VENV)/bin/python examples/demo.py

test: lint interop
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

test-oldest: $(VENV_OLDEST)/.stamp interop
	$(VENV_OLDEST)/bin/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.stamp
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/mypy

interop: $(TORCHSNAPSHOTS)

# About half an hour, on a disk that nothing else uses meanwhile. A single one: `make bench-save_load`; a quick look:
# `make bench BENCH_ARGS='--scale 0.05'`; another disk: BENCH_ARGS='--dir /mnt/disk'.
bench:
	$(MAKE) bench-save_load
	$(MAKE) bench-small_tensors
	$(MAKE) bench-memory

bench-%: benchmarks/%.py $(VENV_BENCH)/.stamp .interop/torchsnapshot-0.1.0/.stamp
	$(VENV_BENCH)/bin/python $< --json build/bench/$*.json $(BENCH_ARGS)

clean:
	rm -rf $(VENV) $(VENV_OLDEST) $(VENV_BENCH) .interop .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
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
	$(@D)/bin/python -m pip install --quiet --no-build-isolation --editable '.[lightning]' --requirement requirements/bench.txt
	touch $@

.interop/%/.stamp: requirements/%.txt
	rm -rf $(@D)
	$(PYTHON) -m pip install --quiet --no-deps --target $(@D) --requirement $<
	touch $@
