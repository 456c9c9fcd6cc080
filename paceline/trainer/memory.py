"""The memory plan of a run: what takes how much of the device's memory, what is left for the KV cache, and what would help. It is
an estimate from shapes alone: no weights are put on the device. With several workers it is the plan of one of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from paceline.bundled import resolve_model
from paceline.cache.store import PagedStore
from paceline.config import TrainConfig
from paceline.drafters.checkpoint import read_eagle_config
from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.models.config import ModelConfig
from paceline.models.parameters import (
    adapted_matrices,
    layer_parameters,
    num_active_parameters,
    num_adapted_parameters,
    num_adapter_parameters,
    num_parameters,
)
from paceline.models.weights import open_checkpoint, parse_dtype
from paceline.rl.algorithms import make_algorithm
from paceline.rl.models import HEAD_ROWS
from paceline.spot import SpotConfig, capture_layers
from paceline.spot.losses import MAX_LOGITS
from paceline.trainer.device import run_device
from paceline.trainer.feature_downloads import MAX_PENDING_BYTES
from paceline.trainer.validation import check_kv_room, setting_problems

_GB = 2**30
_RESERVED = 0.05
"""Share of the device's memory that is left to the framework and to fragmentation."""
_ADAM_BYTES = {"adamw": 8.0, "adamw_8bit": 2 * (1 + 4 / 256)}
"""Bytes per parameter of AdamW's two moments: in float32; in 8 bits, with a float32 scale for 256 values."""
_LOGIT_BYTES, _BACKWARD_BYTES = 24, 24
"""Bytes of temporary tensors: per logit while log-probabilities and entropy are computed; per row and unit of the MLP in the
backward pass of a layer."""
_DRAFTER_BYTES = 20
"""Bytes per parameter of a drafter in training, with gradient, moments and moving average."""
_CHANGES: dict[str, bool | int | str] = {
    "learner.gradient_checkpointing = true": True, "learner.lora_rank = 16": 16, "learner.micro_batch_tokens = 2048": 2048,
    "optimizer.kind = adamw_8bit": "adamw_8bit", "sleep_during_update = true": True, "cluster.shard_training = true": True}
"""Settings that save memory, and their values."""
_GATHERED_LAYERS = 4
"""Number of layers whose whole weights or gradients a rank holds at a time: the one that is computed and the next one, which are
gathered meanwhile, each with the buffer of its exchange."""


class MemoryItem(NamedTuple):
    """One part of a run's memory."""

    what: str
    num_bytes: int
    phase: Literal["always", "update", "engine", "generation"] = "always"
    """When it is held. `engine`: always, except during updates if the engine sleeps then. `generation`: only while answers are
    generated, so its memory is free again for the update."""
    is_later: bool = False
    """Whether it is allocated only after the engine has been made, whose KV cache must leave room for it."""


class MemoryPlan(NamedTuple):
    """Everything that a run holds on its device, apart from the KV cache."""

    items: tuple[MemoryItem, ...]
    kv_bytes_per_token: int
    """Bytes of a token in the KV caches of all engines."""
    kv_tokens: int
    """Number of tokens that all answers that are under way can have together; with several workers, a worker's share of them."""
    capacity: int | None
    """Memory of the device in bytes, or what a worker may use of it; None if it is not known."""
    sleeps: bool
    """Whether the engine sleeps while the policy is updated."""
    savings: tuple[tuple[str, int], ...] = ()
    """Settings that would save memory, and how many bytes."""
    num_workers: int = 1
    """Number of workers; this is the plan of each of them."""
    parameters: tuple[int, int] | None = None
    """Number of parameters of a mixture of experts, and how many of them process one token; None for a dense policy."""

    @property
    def update_bytes(self) -> int:
        """Bytes of everything but the KV cache while the policy is updated."""
        return self._bytes("always", "update") if self.sleeps else self._bytes("always", "update", "engine")

    @property
    def generation_bytes(self) -> int:
        """Bytes of everything but the KV cache while the engine holds one: during generation, and during updates as well unless
        it sleeps then."""
        generating = self._bytes("always", "engine", "generation")
        return generating if self.sleeps else max(generating, self.update_bytes)

    @property
    def later_bytes(self) -> int:
        """Bytes that are allocated after the engine has been made, and that its KV cache must leave room for."""
        later = self._replace(items=tuple(item for item in self.items if item.is_later))
        return later.generation_bytes

    @property
    def left_bytes(self) -> int | None:
        """Bytes that are left for the KV cache; None if the device's memory is not known."""
        return None if self.capacity is None else int((1 - _RESERVED) * self.capacity) - self.generation_bytes

    def fits(self, tokens: int) -> bool:
        """Whether the policy's update fits, and a KV cache of at least so many tokens."""
        if self.capacity is None or self.left_bytes is None:
            return True
        return self.update_bytes <= (1 - _RESERVED) * self.capacity and self.left_bytes >= tokens * self.kv_bytes_per_token

    def _bytes(self, *phases: str) -> int:
        return sum(item.num_bytes for item in self.items if item.phase in phases)

    def __str__(self) -> str:
        whole = self.kv_tokens * self.kv_bytes_per_token
        lines = [f"on each of {self.num_workers} workers:"] if self.num_workers > 1 else []
        if self.parameters is not None:
            total, active = (count / 1e9 for count in self.parameters)
            lines.append(f"{'parameters (mixture of experts)':<42} {total:8.2f} billion, {active:.2f} billion active per token")
        lines += [f"{item.what:<42} {item.num_bytes / _GB:8.2f} GiB" for item in self.items]
        lines.append(f"{'KV cache of a whole step at full length':<42} {whole / _GB:8.2f} GiB")
        if self.left_bytes is not None and self.capacity is not None:
            lines.append(f"{'left for the KV cache':<42} {max(0, self.left_bytes) / _GB:8.2f} GiB of {self.capacity / _GB:.1f}")
        lines += [f"saved by {setting:<33} {saved / _GB:8.2f} GiB" for setting, saved in self.savings]
        return "\n".join(lines)


def memory_plan(config: TrainConfig, capacity: int | None = None) -> MemoryPlan | None:
    """The memory plan of a run on a device with so many bytes (default: its GPU's, or a worker's share of that); None if the
    model's files are not on this machine yet."""
    source, device = resolve_model(config.model), run_device(config)
    if capacity is None and device.startswith("cuda") and torch.cuda.is_available():
        capacity = int(gpu_share(config) * torch.cuda.mem_get_info(device)[1])
    if not Path(source).expanduser().exists():
        return None
    return plan_for(config, open_checkpoint(source).config, capacity)


def check_memory(config: TrainConfig) -> None:
    """ValueError if the KV cache is too small for a single answer; or, with the memory plan in one line, if the run cannot fit on
    its GPU, not even with such a KV cache."""
    device, source, given = run_device(config), Path(resolve_model(config.model)).expanduser(), config.engine.kv_memory_gb
    if given is not None and config.engine.kv_tokens is None and source.exists():
        shape = open_checkpoint(source).config
        check_kv_room(config, shape, int(given * _GB) // max(_kv_bytes(config, shape)))
    plan = memory_plan(config) if device.startswith("cuda") else None
    if plan is not None and not plan.fits(config.rollout.max_new_tokens):
        items = "; ".join(" ".join(line.split()) for line in str(plan).splitlines())
        raise ValueError(f"device: the run does not fit on {device}: {items}")


def gpu_share(config: TrainConfig) -> float:
    """Share of a GPU that one worker may use: less than 1 if several workers share one (`cluster.gpus_per_worker`)."""
    return min(1.0, config.cluster.gpus_per_worker or 1.0) if config.cluster.needs_ray else 1.0


def free_bytes(config: TrainConfig, device: torch.device) -> int:
    """Bytes that this process may still take of its GPU: what is free, within the worker's share. Workers that share a GPU start
    at the same time, so each of them finds memory free that the others are about to take."""
    free, total = torch.cuda.mem_get_info(device)
    return min(free, int(gpu_share(config) * total) - torch.cuda.memory_reserved(device)) if gpu_share(config) < 1 else free


def kv_budget(config: TrainConfig, shape: ModelConfig, free: int, speculate: bool = True,
              num_trained: int | None = None) -> float:
    """Memory in GiB for the KV cache of an engine that is about to be made, of the `free` bytes that its device has now: what
    the policy's training does not need later, nor its update unless the engine sleeps then, nor the second engine of
    `compare_off`, which is made after the one that speculates. `num_trained`: number of parameters that are trained, if another
    library trains them; None: what the configuration says."""
    room = float(free - _plan(config, shape, None, num_trained).later_bytes)
    first, second = _kv_bytes(config, shape)
    if second and speculate:
        room = (room - _engine_bytes(config, shape)) * first / (first + second)
    return max(0.85 * room, 0.1 * free) / _GB


def plan_for(config: TrainConfig, shape: ModelConfig, capacity: int | None = None) -> MemoryPlan:
    """The memory plan of a run whose policy has this shape."""
    plan, known = _plan(config, shape, capacity), set(setting_problems(config))
    savings = []
    for setting, change in _CHANGES.items():
        table, _, key = setting.split(" = ")[0].rpartition(".")
        update = {table: getattr(config, table).model_copy(update={key: change})} if table else {key: change}
        changed = config.model_copy(update=update)
        other = _plan(changed, shape, capacity)
        saved = max(plan.update_bytes, plan.generation_bytes) - max(other.update_bytes, other.generation_bytes)
        if saved > 0.01 * plan.update_bytes and known.issuperset(setting_problems(changed)):
            savings.append((setting, saved))
    return plan._replace(savings=tuple(savings))


def _plan(config: TrainConfig, shape: ModelConfig, capacity: int | None, num_trained: int | None = None) -> MemoryPlan:
    workers = config.cluster.workers
    answers = math.ceil(config.rollout.max_live / workers) * config.rollout.max_new_tokens
    width, adapters = _dtype(config).itemsize, config.learner.lora_rank > 0 or (num_trained or math.inf) < num_parameters(shape)
    items = (*_learner_items(config, shape, width, num_trained), *_engine_items(config, shape, width, adapters),
             *_drafter_items(config, shape, answers))
    return MemoryPlan(items, sum(_kv_bytes(config, shape)), answers, capacity, config.sleep_during_update, num_workers=workers,
                      parameters=(num_parameters(shape), num_active_parameters(shape)) if shape.has_experts else None)


def _dtype(config: TrainConfig) -> torch.dtype:
    return parse_dtype(config.dtype) or torch.float32


def _kv_bytes(config: TrainConfig, shape: ModelConfig) -> tuple[int, int]:
    """Bytes of a token in the KV cache of the engine that speculates, and in that of the second one, if there is one."""
    heads = max(1, shape.num_kv_heads // config.engine.tensor_parallel)  # of one rank
    plain, drafter = [(heads, shape.head_dim)] * shape.num_layers, _drafter_config(config, shape)
    layers = plain if drafter is None else [*plain, (drafter.model.num_kv_heads, drafter.model.head_dim)]
    second = PagedStore.bytes_per_token(plain, len(set(config.engine.capture)) * shape.hidden_size, _dtype(config))
    return PagedStore.bytes_per_token(layers, _feature_size(config, shape), _dtype(config)), second if config.compare_off else 0


def _engine_bytes(config: TrainConfig, shape: ModelConfig) -> int:
    """Bytes of an engine's own weights, on one rank. Those that are not trained are shared with the learner of the same process,
    unless that has a shard of them only, or the engine a part. Every rank has the whole embedding."""
    learner, width, ranks = config.learner, _dtype(config).itemsize, config.engine.tensor_parallel
    if config.engine.num_shares > 1:
        embedding = shape.vocab_size * shape.hidden_size
        return (embedding + (num_parameters(shape) - embedding) // ranks) * width
    shares = learner.lora_rank > 0 and not config.cluster.needs_ray
    return (num_adapted_parameters(shape, learner.lora_targets) if shares else num_parameters(shape)) * width


def _num_shards(config: TrainConfig) -> int:
    """Number of parts into which the models in training are divided, one for each worker."""
    return config.cluster.workers if config.cluster.shard_training else 1


def _feature_size(config: TrainConfig, shape: ModelConfig) -> int:
    """Number of captured features per token that the engine stores: hidden states of the layers that the run asks for, that the
    learned drafter reads, and that it is trained on."""
    layers, drafter = set(config.engine.capture), _drafter_config(config, shape)
    if drafter is not None:
        layers.update(capture_layers(drafter) if config.train_drafter else drafter.feature_layers)
    return len(layers) * shape.hidden_size


def _learner_items(config: TrainConfig, shape: ModelConfig, width: int, num_trained: int | None = None) -> Iterator[MemoryItem]:
    """The models in training, of which every worker holds a shard, and what is whole on each of them. Workers make their engines
    first, so all of this is to come when these are made."""
    algorithm = make_algorithm(config.algorithm, config.rollout.max_new_tokens, **config.algorithm_options)
    total, master, rank, shards = num_parameters(shape), max(4, width), config.learner.lora_rank, _num_shards(config)
    trained = num_adapter_parameters(shape, rank, config.learner.lora_targets) if rank else num_trained or total
    moments = _ADAM_BYTES[config.optimizer.kind] * (master // 4 if config.optimizer.kind == "adamw" else 1)
    exact = config.learner.exact_logprobs
    sharded = [MemoryItem("policy in training", total * width + trained * master if rank else total * master),
               MemoryItem("gradients", trained * master, "update", is_later=True),
               MemoryItem("AdamW", int(trained * moments), is_later=True)]
    if algorithm.needs_reference and not rank and not exact:
        sharded.append(MemoryItem("reference policy", total * width))
    if algorithm.needs_critic:
        sharded += [MemoryItem("critic", total * master),
                    MemoryItem("critic's gradients", total * master, "update", is_later=True),
                    MemoryItem("critic's AdamW", int(total * moments), is_later=True)]
    if config.reward_model is not None:
        sharded.append(_reward_model_item(config.reward_model, width))
    activations = _activation_bytes(config, shape, width, is_frozen=trained < total)
    whole = [MemoryItem("activations of a micro-batch", activations, "update", is_later=True)]
    if config.reward_model is not None:
        whole.append(_scoring_item(config, config.reward_model, width))
    if exact:
        whole.append(MemoryItem("policy for exact log-probabilities", _engine_bytes(config, shape)))
    if algorithm.needs_reference and not rank and exact:
        whole.append(MemoryItem("reference policy", total * width))
    if shards > 1:
        layer = layer_parameters(shape)
        outside = total - shape.num_layers * layer  # embedding and head are whole, with their gradients, during the whole pass
        gathered = (_GATHERED_LAYERS * layer + outside) * width if rank else (_GATHERED_LAYERS * layer + 2 * outside) * master
        whole.append(MemoryItem("layers that are gathered from the shards", gathered, "update"))
    for item in sharded:
        yield item._replace(num_bytes=math.ceil(item.num_bytes / shards), is_later=item.is_later or shards > 1)
    for item in whole:
        yield item._replace(is_later=item.is_later or shards > 1)


def _engine_items(config: TrainConfig, shape: ModelConfig, width: int, adapters: bool) -> Iterator[MemoryItem]:
    ranks = config.engine.tensor_parallel
    name = "engine's policy" if ranks == 1 else f"engine's policy, one part of {ranks}"
    yield MemoryItem(name, _engine_bytes(config, shape) * (2 if config.compare_off else 1), "engine")
    if adapters:
        largest = max(map(math.prod, adapted_matrices(shape, config.learner.lora_targets)))
        yield MemoryItem("merging of adapters", 2 * largest * max(4, width), "engine", is_later=True)


def _reward_model_item(source: str, width: int) -> MemoryItem:
    path = Path(resolve_model(source)).expanduser()
    if not path.exists():
        return MemoryItem("reward model (not on this machine yet)", 0)
    shape = open_checkpoint(path).config
    trunk = num_parameters(replace(shape, tie_embeddings=True))  # it has no vocabulary to predict
    return MemoryItem("reward model", trunk * width + shape.hidden_size * max(4, width))  # its one output is in float32 or better


def _scoring_item(config: TrainConfig, source: str, width: int) -> MemoryItem:
    """Temporary tensors of one layer of the reward model's forward pass, which runs while the engine holds its KV cache: two
    residual streams, norms, qkv, attention, gate, up and their product."""
    path, rows = Path(resolve_model(source)).expanduser(), max(config.learner.micro_batch_tokens, config.rollout.max_new_tokens)
    if not path.exists():
        return MemoryItem("scoring by the reward model", 0, "generation", is_later=True)
    shape = open_checkpoint(path).config
    heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    layer = (2 * max(4, width) + 2 * width) * shape.hidden_size + width * (heads + 3 * shape.mlp_width)
    gathered = _GATHERED_LAYERS * layer_parameters(shape) * width if _num_shards(config) > 1 else 0
    return MemoryItem("scoring by the reward model", rows * layer + gathered, "generation", is_later=True)


def _drafter_items(config: TrainConfig, shape: ModelConfig, answer_tokens: int) -> Iterator[MemoryItem]:
    """A learned drafter, and what it is trained on. Several workers keep features of finished answers on the device; one process
    copies them to the host, and only those that wait for it take memory."""
    drafter, several = _drafter_config(config, shape), config.cluster.needs_ray
    if drafter is None:
        return
    spot, dtype, is_trained = SpotConfig.for_drafter(drafter.form, **config.spot), _dtype(config), config.train_drafter
    heads = 2 * spot.draft_vocab_for(shape.vocab_size) * shape.hidden_size * dtype.itemsize  # gathered rows
    yield MemoryItem("learned drafter", _drafter_parameters(drafter) * (dtype.itemsize + (_DRAFTER_BYTES if is_trained else 0))
                     + heads, is_later=True)
    if not is_trained:
        return
    yield MemoryItem("training of the drafter", drafter_training_bytes(spot, drafter, dtype, run_device(config)),
                     "generation", is_later=True)
    if not several:
        waiting = min(answer_tokens * _feature_size(config, shape) * dtype.itemsize, MAX_PENDING_BYTES)
        yield MemoryItem("features that wait to be copied", waiting, "generation", is_later=True)
    else:
        yield MemoryItem("answers that the drafter is trained on", int(config.drafter_buffer_gb * _GB), is_later=True)


def _drafter_config(config: TrainConfig, shape: ModelConfig) -> EagleConfig | None:
    """Architecture of the run's learned drafter; None if it has none."""
    if not config.has_learned_drafter:
        return None
    if config.drafter == "learned":
        return EagleConfig.for_policy(shape, SpotConfig(**config.spot).module_form)
    try:
        return _read_drafter(config.drafter, shape)
    except ValueError as error:
        raise ValueError(f"drafter {error}") from None


@lru_cache
def _read_drafter(folder: str, shape: ModelConfig) -> EagleConfig:
    """A plan asks several times, and the whole checkpoint is read each time."""
    return read_eagle_config(folder, shape)


def drafter_training_bytes(spot: SpotConfig, drafter: EagleConfig, dtype: torch.dtype, device: str) -> int:
    """Activations and temporary tensors of a micro-batch of drafter training. In every unroll step the inputs, two norms, qkv,
    attention, gate, up and their product are saved; the outputs of all steps exist in float32, with their gradient, and the
    logits of one chunk."""
    model, wide, on_gpu = drafter.model, max(4, dtype.itemsize), device.startswith("cuda")
    rows = spot.resolved(model.hidden_size, on_gpu).micro_batch_tokens
    assert rows is not None, "resolved"
    heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    step = dtype.itemsize * (4 * model.hidden_size + heads + 3 * model.intermediate_size) + 6 * wide * model.hidden_size
    inputs = dtype.itemsize * model.hidden_size * (2 + len(drafter.feature_layers))
    return rows * (spot.recipe.unroll * step + inputs) + 2 * dtype.itemsize * MAX_LOGITS["cuda" if on_gpu else "cpu"]


@lru_cache
def _drafter_parameters(drafter: EagleConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Eagle(drafter).parameters())


def _activation_bytes(config: TrainConfig, shape: ModelConfig, width: int, is_frozen: bool = False) -> int:
    """Activations and temporary tensors of the largest micro-batch. A residual stream in the embedding's data type, two norms,
    qkv, attention, gate, up and their product are saved per layer, and the weights cast to the run's data type; if activations
    are recomputed, only the two inputs of a layer; with exact log-probabilities one, and for a moment twice. The backward of one
    layer, or the logits of one chunk, comes on top. `is_frozen`: only adapters are trained."""
    rows = max(config.learner.micro_batch_tokens, config.rollout.max_new_tokens)
    hidden, inner, lora = shape.hidden_size, shape.mlp_width, is_frozen or config.learner.lora_rank > 0
    residual = width if lora else max(4, width)
    heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    layer = 2 * residual * hidden + width * (2 * hidden + heads + 3 * inner)
    casts = 0 if lora or width >= 4 else width * layer_parameters(shape)
    if config.learner.exact_logprobs:
        saved = rows * (2 * shape.num_layers * width * hidden + layer) + casts
    elif config.learner.gradient_checkpointing:
        saved = rows * (shape.num_layers * (residual + width) * hidden + layer) + casts
    else:
        saved = shape.num_layers * (rows * layer + casts)
    head = _LOGIT_BYTES * min(rows, HEAD_ROWS) * shape.vocab_size
    if not lora:
        head += shape.vocab_size * hidden * (2 * width + max(4, width))  # the head in the run's data type, and its gradient twice
    return saved + max(head, rows * (_BACKWARD_BYTES * inner + 3 * 4 * hidden))
