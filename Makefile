# Each target does its own set-up: a virtual environment in .venv with everything the project needs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: test test-slow train lint results gpu-check clean

train: $(READY)
	$(BIN)/paceline train

test: $(READY)
	$(BIN)/paceline doctor --compile float64 & $(BIN)/paceline doctor --compile bfloat16 & wait
	$(BIN)/ruff check paceline tests benchmarks scripts examples
	$(BIN)/mypy
	-$(BIN)/python scripts/get_smollm2.py
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

results: $(READY)
	$(BIN)/python benchmarks/lib/make_results.py

# On a GPU host: make gpu-check CHECK="--model FOLDER --prompts FILE --train-prompts FILE"
gpu-check: $(READY)
	$(BIN)/python benchmarks/gpu/check.py $(CHECK)

lint: $(READY)
	$(BIN)/ruff check paceline tests benchmarks scripts examples
	$(BIN)/mypy

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/paceline doctor --compile float32
	touch $(READY)

clean:
	rm -rf .venv .models build *.egg-info
