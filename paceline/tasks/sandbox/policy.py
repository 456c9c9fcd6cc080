"""Whether sandboxed processes may run where the kernel cannot isolate them: the environment variable PACELINE_SANDBOX."""

from __future__ import annotations

import os

VARIABLE = "PACELINE_SANDBOX"
_VALUES = ("full", "partial")


class SandboxUnavailable(RuntimeError):
    """The sandbox cannot run on this machine, so nothing that needs it is graded."""


def may_be_partial() -> bool:
    """Whether the user accepts a sandbox without namespaces (PACELINE_SANDBOX=partial). Where there are namespaces, they are used
    in any case."""
    value = os.environ.get(VARIABLE) or _VALUES[0]
    if value not in _VALUES:
        raise ValueError(f"{VARIABLE}: {value!r} is neither of {', '.join(_VALUES)}")
    return value == "partial"


def missing_namespaces(why: str) -> str:
    """What to tell a user whose system refuses namespaces."""
    return (f"this system refuses the namespaces that keep answers away from your files: {why}. docs/sandbox.md says how to "
            f"allow them; {VARIABLE}=partial goes on without them")
