"""Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector, and enable it afterwards if it was enabled before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_until_exit(stack: ExitStack) -> None:
    """Keep the garbage collector from looking at what exists now, such as a warm engine, until the stack is left: that takes it a
    tenth of a second, between steps. What is frozen is not freed before that, so only a command may do it, not the library."""
    gc.collect()
    gc.freeze()
    stack.callback(gc.unfreeze)
