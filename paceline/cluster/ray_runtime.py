"""Workers as Ray actors: one process per worker, on this machine or on any node of a Ray cluster.

Ray starts the processes, carries the messages (large payloads through its object store) and notices when a process dies. All
decisions are the coordinator's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.cluster.learning import ProcessGroup, WorkerDied
from paceline.cluster.messages import Message
from paceline.cluster.ray_actor import COORDINATOR, MAX_LINE, CannotStart, WorkerActor, WorkerSpec, plain
from paceline.cluster.ray_session import RaySession
from paceline.cluster.rendezvous import serve_store
from paceline.cluster.reports import Lost, Report
from paceline.types import WorkersLost

logger = logging.getLogger(__name__)

_COLLECT_SHARE = 0.9
"""Part of the time between two decisions after which reports are sent: they are to be there in time for the next one, and new."""
_SILENT_S = 120.0
"""A worker that has not reported for so long, once it was ready, is killed and counts as lost."""
_NOTICE_S = 10.0
"""Seconds in which workers that train together must notice that one of them has died."""
_RESERVE_S = 30.0
"""Seconds between two warnings that Ray does not have what the workers need."""
_MAX_FAILED_STARTS = 3
"""A worker that dies so many times in a row before its first report cannot be started at all."""


class RayRuntime:
    """Implements `learning.LearnerRuntime` with one actor per worker."""

    def __init__(self, num_workers: int, spec: WorkerSpec, address: str | None = None, num_cpus: float = 0.0,
                 num_gpus: float = 0.0) -> None:
        """`address`: None starts Ray on this machine, on the loopback interface, unless it is already running; "auto" joins the
        cluster that this machine belongs to. `num_cpus`, `num_gpus`: what Ray reserves for each worker."""
        self.num_workers, self._spec = num_workers, spec
        self._rendezvous_numbers, self._starts = count(), count()
        self._store: Any = None
        self._group: PlacementGroup | None = None
        self._options: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_restarts": 0}
        self._actors: dict[int, Any] = {}
        self._incarnation: dict[int, int] = {}
        self._numbers: dict[int, count[int]] = {}
        self._unsent: dict[int, list[Message]] = {}
        self._reports: dict[Any, tuple[int, float]] = {}  # pending report → worker, and when it was asked for
        self._failed_starts = dict.fromkeys(range(num_workers), 0)  # since the last report
        self._is_lost = False
        self._session = RaySession(address)
        try:
            self._reserve(num_cpus, num_gpus)
            for worker in range(num_workers):
                self._launch(worker)
            self._connect()
        except BaseException:
            self.close()
            raise

    def _reserve(self, num_cpus: float, num_gpus: float) -> None:
        """Reserve what every worker needs, and wait until Ray has it."""
        bundle = {name: amount for name, amount in (("CPU", num_cpus), ("GPU", num_gpus)) if amount}
        if not bundle:
            return
        self._group = placement_group([bundle] * self.num_workers, strategy="PACK")
        while not self._group.wait(_RESERVE_S):
            logger.warning("waiting until Ray has %d times %s; it has %s", self.num_workers, bundle, {
                name: amount for name, amount in ray.available_resources().items() if name in bundle})

    def _check(self) -> None:
        """Raises WorkersLost if Ray has ended. Comes before Ray is used: some of its functions end this process if Ray's own
        processes have died."""
        try:
            self._session.check()
        except WorkersLost:
            self._is_lost = True
            raise

    def has_room(self) -> bool:
        """Whether Ray has a node for every worker. Workers that reserve nothing have room on any node."""
        self._check()
        return self._group is None or placement_group_table(self._group).get("state") == "CREATED"

    def start(self, worker: int) -> None:
        self._check()
        self._launch(worker)
        self._connect()

    def put(self, value: Any) -> Any:
        self._check()
        return ray.put(value)

    def post(self, worker: int, message: Message, payload: Any = None) -> None:
        """Messages are sent together by `flush`, because a call takes half a millisecond. One with a payload goes at once."""
        self._unsent[worker].append(message)
        if payload is not None:
            self._send(worker, payload)

    def flush(self, collect_s: float) -> None:
        """Send what was posted, to workers that have reported together with the request for their next report."""
        self._check()
        asked = {worker for worker, _ in self._reports.values()}
        for worker in self._actors:
            if worker in asked:
                self._send(worker)
            else:
                self._ask(worker, collect_s)

    def poll(self, timeout_s: float) -> list[Report | Lost]:
        self._check()
        pending = list(self._reports)
        ready, _ = ray.wait(pending, timeout=timeout_s)
        if ready and len(pending) > 1:
            ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
        self._check()  # a worker that was lost with Ray is not to be started again
        silent = [reference for reference, (worker, asked_at) in self._reports.items() if reference not in ready
                  and not self._failed_starts[worker] and time.perf_counter() - asked_at > _SILENT_S]
        return [self._result(reference) for reference in ready] + [self._give_up(reference) for reference in silent]

    def call(self, method: str, each: Sequence[tuple[Any, ...]]) -> _Calls:
        """Call a method of every worker's learner, between two of its steps, each with arguments of its own."""
        self._check()
        return _Calls({worker: (actor, actor.learn.remote(method, *each[worker])) for worker, actor in self._actors.items()})

    def new_rendezvous(self) -> str:
        """A new rendezvous for workers: a file if they are all on this machine."""
        number = next(self._rendezvous_numbers)
        if self._session.is_local:
            return f"{self._session.folder}/{number}"
        if self._store is None:
            self._store = serve_store(ray.util.get_node_ip_address())
        return f"{self._store.host}:{self._store.port}/{number}"

    def new_process_group(self) -> ProcessGroup:
        """A new process group of all workers."""
        gpus = self._options["num_gpus"]
        return ProcessGroup(self.new_rendezvous(), self.num_workers, "nccl" if gpus >= 1 else "gloo", "cuda" if gpus else "cpu")

    def pids(self) -> dict[int, int]:
        """Process ids of the workers."""
        return {worker: ray.get(actor.pid.remote()) for worker, actor in self._actors.items()}

    def close(self) -> None:
        if not self._is_lost:
            for actor in self._actors.values():
                ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)
        self._actors.clear()
        self._session.close()

    def _launch(self, worker: int) -> None:
        options = dict(self._options)
        if self._group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, worker)
        self._incarnation[worker] = next(self._starts)
        self._failed_starts[worker] += 1
        actor = ray.remote(concurrency_groups={"inbox": 1, "report": 1, "learner": 1})(WorkerActor)  # type: ignore[call-overload]
        self._actors[worker] = actor.options(**options).remote(worker, self._incarnation[worker], self._spec)
        self._numbers[worker], self._unsent[worker] = count(), []
        self._ask(worker)

    def _send(self, worker: int, payload: Any = None) -> None:
        """Send what is unsent. The payload belongs to the last message."""
        messages, self._unsent[worker] = self._unsent[worker], []
        if messages:
            self._actors[worker].post.remote(COORDINATOR, next(self._numbers[worker]), messages, payload)

    def _ask(self, worker: int, collect_s: float = 0.0) -> None:
        messages, self._unsent[worker] = self._unsent[worker], []
        reference = self._actors[worker].report.remote(next(self._numbers[worker]), messages, _COLLECT_SHARE * collect_s)
        self._reports[reference] = worker, time.perf_counter()

    def _result(self, reference: Any) -> Report | Lost:
        worker, _ = self._reports.pop(reference)
        try:
            report, warnings = ray.get(reference)
        except RayError as error:  # not of one kind: a worker may also be killed because the machine's memory is short
            if isinstance(error, RayTaskError) and isinstance(error.cause, CannotStart):
                raise CannotStart(str(error.cause)) from None
            if self._failed_starts[worker] >= _MAX_FAILED_STARTS:
                raise _cannot_start(worker, error) from None
            if isinstance(error, RayTaskError):
                logger.info("worker %d: %s", worker, plain(str(error)))
            ray.kill(self._actors[worker])  # the process of one whose thread has failed is still there
            return Lost(worker, _reason(error))
        for line in warnings:
            logger.warning("worker %d: %s", worker, line)
        self._failed_starts[worker] = 0
        return report

    def _give_up(self, reference: Any) -> Lost:
        worker, _ = self._reports.pop(reference)
        ray.kill(self._actors[worker])
        return Lost(worker, f"no report for {_SILENT_S:.0f} s")

    def _connect(self) -> None:
        for actor in self._actors.values():
            actor.connect.remote(dict(self._actors), dict(self._incarnation))


class _Calls:
    """Implements `learning.LearnerCalls`."""

    def __init__(self, calls: dict[int, tuple[Any, list[Any]]]) -> None:
        self._calls = calls  # worker → actor, and references to its two results
        self._failed_at: float | None = None

    def wait(self, timeout_s: float) -> bool:
        """Once a call has failed, the others fail as well when they notice; those that do not are killed."""
        pending = [results[0] for _, results in self._calls.values()]
        ready, pending = ray.wait(pending, num_returns=len(pending), timeout=timeout_s, fetch_local=False)
        if pending and self._failed_at is None and any(_error_of(reference) is not None for reference in ready):
            self._failed_at = time.perf_counter()
        if pending and self._failed_at is not None and time.perf_counter() - self._failed_at > _NOTICE_S:
            for actor in [actor for actor, results in self._calls.values() if results[0] in pending]:
                ray.kill(actor)
        return not pending

    def results(self) -> list[tuple[Any, Any]]:
        """What a worker has to say counts more than a death, and that more than connections that it broke."""
        found = {worker: _error_of(results[0]) for worker, (_, results) in self._calls.items()}
        errors = {worker: error for worker, error in found.items() if error is not None}
        if any(isinstance(_cause(error), ObjectLostError) for error in errors.values()):
            raise WorkersLost("a part of the training's state was lost with a node")
        for worker in errors:
            _error_of(self._calls[worker][1][1])  # the same one; Ray would print it as nobody's otherwise
        told = [error for error in errors.values() if isinstance(error, RayTaskError)]
        own = [error for error in told if not isinstance(error.cause, RuntimeError)]
        dead = [worker for worker, error in errors.items()
                if not isinstance(error, RayTaskError) or isinstance(error.cause, WorkerDied)]
        if own:
            raise own[0].cause if isinstance(own[0].cause, ValueError | OSError) else RuntimeError(plain(str(own[0])))
        if dead:
            raise WorkerDied(f"worker {dead[0]} has died")
        for error in errors.values():
            raise RuntimeError(plain(str(error)))
        return [(ray.get(results[0]), results[1]) for _, results in self._calls.values()]


def _error_of(reference: Any) -> RayError | None:
    """Why a call that has ended has failed; None if it has not."""
    try:
        ray.get(reference)
    except RayError as error:
        return error
    return None


def _cause(error: RayError) -> BaseException:
    """The exception of a worker's own code, if that has failed; otherwise Ray's."""
    return error.cause if isinstance(error, RayTaskError) else error


def _reason(error: RayError) -> str:
    """Why a worker is lost, in one line."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    said = str(error).split("\n")[0] if cause is None else str(cause) or type(cause).__name__
    return " ".join(plain(said).split())[:MAX_LINE]


def _cannot_start(worker: int, error: RayError) -> RuntimeError:
    """What ends a run whose worker dies again and again. An exception in the worker's own code is a defect, told with its
    traceback."""
    if isinstance(error, RayTaskError):
        return RuntimeError(f"worker {worker} cannot be started: {plain(str(error))}")
    return WorkersLost(f"worker {worker} cannot be started, it has died {_MAX_FAILED_STARTS} times ({_reason(error)})")
