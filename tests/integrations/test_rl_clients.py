"""RL frameworks' own clients against `paceline serve --rl`: tokens and log-probabilities are those of `Engine.generate`, with two
weight updates in between. The clients run in an environment of their own, whose Python PACELINE_RL_PYTHON names."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from paceline import Engine, SamplingParams
from paceline.bundled import resolve_model
from paceline.models.state_dict import export_state

pytestmark = pytest.mark.integration
PYTHON = os.environ.get("PACELINE_RL_PYTHON", str(Path(__file__).parents[2] / ".venvs/rl-clients/bin/python"))
CLIENTS = Path(__file__).parent / "rl_clients"
PROMPTS, KEY = ["27:", "97:"], "a-key"


@pytest.fixture(scope="module")
def engine():
    torch.set_num_threads(1)
    return Engine.load(resolve_model("default"), "cpu", drafter="none", strategy="off", max_batch=4)


@pytest.fixture(scope="module")
def weights(engine, tmp_path_factory):
    """Folders with weights near the bundled policy's, after its own weights."""
    folder = tmp_path_factory.mktemp("weights")
    original = {name: tensor.clone() for name, tensor in export_state(engine.model).items()}
    states = [original]
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        states.append({name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) for name, tensor in original.items()})
        (folder / f"step-{seed}").mkdir()
        save_file(states[-1], folder / f"step-{seed}" / "model.safetensors")
    return folder, states


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The bundled tokenizer with a chat template, which a client renders with."""
    found = AutoTokenizer.from_pretrained(resolve_model("default"))
    found.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    folder = tmp_path_factory.mktemp("tokenizer")
    found.save_pretrained(folder)
    return folder


@pytest.fixture
def serve(tmp_path, weights):
    """Starts a server and returns its address."""
    started = []

    def start(*options: str) -> str:
        log = tmp_path / "log"
        with log.open("w") as out:
            started.append(subprocess.Popen(
                [sys.executable, "-m", "paceline.cli", "serve", "--model", "default", "--port", "0", "--threads", "1", "--rl",
                 "--rl-weights-dir", str(weights[0]), "--no-warm-up", *options], stderr=out, stdout=out,
                env={**os.environ, "PACELINE_API_KEY": ""}))
        end = time.monotonic() + 300
        while not (found := re.search(r"served at (http://\S+)/v1;", log.read_text())):
            assert started[-1].poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        return found[1]

    yield start
    for process in started:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, (tmp_path / "log").read_text()


def ask(script: str, **told: object) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run([PYTHON, str(CLIENTS / script), json.dumps(told)], capture_output=True, text=True, timeout=600,
                           env={**environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("ANSWERS ")).removeprefix("ANSWERS "))


def check(engine, weights, answers: list[dict], prompts: list[list[int]], params: SamplingParams) -> None:
    """Compare answers with the engine's, for each weights."""
    assert len(answers) == 3
    assert len({json.dumps(found["tokens"]) for found in answers}) == 3, "the weights make a difference"
    for found, state in zip(answers, weights[1], strict=True):
        engine.update_weights(state)
        wanted = [group.rollouts[0] for group in engine.generate(prompts, params)]
        assert found["tokens"] == [rollout.token_ids for rollout in wanted]
        for logprobs, rollout in zip(found["logprobs"], wanted, strict=True):
            assert logprobs == pytest.approx(rollout.logprobs, abs=1e-4)


def test_skyrl(engine, weights, tokenizer, serve):
    sampling = {"min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True, "max_tokens": 40, "stop": None,
                "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "seed": 5}
    prompts = [engine.encode(prompt) for prompt in PROMPTS]
    answers = ask("with_skyrl.py", address=serve("--api-key", KEY), key=KEY, tokenizer=str(tokenizer), prompts=prompts,
                  sampling=sampling, weights=["step-1", "step-2"])
    check(engine, weights, answers, prompts, SamplingParams(max_new_tokens=40, seed=5, min_tokens=1))


def test_verifiers_and_prime_rl(engine, weights, tokenizer, serve):
    answers = ask("with_verifiers.py", address=serve("--api-key", KEY), key=KEY, tokenizer=str(tokenizer), prompts=PROMPTS,
                  sampling={"temperature": 0.9, "top_p": 0.95, "max_tokens": 40, "seed": 7},
                  weights=[str(weights[0] / "step-1"), str(weights[0] / "step-2")])
    prompts = [engine.encode(prompt) for prompt in PROMPTS]
    assert all(found["prompts"] == prompts for found in answers)
    check(engine, weights, answers, prompts, SamplingParams(temperature=0.9, top_p=0.95, max_new_tokens=40, seed=7))


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_areal(engine, weights, serve, backend):
    """Greedily: AReaL sends no seeds."""
    prompts = [engine.encode(prompt) for prompt in PROMPTS]
    answers = ask("with_areal.py", backend=backend, address=serve(), prompts=prompts,
                  sampling={"max_new_tokens": 40, "max_tokens": 512, "greedy": True},
                  weights=[str(weights[0] / "step-1"), str(weights[0] / "step-2")])
    check(engine, weights, answers, prompts, SamplingParams(temperature=0, max_new_tokens=40))
