"""What carries the coordinator's messages to its workers. `ray_runtime.py` implements it."""

from __future__ import annotations

from typing import Any, Protocol

from paceline.cluster.messages import Message
from paceline.cluster.reports import Lost, Report


class Runtime(Protocol):
    """Starts workers and carries messages."""

    num_workers: int

    def start(self, worker: int) -> None:
        """Start a worker that was lost. It reports when it is ready."""

    def has_room(self) -> bool:
        """Whether there is a node with room for every worker, those that are lost included."""

    def new_rendezvous(self) -> str:
        """A new rendezvous for workers, as `rendezvous.open_store` takes it."""

    def put(self, value: Any) -> Any:
        """Store a value that is sent to several workers, and return what `post` takes as its payload."""

    def post(self, worker: int, message: Message, payload: Any = None) -> None:
        """Send a message, at the latest with the next `flush`; a lost worker never gets it."""

    def flush(self, collect_s: float) -> None:
        """Send what was posted and is not on its way. Workers may collect news for so many seconds before they report."""

    def poll(self, timeout_s: float) -> list[Report | Lost]:
        """Reports of the workers that have one: as soon as there is any, after at most so many seconds."""

    def close(self) -> None:
        """End all workers."""
