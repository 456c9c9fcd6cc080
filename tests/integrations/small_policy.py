"""A small random policy as a Hugging Face folder, for tests with other libraries."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

import paceline

BUNDLED = Path(paceline.__file__).parent / "assets" / "collatz"
"""The policy that comes with Paceline; its tokenizer knows digits, space and colon."""


def write_policy(folder: Path, seed: int = 0) -> Path:
    """Write a random Llama with the bundled tokenizer and a chat template, and return its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=14, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=256, eos_token_id=13, pad_token_id=13,
                         tie_word_embeddings=False, initializer_range=0.35)
    LlamaForCausalLM(config).save_pretrained(folder)
    shutil.copy(BUNDLED / "tokenizer.json", folder)
    settings = json.loads((BUNDLED / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
