"""The rendezvous of workers that form a process group of torch.distributed.

It is the path of a file, if all workers are on one machine: then they need no port for it, and talk over the loopback interface
only. Or it is HOST:PORT/PREFIX of a store that the driver serves.
"""

from __future__ import annotations

import os
import socket

import torch.distributed as dist


def open_store(rendezvous: str, size: int) -> dist.Store:
    """The key-value store of a rendezvous, for a group of so many processes."""
    if not rendezvous.startswith("/"):
        address, prefix = rendezvous.split("/", 1)
        host, port = address.rsplit(":", 1)
        return dist.PrefixStore(prefix, dist.TCPStore(host, int(port), is_master=False))
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
    return dist.FileStore(rendezvous, size)


def serve_store(host: str) -> dist.TCPStore:
    """A store on a port of its own; its workers may come and go."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
