"""Training the drafter in the background while the engine generates.

`BackgroundThread` runs the trainer in a thread of the same process, on a GPU on a CUDA stream of its own. On a CPU the two
threads would contend for Python's interpreter lock; there `BackgroundProcess` runs it in a process of its own on idle cores,
which shares no Python with the engine. In either case `stop` returns within one micro-batch, and generated tokens do not depend
on training. How far training gets does depend on timing.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import load, save

from paceline.drafters.eagle import Eagle
from paceline.drafters.fingerprint import fingerprint_of
from paceline.models.decoder import Decoder
from paceline.spot.background_worker import AddRecord, Failure, SetPolicy, Setup, run_worker
from paceline.spot.buffer import BufferLimits
from paceline.spot.config import SpotConfig
from paceline.spot.trainer import SpotReport, SpotTrainer
from paceline.types import FeatureRecord


@dataclass(frozen=True, slots=True)
class BackgroundReport:
    """Result of background training between `start` and `stop`."""

    trained: SpotReport
    """What was trained."""
    stop_ms: float
    """Milliseconds that `stop` waited for the current micro-batch, at most `trained.max_micro_batch_s`."""


class BackgroundThread:
    """Runs a spot trainer in a thread. It can be started and stopped any number of times; training continues where it was.

    While it runs, the trainer belongs to the thread and the policy's weights must not change. After `stop` the trainer can be
    asked for its drafter or told of new policy weights.
    """

    def __init__(self, trainer: SpotTrainer, on_micro_batch: Callable[[], None] | None = None, threads: int = 1) -> None:
        """on_micro_batch: Called in the thread after each micro-batch, for example to save a checkpoint. threads: Number of
        CPU threads that torch uses for training."""
        self._trainer, self._on_micro_batch, self._threads = trainer, on_micro_batch, threads
        self._thread: threading.Thread | None = None
        self._stop_requested = threading.Event()
        self._result: SpotReport | BaseException | None = None

    def __enter__(self) -> BackgroundThread:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.running:
            self.stop()

    @property
    def running(self) -> bool:
        """Whether `start` was called without a `stop`, even if the thread has already ended."""
        return self._thread is not None

    @property
    def trainer(self) -> SpotTrainer:
        """The trainer. It may be used only while the thread is stopped."""
        assert not self.running, "the trainer belongs to its thread until stop()"
        return self._trainer

    def start(self, until: Callable[[], bool] | None = None, lengths: Sequence[int] | None = None) -> None:
        """Starts training and returns at once. The arguments are those of `SpotTrainer.run`. `stop` must be called even if
        `until` ends training earlier."""
        assert not self.running, "start() was called twice"
        self._stop_requested.clear()
        self._result = None
        main = threading.main_thread()

        def done() -> bool:
            return self._stop_requested.is_set() or not main.is_alive() or (until is not None and until())

        # A daemon, so that a process whose main thread fails does not wait for it.
        self._thread = threading.Thread(target=self._run, args=(done, lengths), name="spot-trainer", daemon=True)
        self._thread.start()

    def stop(self) -> BackgroundReport:
        """Stops after the current micro-batch. Raises the exception that the thread ended with, if there was one."""
        assert self._thread is not None, "start() was not called"
        began = time.perf_counter()
        self._stop_requested.set()
        self._thread.join()
        stop_ms = 1e3 * (time.perf_counter() - began)
        self._thread = None
        result, self._result = self._result, None
        if isinstance(result, BaseException):
            raise result
        assert result is not None
        return BackgroundReport(result, stop_ms)

    def _run(self, done: Callable[[], bool], lengths: Sequence[int] | None) -> None:
        device = self._trainer.policy.norm.device
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            else:
                torch.set_num_threads(self._threads)  # applies to this thread only
            self._result = self._trainer.run(done, lengths, self._on_micro_batch)
        except BaseException as error:  # raised again by stop()
            self._result = error


class BackgroundProcess:
    """Runs a spot trainer in a process of its own, on a CPU. It can be started and stopped any number of times; training
    continues where it was, also from a checkpoint in `folder`.

    The process is sent everything it needs: the policy's embedding, head and norm whenever they change, and answers as they are
    finished. The caller waits for it only in `stop` (for the current micro-batch) and in `drafter` (for one copy). It ends with
    its parent process.
    """

    def __init__(self, eagle: Eagle, policy: Decoder, config: SpotConfig, limits: BufferLimits, folder: Path | None = None,
                 threads: int = 1, last_step: int = 0) -> None:
        """Starts the process.

        Args:
            eagle: The initial drafter.
            policy: The policy that the drafter drafts for.
            config: How to train.
            limits: Size of the process's feature buffer.
            folder: Folder of its checkpoint and of records on disk, from which training continues if there are any; None writes
                neither.
            threads: Number of CPU threads that torch uses for training.
            last_step: RL step up to which records of an earlier process are used.
        """
        if policy.norm.device.type != "cpu":
            raise ValueError(f"policy: it is on {policy.norm.device}, but a background process trains on the CPU; on a GPU use a "
                             "background thread with a CUDA stream")
        self._policy, self._eagle, self._running, self._ready = policy, eagle, False, False
        self.steps = 0
        """Number of optimizer steps done when `drafter` was last called."""
        ids = None if eagle.draft_ids is None else eagle.draft_ids.tolist()
        weights = {name: p.detach().contiguous() for name, p in eagle.named_parameters()}
        setup = Setup(policy.config, policy.norm.dtype, eagle.config, ids, eagle.head is not None, save(weights), config,
                       limits, None if folder is None else str(folder), threads, last_step)
        context = multiprocessing.get_context("spawn")  # fork would copy locks that the parent's threads hold
        self._commands: multiprocessing.Queue[Any] = context.Queue()
        self._replies, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=run_worker, args=(setup, self._commands, sender), name="spot-trainer",
                                        daemon=True)
        self._process.start()
        sender.close()  # so that the pipe ends when the process dies
        self.policy_changed()

    @property
    def ready(self) -> bool:
        """Whether the process is up, which takes seconds; until then `stop` and `drafter` would wait for it."""
        if not self._ready and self._replies.poll():
            self._ready = self._receive()
        return self._ready

    @property
    def running(self) -> bool:
        """Whether `start` was called without a `stop`."""
        return self._running

    def add(self, record: FeatureRecord, step: int) -> None:
        """Sends a finished answer of RL step `step` and returns at once."""
        features = save({"features": record.features.detach().contiguous()})
        self._commands.put(AddRecord(step, features, replace(record, features=None)))

    def policy_changed(self) -> None:
        """Sends the policy's current weights. Only while training is stopped, because captured features belong to the weights
        that produced them."""
        assert not self._running, "stop() must be called first"
        policy = self._policy
        tensors = {"norm": policy.norm, "embed": policy.embed.weight, "head": policy.head.weight}
        self._commands.put(SetPolicy(save({name: t.detach().clone() for name, t in tensors.items()}), fingerprint_of(policy)))

    def start(self) -> None:
        """Starts training and returns at once."""
        assert not self._running, "start() was called twice"
        self._running = True
        self._commands.put("start")

    def stop(self) -> BackgroundReport:
        """Stops after the current micro-batch. Raises RuntimeError if training failed."""
        assert self._running, "start() was not called"
        self._running = False
        began = time.perf_counter()
        report = self._request("stop")
        assert isinstance(report, SpotReport)
        return BackgroundReport(report, 1e3 * (time.perf_counter() - began))

    def drafter(self) -> Eagle | None:
        """Returns the trained drafter; None if nothing has been trained yet."""
        assert not self._running, "stop() must be called first"
        found = self._request("drafter")
        if found is None:
            return None
        weights, fingerprint, self.steps = found
        module = Eagle(self._eagle.config, self._eagle.draft_ids, self._eagle.head is not None)
        module = module.to(self._policy.norm.dtype).requires_grad_(False)
        module.load_state_dict(load(weights), strict=False)  # everything but the draft ids, which it has
        module.policy_fingerprint = fingerprint
        return module

    def close(self) -> None:
        """Ends the process after it has written its checkpoint. Raises what went wrong in it since it was last heard of."""
        if self._process.is_alive():
            self._commands.put("close")
            self._process.join(timeout=30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._commands.cancel_join_thread()
        reply = None
        with suppress(EOFError):
            while self._replies.poll():
                reply = self._replies.recv()
        self._replies.close()
        if isinstance(reply, Failure):  # for example, its last checkpoint could not be written
            raise reply.kind(reply.message)

    def _request(self, command: str) -> Any:
        if not self._ready:
            self._ready = self._receive()
        self._commands.put(command)
        return self._receive()

    def _receive(self) -> Any:
        try:
            reply = self._replies.recv()
        except EOFError:
            self._process.join(timeout=5)
            raise RuntimeError(f"the drafter's training process died (exit code {self._process.exitcode})") from None
        if isinstance(reply, Failure):
            raise reply.kind(reply.message)
        return reply


# -- idle cores and CUDA streams


def idle_cores() -> int:
    """Returns the number of cores that this process may use and torch's main thread pool does not."""
    return max(0, len(os.sched_getaffinity(0)) - torch.get_num_threads())


def low_priority_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns a CUDA stream for training, whose kernels yield to those of `generation_stream`."""
    return torch.cuda.Stream(device, priority=0)


def generation_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns a CUDA stream for generation, whose kernels take precedence over those of `low_priority_stream`."""
    return torch.cuda.Stream(device, priority=-1)


@contextmanager
def running_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Runs the body on a CUDA stream, ordered after the work queued before it and before the work queued after it; None stays on
    the current stream."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
