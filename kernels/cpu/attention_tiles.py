"""Scores and weighted sums of attention by Intel's tiles, for bfloat16; the same arguments as in `attention_blocks`.

K and V lie as tiles want their second operand: lines of 16 pairs. A tile's unused rows hold garbage, and a row of a
product depends on that row alone.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.attention_blocks import SCORE_BYTES
from kernels.cpu.lanes import part
from kernels.cpu.tiles import BYTES, byte, call_tile, load_configuration, release
from kernels.cpu.vectors import I64, pointer

_I8 = ir.IntType(8)
_SUMS, _LEFT, _RIGHT = range(4), 4, (5, 6, 7)
TILE_ROWS = 16
_NUM_TILES = 4


def _at(builder: Any, base: Any, offset: int = 0) -> Any:
    return builder.inttoptr(builder.add(base, ir.Constant(I64, offset)), BYTES)


@intrinsic  # type: ignore[untyped-decorator]
def _configure(typing_context: Any, rows: Any, left_bytes: Any, right_rows: Any) -> Any:
    """Sets this thread's tiles: rows of the sums and of the left operand, its bytes, rows of the right operand."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, left_bytes, right_rows = (builder.trunc(a, _I8) for a in args)
        sizes = [(rows, byte(64)) for _ in _SUMS] + [(rows, left_bytes)] + [(right_rows, byte(64)) for _ in _RIGHT]
        load_configuration(builder, sizes)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _score_tiles(
    typing_context: Any, keys: Any, stride: Any, steps: Any, query: Any, query_stride: Any, out: Any
) -> Any:
    """Up to 16 rows and 4 groups; steps of 32 of the head."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        keys, stride, steps, query, query_stride, out = args
        groups = [builder.load(pointer(builder, builder.add(keys, ir.Constant(I64, 8 * i)), I64)) for i in _SUMS]
        for tile in _SUMS:
            call_tile(builder, "tilezero", byte(tile))
        step_bytes = builder.shl(stride, ir.Constant(I64, 4))
        with cgutils.for_range(builder, steps) as loop:
            left = builder.add(query, builder.shl(loop.index, ir.Constant(I64, 6)))
            call_tile(builder, "tileloadd64", byte(_LEFT), _at(builder, left), query_stride)
            for tile, group in enumerate(groups):
                right = byte(_RIGHT[tile % len(_RIGHT)])
                place = builder.add(group, builder.mul(loop.index, step_bytes))
                call_tile(builder, "tileloadd64", right, _at(builder, place), stride)
                call_tile(builder, "tdpbf16ps", byte(tile), byte(_LEFT), right)
        for tile in _SUMS:
            call_tile(builder, "tilestored64", byte(tile), _at(builder, out, 64 * tile), ir.Constant(I64, SCORE_BYTES))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


def _value_tiles(num_tiles: int) -> Any:
    """Up to 16 rows and num_tiles vectors of a value."""

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply(
        typing_context: Any, values: Any, groups: Any, inset: Any, line: Any, weights: Any, out: Any, out_stride: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values, groups, inset, line, weights, out, out_stride = args
            for tile in range(num_tiles):
                call_tile(builder, "tilezero", byte(tile))
            with cgutils.for_range(builder, groups) as loop:
                address = builder.add(values, builder.shl(loop.index, ir.Constant(I64, 3)))
                group = builder.add(builder.load(pointer(builder, address, I64)), inset)
                left = builder.add(weights, builder.shl(loop.index, ir.Constant(I64, 5)))
                call_tile(builder, "tileloadd64", byte(_LEFT), _at(builder, left), ir.Constant(I64, SCORE_BYTES))
                for tile in range(num_tiles):
                    right = byte(_RIGHT[tile % len(_RIGHT)])
                    call_tile(builder, "tileloadd64", right, _at(builder, group, 64 * tile), line)
                    call_tile(builder, "tdpbf16ps", byte(tile), byte(_LEFT), right)
            for tile in range(num_tiles):
                call_tile(builder, "tilestored64", byte(tile), _at(builder, out, 64 * tile), out_stride)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return multiply


_four_value_tiles, _one_value_tile = _value_tiles(_NUM_TILES), _value_tiles(1)


@part
def scores_tiles(keys, stride, words, query, query_stride, rows, fours, out):  # type: ignore[no-untyped-def]
    """See `attention_blocks._scores`; words: a multiple of 16."""
    _configure(min(rows, TILE_ROWS), 64, 16)
    row = 0
    while row < rows:
        for i in range(fours):
            place = out + row * SCORE_BYTES + 256 * i
            _score_tiles(keys + 32 * i, stride, words >> 4, query + row * query_stride, query_stride, place)
        row += TILE_ROWS


@part
def values_tiles(at, groups, line, weights, rows, vectors, out, out_stride):  # type: ignore[no-untyped-def]
    """See `attention_blocks._values`."""
    _configure(min(rows, TILE_ROWS), 32, 8)
    row = 0
    while row < rows:
        of, to = weights + row * SCORE_BYTES, out + row * out_stride
        vector = 0
        while vector < vectors:
            if vector + _NUM_TILES <= vectors:
                _four_value_tiles(at, groups, vector * 64, line, of, to + vector * 64, out_stride)
                vector += _NUM_TILES
            else:
                _one_value_tile(at, groups, vector * 64, line, of, to + vector * 64, out_stride)
                vector += 1
        row += TILE_ROWS
    release()
