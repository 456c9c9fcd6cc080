# Each target does its own set-up: a virtual environment in .venv, for training with what that needs, for the others with everything.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
READY_DEV := .venv/.ready-dev

.PHONY: test test-slow test-integrations test-trl test-verl test-environments test-vllm test-server test-rl-clients test-lm-eval train lint docs results settings gpu-check clean

train: $(READY)
	$(BIN)/paceline train

test: $(READY_DEV)
	$(BIN)/paceline doctor --compile float64 & $(BIN)/paceline doctor --compile bfloat16 & wait
	$(BIN)/ruff check paceline tests benchmarks scripts examples
	$(BIN)/mypy
	-$(BIN)/python scripts/get_smollm2.py
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal

test-slow: $(READY_DEV)
	$(BIN)/python -m pytest -m slow

# With the other library installed in an environment of its own.
test-integrations: test-trl test-verl test-environments test-vllm test-server test-rl-clients test-lm-eval

test-trl: .venvs/trl/.ready
	.venvs/trl/bin/python -m pytest -m integration tests/integrations/test_trl_plugin.py tests/integrations/test_trl_processes.py

test-verl: .venvs/verl/.ready
	.venvs/verl/bin/python -m pytest -m integration tests/integrations/test_verl_plugin.py

test-environments: .venvs/verifiers/.ready .venvs/openenv/.ready
	.venvs/verifiers/bin/python -m pytest -m integration tests/integrations/test_package_environments.py
	.venvs/openenv/bin/python -m pytest -m integration tests/integrations/test_package_environments.py

# VLLM_PYTHON=… uses an environment that is there already.
VLLM_PYTHON ?= .venvs/vllm/bin/python
test-vllm: $(READY_DEV) $(if $(filter .venvs/%,$(VLLM_PYTHON)),.venvs/vllm/.ready)
	PACELINE_VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python -m pytest -m integration -s tests/integrations/test_vllm_drafters.py

test-server: $(READY_DEV)
	$(BIN)/python -m pytest -m integration -s tests/integrations/test_server_load.py

# The clients of RL frameworks, without the engines and trainers that they come with. PACELINE_RL_PYTHON=… uses an environment that is there already.
PACELINE_RL_PYTHON ?= .venvs/rl-clients/bin/python
test-rl-clients: $(READY_DEV) $(if $(filter .venvs/%,$(PACELINE_RL_PYTHON)),.venvs/rl-clients/.ready)
	PACELINE_RL_PYTHON=$(PACELINE_RL_PYTHON) $(BIN)/python -m pytest -m integration -s tests/integrations/test_rl_clients.py

.venvs/rl-clients/.ready: tests/integrations/rl_clients/requirements.txt tests/integrations/rl_clients/frameworks.txt
	test -x .venvs/rl-clients/bin/python || $(PYTHON) -m venv .venvs/rl-clients
	.venvs/rl-clients/bin/python -m pip install --quiet 'torch>=2.11,<2.14'  # first: so that nothing pulls a newer one
	.venvs/rl-clients/bin/python -m pip install --quiet -r tests/integrations/rl_clients/requirements.txt
	.venvs/rl-clients/bin/python -m pip install --quiet --no-deps -r tests/integrations/rl_clients/frameworks.txt
	touch $@

# lm-evaluation-harness, which runs in an environment of its own. PACELINE_LM_EVAL_PYTHON=… uses an environment that is there already.
PACELINE_LM_EVAL_PYTHON ?= .venvs/lm-eval/bin/python
test-lm-eval: $(READY_DEV) $(if $(filter .venvs/%,$(PACELINE_LM_EVAL_PYTHON)),.venvs/lm-eval/.ready)
	PACELINE_LM_EVAL_PYTHON=$(PACELINE_LM_EVAL_PYTHON) $(BIN)/python -m pytest -m integration -s tests/integrations/test_lm_eval.py

.venvs/lm-eval/.ready:
	test -x .venvs/lm-eval/bin/python || $(PYTHON) -m venv .venvs/lm-eval
	.venvs/lm-eval/bin/python -m pip install --quiet 'torch>=2.11,<2.14'  # first: so that nothing pulls a newer one
	.venvs/lm-eval/bin/python -m pip install --quiet 'lm-eval[api]>=0.4.13,<0.5' 'transformers>=5.0'
	touch $@

.venvs/vllm/.ready: scripts/vllm_cpu_env.sh
	PYTHON=$(PYTHON) scripts/vllm_cpu_env.sh .venvs/vllm
	touch $@

# From the extra of that name in pyproject.toml, and what the tests need beside it. DeepSpeed compiles nothing when it is installed.
.venvs/trl/.ready: TESTED_WITH = 'deepspeed>=0.19,<0.20'
.venvs/%/.ready: pyproject.toml
	test -x .venvs/$*/bin/python || $(PYTHON) -m venv .venvs/$*
	.venvs/$*/bin/python -m pip install --quiet 'torch>=2.11,<2.14'  # first: so that nothing pulls a newer one
	.venvs/$*/bin/python -m pip install --quiet --editable '.[$*]' pytest hypothesis $(TESTED_WITH)
	touch $@

results: $(READY_DEV)
	$(BIN)/python benchmarks/lib/make_results.py

settings: $(READY_DEV)
	$(BIN)/python scripts/make_settings.py

# The documentation site, in build/site.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/python -m mkdocs build --strict

# On a GPU host: make gpu-check CHECK="--model FOLDER --prompts FILE --train-prompts FILE"
gpu-check: $(READY_DEV)
	$(BIN)/python benchmarks/gpu/check.py $(CHECK)

lint: $(READY_DEV)
	$(BIN)/ruff check paceline tests benchmarks scripts examples
	$(BIN)/mypy

$(READY): pyproject.toml
	$(PYTHON) scripts/set_up.py .venv
	touch $@

$(READY_DEV): $(READY)
	$(PYTHON) scripts/set_up.py .venv --extra dev
	touch $@

clean:
	rm -rf .venv .venvs .models build *.egg-info
