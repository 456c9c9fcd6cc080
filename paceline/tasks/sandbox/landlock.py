"""Landlock: the kernel refuses this process all files but those under the paths it is given. It needs no privileges and no
namespaces, so it also holds in most containers (Linux 5.13 or newer, unless switched off at boot)."""

from __future__ import annotations

import ctypes
import os
import stat
import struct

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REFER, _TRUNCATE = 1, 2, 4, 8, 1 << 13, 1 << 14
_FIRST_VERSION = (1 << 13) - 1
"""Everything that the first version of Landlock controls: reading, executing, writing, making and removing."""
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE


def version() -> int:
    """Version of Landlock in this kernel; 0: there is none."""
    return max(0, ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, _GET_VERSION))


def restrict(readable: tuple[str, ...], writable: str | None) -> None:
    """From here on this process can only read what is under `readable`, and read and write what is under `writable`."""
    everything = _FIRST_VERSION | (_REFER if version() >= 2 else 0) | (_TRUNCATE if version() >= 3 else 0)
    rules = struct.pack("Q", everything)
    descriptor = _call(_CREATE_RULESET, rules, len(rules), 0)
    for path in readable:
        _allow(descriptor, path, (_READ_FILE | _READ_DIR) | (_WRITE_FILE if path == os.devnull else 0))
    if writable is not None:
        _allow(descriptor, writable, everything & ~_EXECUTE)
    _call(_RESTRICT_SELF, descriptor, 0)
    os.close(descriptor)


def _allow(ruleset: int, path: str, access: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            access &= _OF_FILES
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", access, place), 0)
    finally:
        os.close(place)


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"landlock: {os.strerror(ctypes.get_errno())}")
    return int(result)
