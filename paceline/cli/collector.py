"""Python's garbage collector in a process that belongs to one command."""

from __future__ import annotations

import gc
from contextlib import ExitStack


def freeze_until_exit(stack: ExitStack) -> None:
    """Keep the garbage collector from looking at what exists now, such as a warm engine, until the stack is left: that takes it a
    tenth of a second, between steps. What is frozen is not freed before that, so only a command may do it, not the library."""
    gc.collect()
    gc.freeze()
    stack.callback(gc.unfreeze)
