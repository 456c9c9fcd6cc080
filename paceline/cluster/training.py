"""Drafter training on a worker: between requests, on the answers that the worker has generated, in steps of one micro-batch.
Several workers train together, with averaged gradients (`spot_group`)."""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor

from paceline.cluster.messages import TrainedDrafter
from paceline.cluster.spot_group import SpotGroup, TrainingRound, in_background
from paceline.drafters.eagle import Eagle
from paceline.drafters.fingerprint import PolicyFingerprint
from paceline.engine import Engine
from paceline.files import atomic_write
from paceline.spot import FeatureBuffer, SpotConfig, SpotTrainer, restore, snapshot
from paceline.spot.buffer import MAX_AGE
from paceline.spot.checkpoint import Snapshot
from paceline.spot.trainer import StepPlan
from paceline.types import FeatureRecord

logger = logging.getLogger(__name__)
T = TypeVar("T")
_MOMENT_S = 0.002
"""Longest time that a worker waits for others before it looks for messages."""


class DrafterTraining:
    """The spot trainer of one worker. Training continues where the cluster's newest drafter is, whichever worker trained it."""

    def __init__(self, engine: Engine, config: SpotConfig, buffer_bytes: int = 1 << 30, publish_s: float = 2.0) -> None:
        """`publish_s`: seconds of training between two reports of the drafter."""
        assert engine.drafting.eagle is not None, "the engine has a learned drafter"
        self._engine, self._config, self._publish_s = engine, config, publish_s
        self._buffer = FeatureBuffer(buffer_bytes, max_age=MAX_AGE, device=engine.model.norm.device)
        self._trainer: SpotTrainer | None = None
        self._known: TrainedDrafter | None = None
        """The drafter that this worker reported last."""
        self._reported_at, self._num_new = 0.0, 0
        self.active, self.round = False, -1
        """Whether this worker trains, and the number of the newest round that it takes part in."""
        self._group: SpotGroup | None = None
        """None: this worker trains alone."""
        self._forming: Future[bytes] | None = None
        self._pending: Future[Tensor] | None = None
        self._packing: Future[TrainedDrafter] | None = None
        self._is_owed = False
        """Whether the drafter has to be reported as soon as the one before is."""

    @property
    def has_data(self) -> bool:
        """Whether there is any answer to train on."""
        return len(self._buffer) > 0

    def add(self, record: FeatureRecord, version: int) -> None:
        """Keep the features of a finished answer. `version`: the policy's, which counts the steps of the run."""
        self._buffer.add(record, version)

    def policy_changed(self) -> None:
        """The engine has new policy weights."""
        if self._trainer is not None:
            self._trainer.policy_changed()

    def install(self, trained: TrainedDrafter) -> None:
        """Generate with this drafter from the next step on."""
        drafter = unpack_drafter(trained, self._engine)
        with warnings.catch_warnings(action="ignore"):  # a drafter that is trained meanwhile is often one policy version behind
            self._engine.update_drafter(drafter, min(trained.fingerprint.version, self._engine.version))

    def start(self, newest: TrainedDrafter | None, training: TrainingRound, worker: int) -> None:
        """Start to train, from the cluster's newest drafter; or, if this worker trains already, go on with other members. All
        members continue from the first one's state. `worker`: this one."""
        assert self.has_data, "there is something to train on"
        eagle = self._engine.drafting.eagle
        assert eagle is not None
        if self._trainer is None:
            self._trainer = SpotTrainer(eagle.module, self._engine.model, self._buffer, self._config)
            self._trainer.exchange = self._exchange
        if not self.active:
            if newest is not None and (self._known is None or newest.snapshot != self._known.snapshot):
                self._continue(self._trainer, newest.snapshot, newest.snapshot_metadata)
            self._reported_at, self._num_new = time.perf_counter(), 0
        self.active, self.round, self._pending, self._group = True, training.number, None, None
        if len(training.members) > 1:
            self._group = SpotGroup(training, worker)
            self._forming = self._group.begin(_state(_copied(self._trainer)) if self._group.rank == 0 else bytes)

    def run_micro_batch(self) -> None:
        """Train one micro-batch, or wait a moment for the other members. Training has ended afterwards (`active`) if a member is
        gone."""
        assert self._trainer is not None and self.active
        try:
            if not self._is_formed():
                return
            stop = iter((False, True))
            self._num_new += self._trainer.run(lambda: next(stop)).steps
        except RuntimeError as error:  # what torch.distributed raises
            if self._group is None:
                raise
            logger.info("drafter training: the group is broken (%s)", error)
            self.stop()
            return
        self._is_owed = self._num_new > 0 and self._reports and time.perf_counter() - self._reported_at >= self._publish_s
        self._pack_if_owed()

    def stop(self) -> None:
        """End training, at a boundary between micro-batches. Nothing here takes long: a request may wait for it."""
        reports = self._reports and self._num_new > 0
        self.active, self._group, self._forming, self._pending = False, None, None, None
        self._is_owed = reports
        self._pack_if_owed()

    def take_trained(self) -> TrainedDrafter | None:
        """A drafter that is to be reported, once: every `publish_s` seconds of training, and after its end if it has changed."""
        if self._packing is None or not self._packing.done():
            return None
        self._known, self._packing = self._packing.result(), None
        self._pack_if_owed()
        return self._known

    @property
    def _reports(self) -> bool:
        """Whether this member reports the drafter, which all of them have."""
        return self._group is None or self._group.rank == 0

    # -- the other members

    def _is_formed(self) -> bool:
        """Whether the group is formed; then this member is where the first one is."""
        if self._forming is None:
            return True
        state = _result(self._forming)
        if state is None:
            return False
        self._forming = None
        assert self._trainer is not None and self._group is not None
        if self._group.rank:
            length = int.from_bytes(state[:8], "little")
            self._continue(self._trainer, state[8 + length :], json.loads(state[8 : 8 + length]))
        return True

    def _exchange(self) -> bool:
        """Replace the gradients by their mean over all members. Returns False while it is not known."""
        if self._group is None:
            return True
        assert self._trainer is not None
        parameters = list(self._trainer.parameters.values())
        if self._pending is None:
            flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])
            self._pending = self._group.average(flat.cpu())
        mean = _result(self._pending)
        if mean is None:
            return False
        self._pending = None
        for parameter, part in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.device)
        return True

    def _continue(self, trainer: SpotTrainer, tensors: bytes, metadata: dict[str, Any]) -> None:
        """Take over another worker's training. A step that it had begun is dropped: its records are there."""
        restore(trainer, Snapshot(load(tensors), metadata))
        trainer.progress.plan, trainer.progress.cursor = StepPlan(), 0
        trainer.optimizer.zero_grad(set_to_none=True)
        trainer.policy_changed()

    def _pack_if_owed(self) -> None:
        """Copy the drafter and the training's state, and serialize them in the background, one after the other."""
        if not self._is_owed or self._packing is not None:
            return
        assert self._trainer is not None
        drafter, found = self._trainer.drafter(), _copied(self._trainer)
        assert drafter.policy_fingerprint is not None
        weights, fingerprint = dict(drafter.named_parameters()), drafter.policy_fingerprint
        self._is_owed, self._reported_at, self._num_new = False, time.perf_counter(), 0
        self._packing = in_background(lambda: TrainedDrafter(_saved(weights), fingerprint, _saved(found.tensors), found.metadata))


def _copied(trainer: SpotTrainer) -> Snapshot:
    """The trainer's state, which further training does not change."""
    found = snapshot(trainer)
    return Snapshot({name: tensor.detach().clone() for name, tensor in found.tensors.items()}, found.metadata)


def _saved(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as a safetensors file."""
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def _state(found: Snapshot) -> Callable[[], bytes]:
    """Serializes the training's state for other members: the length of the metadata, the metadata as JSON, and the tensors."""
    text = json.dumps(found.metadata).encode()
    return lambda: len(text).to_bytes(8, "little") + text + _saved(found.tensors)


def _result(future: Future[T]) -> T | None:
    """The result, if there is one within a moment; its error, if it has failed."""
    try:
        return future.result(_MOMENT_S)
    except TimeoutError:
        return None


def save_trained(path: Path, trained: TrainedDrafter) -> None:
    """Write a drafter and the state of its training as one file, which is never seen half-written."""
    tensors = {f"{part}.{name}": tensor for part, data in (("drafter", trained.weights), ("training", trained.snapshot))
               for name, tensor in load(data).items()}
    metadata = {"fingerprint": json.dumps(trained.fingerprint.as_json()), "training": json.dumps(trained.snapshot_metadata)}
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, lambda temporary: save_file(tensors, temporary, metadata))


def load_trained(path: Path) -> TrainedDrafter | None:
    """Read what `save_trained` wrote; None if there is no such file."""
    if not path.is_file():
        return None
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    parts = {part: save({name.removeprefix(f"{part}."): t for name, t in tensors.items() if name.startswith(f"{part}.")})
             for part in ("drafter", "training")}
    fingerprint = PolicyFingerprint.from_json(json.loads(metadata["fingerprint"]))
    assert fingerprint is not None
    return TrainedDrafter(parts["drafter"], fingerprint, parts["training"], json.loads(metadata["training"]))


def unpack_drafter(found: TrainedDrafter, engine: Engine) -> Eagle:
    """The drafter as a module that `Engine.update_drafter` accepts."""
    assert engine.drafting.eagle is not None, "the engine has a learned drafter"
    own = engine.drafting.eagle.module
    module = Eagle(own.config, own.draft_ids, own.head is not None).to(engine.model.norm.dtype).requires_grad_(False)
    module.load_state_dict(load(found.weights), strict=False)  # everything but the draft ids, which it has
    module.policy_fingerprint = found.fingerprint
    return module
