"""Prompts and response lengths that the benchmarks use."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.models import TINY


def questions(file: Path | None) -> list[str]:
    """The field `question` of every line of a JSON-lines file; without a file numbered dummies (a tiny model reads no text)."""
    if file is None:
        return [f"question {i}" for i in range(64)]
    return [json.loads(line)["question"] for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def chat(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Each text as one user message through the chat template; without a tokenizer, tokens for the tiny model."""
    if tokenizer is None:
        return [[(len(text) * 7 + 31 * i + j * j) % TINY.vocab_size for j in range(6)] for i, text in enumerate(texts)]
    return [list(tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True,
                                               return_dict=False)) for text in texts]


def distinct_chat(tokenizer: Any, texts: Sequence[str], first: int) -> list[list[int]]:
    """Like `chat`, with a number, from `first` on, in the system message: no two prompts begin alike, even with the same text, so
    no prefix cache helps."""
    if tokenizer is None:
        return random_prompts(len(texts), 12, TINY.vocab_size, first)
    messages = [[{"role": "system", "content": f"Problem {first + i}. You are a helpful assistant."},
                 {"role": "user", "content": text}] for i, text in enumerate(texts)]
    return [list(tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=True, return_dict=False))
            for each in messages]


def random_prompts(count: int, length: int, vocab_size: int, salt: int) -> list[list[int]]:
    """Prompts of random tokens. No two begin alike, so no prefix cache helps."""
    draw = random.Random(salt)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def word_problems(rng: random.Random) -> str:
    """Text like the training prompts of a policy, long enough to be cut anywhere below 128 tokens."""
    names, things = ("Ada", "Bo", "Chen", "Dara", "Eli", "Fay"), ("apples", "books", "tickets", "marbles", "coins", "shells")
    lines = []
    for _ in range(8):
        who, other = rng.sample(names, 2)
        what, a, b, c = rng.choice(things), rng.randint(20, 99), rng.randint(2, 9), rng.randint(2, 19)
        lines.append(f"{who} has {a} {what}, gives {c} of them to {other} and buys {b} boxes with {c} {what} each. "
                     f"How many {what} does {who} have now? Think step by step.")
    return "\n".join(lines)


def length_quantiles(file: Path, count: int) -> list[float]:
    """`count` evenly spaced quantiles, in ascending order, of a distribution of response lengths: a CSV file with the columns
    output_tokens and probability."""
    with file.open(newline="") as stream:
        rows = sorted((float(row["output_tokens"]), float(row["probability"])) for row in csv.DictReader(stream))
    return quantiles(rows, count)


def quantiles(distribution: Sequence[tuple[float, float]], count: int) -> list[float]:
    """Evenly spaced quantiles of (value, probability) pairs in ascending order; the probabilities need not sum to one."""
    total, mass, found, index = sum(p for _, p in distribution), 0.0, [], 0
    for i in range(count):
        while mass + distribution[index][1] < (i + 0.5) / count * total and index < len(distribution) - 1:
            mass += distribution[index][1]
            index += 1
        found.append(distribution[index][0])
    return found


def long_tailed_lengths(file: Path | None, count: int, longest: int) -> list[int]:
    """Quantiles of the distribution in `file` (without a file: of a made-up heavy tail), scaled to `longest`, in random order."""
    drawn = quantiles([(2.0**k, 2.0**-k) for k in range(8)], count) if file is None else length_quantiles(file, count)
    lengths = [max(1, round(length * longest / drawn[-1])) for length in drawn]
    random.Random(0).shuffle(lengths)
    return lengths
