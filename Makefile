# Everything a developer runs. Each target makes .venv first; that is a no-op when it is up to date.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
MPICH  := $(VENV)/mpich
SWEEP  := $(VENV)/sweep
# Another version of torch for `make test-torch`, in an environment of its own.
TORCH      ?= 2.11
TORCH_VENV := .venv-torch-$(TORCH)
# The build environment pip makes for shoal itself follows the constraints as well.
PIP    := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
          PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-soak test-torch lint format type bench sweep docs survey clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(STAMP)  ## .venv with shoal, its tools, Open MPI and (aside) MPICH

# The wheels of Open MPI and MPICH hold files of the same names, so MPICH, which only tests need,
# gets a prefix of its own.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[dev,mpi]'
	rm -rf $(MPICH)
	$(PIP) --prefix $(MPICH) --ignore-installed --no-deps mpich
	touch $@

demo: setup  ## a small GPT on four ranks, under every strategy
	$(BIN)/shoal demo

test: setup  ## the tests, with pairs of the large matrices
	$(BIN)/python tools/run_tests.py -m 'not full' $(ARGS)

test-full: setup  ## the tests, with all of the large matrices
	$(BIN)/python tools/run_tests.py --hypothesis-profile=full $(ARGS)

test-soak: setup  ## ten minutes of random kills, kills in saves, mismatches, kills that are survived
	$(BIN)/python tools/soak.py $(ARGS)

test-torch: $(TORCH_VENV)/.installed  ## what depends on torch, with another one: TORCH=2.11
	$(TORCH_VENV)/bin/python tools/torch_tests.py $(ARGS)

$(TORCH_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TORCH_VENV)
	grep -v '^torch==' constraints.txt > $(TORCH_VENV)/constraints.txt
	PIP_CONSTRAINT=$(TORCH_VENV)/constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
		$(TORCH_VENV)/bin/python -m pip install --quiet 'torch==$(TORCH).*' --editable '.[dev]'
	touch $@

lint: setup  ## style, formatting, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: setup  ## fix what `lint` can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: setup  ## mypy, strict
	$(BIN)/mypy

bench: setup  ## collectives: shm against Gloo and MPI
	$(BIN)/python benchmarks/collectives.py $(ARGS)

sweep: $(SWEEP)/.installed  ## every optimizer of torch, timm and pytorch_optimizer, compared
	PYTHONPATH=$(SWEEP) $(BIN)/python benchmarks/optimizers/sweep.py $(ARGS)

# Aside and without what they depend on: timm wants torchvision, which its optimizers do not need.
$(SWEEP)/.installed: $(STAMP)
	rm -rf $(SWEEP)
	$(PIP) --target $(SWEEP) --no-deps timm pytorch_optimizer
	touch $@

docs: setup  ## links resolve and lead to all pages, examples compile, names exist
	$(BIN)/python tools/check_docs.py

survey: setup  ## sizes, repeated names, how far one has to walk; ARGS='OTHER/CHECKOUT .' compares
	$(BIN)/python tools/survey $(ARGS)

clean:  ## remove .venv and caches
	rm -rf $(VENV) .venv-torch-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
