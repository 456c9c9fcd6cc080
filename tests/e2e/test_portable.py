"""What a user on another CPU runs: the portable kernels, forced here, and a torch without MKL and oneDNN."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import toy

ROOT = Path(__file__).resolve().parents[2]

WITHOUT_LIBRARIES = """
import torch

def hidden(self, name):
    raise AttributeError(f"'_OpNamespace' '{self.name}' object has no attribute '{name}'")

for namespace in (torch.ops.mkl, torch.ops.mkldnn):
    namespace.__class__ = type("Hidden", (type(namespace),), {"__getattr__": hidden})
torch.backends.mkl.is_available = lambda: False

from paceline import Engine, SamplingParams
from paceline.kernels import choose_backend
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder

shape = ModelConfig("llama", 61, 32, 48, 2, 4, 2, 8, max_context=128)
for dtype in (torch.float32, torch.bfloat16):
    assert choose_backend("cpu", dtype).name == "portable"
    model = Decoder.random(shape, 0, 0.3, dtype)
    off, on = (Engine(model, strategy=strategy).generate([[1, 2, 3]], SamplingParams(max_new_tokens=24), n=3)
               for strategy in ("off", "suffix:d4w2v8"))
    assert [r.token_ids for r in off[0].rollouts] == [r.token_ids for r in on[0].rollouts]
print("same tokens")
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    found = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
                           env={**os.environ, **environment})
    assert found.returncode == 0, found.stderr[-3000:]
    return found


def test_a_training_run_with_the_portable_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_KERNELS", "portable")
    settings = ["steps=1", "rollout.prompts=2", "rollout.group_size=4", "rollout.max_new_tokens=32", "evaluation.problems=2",
                "threads=1", f"out={tmp_path / 'run'}"]
    options = [part for setting in settings for part in ("--set", setting)]
    assert toy.run(["train", *options]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["identical_rollouts"] and summary["compared_rollouts"] == 8


def test_the_engine_without_the_operators_of_mkl_and_onednn():
    assert run("-c", WITHOUT_LIBRARIES, PACELINE_KERNELS="").stdout == "same tokens\n"


def test_the_doctor_says_which_kernels_are_used_and_why(capsys, monkeypatch):
    monkeypatch.setenv("PACELINE_KERNELS", "portable")
    assert toy.run(["doctor"]) == 0
    found = capsys.readouterr().out
    for name in ("python", "torch", "numba", "triton", "cuda", "threads"):
        assert f" {name}  " in found
    assert found.count("portable kernels: PACELINE_KERNELS=portable") == 3
    monkeypatch.delenv("PACELINE_KERNELS")
    assert toy.run(["doctor", "--compile", "float32"]) == 0
    assert "ready in" in capsys.readouterr().out
