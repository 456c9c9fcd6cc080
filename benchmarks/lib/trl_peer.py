"""TRL's GRPOTrainer as the peer of `benchmarks/cpu/rl_step.py`: its own loop and transformers' generation, with given response
lengths."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Sizes(NamedTuple):
    """Sizes of a run of TRL's trainer."""

    prompts: int
    """Number of prompts per step."""
    group: int
    """Number of responses per prompt."""
    longest: int
    """Maximum number of new tokens."""
    micro_batch: int
    """Number of sequences per forward pass of TRL's trainer."""
    steps: int
    """Number of optimizer steps."""
    lr: float
    """Learning rate."""


class ForcedLengths(LogitsProcessor):
    """A logits processor that ends response i after lengths[i] tokens: the end token is forced then and forbidden before."""

    def __init__(self, eos: int) -> None:
        self.eos, self.lengths, self._drawn = eos, torch.zeros(0), 0

    def begin(self, lengths: list[int]) -> None:
        self.lengths, self._drawn = torch.tensor(lengths), 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._drawn += 1
        scores[:, self.eos] = -torch.inf
        last = self.lengths == self._drawn
        if last.any():
            scores[last] = -torch.inf
            scores[last, self.eos] = 0.0
        return scores


class TimedTrainer(GRPOTrainer):
    """TRL's trainer, unchanged but for timers around generation and reward."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.answers: list[list[int]] = []
        super().__init__(*args, **kwargs)

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - began

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock("generate"):
            found = super()._generate_single_turn(*args, **kwargs)
        self.answers = found[0]
        return found

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock("reward"):
            return super()._calculate_rewards(*args, **kwargs)


class Turns(TrainerCallback):
    """Calls a function before and after every whole step of the trainer's own loop."""

    def __init__(self, before: Callable[[int], None], after: Callable[[int], None]) -> None:
        self.before, self.after = before, after

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.before(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.after(state.global_step - 1)


def make_trainer(folder: Path, prompts: list[str], reward: Callable[[str], float], sizes: Sizes,
                 scratch: str) -> tuple[TimedTrainer, ForcedLengths]:
    """A trainer with one optimizer step per batch of responses, AdamW, no KL term, no activation checkpointing, no logging."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    forced = ForcedLengths(tokenizer.eos_token_id)
    model.generate = partial(model.generate, logits_processor=LogitsProcessorList([forced]))  # the one hook generate offers
    accumulate = sizes.prompts * sizes.group // sizes.micro_batch
    assert accumulate * sizes.micro_batch == sizes.prompts * sizes.group, "--trl-batch must divide the number of answers"

    def rewards(completions: list[str], **kwargs: Any) -> list[float]:
        return [reward(text) for text in completions]

    config = GRPOConfig(
        output_dir=scratch, use_cpu=True, bf16=False, per_device_train_batch_size=sizes.micro_batch,
        gradient_accumulation_steps=accumulate, steps_per_generation=accumulate, num_generations=sizes.group,
        max_completion_length=sizes.longest, temperature=1.0, top_k=0, top_p=1.0, beta=0.0, epsilon=0.2, loss_type="grpo",
        scale_rewards="group", learning_rate=sizes.lr, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0,
        max_steps=sizes.steps, shuffle_dataset=False, gradient_checkpointing=False, save_strategy="no", report_to=[],
        logging_steps=10**6, disable_tqdm=True, seed=0)
    trainer = TimedTrainer(model, rewards, config, Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer)
    return trainer, forced


def loss_and_norm(trainer: TimedTrainer, inputs: dict[str, Tensor]) -> tuple[float, float]:
    """TRL's loss for one batch and the norm of its gradient; the weights are not updated."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # its loop sets it
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), torch.inf)
    trainer.model.zero_grad(set_to_none=True)
    return float(loss.detach()), float(norm)
