# Two goals do everything on a fresh machine:
#   make train   environment, installation, the main job on the built-in data
#   make test    environment, installation, the tests; CONTRIBUTING.md: all of them
# Another Python or torch has an environment of its own: make test TORCH=2.15.0
PYTHON ?= python3
TORCH  ?=
VENV   ?= .venv$(addprefix -,$(notdir $(filter-out python3,$(PYTHON))))$(addprefix -torch,$(TORCH))
BIN    := $(VENV)/bin
OUT    ?= runs/emotions

# What is pinned, but for the torch that was asked for, which may want an older setuptools;
# newer torchao does not import with torch 2.9.
PINS   := sed -e 's/^torch==.*/$(if $(TORCH),torch==$(TORCH),&)/' $(if $(TORCH),-e '/^setuptools==/d') \
	-e 's/^torchao==.*/$(if $(filter 2.9%,$(TORCH)),torchao==0.14.1,&)/' constraints.txt > $(VENV)/constraints.txt

# Else each process of a test compiles the package anew, and each run of pytest the tests.
unexport PYTHONDONTWRITEBYTECODE

# A file of tests at a time to each process, of which each core has one: the tests of a
# file share what they have made. Files that take longest come first.
PYTEST := $(BIN)/python -m pytest -q -m "not slow" \
	-n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# Where there is a GPU, the tests that need one.
define PYTEST_GPU
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then $(BIN)/python -m pytest -q -m gpu -n 4 --dist loadfile; fi
endef

.PHONY: train test test-all test-pages test-caps test-wheel lint types docs check clean

train: $(VENV)/.train
	$(BIN)/halfstep train --compare-fp32 20 --out $(OUT) --overwrite
	@echo 'next: source $(BIN)/activate; halfstep predict $(OUT) "今天真开心"; open $(OUT)/report.html'

# Of the tests that start processes, a third.
test: $(VENV)/.dev
	$(PYTEST) --third integration tests
	$(PYTEST_GPU)

test-all: $(VENV)/.dev
	$(PYTEST) tests
	$(PYTEST_GPU)

# Code blocks of pages, and examples in docstrings.
test-pages: $(VENV)/.dev
	$(PYTEST) src docs benchmarks/*.md *.md

# Likewise, the numeric tests under each instruction set that this CPU has.
test-caps: $(VENV)/.dev
	.ci/caps $(BIN)/python

# The wheel, with the oldest versions it allows, away from its source.
test-wheel:
	.ci/wheel $(PYTHON)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python .ci/lines

# The documentation, in build/docs; a warning, such as of a link to nowhere, is an error.
docs: $(VENV)/.dev
	$(BIN)/sphinx-build -q -W --keep-going -c docs . build/docs
	@echo 'build/docs/index.html'

types: $(VENV)/.dev
	$(BIN)/mypy

check: lint types docs test-all test-pages

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache

$(VENV)/.train: pyproject.toml constraints.txt
	@echo 'installing into $(VENV): some minutes'
	$(PYTHON) -m venv $(VENV)
	$(PINS)
	$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt -e '.[train,report]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	@echo 'installing into $(VENV): some minutes'
	$(PYTHON) -m venv $(VENV)
	$(PINS)
	$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt -e '.[dev]'
	touch $@
