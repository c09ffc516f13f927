# `make demo` and `make test` are all a fresh machine with Python, pip and g++ needs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help install demo test test-full test-cuda mutations papers bench wheel lint docs screenshots format clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "  make %-10s %s\n", $$1, $$2}'

# torch goes in first, through the constraints: the package's own requirement is a range, and a range alone may resolve to
# a CUDA build. Without build isolation, because an isolated build would fetch a second set of build requirements.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt setuptools torch
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[test,lint,docs]'
	@touch $@

install: $(STAMP)  ## make .venv and install the package into it

demo: $(STAMP)  ## train inside a budget in which plain PyTorch fails
	$(BIN)/lowtide demo

test: $(STAMP)  ## the tests, without the slow ones
	tests/run.sh $(BIN)/python

test-full: $(STAMP)  ## every test
	$(BIN)/python -m pytest -q

# On a machine with a GPU, in an environment whose torch is a CUDA build: make test-cuda VENV=path
test-cuda:  ## the accelerator's tests on a GPU
	LOWTIDE_TEST_DEVICE=cuda PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True $(BIN)/python -m pytest -q tests/accelerator

mutations: $(STAMP)  ## take the hosted systems apart line by line: a test has to fail each time
	$(BIN)/python tests/mutations.py

papers: $(STAMP)  ## simulate the headlines of the papers and write docs/reproduction.md
	$(PIP) install -q -c constraints.txt matplotlib
	$(BIN)/python benchmarks/papers.py

bench: $(STAMP)  ## measure against stock PyTorch and others; takes long
	$(BIN)/python benchmarks/run.py

# In a root of its own; docs/install.md says what that needs.
wheel: $(STAMP)  ## build the wheel that needs no compiler, into dist
	$(BIN)/python release/wheel.py

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)  ## the documentation as a site, with every link checked
	$(BIN)/python docs/site/build.py

# Needs a Chromium: apt-get install chromium fonts-dejavu-core
screenshots: $(STAMP)  ## take the pictures of the documentation again
	$(BIN)/python -m docs.site.screenshots

format: $(STAMP)  ## let ruff lay out the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove everything that make created
	rm -rf $(VENV) build docs/generated dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
