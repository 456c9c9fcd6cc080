"""Drafter training on a worker: between requests, on the answers that the worker has generated, in steps of one micro-batch."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load, save, save_file

from paceline.cluster.messages import TrainedDrafter
from paceline.drafters.eagle import Eagle
from paceline.drafters.fingerprint import PolicyFingerprint
from paceline.engine import Engine
from paceline.files import atomic_write
from paceline.spot import FeatureBuffer, SpotConfig, SpotTrainer, restore, snapshot
from paceline.spot.checkpoint import Snapshot
from paceline.spot.trainer import StepPlan
from paceline.types import FeatureRecord


class DrafterTraining:
    """The spot trainer of one worker. Training continues where the cluster's newest drafter is, whichever worker trained it."""

    def __init__(self, engine: Engine, config: SpotConfig, buffer_bytes: int = 1 << 30, publish_s: float = 2.0) -> None:
        """`publish_s`: seconds of training between two reports of the drafter."""
        assert engine.drafting.eagle is not None, "the engine has a learned drafter"
        self._engine, self._config, self._publish_s = engine, config, publish_s
        self._buffer = FeatureBuffer(buffer_bytes, device=engine.model.norm.device)
        self._trainer: SpotTrainer | None = None
        self._known: TrainedDrafter | None = None
        """The drafter that this worker reported last."""
        self._reported_at, self._num_new = 0.0, 0
        self.active = False

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

    def start(self, newest: TrainedDrafter | None) -> None:
        """Start to train, from the cluster's newest drafter."""
        if self.active or not self.has_data:
            return
        eagle = self._engine.drafting.eagle
        assert eagle is not None
        if self._trainer is None:
            self._trainer = SpotTrainer(eagle.module, self._engine.model, self._buffer, self._config)
        if newest is not None and (self._known is None or newest.snapshot != self._known.snapshot):
            self._continue(self._trainer, newest)
        self.active, self._reported_at, self._num_new = True, time.perf_counter(), 0

    def run_micro_batch(self) -> TrainedDrafter | None:
        """Train one micro-batch. Returns the drafter if it is time to report it."""
        assert self._trainer is not None and self.active
        stop = iter((False, True))
        self._num_new += self._trainer.run(lambda: next(stop)).steps
        if self._num_new and time.perf_counter() - self._reported_at >= self._publish_s:
            return self._pack()
        return None

    def stop(self) -> TrainedDrafter | None:
        """End training, at a boundary between micro-batches. Returns the drafter if it has changed since it was reported last."""
        self.active = False
        return self._pack() if self._num_new else None

    def _continue(self, trainer: SpotTrainer, newest: TrainedDrafter) -> None:
        """Take over another worker's training. A step that it had begun is dropped: its records are there."""
        restore(trainer, Snapshot(load(newest.snapshot), newest.snapshot_metadata))
        trainer.progress.plan, trainer.progress.cursor = StepPlan(), 0
        trainer.optimizer.zero_grad(set_to_none=True)
        trainer.policy_changed()

    def _pack(self) -> TrainedDrafter:
        assert self._trainer is not None
        drafter, found = self._trainer.drafter(), snapshot(self._trainer)
        weights = {name: p.detach().cpu().contiguous() for name, p in drafter.named_parameters()}
        assert drafter.policy_fingerprint is not None
        self._reported_at, self._num_new = time.perf_counter(), 0
        self._known = TrainedDrafter(save(weights), drafter.policy_fingerprint,
                                     save({name: t.detach().cpu().contiguous() for name, t in found.tensors.items()}),
                                     found.metadata)
        return self._known


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
