"""The spot trainer: trains the drafter whenever there is time, and yields between micro-batches.

It owns the weights in training (in float32 at least, in units of their own: `scales`), the optimizer and how far the current step
is; it only reads the policy. Stopped in the middle of an optimizer step it goes on there: the gradients so far stay.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from paceline.drafters.eagle import Eagle
from paceline.drafters.origin import Origin, origin_of
from paceline.kernels import TorchOps
from paceline.models.decoder import Decoder, Rope
from paceline.optim import learning_rate_factor, make_adamw
from paceline.spot.buffer import FeatureBuffer
from paceline.spot.config import SpotConfig
from paceline.spot.objective import Loss, Objective, means
from paceline.spot.packing import cut, first_fit, num_rows, pack
from paceline.spot.scales import Scales, measure, to_plain, to_training, training_config
from paceline.types import FeatureRecord

_MEASURED = 64
"""Records that scales are measured on."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One optimizer step: which records lie side by side, and what a row weighs at each unroll step."""

    micro_batches: tuple[tuple[int, ...], ...] = ()
    """Keys of the buffer's records."""
    shares: tuple[float, ...] = ()


@dataclass(slots=True)
class Progress:
    step: int = 0
    """Optimizer steps done."""
    cursor: int = 0
    """Micro-batches of the plan that are done: their gradients are summed up."""
    plan: Plan = Plan()
    skipped: int = 0
    """Steps left out because a gradient was not a number."""


@dataclass(frozen=True, slots=True)
class SpotReport:
    """What one `run` did."""

    seconds: float
    micro_batches: int
    steps: int
    tokens: int
    """Rows trained on."""
    losses: dict[str, float]
    """Per row: hidden, target; overlap/d and top1/d with the policy's distribution at depth d."""
    max_micro_batch_s: float
    """It returns at most this long after it should: the longest time it did not look."""
    late_s: float
    """How long past a given number of seconds it returned."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class SpotTrainer:
    def __init__(self, eagle: Eagle, policy: Decoder, buffer: FeatureBuffer, config: SpotConfig,
                 stream: torch.cuda.Stream | None = None) -> None:
        """eagle is where training begins; it is not written to. stream: where a GPU's work is queued (None: the current one)."""
        if eagle.config.form != config.module_form:
            raise ValueError(f"form: {config.form} trains an {config.module_form} drafter, this one is {eagle.config.form}")
        if eagle.config.form == "eagle3" and config.recipe.hidden_weight:
            raise ValueError(f"hidden_weight: {config.hidden_weight} with eagle3, whose outputs are not held to features")
        config = config.resolved(policy.config.hidden_size, policy.norm.device.type == "cuda")
        self.policy, self.buffer, self.config = policy, buffer, config
        self.plain_config = eagle.config
        self.scales = measure(policy, eagle.config, self._some_records())
        self.module = to_training(eagle, self.scales)
        self.parameters: dict[str, nn.Parameter] = dict(self.module.named_parameters())
        self.averaged = {name: p.detach().clone() for name, p in self.parameters.items()}
        assert config.lr is not None, "resolved"
        self.optimizer = make_adamw(self.parameters.values(), config.lr, config.betas, config.eps, config.weight_decay)
        self.progress = Progress()
        rope = Rope(policy.config, config.max_length + config.recipe.unroll, self.module.fc.weight.dtype, policy.norm.device)
        self._objective = Objective(policy, config, self.scales, TorchOps(), rope)
        self._stream = stream
        self._origin = origin_of(policy)

    def run(self, until: Callable[[], bool] | float, lengths: Sequence[int] | None = None,
            between: Callable[[], None] | None = None) -> SpotReport:
        """Trains until `until()` is true or so many seconds are over; not if the buffer is empty. lengths: as in its `draw`;
        between: called behind each micro-batch, to save a checkpoint for example."""
        began = time.perf_counter()
        done = until if callable(until) else (lambda: time.perf_counter() - began >= until)
        losses: Loss | None = None
        first_step, count, tokens, longest = self.progress.step, 0, 0, 0.0
        with self._queue():
            while not done():
                start = time.perf_counter()
                if not self._plan(lengths):
                    break
                rows, loss = self._micro_batch()
                count, tokens = count + 1, tokens + rows
                losses = losses if loss is None else loss.plus(losses)
                if between is not None:
                    between()
                longest = max(longest, time.perf_counter() - start)
        seconds = time.perf_counter() - began
        late = 0.0 if callable(until) else max(0.0, seconds - until)
        found = {} if losses is None else means(losses)
        return SpotReport(seconds, count, self.progress.step - first_step, tokens, found, longest, late)

    def drafter(self) -> Eagle:
        """What has been learned so far, as a drafter of its own that engines take, in the policy's dtype."""
        weights = self.averaged if self.config.average else self.parameters
        drafter = to_plain(self.module, weights, self.scales, self.plain_config, self.policy.norm.dtype)
        drafter.origin = self.origin
        return drafter

    @property
    def origin(self) -> Origin:
        """The policy that is learned from, at the version of the newest record."""
        return replace(self._origin, version=max(self._origin.version, self.buffer.newest_version))

    def trained_for(self, origin: Origin) -> None:
        """What has been learned so far belongs to that policy, whatever this one has become."""
        self._origin = origin

    def policy_changed(self) -> None:
        """The policy has new weights. Not while `run` is under way."""
        self._objective.policy_changed()
        self._origin = origin_of(self.policy)

    def rescale(self, scales: Scales) -> None:
        """These units from now on, for weights that were trained in them."""
        self.scales = self._objective.scales = scales
        self.module.config = training_config(self.plain_config, scales)

    def _plan(self, lengths: Sequence[int] | None) -> bool:
        """There is a micro-batch to do."""
        progress = self.progress
        if progress.cursor < len(progress.plan.micro_batches):
            return True
        config = self.config
        assert config.step_tokens is not None and config.micro_batch_tokens is not None, "resolved"
        rng = random.Random(f"{config.seed}/{progress.step}/{progress.skipped}")
        drawn = self.buffer.draw(rng, config.step_tokens, lengths)
        sizes = [min(entry.num_tokens, config.max_length) for entry in drawn]
        bins = first_fit([num_rows(size) for size in sizes], config.micro_batch_tokens)
        shares = self._objective.shares([(size, entry.prompt_length) for size, entry in zip(sizes, drawn, strict=True)])
        progress.plan = Plan(tuple(tuple(drawn[i].key for i in members) for members in bins), tuple(shares))
        progress.cursor = 0
        return bool(bins)

    def _micro_batch(self) -> tuple[int, Loss | None]:
        """Forward, backward, and behind the last one of the plan the optimizer's step. Returns when the device has done it."""
        progress, device = self.progress, self.policy.norm.device
        found = [self.buffer.get(key) for key in progress.plan.micro_batches[progress.cursor]]
        records = [cut(record, self.config.max_length) for record in found if record is not None]  # None: dropped meanwhile
        loss, rows = None, 0
        if records:
            packed = pack(records, self.module.config.feature_layers, self.policy.config.hidden_size, device)
            loss, rows = self._objective(self.module, packed, progress.plan.shares, self._noise()), len(packed.follow)
            loss.total.backward()
        progress.cursor += 1
        if progress.cursor == len(progress.plan.micro_batches):
            self._apply()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # what was queued is a promise; the bound is about what is done
        return rows, loss

    def _apply(self) -> None:
        progress, config = self.progress, self.config
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), config.max_grad_norm)
        if bool(torch.isfinite(norm)):
            assert config.lr is not None, "resolved"
            factor = learning_rate_factor(progress.step, config.total_steps, config.schedule, config.warmup_steps,
                                          config.min_lr_ratio)
            for group in self.optimizer.param_groups:
                group["lr"] = config.lr * factor
            self.optimizer.step()
            progress.step += 1
            self._average()
        else:
            progress.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        progress.plan, progress.cursor = Plan(), 0

    @torch.no_grad()
    def _average(self) -> None:
        """The first steps count for little: an average over about a tenth of the steps so far, up to the configured."""
        done = self.progress.step + self.config.head_start
        keep = min(self.config.average, done / (done + 10))
        torch._foreach_lerp_(list(self.averaged.values()), [p.detach() for p in self.parameters.values()], 1 - keep)

    def _noise(self) -> torch.Generator | None:
        """A function of where training stands, so that it is the same after a restart."""
        if self.config.feature_noise == 0:
            return None
        seed = random.Random(f"{self.config.seed}/{self.progress.step}/{self.progress.cursor}").getrandbits(63)
        return torch.Generator(self.policy.norm.device).manual_seed(seed)

    def _some_records(self) -> list[FeatureRecord]:
        found = (self.buffer.get(entry.key) for entry in self.buffer.entries()[:_MEASURED])
        return [record for record in found if record is not None]

    def _queue(self) -> torch.cuda.StreamContext | nullcontext[None]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.policy.norm.device))
        return torch.cuda.stream(self._stream)
