"""Tiles: Intel's AMX registers of 16 rows of 64 bytes, and the products of bfloat16 pairs between them.

A product's tiles are C 2 x 2 (numbers 0 to 3: first row tile, then second), A (4, 5) and B (6, 7); `configure` gives
their rows. The tiles of a thread are set up by `configure` and must be let go of by `release`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.vectors import I64, prefetch_line

_I8 = ir.IntType(8)
BYTES = ir.PointerType(_I8)
TILE_BYTES = 1024
_A, _B = (4, 5), (6, 7)


def call_tile(builder: Any, name: str, *args: Any) -> None:
    """Calls an instruction on tiles by its name in LLVM."""
    function_type = ir.FunctionType(ir.VoidType(), [a.type for a in args])
    builder.call(cgutils.get_or_insert_function(builder.module, function_type, f"llvm.x86.{name}"), args)


def byte(number: int) -> Any:
    """A tile's number, or a size in a configuration."""
    return ir.Constant(_I8, number)


def _address(builder: Any, base: Any, *offsets: Any) -> Any:
    for offset in offsets:
        base = builder.add(base, ir.Constant(I64, offset) if isinstance(offset, int) else offset)
    return builder.inttoptr(base, BYTES)


def load_configuration(builder: Any, sizes: list[tuple[Any, Any]]) -> None:
    """Sets this thread's tiles: rows and bytes of a row of each, as 8 bits (Intel's manual, LDTILECFG)."""
    config = cgutils.alloca_once(builder, ir.ArrayType(_I8, 64))
    config.align = 64
    builder.store(ir.Constant(config.type.pointee, [1] + [0] * 63), config)
    for tile, (rows, width) in enumerate(sizes):
        for place, value in ((16 + 2 * tile, width), (48 + tile, rows)):
            builder.store(value, cgutils.gep_inbounds(builder, config, 0, place))
    call_tile(builder, "ldtilecfg", builder.bitcast(config, BYTES))


@intrinsic  # type: ignore[untyped-decorator]
def configure(typing_context: Any, first_rows: Any, second_rows: Any) -> Any:
    """Sets this thread's tiles: the rows of the first row tile, and of the second (0: there is none)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first, second = (builder.trunc(rows, _I8) for rows in args)
        # A tile that is not used must have no rows, or all of its sizes.
        second_bytes = builder.select(builder.icmp_signed(">", args[1], ir.Constant(I64, 0)), byte(64), byte(0))
        first_tile, second_tile, whole = (first, byte(64)), (second, second_bytes), (byte(16), byte(64))
        load_configuration(builder, [first_tile] * 2 + [second_tile] * 2 + [first_tile, second_tile] + [whole] * 2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def release(typing_context: Any) -> Any:
    """Lets go of this thread's tiles: a switch of threads need not save them."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call_tile(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


def _bfloat16_tiles(num_row_tiles: int) -> Any:
    """Product of 16 x num_row_tiles rows and one panel of 32 columns, into a scratch of rows of 32 float32."""

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply(typing_context: Any, x: Any, x_stride: Any, panel: Any, num_steps: Any, ahead: Any, out: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, x_stride, panel, num_steps, ahead, out = args
            row_tiles = range(num_row_tiles)
            for i in row_tiles:
                for j in range(2):
                    call_tile(builder, "tilezero", byte(2 * i + j))
            second_x = builder.add(x, builder.mul(x_stride, ir.Constant(I64, 16)))
            with cgutils.for_range(builder, num_steps) as loop:
                x_offset = builder.shl(loop.index, ir.Constant(I64, 6))
                step = builder.add(panel, builder.shl(loop.index, ir.Constant(I64, 11)))
                for i in row_tiles:
                    row = (x, second_x)[i]
                    call_tile(builder, "tileloadd64", byte(_A[i]), _address(builder, row, x_offset), x_stride)
                for j in range(2):
                    # A row of B is the pair of k of 16 columns; the panel's other half lies between.
                    row_bytes = ir.Constant(I64, 128)
                    call_tile(builder, "tileloadd64", byte(_B[j]), _address(builder, step, 64 * j), row_bytes)
                    for line in range(16):
                        prefetch_line(
                            builder, builder.add(step, builder.add(ahead, ir.Constant(I64, 64 * (16 * j + line))))
                        )
                    for i in row_tiles:
                        call_tile(builder, "tdpbf16ps", byte(2 * i + j), byte(_A[i]), byte(_B[j]))
            for i in row_tiles:
                for j in range(2):
                    place = _address(builder, out, 2 * TILE_BYTES * i + 64 * j)
                    call_tile(builder, "tilestored64", byte(2 * i + j), place, ir.Constant(I64, 128))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return multiply


bfloat16_tiles_1 = _bfloat16_tiles(1)
"""(x, x's row stride, panel, steps of 32 k, bytes to prefetch ahead, scratch of 16 rows); strides in bytes."""
bfloat16_tiles_2 = _bfloat16_tiles(2)
"""The same for 17 to 32 rows."""
