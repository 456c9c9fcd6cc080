"""A file system of its own for a process in new user and mount namespaces: Python's library and the system's shared libraries,
read-only, four devices, and one empty folder in memory, from which nothing can be executed. Nothing else exists there: no home,
no /proc, no /run, no /etc. What is not in the system's own folders, such as a Python in somebody's home, is there under another
name, so that not even the names of its folders can be seen."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Callable
from pathlib import PurePath
from types import ModuleType
from typing import Any

FOLDER = "/sandbox"
"""The folder that can be written to, as seen from inside."""
_FOLDER_OPTIONS = b"mode=700,size=64m,nr_inodes=4096"
_ELSEWHERE = "/python"
"""Where everything appears that is not in one of the system's folders."""
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/opt", "/nix", "/gnu", "/etc", "/dev")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/nix/store", "/gnu/store",
              "/etc/ld.so.cache", "/usr/share/zoneinfo")
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41}
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x1000, 0x4000, 0x40000, 2
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8


def visible_paths(readable: tuple[str, ...] = ()) -> tuple[str, ...]:
    """What can be read from inside: Python's installation, the system's shared libraries, the devices and `readable`."""
    python = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, os.path.dirname(os.__file__)} - {"/"}
    return tuple(sorted(path for path in {*python, *_LIBRARIES, *_DEVICES, *readable} if os.path.exists(path)))


def enter(folder: str, visible: tuple[str, ...]) -> tuple[str, ...]:
    """Replaces the root of this process's mount namespace, and returns what the visible paths are called inside. `folder` only
    serves as the place to assemble the new one: nothing is written to it. OSError if the kernel refuses a step."""
    libc, places = _Libc(), _Places()
    libc.call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    libc.call("mount", b"tmpfs", folder.encode(), b"tmpfs", 0, b"mode=755,size=1m")
    inside = tuple(_show(libc, folder, path, places) for path in visible)  # sorted: a folder comes before what it contains
    os.mkdir(folder + FOLDER)
    libc.set_attributes(folder, _AT_RECURSIVE, _RDONLY | _NOSUID)
    _mount_folder(libc, (folder + FOLDER).encode())
    os.chdir(folder)
    libc.call("syscall", libc.pivot_root, b".", b".")  # the old root now lies over the new one …
    libc.call("umount2", b".", _MNT_DETACH)  # … and is taken off
    os.chdir("/")
    _rename_in_process(places.inside)
    return tuple(sorted(set(inside)))


def _mount_folder(libc: _Libc, place: bytes) -> None:
    flags = _NOSUID | _NODEV
    try:
        libc.call("mount", b"tmpfs", place, b"tmpfs", flags | _NOEXEC, _FOLDER_OPTIONS)
    except OSError:  # a kernel that refuses this kind of mount only
        libc.call("mount", b"tmpfs", place, b"tmpfs", flags, _FOLDER_OPTIONS)


def _show(libc: _Libc, root: str, path: str, places: _Places) -> str:
    """Makes a path appear under the new root, as a link where it is one in a folder of the system. Returns its name inside."""
    real = os.path.realpath(path)
    place = places.add(path, real)
    if not os.path.lexists(root + place):
        if os.path.isdir(real):
            os.makedirs(root + place)
        else:
            os.makedirs(os.path.dirname(root + place), exist_ok=True)
            os.close(os.open(root + place, os.O_CREAT | os.O_EXCL))
        libc.call("mount", real.encode(), (root + place).encode(), None, _MS_BIND | _MS_REC, None)
    if not _is_under(path, *_SYSTEM):
        return place
    if not os.path.lexists(root + path):
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(place, root + path)
    return path


class _Places:
    """The names inside of what has another name outside."""

    def __init__(self) -> None:
        self._moved: dict[str, str] = {}

    def add(self, path: str, real: str) -> str:
        """The name of this real path inside; `path` is how it is called outside."""
        if _is_under(real, *_SYSTEM):
            place = real
        else:
            place = self.inside(real)
            if place == real:  # not in a folder that was added before
                place = f"{_ELSEWHERE}/{len(self._moved)}"
        for name in (path, real):
            if not _is_under(name, *_SYSTEM):
                self._moved[name] = place
        return place

    def inside(self, path: str) -> str:
        """What a path is called inside, if it or a folder that it is in was added; otherwise the path itself."""
        found = max((name for name in self._moved if _is_under(path, name)), key=len, default=None)
        return path if found is None else self._moved[found] + path[len(found) :]


def _is_under(path: str, *folders: str) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def _rename_in_process(inside: Callable[[str], str]) -> None:
    """Tells this interpreter the new names: where to import from, and where loaded modules are and have their data. Names within
    code, which tracebacks show, stay."""
    sys.path[:] = [path for path in map(inside, sys.path) if not path.startswith("/") or os.path.exists(path)]
    for name in ("prefix", "exec_prefix", "base_prefix", "base_exec_prefix", "executable", "_base_executable", "_stdlib_dir"):
        value = vars(sys).get(name)
        if isinstance(value, str):
            setattr(sys, name, inside(value))
    sys.path_importer_cache.clear()
    for module in [module for module in list(sys.modules.values()) if isinstance(module, ModuleType) and module is not sys]:
        values = vars(module)
        for name, value in list(values.items()):
            if isinstance(value, str | PurePath) and str(value).startswith("/") and inside(str(value)) != str(value):
                values[name] = type(value)(inside(str(value)))
        spec = values.get("__spec__")
        for folders in (values.get("__path__"), getattr(spec, "submodule_search_locations", None)):
            if isinstance(folders, list):
                folders[:] = map(inside, folders)
        for owner, name in ((spec, "origin"), (spec, "cached"), (values.get("__loader__"), "path")):
            if isinstance(getattr(owner, name, None), str):
                setattr(owner, name, inside(getattr(owner, name)))


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
