"""Atomic words, calls by address and Linux's futex, for kernels that share work between threads."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.vectors import I32, I64, pointer

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE, _ALL = 128, 129, 0x7FFFFFFF


def has_futex() -> bool:
    """Whether threads can sleep and wake each other here."""
    return platform.system() == "Linux" and platform.machine() in _SYS_FUTEX


@intrinsic  # type: ignore[untyped-decorator]
def atomic_load(typing_context: Any, address: Any) -> Any:
    """The int64 at an address; what its writer wrote before is seen too."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(pointer(builder, args[0], I64), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def atomic_store(typing_context: Any, address: Any, value: Any) -> Any:
    """Writes an int64 after everything that was written before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], pointer(builder, args[0], I64), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def atomic_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Adds to an int64 and returns what it was before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, args[0], I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def compare_and_swap(typing_context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Writes an int64 if it is still as expected; whether it did."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pair = builder.cmpxchg(pointer(builder, args[0], I64), args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def pause(typing_context: Any) -> Any:
    """Tells the processor that this is a waiting loop."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() == "x86_64":
            builder.call(
                cgutils.get_or_insert_function(
                    builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
                ),
                [],
            )
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def call_at(typing_context: Any, function: Any, args_address: Any, chunk: Any) -> Any:
    """Calls the function void(int64, int64) at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        type_ = ir.FunctionType(ir.VoidType(), [I64, I64])
        builder.call(builder.inttoptr(args[0], ir.PointerType(type_)), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _futex(operation: int) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def futex(typing_context: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            syscall = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(I64, [I64], var_arg=True), "syscall"
            )
            number = ir.Constant(I64, _SYS_FUTEX[platform.machine()])
            nothing = ir.Constant(I64, 0)
            expected = builder.trunc(args[1], I32)
            builder.call(syscall, [number, args[0], ir.Constant(I64, operation), expected, nothing, nothing, nothing])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return futex


futex_wait = _futex(_FUTEX_WAIT_PRIVATE)
"""Sleeps while the lower 32 bits at an address have a value; may wake for nothing."""
futex_wake = _futex(_FUTEX_WAKE_PRIVATE)
"""Wakes as many sleepers at an address as the value says."""
EVERYONE = _ALL


@intrinsic  # type: ignore[untyped-decorator]
def current_cpu(typing_context: Any) -> Any:
    """The number of the processor that this thread runs on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "sched_getcpu")
        return builder.sext(builder.call(function, []), I64)

    return types.int64(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def run_on(typing_context: Any, mask: Any) -> Any:
    """Binds this thread to processors; mask: the address of 1024 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(I32, [I32, I64, I64])
        function = cgutils.get_or_insert_function(builder.module, function_type, "sched_setaffinity")
        builder.call(function, [ir.Constant(I32, 0), ir.Constant(I64, 128), args[0]])
        return context.get_dummy_value()

    return types.void(types.int64), codegen
