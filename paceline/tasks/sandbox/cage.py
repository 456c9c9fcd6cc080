"""The part of the sandbox that the kernel enforces on a process and on those that it forks.

`enter`: another user if started by root, and namespaces of its own: no network, no other process, and a file system that holds
Python's library and one empty folder (`rootfs.py`). Where the system refuses namespaces (many containers, every system but
Linux), it raises, unless the caller accepts to go on without. `confine`: resource limits, system calls refused by a filter
(`syscalls.py`), files by Landlock (`landlock.py`); for the processes that run code, which start none of their own.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from typing import Any, NamedTuple

import landlock
import rootfs
import syscalls

NOBODY = 65534
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS = 1, 4, 38


class Unavailable(Exception):
    """The system refuses namespaces, and the caller does not go on without."""


class Cage(NamedTuple):
    """What `enter` has achieved."""

    folder: str
    """The folder to work in; the only one that can be written to."""
    visible: tuple[str, ...]
    """Files and folders that can be read, by the names that they have inside."""
    held: tuple[str, ...]
    """What the kernel enforces: user, namespaces, seccomp, landlock."""


def enter(folder: str, readable: tuple[str, ...] = (), partial: bool = False) -> Cage:
    """Confines this process and those that it forks from now on. Readable are Python's library and the paths in `readable`.
    Raises Unavailable if the system refuses namespaces, unless `partial`."""
    visible, held = rootfs.visible_paths(readable), []
    if _leave_root(folder):
        held.append("user")
    try:
        _new_namespaces()
        visible = rootfs.enter(folder, visible)
        folder = rootfs.FOLDER
        held.append("namespaces")
    except OSError as error:
        if not partial:
            raise Unavailable(f"{error.strerror} ({error.filename})") from None
    os.chdir(folder)
    os.environ.update(HOME=folder, TMPDIR=folder)
    if sys.platform == "linux":
        _drop_capabilities()
        held += ["seccomp"] * syscalls.is_supported() + ["landlock"] * bool(landlock.version())
    die_with_parent()  # last: a change of credentials clears it
    return Cage(folder, visible, tuple(held))


def confine(cage: Cage, *, cpu_s: int, memory_bytes: int, file_bytes: int, processes: int) -> None:
    """Limits this process for good, before it runs code that nobody vouches for. It can start threads, but no process. With
    `file_bytes` 0 it can write to no folder, and needs none."""
    die_with_parent()
    limit(cpu_s, memory_bytes, file_bytes, processes)
    if "landlock" in cage.held:
        landlock.restrict(cage.visible, cage.folder if file_bytes else None)
    if "seccomp" in cage.held:
        syscalls.install(attributes="namespaces" in cage.held)


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends (on Linux)."""
    _prctl(_PDEATHSIG, signal.SIGKILL)


def hide_memory() -> None:
    """Keeps other processes of the same user from reading the memory of this one (on Linux)."""
    _prctl(_DUMPABLE, 0)


def limit(cpu_s: int, memory_bytes: int, file_bytes: int, processes: int) -> None:
    """Sets the resource limits of this process. Of `processes`, without a user namespace, all those of the user count."""
    wanted = {resource.RLIMIT_CPU: cpu_s, resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_FSIZE: file_bytes,
              resource.RLIMIT_NOFILE: 64, resource.RLIMIT_CORE: 0, resource.RLIMIT_NPROC: processes}
    for kind, most in wanted.items():
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        try:
            resource.setrlimit(kind, (most, most))
        except (OSError, ValueError):
            if kind != resource.RLIMIT_AS or sys.platform == "linux":  # macOS knows no limit of address space
                raise


def _leave_root(folder: str) -> bool:
    """Becomes the user nobody if started by root, and if nobody can read Python's library (it may be in root's home) and reach
    `folder`."""
    if os.getuid() != 0:
        return False
    try:
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    except OSError:  # a root without its capabilities
        os.setegid(0)
        return False
    needed = ((os.__file__, os.R_OK), (sys.executable, os.X_OK), (os.path.dirname(folder), os.X_OK))
    reached = all(os.access(path, mode, effective_ids=True) for path, mode in needed)
    os.seteuid(0)
    os.setegid(0)
    if reached:
        os.chown(folder, NOBODY, NOBODY)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    return reached


def _new_namespaces() -> None:
    """Gives this process a user, network, mount, IPC and host name namespace, and its children a process namespace."""
    if sys.platform != "linux":
        raise OSError(0, f"there are none on {sys.platform}", "unshare")
    user, group = os.getuid(), os.getgid()
    _prctl(_DUMPABLE, 1)  # else a process that left root may not write its own uid_map
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEWUSER | _NEWNET | _NEWPID | _NEWNS | _NEWIPC | _NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "unshare")
    libc.sethostname(b"sandbox", 7)
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _drop_capabilities() -> None:
    """Gives up the capabilities that a new user namespace gave, for good: no executable brings them back."""
    _prctl(_NO_NEW_PRIVS, 1)
    ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", 0, 0, 0, 0, 0, 0))


def _prctl(option: int, value: Any) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
