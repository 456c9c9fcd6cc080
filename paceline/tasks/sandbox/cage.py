"""The part of the sandbox that the kernel enforces: another user if started by root, namespaces without a network, a read-only
file system, resource limits.

Each is tried, and left out where the system refuses it (containers often forbid namespaces); `enter` returns which ones hold.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from typing import Any

NOBODY = 65534
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _RDONLY = 442, -100, 0x8000, 1
_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS = 1, 4, 38


def enter(folder: str) -> list[str]:
    """Confines this process and those that it forks from now on. `folder` stays writable. Returns what holds: user, network,
    processes, files."""
    held = []
    if _leave_root(folder):
        held.append("user")
    if sys.platform != "linux":
        return held
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    libc.prctl(_DUMPABLE, 1, 0, 0, 0)  # else a process that left root may not write its own uid_map
    if libc.unshare(_NEWUSER | _NEWNET | _NEWPID | _NEWNS | _NEWIPC) == 0:
        _map_user(user, group)
        held += ["network", "processes"]
        if _read_only(libc, folder):
            held.append("files")
    elif libc.unshare(_NEWUSER | _NEWNET) == 0:
        _map_user(user, group)
        held.append("network")
    _drop_capabilities(libc)
    die_with_parent(libc)  # last: a change of credentials clears it
    return held


def die_with_parent(libc: Any = None) -> None:
    """Makes the kernel kill this process when its parent ends (on Linux)."""
    if sys.platform == "linux":
        (libc or ctypes.CDLL(None)).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def hide_memory() -> None:
    """Keeps other processes of the same user from reading the memory of this one (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DUMPABLE, 0, 0, 0, 0)


def limit(cpu_s: int, memory_bytes: int, file_bytes: int, processes: int | None) -> None:
    """Sets the resource limits of this process. `processes` is for processes that fork nothing: without a user namespace all
    processes of the user count."""
    wanted = {resource.RLIMIT_CPU: cpu_s, resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_FSIZE: file_bytes,
              resource.RLIMIT_NOFILE: 64, resource.RLIMIT_CORE: 0}
    if processes is not None:
        wanted[resource.RLIMIT_NPROC] = processes
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


def _map_user(user: int, group: int) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _read_only(libc: Any, folder: str) -> bool:
    """Makes every mount read-only except `folder`, which becomes a mount of its own."""
    where = folder.encode()

    def set_read_only(path: bytes, flags: int, on: int, off: int) -> bool:
        attributes = struct.pack("QQQQ", on, off, 0, 0)
        return libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path, flags, attributes, len(attributes)) == 0

    done = (libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
            and libc.mount(where, where, None, _MS_BIND, None) == 0
            and set_read_only(b"/", _AT_RECURSIVE, _RDONLY, 0) and set_read_only(where, 0, 0, _RDONLY))
    os.chdir(folder)  # into the new mount
    return done


def _drop_capabilities(libc: Any) -> None:
    """Gives up the capabilities that a new user namespace gave, for good: no executable brings them back."""
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", 0, 0, 0, 0, 0, 0))
