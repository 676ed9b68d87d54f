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

from kernels.cpu.features import cpu_flags
from kernels.cpu.vectors import I64

HAS_TILES = {"amx_tile", "amx_bf16", "amx_int8"} <= cpu_flags()
"""Whether tiles can be compiled; `features.isa()` says whether they may be used."""
_I8 = ir.IntType(8)
BYTES = ir.PointerType(_I8)
TILE_BYTES = 1024
_A, _B = (4, 5), (6, 7)


def call_tile(builder: Any, name: str, *args: Any) -> None:
    """Calls an instruction on tiles by its name in LLVM; nothing where the processor has none."""
    if not HAS_TILES:
        return
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


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def clear_sums(typing_context: Any, num_row_tiles: Any) -> Any:
    """Zeros for a product of 16 x num_row_tiles (1 or 2, a literal) rows and one panel of 32 columns."""
    count = num_row_tiles.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for tile in range(2 * count):
            call_tile(builder, "tilezero", byte(tile))
        return context.get_dummy_value()

    return types.void(num_row_tiles), codegen


def _first_half(instruction: str, line: int, load: str = "tileloadd64") -> Any:
    @intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
    def add(typing_context: Any, num_row_tiles: Any, x: Any, x_stride: Any, weights: Any) -> Any:
        count = num_row_tiles.literal_value

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, x, x_stride, weights = args
            for i in range(count):
                row = builder.add(x, builder.mul(x_stride, ir.Constant(I64, 16 * i)))
                call_tile(builder, load, byte(_A[i]), _address(builder, row), x_stride)
            _add_columns(builder, count, instruction, weights, line, 0)
            return context.get_dummy_value()

        return types.void(num_row_tiles, *[types.int64] * 3), codegen

    return add


def _second_half(instruction: str, line: int) -> Any:
    @intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
    def add(typing_context: Any, num_row_tiles: Any, weights: Any) -> Any:
        count = num_row_tiles.literal_value

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _add_columns(builder, count, instruction, args[1], line, 1)
            return context.get_dummy_value()

        return types.void(num_row_tiles, types.int64), codegen

    return add


def _add_columns(builder: Any, num_row_tiles: int, instruction: str, weights: Any, line: int, half: int) -> None:
    call_tile(builder, "tileloadd64", byte(_B[half]), _address(builder, weights), ir.Constant(I64, line))
    for i in range(num_row_tiles):
        call_tile(builder, instruction, byte(2 * i + half), byte(_A[i]), byte(_B[half]))


add_first_half, add_second_half = _first_half("tdpbf16ps", 128), _second_half("tdpbf16ps", 128)
"""64 bytes of the rows at x times 16 columns; then, with the same rows, times the other 16.

(num_row_tiles, x, its stride, the first columns' weights), (num_row_tiles, the other columns' weights); strides in
bytes. Here a row of B, the pair of k of 16 columns, is followed by that of the other columns."""
add_passing_half = _first_half("tdpbf16ps", 128, "tileloaddt164")
"""As add_first_half, of rows that need not stay in the first-level cache, so that the weights do."""
add_first_panel, add_second_panel = _first_half("tdpbf16ps", 64), _second_half("tdpbf16ps", 64)
"""The same where each 16 columns lie by themselves."""
add_first_bytes, add_second_bytes = _first_half("tdpbsud", 64, "tileloaddt164"), _second_half("tdpbsud", 64)
"""The same for signed bytes of x, in passing, and unsigned weights; the sums are int32."""


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def store_sums(typing_context: Any, num_row_tiles: Any, out: Any) -> Any:
    """The sums, to rows of 32 float32."""
    count = num_row_tiles.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for tile in range(2 * count):
            place = _address(builder, args[1], 2 * TILE_BYTES * (tile // 2) + 64 * (tile % 2))
            call_tile(builder, "tilestored64", byte(tile), place, ir.Constant(I64, 128))
        return context.get_dummy_value()

    return types.void(num_row_tiles, types.int64), codegen
