"""A connection to Ray: a cluster that is joined, or a Ray of this process's own, of which nothing stays behind.

Most of Ray's own processes end when the process that started them does, however that ends; its session folder stays, and some
processes outlive one that was killed. So a session of our own has a folder of its own. Once the session or this process has
ended, a small watching process removes the folder, and ends what still belongs to it. A folder of its own also keeps two runs on
one machine apart.

If Ray's raylet or one of its agents dies, its node leaves the cluster, and Ray ends this process as soon as it hears of that. So
the watching process ends the rest of our own Ray at once, and `RaySession.check` says what has happened. On a busy machine Ray
may still be faster: `paceline.cli.supervisor` is there for that.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import Any

import ray
from ray._private import ray_constants, worker

from paceline.trainer.device import cluster_address
from paceline.types import WorkersLost

logger = logging.getLogger(__name__)

_WATCH = r"""
import glob, os, re, select, shutil, signal, sys, time
folder, driver = sys.argv[1:]

def read(process, name):
    try:
        with open(f"/proc/{process}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""  # it has ended

def status(process):  # its state and its parent
    return read(process, "stat").rpartition(b")")[2].split()[:2]

def agents(raylet):
    found = [p[6:] for p in glob.glob("/proc/[0-9]*") if status(p[6:])[1:] == [str(raylet).encode()]]
    return [int(p) for p in found if re.search(rb"agent\.py|agent/main\.py|::\w*Agent", read(p, "cmdline"))]

def handles(raylet, others):  # which can be read when a process ends
    try:
        return [os.pidfd_open(process) for process in (raylet, *others, *agents(raylet))]
    except (AttributeError, OSError):
        return []  # not on this system

watched, ended = [], []
while True:  # until the process that has the other end of the pipe ends, or says that it ends Ray
    ready = select.select([0, *watched], [], [])[0]
    if 0 in ready:
        words = os.read(0, 1000).split()
        if not words or b"end" in words:
            break
        ended = [int(word) for word in words]
        watched = handles(ended[0], ended[1:])
    else:
        watched = []
        for process in ended:
            try:
                os.kill(process, signal.SIGKILL)
            except OSError:
                pass

def belongs(process):  # its command line or an open file names the folder
    try:
        with open(process + "/cmdline", "rb") as file:
            if (folder + "/").encode() in file.read():
                return True
        return any(os.readlink(link).startswith(folder + "/") for link in glob.glob(process + "/fd/*"))
    except OSError:
        return False  # it has ended, or is another user's

for turn in range(50):  # Ray's processes notice a little later, and may write to the folder until then
    shutil.rmtree(folder, ignore_errors=True)
    others = [p for p in glob.glob("/proc/[0-9]*") if p[6:] not in (driver, str(os.getpid())) and belongs(p)]
    if not others and not os.path.exists(folder):
        break
    for process in others if turn > 5 else ():  # some of them would stay for minutes
        try:
            os.kill(int(process[6:]), signal.SIGKILL)
        except OSError:
            pass
    time.sleep(0.2)
"""
_LONGEST_FOLDER = 30
"""Ray puts sockets into its folder, whose paths may have about a hundred characters."""
_MAX_STARTS = 3
"""Number of times that a Ray of our own is started, if it takes longer than the half minute that Ray itself allows."""
_PROBE_EVERY_S, _PROBE_S, _GONE_S = 1.0, 1.0, 20.0
"""Seconds between two probes of a cluster that was joined, seconds that one may take, and how long those of the head node may
fail. Ray itself ends this process after 60 seconds."""


class RaySession:
    """Ray, as long as this object is open. What the program has started or joined before stays as it is."""

    def __init__(self, address: str | None = None) -> None:
        """`address`: None starts Ray on this machine, on the loopback interface, unless this process has started or joined one;
        "auto" joins the cluster that this machine belongs to."""
        self._owns_ray, self._started_ray = not ray.is_initialized(), False
        for more in reversed(range(_MAX_STARTS)):
            try:
                self._open(address)
                return
            except _TooSlow:
                if not more:
                    raise
                logger.warning("Ray has not started in time, as on a machine that is very busy; it is started again")

    def _open(self, address: str | None) -> None:
        self._probed_at = self._answered_at = time.monotonic()
        self.folder = tempfile.mkdtemp(prefix="paceline-ray-", dir=_short_folder())
        """A folder that is removed when this object is closed, or when this process ends."""
        self._watcher = subprocess.Popen([sys.executable, "-I", "-S", "-c", _WATCH, self.folder, str(os.getpid())],
                                         stdin=subprocess.PIPE, start_new_session=True)
        try:
            if self._owns_ray and address is None:
                self._start()
            elif self._owns_ray and address is not None:
                _init(address=cluster_address(address))
            self._started_ray = self._owns_ray and address is None
            if self._started_ray:
                self._tell_watcher(" ".join(str(found.process.pid) for found in _processes()))
            self.is_local = address is None and (self._owns_ray or len(ray.nodes()) == 1)
            """Whether all workers are on this machine."""
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        # Ray replaces a loopback address by one that other nodes can reach, unless this switch of its own is off.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # how to protect a Ray that others can reach
        before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
        try:
            # Ray's own niceness of workers, 15, would stop them where anything else runs on the machine.
            _init(address="local", _node_ip_address="127.0.0.1", include_dashboard=False, _temp_dir=self.folder,
                  _system_config={"worker_niceness": 0})
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = before
            del os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]

    def check(self) -> None:
        """Raises WorkersLost if Ray cannot be used any more: some of its functions would end this process then, others would
        never return. A Ray of our own is lost with its processes; a cluster that was joined if its head node or this machine's
        part of it has not answered for a while."""
        node: Any = worker._global_node
        if node is None:
            return  # a client of a cluster that it is no part of
        if self._started_ray:
            if any(found.process.poll() is not None for found in _processes()):
                raise WorkersLost("Ray has ended, and the workers with it: one of its processes has died")
            return
        now = time.monotonic()
        if now - self._probed_at < _PROBE_EVERY_S:
            return
        self._probed_at = now
        if not _accepts(socket.AF_UNIX, node.raylet_socket_name):
            raise WorkersLost("Ray has ended on this machine, which the run is led from")
        host, _, port = node.gcs_address.rpartition(":")
        if _accepts(socket.AF_INET6 if ":" in host else socket.AF_INET, (host.strip("[]"), int(port))):
            self._answered_at = now
        elif now - self._answered_at > _GONE_S:
            raise WorkersLost(f"Ray's head node has not answered for {_GONE_S:.0f} s")

    def close(self) -> None:
        """Leave the cluster, or end Ray and remove its folder."""
        self._tell_watcher("end")
        if self._owns_ray:
            ray.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._watcher.communicate()

    def _tell_watcher(self, line: str) -> None:
        assert self._watcher.stdin is not None
        with suppress(BrokenPipeError):  # somebody has ended it
            self._watcher.stdin.write(f"{line}\n".encode())
            self._watcher.stdin.flush()


def num_gpus(address: str) -> float:
    """Number of GPUs in a Ray cluster."""
    session = RaySession(address)
    try:
        return float(ray.cluster_resources().get("GPU", 0.0))
    finally:
        session.close()


class _TooSlow(WorkersLost):
    """Ray's processes took longer to start than Ray allows."""


def _init(**options: Any) -> None:
    """Start or join Ray. Neither what workers print nor what Ray itself has to say about a process that died is printed: what
    matters comes with the workers' reports, and from `RaySession.check`."""
    log = logging.getLogger("ray")
    level = log.level
    log.setLevel(logging.CRITICAL)  # a dashboard that is late prints its log files; the exception says enough
    try:
        ray.init(configure_logging=False, log_to_driver=False, **options)
    except Exception as error:  # Ray raises bare ones, for example if its processes take too long to start
        kind = _TooSlow if "timed out during startup" in str(error) else WorkersLost
        raise kind(f"Ray cannot be started or joined: {' '.join(str(error).split())[:300]}") from None
    finally:
        log.setLevel(level)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)  # again: Ray puts a handler before it that prints a stack of C++ calls
    driver: Any = worker.global_worker
    if driver.mode == worker.SCRIPT_MODE:  # its thread prints the logs of a Ray that has died
        driver.threads_stopped.set()
        driver.gcs_error_subscriber.close()
        driver.listener_thread.join()


def _processes() -> list[Any]:
    """Ray's own processes, of a Ray that this process has started: the raylet first, then the server that knows the cluster."""
    node: Any = worker._global_node
    return [found for kind in (ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER)
            for found in node.all_processes.get(kind, ())]


def _accepts(family: socket.AddressFamily, address: Any) -> bool:
    """Whether somebody accepts connections at an address."""
    with socket.socket(family) as connection:
        connection.settimeout(_PROBE_S)
        return connection.connect_ex(address) == 0


def _short_folder() -> str:
    """A folder for temporary files with a short path."""
    usual = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return usual if len(usual) <= _LONGEST_FOLDER or not os.path.isdir("/tmp") else "/tmp"
