"""The learner turns a batch of answers into a weight update. It owns the models in training and their optimizers, and knows
neither the engine, nor the task, nor any algorithm by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from paceline.config import LearnerConfig, OptimizerConfig
from paceline.models.decoder import Decoder
from paceline.models.routing import Routing, RoutingTotals
from paceline.models.state_dict import load_state
from paceline.models.weights import empty_model
from paceline.optim import (
    NonFiniteError,
    learning_rate_factor,
    make_adamw,
    make_adamw_8bit,
    reproducible,
    require_finite,
    set_learning_rate,
)
from paceline.rl.adapters import adapters_off, add_lora, decoder_of, merged_parameters, plain_copy, unadapted_parameters
from paceline.rl.algorithms import PPO, Algorithm
from paceline.rl.batch import MicroBatch, Sample, pack
from paceline.rl.exact import ExactForward
from paceline.rl.losses import importance_weights
from paceline.rl.models import Policy, SamplingFilters, Scorer, recompute_activations
from paceline.rl.ranks import Ranks, full, gathered, local, trained
from paceline.rl.reward_model import RewardModel


class Learner:
    """The policy in training, the frozen reference, the critic and the reward model, as the algorithm needs them."""

    def __init__(self, model: Decoder, algorithm: Algorithm, config: LearnerConfig, optimizer: OptimizerConfig, steps: int,
                 temperature: float, compute: torch.dtype, seed: int = 0, reward_model: RewardModel | None = None,
                 reward_weight: float = 1.0, filters: SamplingFilters | None = None, num_shares: int = 1) -> None:
        """`model` has weights in float32 or better, or in `compute` if only adapters are trained; `compute` is the data type of
        matrix products; `steps` is the number of steps of the whole run, which the learning-rate schedule needs; `temperature`
        and `filters` are those of the engine's sampling; `num_shares` is the number of shares in which it sums products."""
        self.filters, self._num_shares = filters or SamplingFilters(), num_shares
        self.ranks = Ranks()
        self.algorithm, self.config, self.temperature, self.reward_model = algorithm, config, temperature, reward_model
        self.optimizer_config, self.total_steps, self.reward_weight = optimizer, steps, reward_weight
        self.policy = Policy(model.requires_grad_(True), compute)
        self.critic = Scorer(_trainable_copy(model), compute) if algorithm.needs_critic else None
        self.reference: Policy | None = None
        """The frozen first policy, if the algorithm needs it. With adapters it is the policy itself, with the adapters off; where
        log-probabilities are exact, it is a plain policy that shares the frozen weights."""
        if config.lora_rank:
            model.requires_grad_(False)
            if config.exact_logprobs and algorithm.needs_reference:
                self.reference = Policy(decoder_of(model.config, dict(model.named_parameters())), compute)
            add_lora(model, config, seed)
        elif algorithm.needs_reference:
            self.reference = Policy(_frozen_copy(model, compute), compute)
        if config.gradient_checkpointing:
            for module in (None if config.exact_logprobs else self.policy, self.critic):  # the exact policy does so by itself
                if module is not None:
                    recompute_activations(module)
        self.optimizers = self._make_optimizers()

    def load_reference(self, state: Mapping[str, Tensor]) -> None:
        """Make the policy with these weights the reference."""
        assert self.reference is not None, "the algorithm needs a reference, and it is a policy of its own"
        load_state(self.reference.model, state)
        if self.reference.exact is not None:
            load_state(self.reference.exact.model, self.reference.model.named_parameters())
            self.reference.exact.weights_changed()

    def _refresh_exact(self) -> None:
        """Copy the policy's weights to where exact log-probabilities are computed from. The copy is made at the first call, when
        the policy is on the device that it stays on."""
        if not self.config.exact_logprobs:
            return
        if self.policy.exact is not None:
            load_state(self.policy.exact.model, self.weights())
            self.policy.exact.weights_changed()
            return
        model = self.policy.model
        shared = unadapted_parameters(model) if self.config.lora_rank and not self.policy.sharded else {}
        self.policy.exact = ExactForward(plain_copy(model, self.weights(), self.policy.compute, shared, self._num_shares))
        if self.reference is not None:
            own = dict(self.reference.model.named_parameters())
            self.reference.exact = ExactForward(
                plain_copy(self.reference.model, own.items(), self.policy.compute, own, self._num_shares))

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        config = self.optimizer_config
        found = [_adamw(self.policy, config, config.lr)]
        if self.critic is not None:
            found.append(_adamw(self.critic, config, config.critic_lr or config.lr))
        return found

    def shard(self, ranks: Ranks) -> None:
        """Train on several ranks from now on. Every rank must have a learner with the same weights that has made no update."""
        self.ranks, exact = ranks, self.config.exact_logprobs
        if exact and self.config.gradient_checkpointing:
            recompute_activations(self.policy)
        for model in (self.policy, None if exact else self.reference, self.critic):
            if model is not None:
                ranks.shard(model)
        if exact and self.reference is not None:
            self.reference.to(self.device)  # whole on every rank, as exact log-probabilities need it
        self.policy.exact = None  # it was on another device
        if self.reward_model is not None:
            ranks.shard(self.reward_model.scorer)
        self.optimizers = self._make_optimizers()

    @property
    def device(self) -> torch.device:
        """Device of all models."""
        return self.policy.model.norm.device

    @property
    def _has_experts(self) -> bool:
        return self.policy.model.config.has_experts

    @property
    def _balance(self) -> float:
        """Weight of the load-balancing loss of one layer, so that the layers' mean has the configured weight."""
        return self.config.router_aux_loss / self.policy.model.config.num_sparse_layers

    @property
    def has_reward_model(self) -> bool:
        """Whether a reward model's scores are part of the rewards."""
        return self.reward_model is not None

    @torch.no_grad()
    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """The reward model's score of every sample, times its weight. NonFiniteError if one is not finite."""
        assert self.reward_model is not None
        limit = self.ranks.micro_batch_tokens(samples, self.config.micro_batch_tokens)
        found = torch.zeros(len(samples), dtype=torch.float64)
        for batch in self.ranks.share(self.reward_model.packed(samples, limit, self.device)):
            scores = self.reward_model.scorer.scores(batch)
            if batch.members:
                found[list(batch.members)] = scores.to("cpu", torch.float64)
        scores = self.ranks.sum(found)
        if not scores.isfinite().all():
            raise NonFiniteError(f"reward_model: the score of an answer is {float(scores[~scores.isfinite()][0])}")
        return (self.reward_weight * scores).tolist()

    @torch.no_grad()
    def infer(self, samples: Sequence[Sample]) -> None:
        """Fills in the samples' old and reference log-probabilities, and the critic's values."""
        self._refresh_exact()
        if self.config.old_logprobs == "engine":
            for sample in samples:
                sample.old = sample.sampled
        wants_old = self.config.old_logprobs == "trainer" and self._needs_old
        if not (wants_old or self.algorithm.needs_reference or self.critic is not None):
            return
        for batch in self._packed(samples):
            if wants_old:
                _scatter(samples, batch, "old", self.policy.logprobs(batch, self.temperature, self.filters)[0])
            if self.algorithm.needs_reference:
                _scatter(samples, batch, "reference", self._reference_logprobs(batch))
            if self.critic is not None:
                _scatter(samples, batch, "values", self.critic.values(batch))
        self._exchange(samples, wants_old)

    def _exchange(self, samples: Sequence[Sample], wants_old: bool) -> None:
        """Each rank has filled in its own samples' columns; afterwards all have all."""
        wanted = {"old": wants_old, "reference": self.algorithm.needs_reference, "values": self.critic is not None}
        for name in [name for name, is_wanted in wanted.items() if is_wanted and self.ranks.size > 1]:
            found = [getattr(sample, name) for sample in samples]
            mine = [torch.zeros_like(s.sampled) if part is None else part for s, part in zip(samples, found, strict=True)]
            parts = self.ranks.sum(torch.cat(mine)).split([len(part) for part in mine])
            for sample, part in zip(samples, parts, strict=True):
                setattr(sample, name, part)

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probabilities [A] under the first policy, without the engine's filters: the KL divergence is from all of it."""
        if self.reference is not None:
            return self.reference.logprobs(batch, self.temperature)[0]
        with adapters_off(self.policy.model):
            return self.policy.logprobs(batch, self.temperature)[0]

    @property
    def sample_dtype(self) -> torch.dtype:
        """Data type of log-probabilities and advantages."""
        return torch.float64 if self.policy.model.norm.dtype == torch.float64 else torch.float32

    @property
    def _needs_old(self) -> bool:
        """Whether old log-probabilities must be computed before the update. With a single update and no KL in the reward,
        those computed in the update itself are the old ones."""
        in_reward = self.algorithm.needs_reference and not self.algorithm.kl_in_loss
        return in_reward or self.config.epochs * self.config.minibatches > 1

    def warm_up(self) -> None:
        """Runs the policy forward and backward on a few tokens, so that kernels are compiled and libraries are loaded before the
        first step. No weight changes, and no gradient is kept."""
        self._refresh_exact()
        (batch,) = pack([Sample([0] * 32, 16, 0, 0.0, False, torch.zeros(16, dtype=self.sample_dtype))], 32, device=self.device)
        logprobs, _ = self.policy.logprobs(batch, self.temperature, self.filters, self.algorithm.entropy_bonus > 0)
        in_first_layer = [parameter for name, parameter in trained(self.policy) if "layers.0." in name]
        torch.autograd.grad(logprobs.sum(), min(in_first_layer, key=Tensor.numel))  # a small one: the others need no gradient

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """Makes `epochs` passes over the batch with `minibatches` optimizer steps each, and returns metrics. The samples must
        have their advantages. `step` is counted from 0. NonFiniteError if a loss, a gradient or an updated weight is not
        finite."""
        lr = self._set_learning_rates(step)
        mismatch, routers = _EngineMismatch(), RoutingTotals()
        totals: dict[str, float] = {}
        parts = list(_minibatches(samples, self.config.minibatches))
        count = self.config.epochs * len(parts)
        for number in range(count):
            try:
                with reproducible(self.config.deterministic):
                    found = self._optimizer_step(parts[number % len(parts)], mismatch if number == 0 else None, routers)
            except NonFiniteError as error:
                before = f" Of this step's {count} updates {number} had been made; they are in no checkpoint" if number else ""
                raise NonFiniteError(f"{error}{'.' if before else ''}{before}") from None
            for name, value in found.items():
                totals[name] = totals.get(name, 0.0) + value / count
        self.require_finite()
        return {**totals, "lr": lr, **mismatch.metrics(self.ranks), **routers.metrics(self.ranks.sum)}

    def require_finite(self) -> None:
        """NonFiniteError if a trained weight of the policy or the critic is not finite."""
        for what, module in (("policy", self.policy), ("critic", self.critic)):
            if module is not None:
                require_finite(((name, local(p)) for name, p in trained(module)), what, self.ranks.sum)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values of the policy's weights, with adapters merged. Sharded ones are gathered a few at a time, so all ranks
        must go through the whole iterator."""
        return gathered(merged_parameters(self.policy.model))

    def _optimizer_step(self, samples: Sequence[Sample], mismatch: _EngineMismatch | None,
                        routers: RoutingTotals) -> dict[str, float]:
        self._refresh_exact()
        sums: dict[str, Tensor] = {}
        weights = self.algorithm.weights([s.num_answer for s in samples])
        samples, weights, share = self._with_gradient(samples, weights)
        num_rows = sum(len(sample.tokens) for sample in samples)
        for batch in self._packed(samples, weights):
            bonus = self.algorithm.entropy_bonus > 0
            rows = len(batch.tokens) if batch.members else 0  # a micro-batch without members counts for nothing
            routing = Routing(balance=self._balance * rows / num_rows) if self._has_experts else None
            logprobs, entropy = self.policy.logprobs(batch, self.temperature, self.filters, bonus, routing)
            batch = self._corrected(batch, logprobs.detach())
            loss = self.algorithm.loss(logprobs, batch, entropy)
            loss.total.backward()
            if routing is not None:
                routers.add(routing, rows)
            found = {**loss.parts, "entropy": (batch.weights * entropy.detach()).sum()}
            if self.critic is not None:
                assert isinstance(self.algorithm, PPO)
                value_loss = self.algorithm.value_loss(self.critic.values(batch), batch)
                value_loss.backward()
                found["loss/value"] = value_loss.detach()
            for name, value in found.items():
                sums[name] = sums[name] + value if name in sums else value
            if mismatch is not None and batch.members:
                mismatch.add(logprobs.detach(), batch)
        metrics = dict(zip(sums, self.ranks.sum(torch.stack(list(sums.values()))).tolist(), strict=True)) if sums else {}
        if "entropy" in metrics:
            metrics["entropy"] /= share
        return {**metrics, **self._apply(metrics)}

    def _corrected(self, batch: MicroBatch, logprobs: Tensor) -> MicroBatch:
        """The micro-batch with importance weights between engine and trainer, of the policy before its first update. Where the
        ratio itself is taken against the engine's log-probabilities, there is nothing to correct."""
        config = self.config
        if config.old_logprobs == "engine" or config.importance_correction == "off":
            return batch
        before = logprobs if batch.old is None else batch.old
        return batch._replace(correction=importance_weights(before, batch.sampled, config.importance_correction,
                                                            config.importance_cap))

    def _with_gradient(self, samples: Sequence[Sample], weights: list[float]) -> tuple[Sequence[Sample], list[float], float]:
        """The samples that contribute to the gradient, their weights, and the share of all weight that they have. Where every
        answer of a group earned the same reward, advantages are zero, and so is the gradient, unless a KL term, an entropy bonus
        or a critic adds to the loss: such samples need no forward and backward pass, and leaving them out changes no weight."""
        if self.algorithm.needs_reference or self.critic is not None or self.algorithm.entropy_bonus:
            return samples, weights, 1.0
        kept = [i for i, sample in enumerate(samples) if sample.advantages is None or bool(sample.advantages.any())]
        if not kept:  # the optimizer still makes its step, with what momentum it has
            for _, parameter in trained(self.policy):
                parameter.grad = torch.zeros_like(parameter)
            return [], [], 1.0
        lengths = [sample.num_answer for sample in samples]
        total = sum(weight * length for weight, length in zip(weights, lengths, strict=True))
        share = sum(weights[i] * lengths[i] for i in kept) / total if total else 1.0
        return [samples[i] for i in kept], [weights[i] for i in kept], share

    def _apply(self, losses: dict[str, float]) -> dict[str, float]:
        """Clips the gradients and makes the optimizers' step. If a loss or gradient norm is not finite, raises and changes no
        weight."""
        norms = {"grad_norm": self._clip(self.policy)}
        if self.critic is not None:
            norms["grad_norm/critic"] = self._clip(self.critic)
        wrong = next((name for name, value in {**losses, **norms}.items() if not math.isfinite(value)), None)
        if wrong is None:
            if self.device.type == "cuda" and not self.optimizers[0].state:
                torch.cuda.empty_cache()  # the moments are made now and stay: not in pieces of what activations took
            for optimizer in self.optimizers:
                optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if wrong is not None:
            raise NonFiniteError(f"{wrong} is {losses.get(wrong, norms.get(wrong))}; no weight was changed by it")
        return norms

    def _clip(self, module: nn.Module) -> float:
        parameters = [parameter for _, parameter in trained(module)]
        return float(full(nn.utils.clip_grad_norm_(parameters, self.optimizer_config.max_grad_norm)))

    def _packed(self, samples: Sequence[Sample], weights: list[float] | None = None) -> list[MicroBatch]:
        limit = self.ranks.micro_batch_tokens(samples, self.config.micro_batch_tokens)
        return self.ranks.share(pack(samples, limit, weights, self.device))

    def _set_learning_rates(self, step: int) -> float:
        config = self.optimizer_config
        factor = learning_rate_factor(step, self.total_steps, config.schedule, config.warmup_steps, config.min_lr_ratio)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                set_learning_rate(group, group["base_lr"] * factor)
        return float(self.optimizers[0].param_groups[0]["lr"])


class _EngineMismatch:
    """How far the trainer's log-probabilities of the answer tokens are from the engine's before the first update of a step, and
    how much of the tokens' weight the correction for it takes."""

    def __init__(self) -> None:
        self._total, self._count, self._max = 0.0, 0, 0.0
        self._weight, self._limited, self._corrected = 0.0, 0, False

    def add(self, trainer: Tensor, batch: MicroBatch) -> None:
        away = (trainer - batch.sampled).abs()
        self._total, self._count = self._total + float(away.sum()), self._count + len(away)
        self._max = max(self._max, float(away.max()))
        if batch.correction is not None:
            ratio = (trainer if batch.old is None else batch.old) - batch.sampled
            self._corrected, self._weight = True, self._weight + float(batch.correction.sum())
            self._limited += int((batch.correction.log() < ratio - 1e-2).sum())

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        sums = torch.tensor([self._total, self._count, self._weight, self._limited], dtype=torch.float64)
        total, count, weight, limited = ranks.sum(sums).tolist()
        largest, corrected = ranks.max(torch.tensor([self._max, self._corrected], dtype=torch.float64)).tolist()
        count = max(1.0, count)
        found = {"logprob_difference/mean": total / count, "logprob_difference/max": largest}
        if corrected:
            found |= {"importance/mean": weight / count, "importance/limited": limited / count}
        return found


def _minibatches(samples: Sequence[Sample], count: int) -> Iterable[Sequence[Sample]]:
    """Splits the samples into `count` minibatches. Each takes every count-th sample, so that groups are spread over all of
    them."""
    return (part for part in (samples[i::count] for i in range(count)) if part)


def _scatter(samples: Sequence[Sample], batch: MicroBatch, name: str, values: Tensor) -> None:
    if not batch.members:
        return
    parts = values.to("cpu", samples[0].sampled.dtype).split([samples[i].num_answer for i in batch.members])
    for i, part in zip(batch.members, parts, strict=True):
        setattr(samples[i], name, part)


def _frozen_copy(model: Decoder, compute: torch.dtype) -> Decoder:
    """A copy that is not trained. In bfloat16 it takes half the memory, and its products are in that type anyway."""
    if compute != torch.bfloat16:
        return deepcopy(model).requires_grad_(False)
    copy = empty_model(model.config, compute, model.norm.device)
    load_state(copy, model.named_parameters())
    return copy


def _trainable_copy(model: Decoder) -> Decoder:
    """A copy with weights in float32 or better."""
    copy = deepcopy(model)
    return (copy.float() if model.norm.dtype == torch.bfloat16 else copy).requires_grad_(True)


def _adamw(module: nn.Module, config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
    make = make_adamw_8bit if config.kind == "adamw_8bit" else make_adamw
    return make(module.parameters(), lr, config.betas, config.eps, config.weight_decay)
