# `make demo` and `make test` work in a fresh clone: each first makes the environment that it needs.

# VENV is where the environment lives; BASE_PYTHON is what makes it (3.11 or newer).
VENV ?= .venv
BASE_PYTHON ?= $(shell command -v python3.11 || command -v python3)
EXTRAS ?= all,test
DEMO_DIR ?= demo
PYTEST_ARGS ?=
# One worker for each core of CI; 0 for none, where a debugger is wanted.
WORKERS ?= 2
# A file's tests run in one worker, in the order of names: what they share, such as a count of operations, is made once.
TESTS := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Exhaustive tests take longer than the time after which pytest dumps all stacks, which may end the process.
LONG := -o faulthandler_timeout=3600

# Tests start hundreds of processes; without its cache, Python would compile the sources in each of them.
unexport PYTHONDONTWRITEBYTECODE

PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.up-to-date
# Ordinary indexes have torch with gigabytes of CUDA for Linux; this one has builds for the CPU only.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# The first check and the demonstration have small environments of their own, unless the full one is there.
CORE := $(foreach subject,tree save load format items look,$(wildcard tests/*/$(subject))) tests/contract/run/test_policies.py
SMALL = $(VENV)$(if $(wildcard $(STAMP)),,-$@)

.DEFAULT_GOAL := list
.PHONY: list check lint test test-all test-floors test-latest recorded mutants faults soak demo bench docs

list:
	@awk -F ':.*## ' '/^[a-z-]+.*:.*## / {printf "  make %-22s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# $(call install,ENVIRONMENT,EXTRAS,SIZE): an index of torch is asked, too, if it answers; the stamp is touched last, so that an interrupted installation is done again.
define install
@echo "setting up $(1), once: about $(3), which takes a few minutes"
@"$(BASE_PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ckpt needs Python 3.11 or newer")'
@test -x "$(1)/bin/python" || "$(BASE_PYTHON)" -m venv "$(1)"
@index=; if "$(1)/bin/python" tests/support/reachable.py "$(TORCH_INDEX)/torch/"; then index="--extra-index-url $(TORCH_INDEX)"; fi; \
"$(1)/bin/python" -m pip install -qq --no-compile --disable-pip-version-check $$index -c constraints.txt -e '.[$(2)]'
@"$(1)/bin/python" -m compileall -qq -j 0 "$(1)/lib" || true  # on all cores, where pip takes one; templates of code do not compile
@touch "$@"
endef

$(STAMP): pyproject.toml constraints.txt
	$(call install,$(VENV),$(EXTRAS),3 GB)

$(VENV)-check/.up-to-date: pyproject.toml constraints.txt
	$(call install,$(VENV)-check,check,0.9 GB)

$(VENV)-demo/.up-to-date: pyproject.toml constraints.txt
	$(call install,$(VENV)-demo,demo,0.8 GB)

# $(call style,PYTHON)
define style
@"$(1)" -m ruff check --quiet .
@"$(1)" -m ruff format --quiet --check . || { echo "run: ruff format"; exit 1; }
endef

.SECONDEXPANSION:
check: $$(SMALL)/.up-to-date  ## the core alone: style, types and quick tests, in three minutes
	$(call style,$(SMALL)/bin/python)
	@"$(SMALL)/bin/python" -m pyright --pythonpath "$(SMALL)/bin/python" $(wildcard ckpt_core/_*) & types=$$!; \
	"$(SMALL)/bin/python" $(TESTS) --quick $(PYTEST_ARGS) $(CORE); tests=$$?; \
	wait $$types && exit $$tests

lint: $(STAMP)  ## style and types of everything; CI runs it beside the tests
	$(call style,$(PYTHON))
	@"$(PYTHON)" -m pyright --pythonpath "$(PYTHON)"

# Most programs of the tests are compiled to run once: LLVM's optimizations take a fifth of the CPU time of tests of frameworks. test-all
# compiles as users do.
check test test-floors test-latest: export JAX_DISABLE_MOST_OPTIMIZATIONS ?= 1
# A sync of a busy disk takes milliseconds, and saves make thousands: where memory has room, temporary files are in it. test-all has the disk.
check test test-floors test-latest: export TMPDIR ?= $(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 6000000 {print $$6}')
test: $(STAMP)  ## what CI runs: all but what tests/seconds.txt calls slow
	@"$(PYTHON)" $(TESTS) --quick -m "not soak" $(PYTEST_ARGS)

test-all: lint  ## all but soak; writes tests/seconds.txt
	@"$(PYTHON)" $(TESTS) --measure -m "not soak" $(LONG) $(PYTEST_ARGS)

test-floors test-latest: test-%:  ## quick tests with the oldest, the newest versions
	@TORCH_INDEX="$(TORCH_INDEX)" "$(BASE_PYTHON)" tests/support/try_versions.py $* "$(VENV)-$*" $(PYTEST_ARGS)

mutants: $(STAMP)  ## break one promise after another in a copy; a contract test has to find each
	@"$(PYTHON)" tests/mutants/run.py

faults: $(STAMP)  ## only the tests that kill, cut and break
	@"$(PYTHON)" -m pytest -m "faults and not soak" $(LONG) $(PYTEST_ARGS)

soak: $(STAMP)  ## random work for a long time
	@"$(PYTHON)" -m pytest -m "soak" $(LONG) $(PYTEST_ARGS)

recorded: $(STAMP)  ## compare what is seen from outside with tests/recorded; UPDATE=1 replaces it
	@"$(PYTHON)" -m tests.support.recorded

demo: $$(SMALL)/.up-to-date  ## train, kill in the middle of saves, resume, compare bit for bit
	@"$(SMALL)/bin/python" examples/train_nnx.py --demo --directory "$(DEMO_DIR)"

bench: $(STAMP)  ## ckpt beside Orbax in half a minute; benchmarks/ has more
	@"$(PYTHON)" -m ckpt_core.cli bench run benchmarks/quick.yaml -o benchmarks/out/quick

docs: $(STAMP)  ## build the site into build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 "$(PYTHON)" -m mkdocs build --quiet --strict && echo build/site/index.html
