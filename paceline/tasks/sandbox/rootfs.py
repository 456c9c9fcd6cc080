"""A file system of its own for a process in new user and mount namespaces: Python's library and the system's shared libraries,
read-only, four devices, and one empty folder in memory. Nothing else exists there: no home, no /proc, no /run, no /etc."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from typing import Any

FOLDER = "/sandbox"
"""The folder that can be written to, as seen from inside."""
_FOLDER_OPTIONS = b"mode=700,size=64m,nr_inodes=4096"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/nix/store", "/gnu/store",
              "/etc/ld.so.cache", "/usr/share/zoneinfo")
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41}
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x1000, 0x4000, 0x40000, 2
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_RDONLY, _NOSUID, _NODEV = 1, 2, 4


def visible_paths(readable: tuple[str, ...] = ()) -> tuple[str, ...]:
    """What can be read from inside: Python's installation, the system's shared libraries, the devices and `readable`."""
    python = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, os.path.dirname(os.__file__)} - {"/"}
    return tuple(sorted(path for path in {*python, *_LIBRARIES, *_DEVICES, *readable} if os.path.exists(path)))


def enter(folder: str, visible: tuple[str, ...]) -> None:
    """Replaces the root of this process's mount namespace. `folder` only serves as the place to assemble the new one: nothing is
    written to it. OSError if the kernel refuses a step."""
    libc = _Libc()
    libc.call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    libc.call("mount", b"tmpfs", folder.encode(), b"tmpfs", 0, b"mode=755,size=1m")
    for path in visible:  # sorted, so that a folder comes before what it contains
        _show(libc, folder, path)
    os.mkdir(folder + FOLDER)
    libc.set_attributes(folder, _AT_RECURSIVE, _RDONLY | _NOSUID)
    libc.call("mount", b"tmpfs", (folder + FOLDER).encode(), b"tmpfs", _NOSUID | _NODEV, _FOLDER_OPTIONS)
    os.chdir(folder)
    libc.call("syscall", libc.pivot_root, b".", b".")  # the old root now lies over the new one …
    libc.call("umount2", b".", _MNT_DETACH)  # … and is taken off
    os.chdir("/")


def _show(libc: _Libc, root: str, path: str) -> None:
    """Makes a path appear under the new root, at its real place, and as a link where it is one."""
    real = os.path.realpath(path)
    if not os.path.lexists(root + real):
        if os.path.isdir(real):
            os.makedirs(root + real)
        else:
            os.makedirs(os.path.dirname(root + real), exist_ok=True)
            os.close(os.open(root + real, os.O_CREAT | os.O_EXCL))
        libc.call("mount", real.encode(), (root + real).encode(), None, _MS_BIND | _MS_REC, None)
    if not os.path.lexists(root + path):
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(real, root + path)


class _Libc:
    """Calls of the C library that raise OSError instead of returning -1."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.pivot_root = _PIVOT_ROOT.get(platform.machine(), -1)

    def call(self, name: str, *arguments: Any) -> None:
        if getattr(self._libc, name)(*arguments) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), name if name != "syscall" else "pivot_root")

    def set_attributes(self, path: str, flags: int, on: int) -> None:
        attributes = struct.pack("QQQQ", on, 0, 0, 0)
        if self._libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, attributes, len(attributes)) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), "mount_setattr")
