"""The spot trainer: trains the drafter whenever there is time, and can be interrupted between micro-batches.

It owns the weights in training (in float32 at least, at the scale of `scaling`), the optimizer and the position within the
current optimizer step; it only reads the policy. A trainer that is interrupted within an optimizer step keeps the accumulated
gradients and continues from there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from paceline.drafters.eagle import Eagle
from paceline.drafters.fingerprint import PolicyFingerprint, fingerprint_of
from paceline.kernels.reference.training import TrainOps
from paceline.models.decoder import Decoder, Rope
from paceline.optim import NonFiniteError, decay_factor, make_adamw, require_finite
from paceline.packing import first_fit_decreasing
from paceline.spot.buffer import FeatureBuffer
from paceline.spot.config import SpotConfig
from paceline.spot.losses import DrafterLoss, LossSums
from paceline.spot.packing import Stretch, num_rows, pack, stretches
from paceline.spot.scaling import Scales, measure_scales, to_plain_scale, to_training_scale, training_config
from paceline.types import FeatureRecord

SCALE_RECORDS = 64
"""Number of records that the input scales are measured on."""
_MAX_SKIPPED = 20
"""Number of consecutive optimizer steps with a gradient that is not finite after which training is given up."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Micro-batches of one optimizer step."""

    micro_batches: tuple[tuple[tuple[int, int], ...], ...] = ()
    """What each micro-batch trains on: the key of a record and the number of one of its parts (`packing.stretches`)."""
    shares: tuple[float, ...] = ()
    """Weight of one row at each unroll step."""


@dataclass(slots=True)
class TrainingProgress:
    """Position of a trainer within its training."""

    step: int = 0
    """Number of optimizer steps done."""
    cursor: int = 0
    """Number of micro-batches of the current plan done, whose gradients are accumulated."""
    plan: BatchPlan = BatchPlan()
    """Micro-batches of the current optimizer step."""
    skipped: int = 0
    """Number of optimizer steps skipped because a gradient was not finite."""
    seconds: float = field(default=0.0, compare=False)
    """Seconds of training so far."""
    tokens: int = 0
    """Number of rows trained on so far."""

    def share_done(self, config: SpotConfig) -> float:
        """Share of the training that is done; 0 if its length is not known."""
        by_steps = 0.0 if config.total_steps is None else self.step / config.total_steps
        by_time = 0.0 if config.total_seconds is None else self.seconds / config.total_seconds
        return min(1.0, max(0.0, by_steps, by_time))


@dataclass(frozen=True, slots=True)
class SpotReport:
    """Result of one call of `SpotTrainer.run`."""

    seconds: float
    """Duration of the call."""
    micro_batches: int
    """Number of micro-batches done."""
    steps: int
    """Number of optimizer steps done."""
    tokens: int
    """Number of rows trained on."""
    losses: dict[str, float]
    """Means per row: `hidden` and `target` loss, `overlap/d` and `top1/d` with the policy's distribution at depth d."""
    max_micro_batch_s: float
    """Duration of the longest micro-batch, which bounds how long an interruption can take."""

    @property
    def tokens_per_second(self) -> float:
        """Number of rows trained on per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


class SpotTrainer:
    """Trains a drafter on the records of a feature buffer."""

    def __init__(self, eagle: Eagle, policy: Decoder, buffer: FeatureBuffer, config: SpotConfig) -> None:
        """Creates a trainer.

        Args:
            eagle: The initial drafter. It is copied, not modified.
            policy: The policy that the drafter drafts for.
            buffer: The training data.
            config: How to train.
        """
        if eagle.config.form != config.module_form:
            raise ValueError(f"form: {config.form} trains an {config.module_form} drafter, but this one is {eagle.config.form}")
        if eagle.config.form == "eagle3" and config.recipe.hidden_weight:
            raise ValueError(f"hidden_weight: {config.hidden_weight} does not apply to eagle3, which has no feature loss")
        config = config.resolved(policy.config.hidden_size, policy.norm.device.type == "cuda")
        self.policy, self.buffer, self.config = policy, buffer, config
        self.plain_config = eagle.config
        self.scales = measure_scales(policy, eagle.config, self._first_records())
        self.module = to_training_scale(eagle, self.scales)
        self.parameters: dict[str, nn.Parameter] = dict(self.module.named_parameters())
        self.averaged = {name: p.detach().clone() for name, p in self.parameters.items()}
        assert config.lr is not None, "resolved"
        self.optimizer = make_adamw(self.parameters.values(), config.lr, config.betas, config.eps, config.weight_decay)
        self.progress = TrainingProgress()
        self.exchange: Callable[[], bool] | None = None
        """Averages the gradients over several trainers before each optimizer step. It is called until it returns True."""
        self._skipped_in_a_row = 0
        self._max_length = min(config.max_length or policy.config.max_context, policy.config.max_context)
        rope = Rope(eagle.config.model, self._max_length + config.recipe.unroll, self.module.fc.weight.dtype, policy.norm.device)
        self._loss = DrafterLoss(policy, config, self.scales, TrainOps(narrow=True), rope)
        self._fingerprint = fingerprint_of(policy)

    def run(self, until: Callable[[], bool] | float, lengths: Sequence[int] | None = None,
            on_micro_batch: Callable[[], None] | None = None) -> SpotReport:
        """Trains until it is told to stop. Returns at once if the buffer is empty.

        Args:
            until: A function that is called before each micro-batch and returns True to stop, or a time limit in seconds.
            lengths: Answer lengths that the training data should follow, see `FeatureBuffer.draw`.
            on_micro_batch: Called after each micro-batch, for example to save a checkpoint.

        Raises NonFiniteError once a weight is not finite, or the gradients of twenty steps in a row are not. The trainer cannot
        be used any more then; its last checkpoint can.
        """
        began = time.perf_counter()
        done = until if callable(until) else (lambda: time.perf_counter() - began >= until)
        losses: LossSums | None = None
        first_step, count, tokens, longest = self.progress.step, 0, 0, 0.0
        while not done():
            start = time.perf_counter()
            if not self._plan_step(lengths):
                break
            rows, loss = self._run_micro_batch()
            count, tokens = count + 1, tokens + rows
            losses = losses if loss is None else loss.plus(losses)
            self.progress.seconds, self.progress.tokens = (self.progress.seconds + time.perf_counter() - start,
                                                           self.progress.tokens + rows)
            if on_micro_batch is not None:
                on_micro_batch()
            longest = max(longest, time.perf_counter() - start)
        seconds = time.perf_counter() - began
        means = {} if losses is None else losses.means()
        return SpotReport(seconds, count, self.progress.step - first_step, tokens, means, longest)

    def drafter(self) -> Eagle:
        """Returns the trained drafter as a new module that engines can use, in the policy's dtype."""
        weights = self.averaged if self.config.average else self.parameters
        drafter = to_plain_scale(self.module, weights, self.scales, self.plain_config, self.policy.norm.dtype)
        drafter.policy_fingerprint = self.policy_fingerprint
        return drafter

    @property
    def policy_fingerprint(self) -> PolicyFingerprint:
        """Fingerprint of the policy that the drafter is trained for, at the version of the newest record."""
        return replace(self._fingerprint, version=max(self._fingerprint.version, self.buffer.newest_version))

    def set_policy_fingerprint(self, fingerprint: PolicyFingerprint) -> None:
        """Declares which policy the weights trained so far belong to, where that is not `self.policy` as it is now."""
        self._fingerprint = fingerprint

    def policy_changed(self) -> None:
        """Must be called after the policy's weights changed, and not while `run` is active."""
        self._loss.policy_changed()
        self._fingerprint = fingerprint_of(self.policy)

    def set_scales(self, scales: Scales) -> None:
        """Sets the input scales, for weights that were trained with them."""
        self.scales = self._loss.scales = scales
        self.module.config = training_config(self.plain_config, scales)

    def rows_per_pass(self) -> int:
        """Number of rows that training on every record of the buffer once takes."""
        return sum(num_rows(part.end - part.first) for entry in self.buffer.entries()
                   for part in self._stretches(entry.num_tokens, entry.prompt_length))

    def _plan_step(self, lengths: Sequence[int] | None) -> bool:
        """Plans the next optimizer step if the current one is done. Returns whether there is a micro-batch to run."""
        progress = self.progress
        if progress.plan.micro_batches:
            return True
        config = self.config
        assert config.step_tokens is not None and config.micro_batch_tokens is not None, "resolved"
        rng = random.Random(f"{config.seed}/{progress.step}/{progress.skipped}")
        drawn = self.buffer.draw(rng, config.step_tokens, lengths)
        parts = [(entry.key, i, part) for entry in drawn
                 for i, part in enumerate(self._stretches(entry.num_tokens, entry.prompt_length)) if part.end > part.start]
        sizes = [(part.end - part.first, part.start - part.first) for _, _, part in parts]
        bins = first_fit_decreasing([num_rows(size) for size, _ in sizes], config.micro_batch_tokens)
        shares = self._loss.row_weights(sizes)
        progress.plan = BatchPlan(tuple(tuple(parts[i][:2] for i in members) for members in bins), tuple(shares))
        progress.cursor = 0
        return bool(bins)

    def _stretches(self, num_tokens: int, prompt_length: int) -> list[Stretch]:
        return stretches(min(num_tokens, self._max_length), prompt_length, self.plain_config.window)

    def _run_micro_batch(self) -> tuple[int, LossSums | None]:
        """Runs the forward and backward pass of the next micro-batch, and after the last one of the plan the optimizer step, once
        the gradients are exchanged. Returns its number of rows and its loss once the device has finished."""
        progress, device = self.progress, self.policy.norm.device
        rows, loss = (0, None) if progress.cursor == len(progress.plan.micro_batches) else self._accumulate()
        if progress.cursor == len(progress.plan.micro_batches) and (self.exchange is None or self.exchange()):
            self._optimizer_step()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # `max_micro_batch_s` must bound finished, not queued work
        return rows, loss

    def _accumulate(self) -> tuple[int, LossSums | None]:
        progress, device = self.progress, self.policy.norm.device
        found = [(self.buffer.get(key), i) for key, i in progress.plan.micro_batches[progress.cursor]]
        records = [self._stretches(len(record.token_ids), record.prompt_length)[i].of(record) for record, i in found
                   if record is not None]  # None: dropped since
        loss, rows = None, 0
        if records:
            packed = pack(records, self.module.config.feature_layers, self.policy.config.hidden_size, device)
            loss, rows = self._loss(self.module, packed, progress.plan.shares, self._noise_generator()), len(packed.next_tokens)
            loss.total.backward()
        progress.cursor += 1
        return rows, loss

    def _optimizer_step(self) -> None:
        progress, config = self.progress, self.config
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), config.max_grad_norm)
        if bool(torch.isfinite(norm)):
            assert config.lr is not None, "resolved"
            factor = min(1.0, (progress.step + 1) / max(1, config.warmup_steps))
            factor *= decay_factor(progress.share_done(config), config.schedule, config.min_lr_ratio)
            for group in self.optimizer.param_groups:
                group["lr"] = config.lr * factor
            self.optimizer.step()
            require_finite(self.parameters.items(), "drafter")
            progress.step += 1
            self._update_average()
            self._skipped_in_a_row = 0
        else:
            progress.skipped += 1
            self._skipped_in_a_row += 1
            if self._skipped_in_a_row == _MAX_SKIPPED:
                raise NonFiniteError(f"drafter: the gradients of {_MAX_SKIPPED} steps in a row are not finite")
        self.optimizer.zero_grad(set_to_none=True)
        progress.plan, progress.cursor = BatchPlan(), 0

    @torch.no_grad()
    def _update_average(self) -> None:
        """Updates the moving average. Its window is about a tenth of the steps so far, up to the configured one, so that the
        first steps are soon forgotten. So it is for drafters that were trained before: with a long window from the start, short
        training would publish a tenth of what it has learned."""
        keep = min(self.config.average, self.progress.step / (self.progress.step + 10))
        torch._foreach_lerp_(list(self.averaged.values()), [p.detach() for p in self.parameters.values()], 1 - keep)

    def _noise_generator(self) -> torch.Generator | None:
        """Returns a generator seeded by the progress of training, so that a resumed run uses the same noise."""
        if self.config.feature_noise == 0:
            return None
        seed = random.Random(f"{self.config.seed}/{self.progress.step}/{self.progress.cursor}").getrandbits(63)
        return torch.Generator(self.policy.norm.device).manual_seed(seed)

    def _first_records(self) -> list[FeatureRecord]:
        found = (self.buffer.get(entry.key) for entry in self.buffer.entries()[:SCALE_RECORDS])
        return [record for record in found if record is not None]
