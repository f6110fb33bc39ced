# Everything a newcomer needs: make setup, make demo, make test. Nothing outside .venv is changed but
# the cache of compiled kernels (geartrain native says where; GEARTRAIN_CACHE=DIR moves it).
#   PYTHON=python3.12 make setup      another interpreter (3.11 or newer)
#   GEARTRAIN_DATA=DIR make test      real data for the tests that need it
#   PROCESSES=8 make test             tests side by side (a process a core if nothing is said)
#   COVER=1 make test                 branches are counted in some of them; below the floor it fails
#   SINCE=COMMIT make lint            lines of C that have changed since then are looked at

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
# What is imported is compiled then: most of it never is, and all of it would take most of the time.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile \
  -c constraints.txt

# Data beside the checkout is used unless the caller said otherwise (an empty value says: none).
ifeq ($(origin GEARTRAIN_DATA),undefined)
BESIDE := $(shell cd ../shared/data 2>/dev/null && pwd)
ifneq ($(BESIDE),)
export GEARTRAIN_DATA := $(BESIDE)
endif
endif

# Some environments forbid it, and then each of the many processes here compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE
# Another tree on it would be what is tried.
unexport PYTHONPATH

# What OMP_NUM_THREADS says is of products, and nproc would take it for the number of cores.
PROCESSES ?= $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2)
SINCE ?= HEAD
# Tests share cores by processes, not by threads of one product. Work steals: tests last from a
# millisecond to half a minute, and a process that has done its own takes those of another.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
SIDE_BY_SIDE := -n $(PROCESSES) --dist worksteal
# Every case runs once, and the tracer follows some: the first case of each test of a room.
COVERED := $(if $(COVER),--first-cases --cov --cov-report=term:skip-covered)

.PHONY: help setup demo test test-slow setup-ray test-ray sanitize unlocked coverage package lint lint-c docs clean

help:
	@echo 'make setup      create $(VENV), install geartrain, pinned by constraints.txt; compile kernels'
	@echo 'make demo       two worker processes beside one worker, measured; a report (a minute)'
	@echo 'make test       the tests (not the slow ones); first cases that ask for kernels also without'
	@echo 'make test-slow  the slow ones; then the rooms of kernels, all without kernels'
	@echo 'make setup-ray  $(VENV)-ray: the same, and Ray'
	@echo 'make test-ray   the tests of workers on Ray, on one that they start here'
	@echo 'make sanitize   native tests on C built with AddressSanitizer and UBSan, and with TSan (gcc)'
	@echo 'make unlocked   the tests of workers on an interpreter without the lock (python3.14t)'
	@echo 'make coverage   make test, and the branches that first cases cover: COVER=1 make test'
	@echo 'make package    wheel and sdist; the wheel is installed in an environment of its own, tried'
	@echo 'make lint       ruff check, ruff format --check, mypy, clang-format of new lines'
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
$(KERNELS): $(STAMP) $(wildcard $(foreach here,native whole/*,src/geartrain/$(here)/*.c \
  src/geartrain/$(here)/*.inc))
	@$(BIN)/geartrain native || true
	@touch $(KERNELS)
	@echo 'setup: done; $(BIN)/geartrain --help'

demo: setup
	$(BIN)/geartrain demo

test: setup
	$(PYTEST) $(SIDE_BY_SIDE) $(COVERED)

coverage:
	@$(MAKE) --no-print-directory test COVER=1

test-slow: setup
	$(PYTEST) -m slow
	GEARTRAIN_NATIVE=0 $(PYTEST) $(SIDE_BY_SIDE) \
	  tests/nodes tests/derived tests/graph tests/nn tests/whole tests/pipeline tests/oracle

# Ray is an extra that brings much: an environment of its own, which $(VENV) lends the rest.
setup-ray: $(VENV)-ray/.installed

$(VENV)-ray/.installed: $(STAMP)
	@rm -f $@
	@echo 'setup-ray: installing Ray'
	@$(BIN)/python -m venv --clear $(VENV)-ray
	@$(BIN)/python -c 'import torch; print(torch.__path__[0].removesuffix("/torch"))' \
	  >"$$(echo $(VENV)-ray/lib/python*/site-packages)/others.pth"
	@$(VENV)-ray/bin/python -m pip --disable-pip-version-check install --quiet --no-compile \
	  -c constraints.txt -e '.[ray]'
	@touch $@

test-ray: setup-ray
	PYTHONPATH=$(CURDIR)/src OMP_NUM_THREADS=1 $(VENV)-ray/bin/python -m pytest -q -m "ray and not slow" \
	  tests/runtime tests/oracle

# The kernels are compiled with the sanitizers (a minute each, once); on them run the tests of kernels,
# a program that is given structure which means harm (tests/native/test_hostile.py), and workers as
# threads (tests/native/test_racing.py).
sanitize: setup
	@command -v gcc >/dev/null || { echo "sanitize: no 'gcc' on the PATH; install it" >&2; exit 1; }
	@test -f "$$(gcc -print-file-name=libasan.so)" || { \
	  echo 'sanitize: gcc finds no libasan.so; install its address sanitizer (libasan)' >&2; exit 1; }
	$(PYTEST) $(SIDE_BY_SIDE) -m 'slow or not slow' tests/native/test_hostile.py tests/native/test_racing.py

# An interpreter without the lock, in an environment of its own; versions as far as they are built for
# it, so constraints are not asked for more than torch's.
UNLOCKED ?= python3.14t
unlocked:
	@command -v '$(UNLOCKED)' >/dev/null || { \
	  echo "unlocked: no '$(UNLOCKED)' on the PATH: skipped (UNLOCKED=/path/to/python3.14t)"; exit 0; }; \
	'$(UNLOCKED)' -m venv --clear $(VENV)-unlocked && \
	$(VENV)-unlocked/bin/python -m pip --disable-pip-version-check install --quiet \
	  "$$(grep '^torch==' constraints.txt)" -e . pytest pytest-timeout hypothesis && \
	PYTHON_GIL=0 OMP_NUM_THREADS=1 $(VENV)-unlocked/bin/python -m pytest -q \
	  tests/engine tests/runtime tests/sharing tests/native tests/train

# The environment sees no source: what is tried is what the wheel brings. What it needs is lent by
# $(VENV); that all of it is declared is looked at by tests/test_packages.py.
package: setup
	rm -rf dist build
	$(BIN)/python -m build --quiet
	rm -rf build/tried && '$(BIN)/python' -m venv --without-pip build/tried
	$(BIN)/python -m pip --python build/tried/bin/python --disable-pip-version-check install \
	  --quiet --no-deps dist/*.whl
	$(BIN)/python -c 'import torch; print(torch.__path__[0].removesuffix("/torch"))' \
	  >"$$(echo build/tried/lib/python*/site-packages)/others.pth"
	cd build/tried && bin/python -c 'import geartrain as g, sys; sys.exit(sys.prefix not in g.__file__)'
	cd build/tried && bin/geartrain --help >/dev/null
	cd build/tried && bin/geartrain train listreduce --epochs 1 --json \
	  --option train_size=300 --option valid_size=60 --option hidden=8

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@$(MAKE) --no-print-directory lint-c

lint-c: setup
	@$(BIN)/git-clang-format --binary $(BIN)/clang-format --quiet --diff --extensions c,inc $(SINCE) -- src

# What writes the site is installed when it is first wanted.
$(SITE_TOOLS): $(STAMP)
	@echo 'docs: installing mkdocs'
	@$(PIP) -e '.[docs]'
	@touch $(SITE_TOOLS)

docs: $(SITE_TOOLS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo 'docs: site/index.html; to search in it, $(BIN)/python -m http.server -d site'

clean:
	rm -rf $(VENV) $(VENV)-unlocked $(VENV)-ray build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
