#!/usr/bin/env python3
"""Train the policy that is bundled with the package, a deep, narrow decoder that writes Collatz paths and is right some of the
time, and its drafter, one layer that is trained on the policy's answers.

It is trained from random weights on correct paths with label smoothing, so that it learns every step and is not too sure of
itself. Then it is trained on paths with one kind of mistake: sometimes a number that is divisible by 4 is halved twice at once;
first on short pieces, and at last on many whole paths and with hardly any smoothing, until it makes hardly any other mistakes.
So it knows every step, and often makes a mistake that reinforcement learning can find and mend: each path has such numbers, and
what is learned on short paths helps on long ones. (Mistakes that are spread over all tokens give hardly any signal: one token
of an answer is wrong, and all are blamed. A policy whose training was stopped early would know some steps and not others, and
far fewer groups would contain both right and wrong answers.)

The policy has many layers because a large model does: a step takes about as long for a few tokens as for one, and many times as
long as the drafter's layer. The same seed gives the same policy and drafter up to rounding. This takes about six minutes on two
idle cores, and one more for the sampled accuracy that is printed at the end. `--drafter-only` trains the drafter alone, for the
policy that is there. `--scale 0.01` tries all of it out in half a minute, with a hundredth of the steps and answers.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from paceline import Engine, SamplingParams
from paceline.drafters.checkpoint import load_eagle, save_eagle
from paceline.kernels import TorchOps
from paceline.models.attend import PackedAttend
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder, Rope
from paceline.models.save import save_model
from paceline.models.weights import load_model
from paceline.spot import SpotConfig
from paceline.tasks.collatz import Collatz, CollatzConfig, collatz_path
from paceline.trainer.standalone_drafter import StandaloneDrafterOptions, StandaloneDrafterTrainer

ASSETS = Path(__file__).resolve().parent.parent / "paceline" / "assets"
CHARACTERS = "0123456789 :?"  # "?" stands for all other characters
END = "<end>"
CHAT_TEMPLATE = ("{% for message in messages %}{{ message.content }}{{ ':' if loop.last and add_generation_prompt and "
                 "not message.content.endswith(':') }}{% endfor %}")
CONFIG = ModelConfig(
    "qwen3", vocab_size=len(CHARACTERS) + 1, hidden_size=64, intermediate_size=128, num_layers=48, num_heads=2, num_kv_heads=1,
    head_dim=32, qk_norm=True, tie_embeddings=True, max_context=1024, eos_token_ids=(len(CHARACTERS),),
)
DRAFTER_ANSWERS, DRAFTER_STEPS, REPORT_SAMPLES = 512, 400, 8
OPS, ROPE = TorchOps(), Rope(CONFIG, CONFIG.max_context, torch.float32, "cpu")


class Part(NamedTuple):
    """A part of the policy's training."""

    steps: int
    warm_up: int
    peak_rate: float
    smoothing: float  # probability that is spread evenly over all tokens
    skip: float  # chance that a number divisible by 4 is halved twice at once
    batch_tokens: int
    window: int  # tokens of a text that is not whole
    whole_share: float


RIGHT = Part(300, 30, 3e-3, 0.016, 0.0, 2048, 48, 0.1)
MISTAKEN = Part(40, 5, 1.5e-3, 0.002, 0.1, 1024, 32, 0.03)
SURE = Part(100, 5, 1e-3, 0.0005, 0.1, 1536, 48, 0.3)


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=ASSETS / "collatz", help="folder of the policy")
    options.add_argument("--drafter-out", type=Path, default=ASSETS / "collatz-drafter", help="folder of the drafter")
    options.add_argument("--drafter-only", action="store_true", help="the policy is there already")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--scale", type=float, default=1.0, help="share of all steps and answers")
    args = options.parse_args(arguments)
    torch.set_num_threads(2)  # the model is too small for more
    task = Collatz(CollatzConfig())
    if not args.drafter_only:
        make_policy(task, args.out, args.seed, args.scale)
    make_drafter(args.out, args.drafter_out, args.seed, args.scale)
    report(args.out, args.drafter_out, task, args.scale)


def scaled(count: int, scale: float, least: int = 2) -> int:
    return max(least, round(count * scale))


def make_policy(task: Collatz, folder: Path, seed: int, scale: float) -> None:
    tokenizer, model = make_tokenizer(), initial_model(seed)
    for number, part in enumerate((RIGHT, MISTAKEN, SURE)):
        train(model, tokenizer, task.starts, seed + number, part._replace(steps=scaled(part.steps, scale)))
    save_model(model.bfloat16(), tokenizer, folder, overwrite=True)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes files that only their owner can read


def make_drafter(policy: Path, folder: Path, seed: int, scale: float) -> None:
    """Train a drafter as `paceline drafter train` does, and keep what an engine loads of it, in bfloat16."""
    with TemporaryDirectory() as place:
        params = SamplingParams(max_new_tokens=512, seed=seed)
        StandaloneDrafterTrainer(StandaloneDrafterOptions(
            str(policy), "task:collatz", Path(place), scaled(DRAFTER_ANSWERS, scale, 32), 1, params, SpotConfig(seed=seed),
            seconds=None, steps=scaled(DRAFTER_STEPS, scale), device="cpu", dtype="float32", report_every=1e9,
            checkpoint_every=1e9)).run()
        model, _ = load_model(policy, "cpu", "float32")
        drafter = load_eagle(place, model)
    save_eagle(drafter.bfloat16(), folder)
    (folder / "model.safetensors").chmod(0o644)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, which decodes to exactly the text that was encoded."""
    vocabulary = {character: number for number, character in enumerate([*CHARACTERS, END])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False,
                                   model_max_length=CONFIG.max_context, chat_template=CHAT_TEMPLATE)


def initial_model(seed: int) -> Decoder:
    """Random weights: every matrix preserves the scale of its input, and each layer's output is scaled down with the number of
    layers."""
    model = Decoder.random(CONFIG, seed, std=1.0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name == "embed.weight":
                weight.mul_(0.1)
            elif weight.dim() == 2:
                weight.mul_(weight.shape[1] ** -0.5)
            if name.endswith(("attention.o.weight", "mlp.down.weight")):
                weight.mul_((2 * CONFIG.num_layers) ** -0.5)
    return model.requires_grad_(True)


def train(model: Decoder, tokenizer: PreTrainedTokenizerFast, starts: list[int], seed: int, part: Part) -> None:
    """Train on paths from these numbers with a cosine schedule."""
    texts = batches(tokenizer, starts, random.Random(seed), part)
    optimiser = torch.optim.AdamW(model.parameters(), lr=part.peak_rate, betas=(0.9, 0.95), weight_decay=0.01)
    began = time.perf_counter()
    for step in range(1, part.steps + 1):
        optimiser.param_groups[0]["lr"] = part.peak_rate * min(
            step / part.warm_up, 0.51 + 0.49 * math.cos(math.pi * step / part.steps))
        loss = -torch.cat(answer_logprobs(model, next(texts), part.smoothing)).mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 20 == 0 or step == part.steps:
            chances = right_chances(model, tokenizer, starts)
            print(f"step {step:4d}  {time.perf_counter() - began:4.0f} s  loss {loss.item():.4f}  "
                  f"accuracy {statistics.fmean(chances):.3f}  mixed groups of 8 {mixed(chances):.2f}", flush=True)


Text = tuple[Tensor, int]  # token ids of prompt and answer, length of the prompt


def batches(tokenizer: PreTrainedTokenizerFast, starts: list[int], rng: random.Random, part: Part) -> Iterator[list[Text]]:
    """Batches of training texts: mostly the beginnings of paths from any number that lies on one, so that rare steps occur as
    often as common ones, and some whole paths, so that every position occurs."""
    numbers = sorted({number for start in starts for number in (start, *collatz_path(start)) if number > 1})
    while True:
        batch: list[Text] = []
        while sum(len(ids) for ids, _ in batch) < part.batch_tokens:
            if rng.random() < part.whole_share:
                batch.append(encode(tokenizer, rng.choice(starts), rng, part.skip))
            else:
                ids, prompt = encode(tokenizer, rng.choice(numbers), rng, part.skip)
                batch.append((ids[: part.window], prompt))
        yield batch


def encode(tokenizer: PreTrainedTokenizerFast, start: int, rng: random.Random | None = None, skip: float = 0.0) -> Text:
    """A prompt and its answer; with `skip` an answer that lacks some numbers."""
    path = [start, *collatz_path(start)]
    if rng is not None and skip:
        path = [path[0], *(number for before, number in pairwise(path) if before % 4 or rng.random() >= skip)]
    prompt = tokenizer.encode(f"{start}:")
    answer = tokenizer.encode(" " + " ".join(map(str, path[1:])) + END)
    return torch.tensor(prompt + answer), len(prompt)


def answer_logprobs(model: Decoder, batch: list[Text], smoothing: float = 0.0) -> list[Tensor]:
    """Log-probabilities of the answer tokens of each text."""
    lengths = tuple(len(ids) for ids, _ in batch)
    cos, sin = ROPE(torch.cat([torch.arange(length) for length in lengths]))
    tokens = torch.cat([ids for ids, _ in batch])
    logits = model.logits(model(tokens, PackedAttend(OPS, cos, sin, lengths)).final, OPS)
    logprobs = -F.cross_entropy(logits, tokens.roll(-1), reduction="none", label_smoothing=smoothing)
    return [row[prompt - 1 : -1] for row, (_, prompt) in zip(logprobs.split(lengths), batch, strict=True)]


@torch.no_grad()
def right_chances(model: Decoder, tokenizer: PreTrainedTokenizerFast, starts: list[int]) -> list[float]:
    """For each start, the probability that an answer sampled at temperature 1 is right: the product of its tokens'
    probabilities."""
    texts = [encode(tokenizer, start) for start in starts]
    rows = [row for i in range(0, len(texts), 32) for row in answer_logprobs(model, texts[i : i + 32])]
    return [math.exp(row.sum().item()) for row in rows]


def mixed(chances: list[float]) -> float:
    """Expected share of groups of 8 answers that contain both right and wrong ones, which are the groups with a training
    signal."""
    return statistics.fmean(1 - p**8 - (1 - p) ** 8 for p in chances)


def report(folder: Path, drafter: Path, task: Collatz, scale: float) -> None:
    engine = Engine.load(folder, dtype="float32", drafter=drafter, strategy="eagle:d6w1v6")
    problems = [task[i] for i in range(scaled(len(task), scale))]
    groups = engine.generate([p.prompt for p in problems], SamplingParams(max_new_tokens=700), n=REPORT_SAMPLES)
    answers = [(problem, rollout) for problem, group in zip(problems, groups, strict=True) for rollout in group.rollouts]
    rewards = [task.grade(problem, rollout.text) for problem, rollout in answers]
    lengths = sorted(len(rollout.token_ids) for _, rollout in answers)
    p50, p90, p99 = (lengths[round(q * (len(lengths) - 1))] for q in (0.5, 0.9, 0.99))
    both = statistics.fmean(0 < sum(rewards[i : i + REPORT_SAMPLES]) < REPORT_SAMPLES
                            for i in range(0, len(rewards), REPORT_SAMPLES))
    size = sum(file.stat().st_size for place in (folder, drafter) for file in place.iterdir())
    print(f"{folder}, {drafter}: {size / 1e6:.2f} MB\ndrafts of 6 tokens: {engine.stats().tokens_per_verification:.2f} tokens "
          f"per verification\nsampled accuracy {statistics.fmean(rewards):.3f}, mixed groups of 8 {both:.2f}\n"
          f"answer tokens p50 {p50}, p90 {p90}, p99 {p99} (p99/p50 {p99 / p50:.1f}), mean {statistics.fmean(lengths):.0f}, "
          f"cut off {statistics.fmean(r.finish_reason == 'length' for _, r in answers):.3f}")


if __name__ == "__main__":
    main()
