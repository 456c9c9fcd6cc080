"""A list of kernel calls as one kernel: all layers of a step in one call from Python."""

from __future__ import annotations

from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline.kernels.cpu.arguments import PROGRAM
from paceline.kernels.cpu.jit.base import inlined, int64s

_SPINS = 4096
"""Times that a thread looks whether the others have arrived before it offers its core to another one."""


@intrinsic
def call_kernel(typingctx, address, block):  # type: ignore[no-untyped-def]
    """Call the kernel at this address with the block at this address."""
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = ir.IntType(8).as_pointer()
        kernel = builder.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [pointer]).as_pointer())
        builder.call(kernel, [builder.inttoptr(args[1], pointer)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def call_int(typingctx, address):  # type: ignore[no-untyped-def]
    """The result of the C function `int f(void)` at this address."""
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        function = builder.inttoptr(args[0], ir.FunctionType(ir.IntType(32), []).as_pointer())
        return builder.sext(builder.call(function, []), ir.IntType(64))

    return types.int64(types.int64), codegen


@intrinsic
def arrive(typingctx, block):  # type: ignore[no-untyped-def]
    """Count this thread at the barrier, after all that it has written."""
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        counter = builder.bitcast(args[0], ir.IntType(64).as_pointer())
        builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "acq_rel")
        return context.get_dummy_value()

    return types.void(types.voidptr), codegen


@intrinsic
def wait_for(typingctx, block, count, yield_thread):  # type: ignore[no-untyped-def]
    """Spin until the counter has reached `count`, calling the function at `yield_thread` (0: none) now and then."""
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        word = ir.IntType(64)
        counter = builder.bitcast(args[0], word.as_pointer())
        spins = cgutils.alloca_once_value(builder, ir.Constant(word, 0))
        look, again, tired, yielding, done = (builder.append_basic_block(name) for name in
                                              ("look", "again", "tired", "yield", "done"))
        builder.branch(look)
        builder.position_at_end(look)
        arrived = builder.load_atomic(counter, "acquire", 8)
        builder.cbranch(builder.icmp_signed(">=", arrived, args[1]), done, again)
        builder.position_at_end(again)
        number = builder.add(builder.load(spins), ir.Constant(word, 1))
        builder.store(number, spins)
        builder.cbranch(builder.icmp_signed("<", number, ir.Constant(word, _SPINS)), look, tired)
        builder.position_at_end(tired)
        builder.store(ir.Constant(word, 0), spins)
        builder.cbranch(builder.icmp_signed("==", args[2], ir.Constant(word, 0)), look, yielding)
        builder.position_at_end(yielding)
        builder.call(builder.inttoptr(args[2], ir.FunctionType(ir.IntType(32), []).as_pointer()), [])
        builder.branch(look)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(types.voidptr, types.int64, types.int64), codegen


@inlined
def program(block):  # type: ignore[no-untyped-def]
    """Run the kernels in order, each with its block, on every thread of the team; threads meet after each of them. The block's
    counter is the barrier's."""
    a = carray(block, 1, PROGRAM)[0]
    kernels, blocks = int64s(a.kernels, a.num_calls), int64s(a.blocks, a.num_calls)
    team = call_int(a.team_size) if a.team_size else 1
    for i in range(a.num_calls):
        call_kernel(kernels[i], blocks[i])
        if team > 1:
            arrive(block)
            wait_for(block, (i + 1) * team, a.yield_thread)
