"""A toy run for tests: a tiny random policy with a tokenizer, and a task whose reward it can climb in a few steps."""

from __future__ import annotations

import json
import os
import string
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from paceline.cli import main
from paceline.models.decoder import Decoder
from paceline.models.save import save_model

LETTERS = string.ascii_letters[: tiny.VOCAB - 1] + "~"
REWARD = '''
def score(problem, answer):
    """Share of lower-case letters."""
    return sum(c.islower() for c in answer) / max(1, len(answer))
'''


def make_folder(path: Path, problems: int = 6, kind: str = "llama") -> None:
    """`model/`, `prompts.jsonl` and `reward.py` under `path`."""
    tokenizer = Tokenizer(WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token="~"))
    tokenizer.pre_tokenizer, tokenizer.decoder = Split("", "isolated"), Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="~", clean_up_tokenization_spaces=False)
    save_model(Decoder.random(tiny.CONFIGS[kind], 0, std=0.2, dtype=torch.float64), fast, path / "model")
    lines = [json.dumps({"id": f"p{i}", "prompt": LETTERS[i : i + 3], "answer": ""}) for i in range(problems)]
    (path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (path / "reward.py").write_text(REWARD)


def settings(path: Path, out: str, **changes: object) -> list[str]:
    """Arguments of `paceline train`."""
    values = {"model": f"{path}/model", "task": "python", "task_options.function": f"{path}/reward.py:score",
              "task_options.data": f"{path}/prompts.jsonl", "algorithm": "grpo", "steps": 5, "dtype": "float64", "seed": 3,
              "out": f"{path}/{out}", "threads": 1, "checkpoint_every": 2, "compare_off": False, "strategy": "suffix:d4w2v8",
              "rollout.prompts": 3, "rollout.group_size": 4, "rollout.max_new_tokens": 12, "optimizer.lr": 0.01,
              "reward.workers": 0, "engine.kv_tokens": 2048, "engine.max_batch": 8, **changes}
    return ["train", str(empty_config(path)), *(x for k, v in values.items() for x in ("--set", f"{k}={json.dumps(v)}"))]


def empty_config(path: Path) -> Path:
    file = path / "empty.toml"
    file.write_text("")
    return file


def drafter_settings(path: Path, out: str, **changes: object) -> list[str]:
    """Arguments of a quick `paceline drafter train`. Small micro-batches: several to an optimizer step."""
    values = {"model": path / "model", "prompts": path / "prompts.jsonl", "out": path / out, "answers": 48, "steps": 40,
              "max_new_tokens": 12, "dtype": "float64", "threads": 1, "report_every": 5, "seed": 3, **changes}
    sizes = ["--set", "step_tokens=64", "--set", "micro_batch_tokens=24"]
    return ["drafter", "train", *(str(x) for k, v in values.items() for x in (f"--{k.replace('_', '-')}", v)), *sizes]


def run(arguments: list[str], report: bool = False) -> int:
    """Runs the command line in this process and returns its exit code.

    report: Whether a training run draws its report at the end, which takes longer than a toy's training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.cli.train.freeze_until_exit", lambda stack: None)  # the process is not the command's own
        patch.setattr("paceline.cli.generate.freeze_until_exit", lambda stack: None)
        if not report:
            patch.setattr("paceline.trainer.callbacks.write_report", lambda folder: None)
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
    return int(stopped.value.code or 0)


def start(arguments: list[str], **options: object) -> subprocess.Popen:
    """Starts the command line in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    streams = {"stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, **options}
    return subprocess.Popen([sys.executable, "-m", "paceline.cli", *arguments], env=environment, **streams)


def weights(out: Path) -> dict[str, torch.Tensor]:
    """Weights of the policy in a run's last checkpoint."""
    latest = sorted(path for path in (out / "checkpoints").glob("step-*") if path.suffix != ".damaged")[-1]
    return load_file(latest / "policy" / "model.safetensors")


def rollouts(out: Path) -> list[dict]:
    return [json.loads(line) for file in sorted(out.glob("rollouts-*.jsonl")) for line in file.read_text().splitlines()]


def assert_same_run(a: Path, b: Path) -> None:
    assert rollouts(a) == rollouts(b)
    assert_same_tensors(weights(a), weights(b))


def assert_same_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name
