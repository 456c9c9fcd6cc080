"""Drafter training on a worker: between requests, on the answers that the worker has generated, in steps of one micro-batch.
Several workers train together, with averaged gradients (`spot_group`)."""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor

from paceline.cluster.reports import DrafterMeasured, TrainedDrafter
from paceline.cluster.spot_group import SpotGroup, TrainingRound, in_background
from paceline.drafters.eagle import Eagle
from paceline.engine import Engine
from paceline.optim import NonFiniteError
from paceline.spot import FeatureBuffer, SpotConfig, SpotReport, SpotTrainer, drafter_of, fresh_eagle, restore, snapshot
from paceline.spot.buffer import MAX_AGE
from paceline.spot.checkpoint import Snapshot
from paceline.spot.initialization import is_untrained
from paceline.spot.trainer import SCALE_RECORDS, BatchPlan
from paceline.trainer.drafter import compare, to_measure
from paceline.types import FeatureRecord

logger = logging.getLogger(__name__)
T = TypeVar("T")
_MOMENT_S = 0.002
"""Longest time that a worker waits for others before it looks for messages."""
_OF_DRAFTER = ("average.", "scales.", "draft_ids")
"""Beginnings of the names of those tensors of a snapshot that the drafter itself is made from."""


class DrafterTraining:
    """The spot trainer of one worker. Training continues where the cluster's newest drafter is, whichever worker trained it."""

    def __init__(self, engine: Engine, config: SpotConfig, buffer_bytes: int = 1 << 30, publish_s: float = 2.0) -> None:
        """`publish_s`: seconds of training between two reports of the drafter."""
        assert engine.eagle is not None, "the engine has a learned drafter"
        self._engine, self._config, self._publish_s = engine, config, publish_s
        self._buffer = FeatureBuffer(buffer_bytes, max_age=MAX_AGE, device=engine.model.norm.device)
        self._held_out: list[tuple[FeatureRecord, int]] = []
        self._newest: Eagle | None = None
        """The cluster's newest drafter, if the engine does not use it yet."""
        self._trainer: SpotTrainer | None = None
        self._known: TrainedDrafter | None = None
        """The drafter that this worker reported last."""
        self._reported_at, self._num_new = 0.0, 0
        self.active, self.round = False, -1
        """Whether this worker trains, and the number of the newest round that it takes part in."""
        self.failure: str | None = None
        """Why the drafter cannot be trained any more; None: it can."""
        self.max_passes: float | None = None
        """Number of passes over the answers after which more of them are waited for; None: no limit."""
        self._rows_per_pass: int | None = None  # None: there are new answers since
        self._group: SpotGroup | None = None
        """None: this worker trains alone."""
        self._forming: Future[bytes] | None = None
        self._pending: Future[Tensor] | None = None
        self._packing: Future[TrainedDrafter] | None = None
        self._is_owed = False
        """Whether the drafter has to be reported as soon as the one before is."""

    @property
    def can_train(self) -> bool:
        """Whether there are answers to train on that training has not seen often enough."""
        return self.failure is None and len(self._buffer) > 0 and not self._has_had_its_passes()

    def _has_had_its_passes(self) -> bool:
        trainer, passes = self._trainer, self.max_passes
        if trainer is None or passes is None:
            return False
        if self._rows_per_pass is None:
            self._rows_per_pass = trainer.rows_per_pass()
        return trainer.progress.tokens >= passes * self._rows_per_pass

    def add(self, record: FeatureRecord, version: int, is_held_out: bool = False) -> None:
        """Keep the features of a finished answer. `version`: the policy's, which counts the steps of the run. `is_held_out`: to
        be measured on before it is trained on."""
        if is_held_out and len(record.token_ids) > max(2, record.prompt_length):
            self._held_out = [(old, of) for old, of in self._held_out if of >= version - MAX_AGE] + [(record, version)]
        else:
            self._buffer.add(record, version)
            self._rows_per_pass = None

    def policy_changed(self) -> None:
        """The engine has new policy weights."""
        if self._trainer is not None:
            self._trainer.policy_changed()

    def receive(self, trained: TrainedDrafter, is_used: bool) -> None:
        """This is the cluster's newest drafter. `is_used`: whether to generate with it."""
        assert self._engine.eagle is not None
        own, policy = self._engine.eagle.module, self._engine.model
        found = Snapshot(load(trained.drafter), trained.snapshot_metadata)
        self._newest = drafter_of(found, own.config, policy.norm.dtype, policy.norm.device)
        if is_used:
            self.use_newest()

    def use_newest(self) -> None:
        """Generate with the newest drafter from the next step on."""
        drafter, self._newest = self._newest, None
        if drafter is None:
            return
        assert drafter.policy_fingerprint is not None, "it was trained"
        with warnings.catch_warnings(action="ignore"):  # a drafter that is trained meanwhile is often one policy version behind
            self._engine.update_drafter(drafter, min(drafter.policy_fingerprint.version, self._engine.version))

    def measure(self, seed: int) -> DrafterMeasured:
        """Compare the newest drafter with the one in use on the held-out answers, which are trained on from now on."""
        assert self._engine.eagle is not None
        own, held_out, found = self._engine.eagle.module, self._held_out, None
        self._held_out = []
        if self._newest is not None and held_out:
            records = to_measure([record for record, _ in held_out], own.config.window, seed)
            found = compare(own, self._newest, self._engine, records, self._config.temperature)
        for record, version in held_out:
            self.add(record, version)
        return DrafterMeasured(found)

    def start(self, newest: TrainedDrafter | None, training: TrainingRound, worker: int, frequent: Sequence[int] = ()) -> None:
        """Start to train, from the cluster's newest drafter; or, if this worker trains already, go on with other members. All
        members continue from the first one's state. `worker`: this one. `frequent`: tokens, most frequent first, from which a new
        drafter's reduced vocabulary is chosen."""
        assert len(self._buffer), "there is something to train on"
        if self._trainer is None:
            self._trainer = SpotTrainer(self._initial_drafter(frequent), self._engine.model, self._buffer, self._config)
            self._trainer.exchange = self._exchange
        if not self.active:
            if newest is not None and (self._known is None or newest.training != self._known.training):
                self._continue(self._trainer, *unpack_drafter(newest))
            self._reported_at, self._num_new = time.perf_counter(), 0
        self.active, self.round = True, training.number
        self._pending = self._group = self._forming = None  # of the round before, which may not have been formed yet
        if len(training.members) > 1:
            self._group = SpotGroup(training, worker)
            self._forming = self._group.begin(_state(_copied(self._trainer)) if self._group.rank == 0 else bytes)

    def _initial_drafter(self, frequent: Sequence[int]) -> Eagle:
        """The engine's drafter; if it is new and has a reduced vocabulary, one with the most frequent tokens of the answers."""
        eagle = self._engine.eagle
        assert eagle is not None
        own = eagle.module
        if own.draft_ids is None or not frequent or not is_untrained(own):
            return own
        found = (self._buffer.get(entry.key) for entry in self._buffer.entries()[:SCALE_RECORDS])
        return fresh_eagle(self._engine.model, self._config.module_form, [record for record in found if record is not None],
                           own.draft_vocab_size, window=own.config.window, texts=[frequent])

    def run_micro_batch(self) -> SpotReport | None:
        """Train one micro-batch, or wait a moment for the other members: then there is no report. Training has ended afterwards
        (`active`) if a member is gone, if it has failed, or if it has had its passes over the answers."""
        assert self._trainer is not None and self.active
        try:
            if not self._is_formed():
                return None
            stop = iter((False, True))
            report = self._trainer.run(lambda: next(stop))
        except NonFiniteError as error:
            self.failure, self._num_new = str(error), 0
            self.stop()
            return None
        except RuntimeError as error:  # what torch.distributed raises
            if self._group is None:
                raise
            logger.info("drafter training: the group is broken (%s)", error)
            self.stop()
            return None
        self._num_new += report.steps
        if self._has_had_its_passes():
            self.stop()
            return report
        self._is_owed = self._num_new > 0 and self._reports and time.perf_counter() - self._reported_at >= self._publish_s
        self._pack_if_owed()
        return report

    def stop(self) -> None:
        """End training, at a boundary between micro-batches. Nothing here takes long: a request may wait for it."""
        reports = self._reports and self._num_new > 0
        self.active, self._group, self._forming, self._pending = False, None, None, None
        self._is_owed = reports
        self._pack_if_owed()

    @property
    def owes_drafter(self) -> bool:
        """Whether there is a drafter that has not been reported."""
        return self._is_owed or self._packing is not None

    def report_trained(self, report: Callable[[TrainedDrafter], None]) -> None:
        """Report the drafter, if it is time: every `publish_s` seconds of training, and after its end if it has changed."""
        if self._packing is not None and self._packing.done():
            self._known = self._packing.result()
            report(self._known)  # before it is no longer owed
            self._packing = None
            self._pack_if_owed()

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
            self._continue(self._trainer, load(state[8 + length :]), json.loads(state[8 : 8 + length]))
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

    def _continue(self, trainer: SpotTrainer, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
        """Take over another worker's training. A step that it had begun is dropped: its records are there."""
        restore(trainer, Snapshot(tensors, metadata))
        trainer.progress.plan, trainer.progress.cursor = BatchPlan(), 0
        trainer.optimizer.zero_grad(set_to_none=True)
        trainer.policy_changed()

    def _pack_if_owed(self) -> None:
        """Copy the training's state, and serialize it in the background, one after the other."""
        if not self._is_owed or self._packing is not None:
            return
        assert self._trainer is not None
        found = _copied(self._trainer)
        self._is_owed, self._reported_at, self._num_new = False, time.perf_counter(), 0
        self._packing = in_background(lambda: pack_drafter(found))


def pack_drafter(found: Snapshot) -> TrainedDrafter:
    """Return a snapshot in the form in which a worker reports it to the coordinator."""
    of_drafter = {name: tensor for name, tensor in found.tensors.items() if name.startswith(_OF_DRAFTER)}
    return TrainedDrafter(_saved(of_drafter), _saved({name: t for name, t in found.tensors.items() if name not in of_drafter}),
                          found.metadata)


def unpack_drafter(trained: TrainedDrafter) -> Snapshot:
    """Return the snapshot from which `pack_drafter` made `trained`."""
    return Snapshot({**load(trained.drafter), **load(trained.training)}, trained.snapshot_metadata)


def _copied(trainer: SpotTrainer) -> Snapshot:
    """The trainer's state, which further training does not change, without the gradients of a step that is under way."""
    found = snapshot(trainer)
    return Snapshot({name: tensor.detach().clone() for name, tensor in found.tensors.items()
                     if not name.startswith("gradient.")}, found.metadata)


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
