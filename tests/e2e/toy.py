"""A toy run for tests: a tiny random policy with a tokenizer, and a task whose reward it can climb in a few steps."""

from __future__ import annotations

import json
import string
from pathlib import Path

import tiny
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

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
