"""The device of a run, and the cluster whose workers have it."""

from __future__ import annotations

import os
import socket
import threading

import torch

from paceline.config import TrainConfig
from paceline.models.weights import check_device, resolve_device

_CONNECT_S, _ANSWER_S = 5.0, 15.0
"""Seconds that connecting to a Ray cluster may take, and that its answer may take altogether."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How a connection to a gRPC server begins: HTTP/2's preface, and settings, which the server answers with its own."""


def run_device(config: TrainConfig) -> str:
    """The device that a run generates and trains on, such as `cpu` or `cuda`. Workers on other nodes may have a GPU where this
    process has none; then only the name is checked. Other devices that this machine does not have are a ValueError."""
    return "cuda" if config.device == "cuda" and are_workers_elsewhere(config) else resolve_device(config.device)


def check_run_device(config: TrainConfig) -> None:
    """Raises a ValueError if the run, or one of its workers, cannot use the device."""
    if not (config.device == "cuda" and are_workers_elsewhere(config)):
        check_device(config.device)
    if not config.cluster.needs_ray:
        return
    if config.device.startswith("cuda:"):
        raise ValueError(f"{config.device}: Ray says which GPU each of several workers has; give cuda")


def gpus_per_worker(config: TrainConfig) -> float:
    """GPUs that Ray reserves for each worker of a run whose device is known."""
    if config.cluster.gpus_per_worker is not None:
        return config.cluster.gpus_per_worker
    return float(config.engine.tensor_parallel) if config.device.startswith("cuda") else 0.0


def check_worker_gpus(config: TrainConfig) -> None:
    """Raises a ValueError if Ray could not reserve the GPUs of the workers, or if they could not use them."""
    cluster, ranks, wanted = config.cluster, config.engine.tensor_parallel, config.cluster.gpus_per_worker
    on_gpu = run_device(config).startswith("cuda")
    if wanted is not None and wanted > 1 and wanted != ranks:
        raise ValueError(f"{wanted:g}: an engine runs on {f'{ranks} GPUs (engine.tensor_parallel)' if ranks > 1 else 'one GPU'}")
    if wanted == 0 and on_gpu:
        raise ValueError("0: workers on a GPU need a share of one")
    if wanted and not on_gpu and config.device != "auto":
        raise ValueError(f"{wanted:g}: the run's device is {config.device}")
    if on_gpu and cluster.address is None:
        available, each = torch.cuda.device_count(), wanted or float(ranks)
        if (available // each if each >= 1 else available * int(1 / each)) < cluster.workers:
            raise ValueError(f"{cluster.workers} workers with {each:g} of a GPU each do not fit on {available} GPU(s); "
                             f"set cluster.gpus_per_worker = {_share(cluster.workers, available):g}")


def are_workers_elsewhere(config: TrainConfig) -> bool:
    """Whether generation and training are done by workers that need not be on this machine."""
    return config.cluster.address is not None and config.cluster.shard_training


def cluster_address(address: str) -> str:
    """Address of the Ray cluster to join. `auto` is the one that RAY_ADDRESS names, or that was started on this machine with
    `ray start`: Ray itself would also take one that another run has started for itself. A ValueError if there is none."""
    if address == "auto":
        from ray._private.services import find_bootstrap_address

        address = os.environ.get("RAY_ADDRESS") or find_bootstrap_address(None) or ""
        if not address:
            raise ValueError("auto: no Ray cluster runs on this machine; start one (ray start --head), or leave the address out")
    found: list[str] = []
    # Ray itself would try for minutes. In a thread, since looking up a name may take long, too.
    probe = threading.Thread(target=lambda: found.append(_why_no_cluster(address)), daemon=True)
    probe.start()
    probe.join(_ANSWER_S)
    why = found[0] if found else f"no answer within {_ANSWER_S:.0f} s"
    if why:
        raise ValueError(f"there is no Ray cluster at {address} ({why})")
    return address


def _why_no_cluster(address: str) -> str:
    """Why there is no Ray cluster at an address; empty if there may be one."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return "an address is HOST:PORT, or auto"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S) as connection:
            if os.environ.get("RAY_USE_TLS") == "1":
                return ""
            connection.settimeout(_ANSWER_S)
            connection.sendall(_HELLO)
            answer = connection.recv(9)
    except (OSError, OverflowError) as error:
        return str(error)
    return "" if answer[3:4] == b"\x04" else "what answers there is not Ray"


def _share(workers: int, gpus: int) -> float:
    """Share of a GPU with which so many workers fit, rounded down."""
    return int(1000 / -(-workers // max(1, gpus))) / 1000
