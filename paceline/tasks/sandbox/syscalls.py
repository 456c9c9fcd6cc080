"""A seccomp filter: system calls that a process which only computes does not need fail, whatever Python code it runs. Starting
processes, sockets, signals to others, namespaces, debugging and the kernel's larger interfaces are refused with EPERM; calls
newer than those listed here do not exist (ENOSYS), which the C library takes for an older kernel.

The filter is a classic BPF program; numbers are those of x86-64 and aarch64. Elsewhere there is no filter.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

_PR_SET_SECCOMP, _MODE_FILTER, _PR_SET_PDEATHSIG = 22, 2, 1
_CLONE_THREAD = 0x10000
_FIRST_NEW, _NEW_ALLOWED = 424, (436, 439)  # from here on numbers are the same everywhere; close_range, faccessat2
_X32 = 0x40000000
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine → what the kernel calls it, and its column in the tables below."""

_REFUSED = {
    "execve": (59, 221), "execveat": (322, 281), "fork": (57, None), "vfork": (58, None),
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242), "sendmsg": (46, 211), "recvmsg": (47, 212), "sendmmsg": (307, 269),
    "recvmmsg": (299, 243),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "setsid": (112, 157), "setpgid": (109, 154),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "bpf": (321, 280), "personality": (135, 92),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "mknod": (133, None),
    "mknodat": (259, 33),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "syslog": (103, 116),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "memfd_create": (319, 279),
}
_ATTRIBUTES = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None), "fchown": (93, 55),
    "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None), "utimensat": (280, 88),
    "futimesat": (261, None), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "truncate": (76, 45), "inotify_add_watch": (254, 27),
}
"""What can be done to a file by its name that Landlock does not control in every version."""
_CLONE, _PRCTL = (56, 220), (157, 167)

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_AT_NUMBER, _AT_ARCHITECTURE, _AT_FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSE, _UNKNOWN = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS

Instruction = tuple[int, int, int, int]
"""Operation, instructions to skip if its test is true, to skip if it is false, operand."""


def is_supported() -> bool:
    """Whether this system can install the filter."""
    libc = ctypes.CDLL(None, use_errno=True)
    asked = libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, None, 0, 0)  # no program: EFAULT where filters exist
    return platform.machine() in _ARCHITECTURES and asked == -1 and ctypes.get_errno() == errno.EFAULT


def install(attributes: bool) -> None:
    """Installs the filter for this process, for good. `attributes` lets it change modes, owners and times of files."""
    program = [struct.pack("HBBI", code, *rest) for code, *rest in _program(attributes)]
    instructions = ctypes.create_string_buffer(b"".join(program))
    described = struct.pack("HxxxxxxP", len(program), ctypes.addressof(instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, described, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp: the filter was refused")


def _program(attributes: bool) -> list[Instruction]:
    architecture, column = _ARCHITECTURES[platform.machine()]
    refused = {**_REFUSED, **({} if attributes else _ATTRIBUTES)}
    numbers = [number for pair in refused.values() if (number := pair[column]) is not None]
    return [
        (_LOAD, 0, 0, _AT_ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL),  # 32-bit calls
        (_LOAD, 0, 0, _AT_NUMBER), (_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL),
        *(part for number in _NEW_ALLOWED for part in ((_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW))),
        (_AT_LEAST, 0, 1, _FIRST_NEW), (_RETURN, 0, 0, _UNKNOWN),
        *(part for number in numbers for part in ((_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE))),
        (_EQUAL, 0, 4, _CLONE[column]), (_LOAD, 0, 0, _AT_FIRST_ARGUMENT), (_ANY_BIT, 0, 1, _CLONE_THREAD),  # threads only
        (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE),
        (_EQUAL, 0, 3, _PRCTL[column]), (_LOAD, 0, 0, _AT_FIRST_ARGUMENT), (_EQUAL, 0, 1, _PR_SET_PDEATHSIG),
        (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW),
    ]
