"""A connection to Ray: a cluster that is joined, or a Ray of this process's own, of which nothing stays behind.

Most of Ray's own processes end when the process that started them does, however that ends; its session folder stays. So a session
of our own has a folder of its own. Once this process is gone, a small watching process removes the folder, and ends what still
writes to it. A folder of its own also keeps two runs on one machine apart.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile

import ray
from ray._private import ray_constants

from paceline.trainer.device import cluster_address

_WATCH = """
import glob, os, shutil, signal, sys, time
folder = sys.argv[1]
sys.stdin.read()  # ends when the process that has the other end does
if os.path.exists(folder):
    for turn in range(50):  # Ray's processes notice a little later, and may write to it until then
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.2)
        for link in glob.glob("/proc/[0-9]*/fd/*") if turn > 5 else ():  # some of them would stay for minutes
            try:
                if os.readlink(link).startswith(folder + "/"):
                    os.kill(int(link.split("/")[2]), signal.SIGKILL)
            except OSError:
                pass  # it has ended, or is another user's
"""
_LONGEST_FOLDER = 30
"""Ray puts sockets into its folder, whose paths may have about a hundred characters."""


class RaySession:
    """Ray, as long as this object is open. What the program has started or joined before stays as it is."""

    def __init__(self, address: str | None = None) -> None:
        """`address`: None starts Ray on this machine, on the loopback interface, unless this process has started or joined one;
        "auto" joins the cluster that this machine belongs to."""
        self._owns_ray = not ray.is_initialized()
        self.folder = tempfile.mkdtemp(prefix="paceline-ray-", dir=_short_folder())
        """A folder that is removed when this object is closed, or when this process ends."""
        self._watcher = subprocess.Popen([sys.executable, "-I", "-S", "-c", _WATCH, self.folder], stdin=subprocess.PIPE,
                                         start_new_session=True)
        try:
            if self._owns_ray and address is None:
                self._start()
            elif self._owns_ray and address is not None:
                ray.init(address=cluster_address(address), configure_logging=False)
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
            ray.init(address="local", _node_ip_address="127.0.0.1", include_dashboard=False, configure_logging=False,
                     _temp_dir=self.folder)
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = before
            del os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]

    def close(self) -> None:
        """Leave the cluster, or end Ray and remove its folder."""
        if self._owns_ray:
            ray.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._watcher.communicate()


def num_gpus(address: str) -> float:
    """Number of GPUs in a Ray cluster."""
    session = RaySession(address)
    try:
        return float(ray.cluster_resources().get("GPU", 0.0))
    finally:
        session.close()


def _short_folder() -> str:
    """A folder for temporary files with a short path."""
    usual = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return usual if len(usual) <= _LONGEST_FOLDER or not os.path.isdir("/tmp") else "/tmp"
