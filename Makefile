# Everything a newcomer needs: make setup, make demo, make test. Nothing outside .venv is changed but
# the cache of compiled kernels (geartrain native says where; GEARTRAIN_CACHE=DIR moves it).
#   PYTHON=python3.12 make setup      another interpreter (3.11 or newer)
#   GEARTRAIN_DATA=DIR make test      real data for the tests that need it

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KERNELS := $(VENV)/.kernels
SITE_TOOLS := $(VENV)/.docs
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

# Data beside the checkout is used unless the caller said otherwise (an empty value says: none).
ifeq ($(origin GEARTRAIN_DATA),undefined)
BESIDE := $(shell cd ../shared/data 2>/dev/null && pwd)
ifneq ($(BESIDE),)
export GEARTRAIN_DATA := $(BESIDE)
endif
endif

.PHONY: help setup demo test test-slow lint docs clean

help:
	@echo 'make setup      create $(VENV), install geartrain, pinned by constraints.txt; compile kernels'
	@echo 'make demo       train list reduction until its accuracy reaches 0.97'
	@echo 'make test       the tests (not the slow ones); those of the core also without native kernels'
	@echo 'make test-slow  the slow ones'
	@echo 'make lint       ruff check, ruff format --check, mypy --strict'
	@echo 'make docs       the documentation as a site, into site/; links that lead nowhere fail'
	@echo 'make clean      remove $(VENV), caches and build leftovers'

setup: $(STAMP) $(KERNELS)

# The stamp is the last line: an install that fails or is interrupted leaves none. torch comes first
# and at its exact version, so that pip takes a CPU wheel it was told about (--find-links or an extra
# index in its own configuration) and does not fetch a newer build with gigabytes of GPU libraries.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $(STAMP)
	@command -v '$(PYTHON)' >/dev/null || { \
	  echo "setup: no '$(PYTHON)' on the PATH; geartrain needs Python 3.11 or newer." \
	    "Name one: PYTHON=python3.11 make setup" >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "setup: '$(PYTHON)' is $$('$(PYTHON)' -V 2>&1); geartrain needs Python 3.11 or newer." \
	    "Name one: PYTHON=python3.11 make setup" >&2; exit 1; }
	@if ! $(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  echo 'setup: creating $(VENV)'; '$(PYTHON)' -m venv --clear $(VENV); fi
	@echo 'setup: installing torch and the rest (a minute or two)'
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) -e '.[test,plot]'
	@touch $(STAMP)

# Without a compiler torch does their work: it says so, and that is no failure.
$(KERNELS): $(STAMP) $(wildcard src/geartrain/native/*.c src/geartrain/native/*.inc)
	@$(BIN)/geartrain native || true
	@touch $(KERNELS)
	@echo 'setup: done; $(BIN)/geartrain --help'

demo: setup
	$(BIN)/geartrain train listreduce --epochs 6 --until 'accuracy>=0.97'

test: setup
	$(BIN)/python -m pytest -q
	GEARTRAIN_NATIVE=0 $(BIN)/python -m pytest -q tests/ir tests/nn tests/oracle

test-slow: setup
	$(BIN)/python -m pytest -q -m slow

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict src/geartrain

# What writes the site is installed when it is first wanted.
$(SITE_TOOLS): $(STAMP)
	@echo 'docs: installing mkdocs'
	@$(PIP) -e '.[docs]'
	@touch $(SITE_TOOLS)

docs: $(SITE_TOOLS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo 'docs: site/index.html; to search in it, $(BIN)/python -m http.server -d site'

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
