# make demo: the main job, right and fast. make test: every feature, in minutes. Both make .venv first.
#
#   make test TORCH=2.15.0     the same with another torch release
#   make test-all              the whole matrix
#   make test-slow             the long fuzz, and the sweep over all operations of torch
#   make fuzz COUNT=2000 SEED=1
#   make test-backends         other backends and devices; what is not installable here is skipped
#   make bench                 benchmarks, a few minutes; DEVICE=cuda where there is one
#   make docs                  the documentation as a site, in site/

TORCH ?= 2.13.0
PYTHON ?= python3
COUNT ?= 500
SEED ?= 0
WORKERS ?= 2
DEVICE ?= cpu
VENV := .venv-$(TORCH)
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

PIP := -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-all test-matrix lint test-slow test-backends docs fuzz bench bench-full clean

# torch is pinned and installed first, so that nothing else can pull another build of it.
$(READY): pyproject.toml
	@rm -f $(VENV)/install.log
	@$(PYTHON) -m venv $(VENV)
	@.ci/quietly $(VENV)/install.log "Installing torch $(TORCH) into $(VENV)" \
	    $(RUN) $(PIP) "torch==$(TORCH)" "setuptools>=77"
	@.ci/quietly $(VENV)/install.log "Installing aliasstorage and what its checks need" \
	    $(RUN) $(PIP) --no-build-isolation -e ".[test,bench,lint]"
	@touch $@

demo: $(READY)
	@$(RUN) -m benchmarks.demo

test: $(READY) lint
	$(RUN) -m pytest -n $(WORKERS) -m "not matrix and not slow"

# What make test leaves out.
test-matrix: $(READY)
	$(RUN) -m pytest -n $(WORKERS) -m "matrix and not slow"

test-all: test test-backends test-matrix

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

test-slow: $(READY)
	$(RUN) -m pytest -n $(WORKERS) -m slow

# An environment of its own, for torch 2.13.0, which these packages are built for.
.venv-backends/.ready: pyproject.toml
	@rm -f .venv-backends/install.log
	@$(PYTHON) -m venv .venv-backends
	@.ci/quietly .venv-backends/install.log "Installing torch 2.13.0 into .venv-backends" \
	    .venv-backends/bin/python $(PIP) "torch==2.13.0" "setuptools>=77"
	@.ci/quietly .venv-backends/install.log "Installing other backends" \
	    .venv-backends/bin/python $(PIP) --no-build-isolation -e ".[test,backends]"
	@touch $@

test-backends: .venv-backends/.ready
	.venv-backends/bin/python -m pytest -n $(WORKERS) tests/compilation/test_other_backends.py

# The pages are read from the source by a static parser, so this needs no torch.
.venv-docs/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check "mkdocs-material>=9.6" "mkdocstrings-python>=1.16"
	touch $@

docs: .venv-docs/.ready
	.venv-docs/bin/python -m mkdocs build --quiet

fuzz: $(READY)
	$(RUN) -m tests.fuzz --count $(COUNT) --seed $(SEED)

bench: $(READY)
	$(RUN) -m benchmarks.run --device $(DEVICE) --output results.json

bench-full: $(READY)
	$(RUN) -m benchmarks.run --device $(DEVICE) --full --output results-full.json
	$(RUN) -m benchmarks.compile_time
	$(RUN) -m benchmarks.compile_time --windows 128 --operations 300

clean:
	rm -rf .venv .venv-* build *.egg-info
