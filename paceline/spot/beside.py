"""The spot trainer in a thread, while something else has the main one: on the same GPU, on a stream of its own, while the tail
decodes. On a CPU both threads would wait for each other's Python: `process.py` is the better neighbour there.

Who owns what: while it runs, the trainer belongs to the thread, and the policy's weights must stay as they are; `stop` hands it
back within one micro-batch, and only then may it be asked for its drafter or told of a new policy. What goes wrong in the thread
comes out of `stop`. Tokens never depend on it; how far it gets does depend on time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch

from paceline.spot.trainer import SpotReport, SpotTrainer


@dataclass(frozen=True, slots=True)
class BesideReport:
    """What one stretch from `start` to `stop` did."""

    trained: SpotReport
    stop_ms: float
    """That `stop` waited: for the rest of a micro-batch, at most `trained.max_micro_batch_s`."""


class Beside:
    """Starts and stops as often as wanted; training goes on where it was."""

    def __init__(self, trainer: SpotTrainer, between: Callable[[], None] | None = None, threads: int = 1) -> None:
        """between: called in the thread behind each micro-batch, to save a checkpoint for example; threads: of a CPU."""
        self._trainer, self._between, self._threads = trainer, between, threads
        self._thread: threading.Thread | None = None
        self._asked = threading.Event()
        self._found: SpotReport | BaseException | None = None

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.running:
            self.stop()

    @property
    def running(self) -> bool:
        """Between `start` and `stop`, also when the thread has come to its end by itself."""
        return self._thread is not None

    @property
    def trainer(self) -> SpotTrainer:
        """To read its drafter, or to say that the policy changed: only while it is stopped."""
        assert not self.running, "the trainer is its thread's until stop()"
        return self._trainer

    def start(self, until: Callable[[], bool] | None = None, lengths: Sequence[int] | None = None) -> None:
        """Returns at once. until: asked in the thread before each micro-batch; if it ends by itself, `stop` is still due."""
        assert not self.running, "started twice"
        self._asked.clear()
        self._found = None
        main = threading.main_thread()

        def done() -> bool:
            return self._asked.is_set() or not main.is_alive() or (until is not None and until())

        # A daemon: a main thread that dies of something else does not wait for it.
        self._thread = threading.Thread(target=self._run, args=(done, lengths), name="spot-trainer", daemon=True)
        self._thread.start()

    def stop(self) -> BesideReport:
        """Returns when the micro-batch under way is done. Raises what was raised in the thread."""
        assert self._thread is not None, "not started"
        began = time.perf_counter()
        self._asked.set()
        self._thread.join()
        stop_ms = 1e3 * (time.perf_counter() - began)
        self._thread = None
        found, self._found = self._found, None
        if isinstance(found, BaseException):
            raise found
        assert found is not None
        return BesideReport(found, stop_ms)

    def _run(self, done: Callable[[], bool], lengths: Sequence[int] | None) -> None:
        device = self._trainer.policy.norm.device
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            else:
                torch.set_num_threads(self._threads)  # of this thread; the main one keeps its own
            self._found = self._trainer.run(done, lengths, self._between)
        except BaseException as error:  # whatever it is, the main thread raises it
            self._found = error


def idle_cores() -> int:
    """Cores that this process may use and the main thread's products do not."""
    return max(0, len(os.sched_getaffinity(0)) - torch.get_num_threads())


def low_priority_stream(device: torch.device) -> torch.cuda.Stream:
    """Its kernels come after those of streams that are waiting with a higher priority (`generation_stream`)."""
    return torch.cuda.Stream(device, priority=0)


def generation_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


@contextmanager
def running_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """What is inside comes behind what was queued before and ahead of what is queued behind; None: no stream of its own."""
    if stream is None:
        yield
        return
    around = torch.cuda.current_stream(stream.device)
    stream.wait_stream(around)
    with torch.cuda.stream(stream):
        yield
    around.wait_stream(stream)
