# Two goals do everything on a fresh machine:
#   make train   environment, installation, the main job on the built-in data
#   make test    environment, installation, the tests
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
OUT    ?= runs/emotions

.PHONY: train test lint types check clean

train: $(VENV)/.train
	$(BIN)/halfstep train --out $(OUT) --overwrite

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m "not slow"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

check: lint types test

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache

$(VENV)/.train: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[train,report]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@
