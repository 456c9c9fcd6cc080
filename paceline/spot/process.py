"""The spot trainer in a process of its own, beside generation on idle cores: it shares no Python with the engine, so generation
hardly notices it (`benchmarks/cpu/background_training.py`). CPU only.

Everything it needs is sent to it: the policy's embedding, head and norm whenever they change, answers as they are finished. The
parent never waits for it but in `stop` (the rest of a micro-batch) and `drafter` (one copy). It ends with its parent.
"""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load, save

from paceline.drafters.eagle import Eagle
from paceline.drafters.origin import origin_of
from paceline.models.decoder import Decoder
from paceline.spot.beside import BesideReport
from paceline.spot.child import Failed, NewPolicy, NewRecord, Setup, serve
from paceline.spot.config import SpotConfig
from paceline.spot.trainer import SpotReport
from paceline.types import FeatureRecord


class BesideProcess:
    """Starts and stops as often as wanted; training goes on where it was, also from the checkpoint in `folder`."""

    def __init__(self, eagle: Eagle, policy: Decoder, config: SpotConfig, buffer_bytes: int, folder: Path | None = None,
                 threads: int = 1) -> None:
        if policy.norm.device.type != "cpu":
            raise ValueError(f"policy: it is on {policy.norm.device}; a process of its own trains on the CPU, a thread with a "
                             "stream on a GPU")
        self._policy, self._eagle, self._running, self._ready = policy, eagle, False, False
        self.steps = 0
        """Of the optimizer, when it was last asked for its drafter."""
        ids = None if eagle.draft_ids is None else eagle.draft_ids.tolist()
        weights = {name: p.detach().contiguous() for name, p in eagle.named_parameters()}
        setup = Setup(policy.config, policy.norm.dtype, eagle.config, ids, eagle.head is not None, save(weights), config,
                      buffer_bytes, None if folder is None else str(folder), threads)
        context = multiprocessing.get_context("spawn")  # a fork would take the parent's threads' locks along
        self._orders: multiprocessing.Queue[Any] = context.Queue()
        self._answers, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=serve, args=(setup, self._orders, theirs), name="spot-trainer", daemon=True)
        self._process.start()
        theirs.close()  # so that its death is the end of the pipe
        self.policy_changed()

    @property
    def ready(self) -> bool:
        """It has come up, which takes seconds: before that, `stop` and `drafter` would wait for it."""
        if not self._ready and self._answers.poll():
            self._ready = self._receive()
        return self._ready

    @property
    def running(self) -> bool:
        return self._running

    def add(self, record: FeatureRecord, step: int) -> None:
        """Returns at once; it is taken up behind the micro-batch under way."""
        features = save({"features": record.features.detach().contiguous()})
        self._orders.put(NewRecord(step, features, replace(record, features=None)))

    def policy_changed(self) -> None:
        """Only while it is stopped: features and head belong together."""
        assert not self._running, "stop it first"
        policy = self._policy
        tensors = {"norm": policy.norm, "embed": policy.embed.weight, "head": policy.head.weight}
        self._orders.put(NewPolicy(save({name: t.detach().clone() for name, t in tensors.items()}), origin_of(policy)))

    def start(self) -> None:
        assert not self._running, "started twice"
        self._running = True
        self._orders.put("start")

    def stop(self) -> BesideReport:
        """Returns when the micro-batch under way is done; raises if training failed."""
        assert self._running, "not started"
        self._running = False
        began = time.perf_counter()
        report = self._ask("stop")
        assert isinstance(report, SpotReport)
        return BesideReport(report, 1e3 * (time.perf_counter() - began))

    def drafter(self) -> Eagle | None:
        """What has been learned so far; None: nothing yet."""
        assert not self._running, "stop it first"
        found = self._ask("drafter")
        if found is None:
            return None
        weights, module_origin, self.steps = found
        module = Eagle(self._eagle.config, self._eagle.draft_ids, self._eagle.head is not None)
        module = module.to(self._policy.norm.dtype).requires_grad_(False)
        module.load_state_dict(load(weights), strict=False)  # all but the draft ids, which it has
        module.origin = module_origin
        return module

    def close(self) -> None:
        """Its checkpoint is on disk afterwards."""
        if self._process.is_alive():
            self._orders.put("close")
            self._process.join(timeout=30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._orders.cancel_join_thread()
        self._answers.close()

    def _ask(self, order: str) -> Any:
        if not self._ready:
            self._ready = self._receive()
        self._orders.put(order)
        return self._receive()

    def _receive(self) -> Any:
        try:
            answer = self._answers.recv()
        except EOFError:
            self._process.join(timeout=5)
            raise RuntimeError(f"the drafter's trainer died (exit code {self._process.exitcode})") from None
        if isinstance(answer, Failed):
            raise RuntimeError(f"the drafter's trainer failed:\n{answer.trace}")
        return answer
