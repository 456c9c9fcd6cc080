# Each target does its own set-up: a virtual environment in .venv with everything the project needs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: test test-slow test-integrations test-trl test-verl train lint results gpu-check clean

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

# With the other library installed in an environment of its own: .venvs/NAME, from the extra of that name in pyproject.toml.
test-integrations: test-trl test-verl

test-trl: .venvs/trl/.ready
	.venvs/trl/bin/python -m pytest -m integration tests/integrations/test_trl_plugin.py

test-verl: .venvs/verl/.ready
	.venvs/verl/bin/python -m pytest -m integration tests/integrations/test_verl_plugin.py

.venvs/%/.ready: pyproject.toml
	test -x .venvs/$*/bin/python || $(PYTHON) -m venv .venvs/$*
	.venvs/$*/bin/python -m pip install --quiet 'torch>=2.11,<2.14'  # first: so that nothing pulls a newer one
	.venvs/$*/bin/python -m pip install --quiet --editable '.[$*]' pytest hypothesis
	touch $@

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
	rm -rf .venv .venvs .models build *.egg-info
