"""What trainers steer: whether the server generates, which model it serves, and what its weights are called."""

from __future__ import annotations

import asyncio
from itertools import groupby
from typing import Any, Literal

from starlette.exceptions import HTTPException

from paceline.engine import Engine
from paceline.engine.thread import EngineThread, Overloaded
from paceline.server.config import ServerConfig
from paceline.types import Rollout

PauseMode = Literal["abort", "keep", "wait"]
"""What happens to requests when generation pauses: they end with what they have, stay where they are, or are finished first."""
Reason = Literal["pause", "sleep"]
_POLL_S = 0.01


class Control:
    """Pauses and resumes generation. Requests that come meanwhile wait, at most `ServerConfig.max_pending` of them. Its methods
    are called in the server's asyncio loop."""

    def __init__(self, thread: EngineThread, engine: Engine, config: ServerConfig) -> None:
        self._thread, self._engine, self._config = thread, engine, config
        self._open = asyncio.Event()
        self._open.set()
        self._reasons: set[Reason] = set()
        self._num_waiting = 0
        self._labels: dict[int, str] = {}
        self.adapter: str | None = None
        """Name of the adapter that is merged into the weights."""

    # Whether the server generates

    def is_held(self, reason: Reason) -> bool:
        """Whether generation is held for this reason."""
        return reason in self._reasons

    async def admit(self) -> None:
        """Return when generation is not held."""
        if self._open.is_set():
            return
        if self._num_waiting >= self._config.max_pending:
            raise Overloaded(f"generation is paused, and {self._num_waiting} requests wait")
        self._num_waiting += 1
        try:
            await self._open.wait()
        finally:
            self._num_waiting -= 1

    async def hold(self, reason: Reason, mode: PauseMode) -> None:
        """Hold generation until `release` has been called for every reason."""
        waits = mode == "wait" and not self._reasons
        self._reasons.add(reason)
        self._open.clear()
        while waits and self._thread.num_pending and reason in self._reasons:
            await asyncio.sleep(_POLL_S)
        if reason not in self._reasons:  # released meanwhile
            return
        if mode == "abort":
            await self._thread.abort()
        await self._thread.pause()

    async def release(self, reason: Reason) -> None:
        """Go on with the requests, unless generation is held for another reason, too."""
        self._reasons.discard(reason)
        if not self._reasons:
            await self._thread.resume()
            self._open.set()

    # Names of model and weights

    @property
    def model_name(self) -> str:
        """Name of the model that is served now: an adapter's, if one is loaded."""
        return self.adapter or self._config.model_name

    def resolve(self, name: str | None) -> str:
        """The name of the model that a request asks for. HTTPException if it is not served."""
        if name not in (None, self.model_name):
            raise HTTPException(404, f"the model {name} does not exist; there is {self.model_name}")
        return self.model_name

    @property
    def weight_version(self) -> str:
        """What the present weights are called."""
        return self._label(self._engine.version)

    def name_weights(self, version: int, label: str) -> None:
        """Call the weights of this version so, in answers."""
        self._labels[version] = label

    def describe(self, rollout: Rollout) -> dict[str, Any]:
        """The versions of the weights that generated an answer, as vLLM reports them, and the newest of them."""
        spans, start = [], 0
        for version, tokens in groupby(rollout.versions):
            end = start + len(list(tokens))
            spans.append({"version": self._label(version), "start": start, "end": end})
            start = end
        return {"weight_version": spans[-1]["version"] if spans else self.weight_version, "weight_versions": spans}

    def _label(self, version: int) -> str:
        return self._labels.get(version, str(version))
