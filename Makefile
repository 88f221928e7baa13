# `make demo` and `make test` work in a fresh clone: both first see to it that $(VENV) is up to date.

# VENV is where the environment lives; BASE_PYTHON is what makes it (3.11 or newer).
VENV ?= .venv
BASE_PYTHON ?= $(shell command -v python3.11 || command -v python3)
EXTRAS ?= all,test
DEMO_DIR ?= demo
PYTEST_ARGS ?=
# Tests run in so many processes; 0 for one, where a debugger is wanted.
WORKERS ?= 2
# Exhaustive tests take longer than the time after which pytest dumps all stacks, which may end the process.
LONG := -o faulthandler_timeout=3600

PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.up-to-date

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all faults soak bench lint types format clean charts

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP)  ## make or update the virtual environment

# The stamp is touched last, so that an interrupted installation is done again.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a few minutes the first time)"
	@"$(BASE_PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ckpt needs Python 3.11 or newer")'
	@test -x "$(PYTHON)" || "$(BASE_PYTHON)" -m venv "$(VENV)"
	@"$(PYTHON)" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch "$@"

demo: $(STAMP)  ## train, kill in the middle of saves, resume, compare bit for bit
	@"$(PYTHON)" examples/train_nnx.py --demo --directory "$(DEMO_DIR)"

test: lint types  ## style, types and the quick tests
	@"$(PYTHON)" -m pytest -n $(WORKERS) -m "not slow and not soak" $(PYTEST_ARGS)

test-all: lint types  ## the same with the long matrices
	@"$(PYTHON)" -m pytest -n $(WORKERS) -m "not soak" $(LONG) $(PYTEST_ARGS)

faults: $(STAMP)  ## only the tests that kill, cut and break
	@"$(PYTHON)" -m pytest -m "faults" $(LONG) $(PYTEST_ARGS)

# Exit code 5 of pytest: nothing carries the marker.
soak: $(STAMP)  ## random work for a long time
	@"$(PYTHON)" -m pytest -m "soak" $(LONG) $(PYTEST_ARGS) || test $$? -eq 5

bench: $(STAMP)  ## ckpt beside Orbax in half a minute; benchmarks/ has more
	@"$(PYTHON)" -m ckpt_core.cli bench run benchmarks/quick.yaml -o benchmarks/out/quick

lint: $(STAMP)
	@"$(PYTHON)" -m ruff check --quiet .
	@"$(PYTHON)" -m ruff format --quiet --check . || { echo "run: make format"; exit 1; }

types: $(STAMP)
	@"$(PYTHON)" -m pyright --pythonpath "$(PYTHON)"

format: $(STAMP)  ## rewrite the sources in the project's style
	@"$(PYTHON)" -m ruff check --fix --quiet . ; "$(PYTHON)" -m ruff format .

charts:  ## build the chart library of reports anew (needs node and npm)
	@cd ckpt_core/report/vendor && npm install --no-package-lock && npm run build && rm -rf node_modules

clean:  ## remove everything that can be made again
	@rm -rf "$(VENV)" build dist "$(DEMO_DIR)" .pytest_cache .ruff_cache .hypothesis benchmarks/out
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
