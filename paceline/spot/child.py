"""The child's side of `process.py`: reads orders between micro-batches, trains while it is told to, answers when it is asked."""

from __future__ import annotations

import multiprocessing
import queue
import time
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import parent_process
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save

from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.drafters.origin import Origin
from paceline.models.config import ModelConfig
from paceline.models.weights import empty_model
from paceline.spot.buffer import FeatureBuffer
from paceline.spot.checkpoint import SpotCheckpoints, load_snapshot, restore, snapshot
from paceline.spot.config import SpotConfig
from paceline.spot.trainer import SpotReport, SpotTrainer
from paceline.types import FeatureRecord

_SAVE_EVERY_S = 2.0


class Setup(NamedTuple):
    """What a child begins with: plain data."""

    model: ModelConfig
    dtype: torch.dtype
    eagle: EagleConfig
    draft_ids: list[int] | None
    own_head: bool
    start: bytes  # weights of the drafter that training begins with
    config: SpotConfig
    buffer_bytes: int
    folder: str | None  # of its checkpoint
    threads: int


@dataclass(frozen=True, slots=True)
class NewRecord:
    step: int
    features: bytes
    record: FeatureRecord
    """Without its features."""


@dataclass(frozen=True, slots=True)
class NewPolicy:
    tensors: bytes
    """norm, embed, head."""
    origin: Origin


class Failed(NamedTuple):
    trace: str


def serve(setup: Setup, orders: multiprocessing.Queue[Any], answers: Connection) -> None:
    """Until it is told to close, or its parent has died."""
    torch.set_num_threads(setup.threads)
    child = _Child(setup, orders, answers)
    try:
        child.serve()
    except BaseException:  # whatever it is, the parent raises it when it asks
        answers.send(Failed(traceback.format_exc()))
    if child.checkpoints is not None:
        child.checkpoints.close()


class _Child:
    def __init__(self, setup: Setup, orders: multiprocessing.Queue[Any], answers: Connection) -> None:
        self.setup, self.orders, self.answers = setup, orders, answers
        # Only what a drafter shares with its policy: no layers.
        self.policy = empty_model(replace(setup.model, num_layers=0), setup.dtype, "cpu")
        self.buffer = FeatureBuffer(setup.buffer_bytes)
        self.checkpoints = None if setup.folder is None else SpotCheckpoints(setup.folder)
        self.origin: Origin | None = None
        self.trainer: SpotTrainer | None = None
        self.running = self.stopping = self.closed = False
        self.reports: list[SpotReport] = []
        self._saved_at = time.perf_counter()

    def serve(self) -> None:
        self.answers.send(True)  # it is up
        while not self.closed:
            if self.running and len(self.buffer):
                self.reports.append(self._made().run(self._interrupted, between=self._save_if_due))
            else:
                self._take(wait=True)
            if self.stopping:
                self.stopping = False
                self.answers.send(merged(self.reports))
                self.reports.clear()
                self._save()

    def _interrupted(self) -> bool:
        """Asked between micro-batches: reads what has come meanwhile."""
        while self._take(wait=False):
            pass
        return not self.running or self.closed

    def _take(self, wait: bool) -> bool:
        """One order, if there is one."""
        parent = parent_process()
        if parent is not None and not parent.is_alive():
            self.closed = True
            return False
        try:
            self._obey(self.orders.get(timeout=1.0) if wait else self.orders.get_nowait())
        except queue.Empty:
            return False
        return True

    def _obey(self, order: object) -> None:
        if isinstance(order, NewRecord):
            self.buffer.add(replace(order.record, features=load(order.features)["features"]), order.step)
        elif isinstance(order, NewPolicy):
            self._load(order)
        elif order == "start":
            self.running = True
        elif order == "stop":
            self.running, self.stopping = False, True
        elif order == "drafter":
            self.answers.send(self._drafter())
        else:
            assert order == "close", order
            self.closed = True

    def _load(self, found: NewPolicy) -> None:
        tensors, policy = load(found.tensors), self.policy
        with torch.no_grad():
            for name, place in (("norm", policy.norm), ("embed", policy.embed.weight), ("head", policy.head.weight)):
                place.copy_(tensors[name])
        if self.origin is None and self.setup.folder is not None:
            self._take_up(found.origin)
        self.origin = found.origin
        if self.trainer is not None:
            self.trainer.policy_changed()

    def _take_up(self, origin: Origin) -> None:
        """The checkpoint of an earlier process."""
        assert self.setup.folder is not None
        earlier = load_snapshot(self.setup.folder)
        if earlier is not None:
            self.trainer = self._new_trainer(origin)
            restore(self.trainer, earlier)

    def _made(self) -> SpotTrainer:
        assert self.origin is not None, "the policy comes first"
        if self.trainer is None:
            self.trainer = self._new_trainer(self.origin)
        self.trainer.trained_for(self.origin)
        return self.trainer

    def _new_trainer(self, origin: Origin) -> SpotTrainer:
        setup = self.setup
        ids = None if setup.draft_ids is None else torch.tensor(setup.draft_ids)
        eagle = Eagle(setup.eagle, ids, setup.own_head).to(setup.dtype).requires_grad_(False)
        eagle.load_state_dict(load(setup.start), strict=False)  # all but the draft ids, which it has
        trainer = SpotTrainer(eagle, self.policy, self.buffer, setup.config)
        trainer.trained_for(origin)
        return trainer

    def _drafter(self) -> tuple[bytes, Origin, int] | None:
        """Weights, whose they are, optimizer steps done."""
        if self.trainer is None:
            return None
        drafter = self.trainer.drafter()
        weights = {name: p.detach().contiguous() for name, p in drafter.named_parameters()}
        return save(weights), self.trainer.origin, self.trainer.progress.step

    def _save_if_due(self) -> None:
        if self.checkpoints is not None and not self.checkpoints.busy and time.perf_counter() - self._saved_at > _SAVE_EVERY_S:
            self._save()

    def _save(self) -> None:
        self._saved_at = time.perf_counter()
        if self.checkpoints is not None and self.trainer is not None:
            self.checkpoints.save(snapshot(self.trainer))


def merged(reports: list[SpotReport]) -> SpotReport:
    """One of several stretches; losses are the last's."""
    return SpotReport(
        sum(r.seconds for r in reports), sum(r.micro_batches for r in reports), sum(r.steps for r in reports),
        sum(r.tokens for r in reports), reports[-1].losses if reports else {},
        max((r.max_micro_batch_s for r in reports), default=0.0), 0.0)
