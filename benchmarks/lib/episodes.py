"""Episodes that are drawn beforehand, for benchmarks of environments: prompts, replies, and how long each reply takes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline import Engine, SamplingParams
from paceline.engine.pool import RequestPool

_SAMPLE_S = 0.05


class DrawnTurn(NamedTuple):
    """A turn of the policy, and what follows it."""

    num_tokens: int
    reply: list[int]
    """Token ids of the environment's reply; none ends the episode."""
    latency_s: float
    """Seconds that the reply takes."""


class Drawn(NamedTuple):
    """An episode."""

    prompt: list[int]
    turns: list[DrawnTurn]

    def as_job(self) -> dict[str, Any]:
        """As `vllm_gpu_server.py` takes it."""
        return {"prompt": self.prompt, "turns": [turn._asdict() for turn in self.turns]}


class Outcome(NamedTuple):
    """A run of all episodes."""

    seconds: float
    num_tokens: int
    """Number of sampled tokens."""
    gpu_busy: float | None
    """Share of the time in which a request could run that the GPU computed; None if it cannot be measured."""
    tokens: list[list[int]]
    """All tokens of every episode."""

    def record(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "tokens_per_s": self.num_tokens / self.seconds, "gpu_busy": self.gpu_busy}


def draw_episodes(take: Callable[[int], list[list[int]]], count: int, num_turns: int, turn_tokens: int,
                  max_latency_s: float, seed: int = 0) -> list[Drawn]:
    """`take`: returns so many further prompts. Latencies are log-normal with a median of a tenth of the longest one, which they
    are cut at."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        prompt, *replies = take(num_turns)
        latencies = [min(max_latency_s, max_latency_s * 0.1 * rng.lognormvariate(0.0, 1.2)) for _ in replies]
        turns = [DrawnTurn(turn_tokens, reply, latency) for reply, latency in zip(replies, latencies, strict=True)]
        found.append(Drawn(prompt, [*turns, DrawnTurn(turn_tokens, [], 0.0)]))
    return found


@dataclass
class _Live:
    """An episode that is under way."""

    number: int
    turn: int = 0


def run_episodes(engine: Engine, episodes: Sequence[Drawn], params: SamplingParams, num_live: int) -> Outcome:
    """Generates all episodes, `num_live` at once."""
    tokens: list[list[int]] = [[] for _ in episodes]
    due: list[tuple[float, int, list[int]]] = []  # when replies are there, for which requests
    left, sampled = iter(range(len(episodes))), 0
    meter = BusyMeter(lambda: engine.has_work)
    began = time.perf_counter()
    with RequestPool[_Live](engine) as requests, meter:
        def begin() -> None:
            number = next(left, None)
            if number is not None:
                requests.add(episodes[number].prompt, params, [_Live(number)], seeds=[number])

        for _ in range(num_live):
            begin()
        while requests:
            now = time.perf_counter()
            for entry in [entry for entry in due if entry[0] <= now]:
                due.remove(entry)
                assert requests.resume(entry[1], entry[2]), "there is room for all turns"
            if not engine.has_work:
                time.sleep(max(0.0, min(entry[0] for entry in due) - time.perf_counter()))
                continue
            for live, turn in requests.step().turns:
                drawn = episodes[live.number].turns[live.turn]
                sampled, live.turn = sampled + len(turn.token_ids), live.turn + 1
                if drawn.reply:
                    due.append((time.perf_counter() + drawn.latency_s, turn.request_id, drawn.reply))
                else:
                    tokens[live.number] = requests.end(turn.request_id).token_ids
                    begin()
    return Outcome(time.perf_counter() - began, sampled, meter.share, tokens)


@dataclass
class BusyMeter:
    """Samples in a thread whether the GPU computes, while there is something to compute."""

    has_work: Callable[[], bool]
    found: list[float] = field(default_factory=list)

    def __enter__(self) -> BusyMeter:
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    @property
    def share(self) -> float | None:
        return sum(self.found) / len(self.found) if self.found else None

    def _sample(self) -> None:
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:  # there is no GPU
            return
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        while not self._ends.wait(_SAMPLE_S):
            if self.has_work():
                self.found.append(pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100)
