"""Counters in memory that processes share: one counts what it has written, another waits for it."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline.jit_cache import cached_njit


@intrinsic
def _increment(typingctx, address):  # type: ignore[no-untyped-def]
    """Add one to the counter, after all that this thread has written."""
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        counter = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "acq_rel")
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _spin(typingctx, address, value, most):  # type: ignore[no-untyped-def]
    """Look at the counter until it has reached the value, at most so many times. Return what it was last."""
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        word = ir.IntType(64)
        counter = builder.inttoptr(args[0], word.as_pointer())
        number = cgutils.alloca_once_value(builder, ir.Constant(word, 0))
        look, again, done = (builder.append_basic_block(name) for name in ("look", "again", "done"))
        builder.branch(look)
        builder.position_at_end(look)
        seen = builder.load_atomic(counter, "acquire", 8)
        builder.cbranch(builder.icmp_signed(">=", seen, args[1]), done, again)
        builder.position_at_end(again)
        count = builder.add(builder.load(number), ir.Constant(word, 1))
        builder.store(count, number)
        builder.cbranch(builder.icmp_signed("<", count, args[2]), look, done)
        builder.position_at_end(done)
        return seen

    return types.int64(types.int64, types.int64, types.int64), codegen


@cached_njit(nogil=True)
def increment(address: int) -> None:
    """Add one to the counter at this address. Whoever sees it sees all that this thread has written before."""
    _increment(address)  # type: ignore[call-arg]


@cached_njit(nogil=True)
def has_reached(address: int, value: int, most: int) -> Any:
    """Whether the counter at this address has reached the value; look at most so many times."""
    return _spin(address, value, most) >= value  # type: ignore[call-arg]
