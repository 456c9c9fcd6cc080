"""Training of the policy on the workers: every worker is a rank of a sharded learner (`rl/ranks.py`).

`RankLearner` is one rank, in a worker's process. `ShardedLearner` is the driver's side and has the methods of a `Learner`: it
sends the samples of a batch to all workers, and each of them trains on its share. New weights go from the shards into the
workers' engines tensor by tensor; nobody ever has a second copy of the whole policy.

After every update each rank hands its shard to the runtime's object store. When a worker dies, the ranks are formed anew from
these shards, without a checkpoint and without a step that is done twice.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from paceline.bundled import resolve_model
from paceline.cluster.coordinator import Coordinator
from paceline.cluster.rendezvous import open_store
from paceline.cluster.runtime import Runtime
from paceline.config import TrainConfig
from paceline.manifest import FileDigest
from paceline.models.weights import open_checkpoint
from paceline.rl.algorithms import make_algorithm
from paceline.rl.batch import Sample
from paceline.rl.checkpoint import ShardState, load_shard, policy_folder, save_learner, shard_state
from paceline.rl.learner import Learner
from paceline.rl.ranks import Ranks
from paceline.trainer.parts import make_learner, master_dtype
from paceline.types import WorkersLost

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 5
"""Number of times that a call is tried while workers die."""
T = TypeVar("T")
_COLUMNS = ("old", "reference", "values")


class WorkerDied(RuntimeError):
    """A worker died during a call that needs all of them."""


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """How all ranks of the policy's training form a process group."""

    rendezvous: str
    """As `rendezvous.open_store` takes it."""
    size: int
    backend: str
    """`gloo`, or `nccl` if every rank has a GPU of its own."""
    device: str
    """Type of device that the ranks train on, `cpu` or `cuda`."""

    def join(self, rank: int) -> DeviceMesh:
        """Form the process group; all ranks must call this. An earlier group of this process is left."""
        if dist.is_initialized():
            dist.destroy_process_group()
        store = open_store(self.rendezvous, self.size)
        dist.init_process_group(self.backend, store=store, rank=rank, world_size=self.size)
        # A mesh makes a group of its own where the default one is gloo's and there is a GPU: of NCCL in some versions of torch,
        # which refuses ranks that share a GPU.
        group = dist.group.WORLD
        assert group is not None, "it was initialized"
        return DeviceMesh.from_group(group, self.device)


class RankLearner:
    """One rank of the policy's training."""

    def __init__(self, config: TrainConfig, rank: int) -> None:
        self._config, self._rank = config, rank
        self.frees_engine = config.sleep_during_update
        """Whether the engine's memory is freed while the policy is trained."""
        self._learner: Learner | None = None
        self._tokenizer: Any = None

    def start(self, group: ProcessGroup, checkpoint: Path | None, shard: ShardState | None) -> None:
        """Build this rank from its shard of the training's present state, or from a checkpoint, or from the model that the run
        starts with. All ranks must call this."""
        self._learner = None  # its memory is needed
        ranks = Ranks(group.join(self._rank))
        self._learner, self._tokenizer = make_learner(self._config, None if shard is not None else checkpoint, ranks)
        if shard is not None:
            load_shard(self._learner, shard)

    def scores(self, samples: list[Sample]) -> list[float]:
        """The reward model's weighted score of every sample."""
        return self._trained.scores(samples)

    def infer(self, samples: list[Sample]) -> list[tuple[Any, ...]]:
        """Columns of all samples that `Learner.infer` fills in; from the first rank only."""
        self._trained.infer(samples)
        return [tuple(getattr(s, name) for name in _COLUMNS) for s in samples] if self._rank == 0 else []

    def update(self, samples: list[Sample], step: int) -> tuple[dict[str, float], ShardState]:
        """Metrics, and this rank's shard of the training's state afterwards."""
        metrics = self._trained.update(samples, step)
        return metrics, shard_state(self._trained)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights, one by one. All ranks must go through them."""
        return self._trained.weights()

    def save(self, folder: Path) -> dict[str, FileDigest]:
        """Write a checkpoint of the learner; the first rank writes, and returns the digests of the files."""
        return save_learner(self._trained, folder, self._tokenizer, str(resolve_model(self._config.model)))

    @property
    def _trained(self) -> Learner:
        assert self._learner is not None, "`start` comes first"
        return self._learner


class LearnerCalls(Protocol):
    """Calls that run on all workers at the same time."""

    def wait(self, timeout_s: float) -> bool:
        """Whether all have ended, after at most so many seconds."""

    def results(self) -> list[tuple[Any, Any]]:
        """Each worker's result, and a reference to the second result of `update`, which stays where it is. Raises the error of
        one of them; WorkerDied if one has died."""


class LearnerRuntime(Runtime, Protocol):
    """A runtime whose workers can train the policy."""

    def call(self, method: str, each: Sequence[tuple[Any, ...]]) -> LearnerCalls:
        """Call a method of every worker's learner between two of its steps, each with arguments of its own."""

    def new_process_group(self) -> ProcessGroup:
        """A new process group of all workers, which they have not formed yet."""


class ShardedLearner:
    """Trains on all workers. Its methods are those of `Learner` of the same names."""

    def __init__(self, config: TrainConfig, coordinator: Coordinator, runtime: LearnerRuntime) -> None:
        self._config, self._coordinator, self._runtime = config, coordinator, runtime
        self.algorithm = make_algorithm(config.algorithm, config.rollout.max_new_tokens, **config.algorithm_options)
        self.sample_dtype, self.device = master_dtype(config), torch.device(config.device)
        self.has_reward_model = config.reward_model is not None
        self.publish_s = 0.0
        """Seconds that the last publication took."""
        self.version = -1
        """Version of the weights in the engines."""
        self._checkpoint: Path | None = None
        self._shards: list[Any] | None = None
        self._formed_at = -1  # number of workers lost until then
        coordinator.republish = self._restore

    def load(self, checkpoint: Path | None) -> Any:
        """Start to train from a checkpoint, or from the model that the run starts with. Returns the tokenizer."""
        self._checkpoint = None if checkpoint is None else checkpoint.absolute()
        self._shards, self._formed_at = None, -1
        self._persist(lambda: None)
        source = resolve_model(self._config.model) if checkpoint is None else policy_folder(checkpoint)
        return open_checkpoint(source).tokenizer()

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        found, _ = self._call("scores", list(samples))[0]
        return list(found)

    def infer(self, samples: Sequence[Sample]) -> None:
        found, _ = self._call("infer", list(samples))[0]
        for sample, values in zip(samples, found, strict=True):
            for name, value in zip(_COLUMNS, values, strict=True):
                setattr(sample, name, value)

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        results = self._call("update", list(samples), step)
        self._shards = [shard for _, shard in results]
        return dict(results[0][0])

    def publish(self, version: int) -> None:
        """Bring the engines of all workers up to date; each has the same bits."""
        began = time.perf_counter()
        self._call("publish", version)
        self.version, self.publish_s = version, time.perf_counter() - began
        self._coordinator.policy_published(version, self.publish_s)

    def save(self, folder: Path) -> dict[str, FileDigest]:
        """Write a checkpoint into a folder that the first worker sees as this process does, and return the digests of its files.
        What a worker that died has left there is removed before the next attempt."""
        shared = (self._runtime.put(folder.absolute()),)

        def attempt() -> list[tuple[Any, Any]]:
            if folder.exists():
                shutil.rmtree(folder)
            return self._run("save", [shared] * self._coordinator.num_workers)

        return dict(self._persist(attempt)[0][0])

    # -- ranks

    def _call(self, method: str, *args: Any) -> list[tuple[Any, Any]]:
        """Call a method on all ranks."""
        shared = tuple(self._runtime.put(arg) for arg in args)
        return self._persist(lambda: self._run(method, [shared] * self._coordinator.num_workers))

    def _persist(self, action: Callable[[], T]) -> T:
        """Do something that needs all ranks. If a worker dies, they are formed anew, and it is done again."""
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                if self._formed_at != self._coordinator.num_lost:
                    self._form()
                return action()
            except WorkerDied as error:
                logger.warning("training: %s; attempt %d of %d", error, attempt, _MAX_ATTEMPTS)
        raise WorkersLost(f"training: workers died {_MAX_ATTEMPTS} times in a row")

    def _form(self) -> None:
        """Form the ranks from the newest shards."""
        self._coordinator.wait_for_all()
        formed_at, group = self._coordinator.num_lost, self._runtime.new_process_group()
        shards = self._shards or [None] * self._coordinator.num_workers
        self._run("start", [(group, self._checkpoint, shard) for shard in shards])
        self._formed_at = formed_at

    def _run(self, method: str, each: Sequence[tuple[Any, ...]]) -> list[tuple[Any, Any]]:
        calls = self._runtime.call(method, each)
        while not calls.wait(0.0):
            self._coordinator.advance()
        return calls.results()

    def _restore(self) -> None:
        """A worker was started again: form the ranks anew, and bring its engine up to date."""
        if self.version >= 0:
            self.publish(self.version)
