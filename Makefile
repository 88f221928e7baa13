# `make demo` and `make test` work in a fresh clone: both first make the environment that they need.

# VENV is where the environment lives; BASE_PYTHON is what makes it (3.11 or newer).
VENV ?= .venv
BASE_PYTHON ?= $(shell command -v python3.11 || command -v python3)
EXTRAS ?= all,test
DEMO_DIR ?= demo
PYTEST_ARGS ?=
# Tests run in so many processes, twice the cores of CI, since a third of their time is waiting; 0 for one, where a debugger is wanted.
WORKERS ?= 4
# A file's tests run in one of them, in the order of names: what they share, such as a count of operations, is made once.
TESTS := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Exhaustive tests take longer than the time after which pytest dumps all stacks, which may end the process.
LONG := -o faulthandler_timeout=3600

# Tests start hundreds of processes; without its cache, Python would compile the sources in each of them.
unexport PYTHONDONTWRITEBYTECODE

PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.up-to-date
# Ordinary indexes have torch with gigabytes of CUDA for Linux; this one has builds for the CPU only.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# The demonstration has an environment of its own, a fifth of the full one, unless that is there already.
DEMO_VENV := $(VENV)$(if $(wildcard $(STAMP)),,-demo)

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all test-portable faults soak bench docs dist test-wheel test-floors test-latest lint types format clean charts

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP)  ## make or update the virtual environment

# $(call install,ENVIRONMENT,EXTRAS,INDEX,SIZE): INDEX is asked, too, if it answers; the stamp is touched last, so that an interrupted installation is done again.
define install
@echo "setting up $(1), once: $(4), which takes a few minutes"
@"$(BASE_PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ckpt needs Python 3.11 or newer")'
@test -x "$(1)/bin/python" || "$(BASE_PYTHON)" -m venv "$(1)"
@index=; if "$(1)/bin/python" tests/support/reachable.py "$(TORCH_INDEX)/torch/"; then index="--extra-index-url $(TORCH_INDEX)"; fi; \
"$(1)/bin/python" -m pip install -qq --no-compile --disable-pip-version-check $$index -c constraints.txt -e '.[$(2)]'
@"$(1)/bin/python" -m compileall -qq -j 0 "$(1)/lib" || true  # on all cores, where pip takes one; templates of code do not compile
@touch "$@"
endef

$(STAMP): pyproject.toml constraints.txt
	$(call install,$(VENV),$(EXTRAS),$(TORCH_INDEX),about 3 GB)

$(VENV)-demo/.up-to-date: pyproject.toml constraints.txt
	$(call install,$(VENV)-demo,demo,,0.8 GB)

demo: $(DEMO_VENV)/.up-to-date  ## train, kill in the middle of saves, resume, compare bit for bit
	@"$(DEMO_VENV)/bin/python" examples/train_nnx.py --demo --directory "$(DEMO_DIR)"

# $(call types_and_tests,ARGUMENTS OF PYTEST): pyright has one thread and takes more than a minute: beside the tests, and what it found is said after them.
define types_and_tests
@"$(PYTHON)" -m pyright --pythonpath "$(PYTHON)" > "$(VENV)/types.txt" 2>&1 & types=$$!; \
"$(PYTHON)" $(TESTS) $(1) $(PYTEST_ARGS); tests=$$?; \
wait $$types; typed=$$?; cat "$(VENV)/types.txt"; exit $$((tests ? tests : typed))
endef

# Most programs of the tests are compiled to run once: LLVM's optimizations take a fifth of the CPU time of tests of frameworks. test-all
# compiles as users do.
test: export JAX_DISABLE_MOST_OPTIMIZATIONS ?= 1
test: lint  ## style, types and the quick tests
	$(call types_and_tests,-m "not slow and not soak")

test-all: lint  ## the same with the long matrices
	$(call types_and_tests,-m "not soak" $(LONG))

# What tests/support/masked takes away, and where that matters.
PORTABLE := $(addprefix tests/,save load run directory tree items format cli look convert processes interrupts faults)

test-portable: $(STAMP)  ## quick tests without what only Linux has
	@CKPT_TEST_PLATFORM=portable "$(PYTHON)" $(TESTS) -m "not slow and not soak" $(PYTEST_ARGS) $(PORTABLE)

faults: $(STAMP)  ## only the tests that kill, cut and break
	@"$(PYTHON)" -m pytest -m "faults" $(LONG) $(PYTEST_ARGS)

# Exit code 5 of pytest: nothing carries the marker.
soak: $(STAMP)  ## random work for a long time
	@"$(PYTHON)" -m pytest -m "soak" $(LONG) $(PYTEST_ARGS) || test $$? -eq 5

bench: $(STAMP)  ## ckpt beside Orbax in half a minute; benchmarks/ has more
	@"$(PYTHON)" -m ckpt_core.cli bench run benchmarks/quick.yaml -o benchmarks/out/quick

docs: $(STAMP)  ## build the site into build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 "$(PYTHON)" -m mkdocs build --quiet --strict && echo build/site/index.html

# Tools of releases, and the oldest and newest versions, each in an environment of its own.
$(VENV)-dist/.up-to-date: Makefile
	@"$(BASE_PYTHON)" -m venv "$(VENV)-dist"
	@"$(VENV)-dist/bin/python" -m pip install --quiet --disable-pip-version-check build twine check-wheel-contents
	@touch "$@"

dist: $(VENV)-dist/.up-to-date  ## build wheel and source archive, and check them
	@rm -rf dist
	@"$(VENV)-dist/bin/python" -m build --outdir dist . > /dev/null
	@"$(VENV)-dist/bin/python" -m twine check --strict dist/*
	@"$(VENV)-dist/bin/check-wheel-contents" dist/*.whl

test-wheel: dist  ## install the wheel with each extra alone, and run that framework's first page
	@"$(BASE_PYTHON)" tests/support/try_wheel.py dist/*.whl

TOOLS := pytest hypothesis pytest-xdist psutil equinox safetensors orbax-checkpoint h5py
# $(call cpu_index,ENVIRONMENT): the option of pip for the index of torch for the CPU, if it answers.
cpu_index = $$("$(1)/bin/python" tests/support/reachable.py "$(TORCH_INDEX)/torch/" && echo "--extra-index-url $(TORCH_INDEX)")
VERSIONED := tests/tree tests/format tests/load tests/save tests/run tests/items tests/bench tests/cli tests/frameworks

test-floors:  ## quick tests with the oldest versions that pyproject.toml admits
	@"$(BASE_PYTHON)" -m venv "$(VENV)-floors"
	@"$(BASE_PYTHON)" tests/support/floors.py > "$(VENV)-floors/floors.txt"
	@"$(VENV)-floors/bin/python" -m pip install --quiet --disable-pip-version-check $(call cpu_index,$(VENV)-floors) \
	  -c "$(VENV)-floors/floors.txt" -e '.[all]' $(TOOLS)
	@"$(VENV)-floors/bin/python" $(TESTS) -m "not slow and not soak" $(PYTEST_ARGS) $(VERSIONED)

test-latest:  ## quick tests with the newest versions that the index has, pre-releases included
	@"$(BASE_PYTHON)" -m venv "$(VENV)-latest"
	@"$(VENV)-latest/bin/python" -m pip install --quiet --disable-pip-version-check --pre --upgrade $(call cpu_index,$(VENV)-latest) \
	  -e '.[all]' $(TOOLS)
	@"$(VENV)-latest/bin/python" -m pip list --disable-pip-version-check --outdated --pre  # what it could not take
	@"$(VENV)-latest/bin/python" $(TESTS) -m "not slow and not soak" $(PYTEST_ARGS) $(VERSIONED)

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
	@rm -rf "$(VENV)" "$(VENV)"-* build dist "$(DEMO_DIR)" .pytest_cache .ruff_cache .hypothesis benchmarks/out
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
