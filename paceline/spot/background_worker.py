"""The child's side of `BackgroundProcess`: what it is started with, the commands that it reads, and its training loop."""

from __future__ import annotations

import multiprocessing
import queue
import time
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import parent_process
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save

from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.drafters.fingerprint import PolicyFingerprint
from paceline.files import DamagedFile
from paceline.models.config import ModelConfig
from paceline.models.weights import empty_model
from paceline.optim import NonFiniteError
from paceline.spot.buffer import BufferLimits, open_buffer
from paceline.spot.checkpoint import SpotCheckpoints, load_snapshot, restore, snapshot
from paceline.spot.config import SpotConfig
from paceline.spot.trainer import SpotReport, SpotTrainer
from paceline.types import FeatureRecord

_SAVE_EVERY_S = 2.0
"""Seconds between two checkpoints of the background process."""


class Setup(NamedTuple):
    """Everything a worker process is started with, as plain data."""

    model: ModelConfig
    dtype: torch.dtype
    eagle: EagleConfig
    draft_ids: list[int] | None
    own_head: bool
    weights: bytes  # of the initial drafter
    config: SpotConfig
    limits: BufferLimits
    folder: str | None  # of the checkpoint and the records
    threads: int
    last_step: int


@dataclass(frozen=True, slots=True)
class AddRecord:
    """Command: add a record to the buffer."""

    step: int
    features: bytes
    record: FeatureRecord
    """The record without its features."""


@dataclass(frozen=True, slots=True)
class SetPolicy:
    """Command: replace the policy's norm, embedding and head."""

    tensors: bytes
    fingerprint: PolicyFingerprint


class Failure(NamedTuple):
    """Reply: the worker failed, and raises this in the parent process."""

    kind: type[Exception]
    message: str


_PASSED_ON: tuple[type[Exception], ...] = (OSError, DamagedFile, NonFiniteError)
"""Exceptions of a worker that the parent process raises as they are; all others are faults of the program."""


def run_worker(setup: Setup, commands: multiprocessing.Queue[Any], replies: Connection) -> None:
    """Runs a worker until it is told to close or its parent process has ended."""
    torch.set_num_threads(setup.threads)
    try:
        worker = _Worker(setup, commands, replies)
        worker.run()
        worker.buffer.close()
        if worker.checkpoints is not None:
            worker.checkpoints.close()
    except _PASSED_ON as error:  # raised again in the parent process
        replies.send(Failure(next(kind for kind in _PASSED_ON if isinstance(error, kind)), str(error)))
    except BaseException:
        replies.send(Failure(RuntimeError, f"the drafter's training process failed:\n{traceback.format_exc()}"))


class _Worker:
    """Trains while it is told to, and reads commands between micro-batches."""

    def __init__(self, setup: Setup, commands: multiprocessing.Queue[Any], replies: Connection) -> None:
        self.setup, self.commands, self.replies = setup, commands, replies
        # Training needs only what the drafter shares with the policy: a model without layers.
        self.policy = empty_model(replace(setup.model, num_layers=0), setup.dtype, "cpu")
        limits = setup.limits if setup.folder is not None else setup.limits._replace(disk=0)
        self.buffer = open_buffer(Path(setup.folder or "") / "records", limits, setup.last_step)
        self.checkpoints = None if setup.folder is None else SpotCheckpoints(setup.folder)
        self.fingerprint: PolicyFingerprint | None = None
        self.trainer: SpotTrainer | None = None
        self.running = self.stopping = self.closed = False
        self.reports: list[SpotReport] = []
        self._saved_at = time.perf_counter()

    def run(self) -> None:
        self.replies.send(True)  # the process is ready
        while not self.closed:
            if self.running and len(self.buffer):
                self.reports.append(self._get_trainer().run(self._interrupted, on_micro_batch=self._save_if_due))
            else:
                self._handle_next(wait=True)
            if self.stopping:
                self.stopping = False
                self.replies.send(_merge_reports(self.reports))
                self.reports.clear()
                self._save()

    def _interrupted(self) -> bool:
        """Handles the commands that arrived during the last micro-batch. Returns whether training must stop."""
        while self._handle_next(wait=False):
            pass
        return not self.running or self.closed

    def _handle_next(self, wait: bool) -> bool:
        """Handles one command, if there is one."""
        parent = parent_process()
        if parent is not None and not parent.is_alive():
            self.closed = True
            return False
        try:
            self._handle(self.commands.get(timeout=1.0) if wait else self.commands.get_nowait())
        except queue.Empty:
            return False
        return True

    def _handle(self, command: object) -> None:
        if isinstance(command, AddRecord):
            self.buffer.add(replace(command.record, features=load(command.features)["features"]), command.step)
        elif isinstance(command, SetPolicy):
            self._set_policy(command)
        elif command == "start":
            self.running = True
        elif command == "stop":
            self.running, self.stopping = False, True
        elif command == "drafter":
            self.replies.send(self._drafter())
        else:
            assert command == "close", command
            self.closed = True

    def _set_policy(self, command: SetPolicy) -> None:
        tensors, policy = load(command.tensors), self.policy
        with torch.no_grad():
            for name, parameter in (("norm", policy.norm), ("embed", policy.embed.weight), ("head", policy.head.weight)):
                parameter.copy_(tensors[name])
        if self.fingerprint is None and self.setup.folder is not None:
            self._resume(command.fingerprint)
        self.fingerprint = command.fingerprint
        if self.trainer is not None:
            self.trainer.policy_changed()

    def _resume(self, fingerprint: PolicyFingerprint) -> None:
        """Restores the checkpoint of an earlier process, if there is one."""
        assert self.setup.folder is not None
        earlier = load_snapshot(self.setup.folder)
        if earlier is not None:
            self.trainer = self._new_trainer(fingerprint)
            restore(self.trainer, earlier)

    def _get_trainer(self) -> SpotTrainer:
        assert self.fingerprint is not None, "the policy is sent first"
        if self.trainer is None:
            self.trainer = self._new_trainer(self.fingerprint)
        # The policy here has no layers, so its fingerprint has to come from the parent process.
        self.trainer.set_policy_fingerprint(self.fingerprint)
        return self.trainer

    def _new_trainer(self, fingerprint: PolicyFingerprint) -> SpotTrainer:
        setup = self.setup
        ids = None if setup.draft_ids is None else torch.tensor(setup.draft_ids)
        eagle = Eagle(setup.eagle, ids, setup.own_head).to(setup.dtype).requires_grad_(False)
        eagle.load_state_dict(load(setup.weights), strict=False)  # everything but the draft ids, which it has
        trainer = SpotTrainer(eagle, self.policy, self.buffer, setup.config)
        trainer.set_policy_fingerprint(fingerprint)
        return trainer

    def _drafter(self) -> tuple[bytes, PolicyFingerprint, int] | None:
        """Returns the drafter's weights, the policy they belong to and the number of optimizer steps done."""
        if self.trainer is None:
            return None
        drafter = self.trainer.drafter()
        weights = {name: p.detach().contiguous() for name, p in drafter.named_parameters()}
        return save(weights), self.trainer.policy_fingerprint, self.trainer.progress.step

    def _save_if_due(self) -> None:
        if self.checkpoints is not None and not self.checkpoints.busy and time.perf_counter() - self._saved_at > _SAVE_EVERY_S:
            self._save()

    def _save(self) -> None:
        self._saved_at = time.perf_counter()
        if self.checkpoints is not None and self.trainer is not None:
            self.checkpoints.save(snapshot(self.trainer))


def _merge_reports(reports: list[SpotReport]) -> SpotReport:
    """Returns one report of several consecutive runs. The losses are those of the last one."""
    return SpotReport(
        sum(r.seconds for r in reports), sum(r.micro_batches for r in reports), sum(r.steps for r in reports),
        sum(r.tokens for r in reports), reports[-1].losses if reports else {},
        max((r.max_micro_batch_s for r in reports), default=0.0), 0.0)
