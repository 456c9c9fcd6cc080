"""A rank of a tensor parallel engine other than 0: it builds its part of the executor and does what rank 0 says.

`python -m paceline.engine.rank FD` is how `Ranks` starts one; FD is the connection to rank 0.
"""

from __future__ import annotations

import logging
import pickle
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.engine.build import RankPlan, build_rank
from paceline.engine.collectives import RankGroup, device_of, open_group, parent_watch
from paceline.engine.command import ExportPages, ImportPages, LoadWeights, NewWeights, Sleep, UpdateEnd, Wake
from paceline.engine.executor import Executor
from paceline.engine.failures import describe_error
from paceline.engine.ranks import Failed, Join

_ANSWERED = (ExportPages, ImportPages, LoadWeights, Sleep, Wake)
"""Commands after which rank 0 waits for an answer."""


def serve(connection: Connection, check: Callable[[], None], owns_process: bool = True) -> None:
    """Be a rank until rank 0 closes the connection. `check`: see `SharedMemoryGroup`. `owns_process`: the process is this rank's,
    so that the number of its threads can be set."""
    join: Join | None = None
    try:
        join = pickle.loads(connection.recv_bytes())
        connection.send_bytes(pickle.dumps("here"))
        if owns_process:
            torch.set_num_threads(join.num_threads)
        device = device_of(torch.device(join.device), join.rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        group = open_group(Path(join.place), device, join.rank, join.size, join.timeout_s, check)
        executor = _build(connection, join, device, group)
        while True:
            _execute(executor, pickle.loads(connection.recv_bytes()), connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        _clean_up(join)  # rank 0 has ended
    except BaseException as error:
        try:
            connection.send_bytes(pickle.dumps(Failed(describe_error(error))))
        except OSError:
            _clean_up(join)
            return
        raise


def _clean_up(join: Join | None) -> None:
    """Remove what all ranks share, which rank 0 could not do if it was killed."""
    if join is not None:
        shutil.rmtree(join.place, ignore_errors=True)


def _build(connection: Connection, join: Join, device: torch.device, group: RankGroup) -> Executor:
    plan: RankPlan = pickle.loads(connection.recv_bytes())
    executor = build_rank(plan._replace(partition=replace(plan.partition, rank=join.rank)), device, group)
    connection.send_bytes(pickle.dumps("built"))
    return executor


def _execute(executor: Executor, command: Any, connection: Connection) -> None:
    if isinstance(command, LoadWeights):
        command = LoadWeights(_received(connection))
    try:
        found = executor.execute(command)
    except UpdateBrokenOff:
        found = None  # rank 0 knows why; the weights are marked as incomplete
    if isinstance(command, _ANSWERED):
        connection.send_bytes(pickle.dumps(found, pickle.HIGHEST_PROTOCOL))


class UpdateBrokenOff(ValueError):
    """Rank 0 refused new weights on the way."""


def _received(connection: Connection) -> Iterator[tuple[str, Tensor]]:
    """This rank's parts of new weights."""
    while True:
        found = pickle.loads(connection.recv_bytes())
        if isinstance(found, UpdateEnd):
            if found.error is not None:
                raise UpdateBrokenOff(found.error)
            return
        assert isinstance(found, NewWeights)
        yield found.name, found.tensor  # type: ignore[misc]


def main() -> None:
    """Be a rank of the engine whose process has started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; rank 0 decides what it means
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    serve(Connection(int(sys.argv[1])), parent_watch())


if __name__ == "__main__":
    main()
