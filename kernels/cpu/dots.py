"""Products of a few rows with one panel of 32 columns, in vector registers: one chain of multiply-adds over k per
output, whatever the number of rows.

A panel is k (or pairs of k) after k, each with the 32 columns beside each other. Results go to a scratch of rows of
32 float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.features import cpu_flags
from kernels.cpu.vectors import (
    F32,
    I32,
    I64,
    V_F32,
    V_I16,
    V_I32,
    WIDTH,
    BFloat,
    broadcast,
    call,
    constant,
    pointer,
    prefetch_line,
)

IS_WIDE = "avx512f" in cpu_flags()
"""32 registers of 16 float32 hold 12 rows of 2 vectors; 16 registers of 8 hold 6 rows of one, twice."""
ROW_BLOCKS = (12, 4, 2, 1) if IS_WIDE else (6, 4, 2, 1)
MAX_ROWS = ROW_BLOCKS[0]
_COLUMN_VECTORS = 2 if IS_WIDE else 1
PANEL_VECTORS = 2


V_PAIRS = ir.VectorType(BFloat(), 2 * WIDTH)


class _Element:
    """How one k (or pair of k) of 16 columns meets one row's."""

    bytes_per_step: int
    """Of x, for one row."""

    def load_weights(self, builder: Any, address: Any) -> Any:
        raise NotImplementedError

    def load_row(self, builder: Any, address: Any) -> Any:
        raise NotImplementedError

    def accumulate(self, builder: Any, total: Any, row: Any, weights: Any) -> Any:
        raise NotImplementedError


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call(builder, "llvm.fma.v16f32", V_F32, a, b, c)


def _aligned(builder: Any, address: Any, type_: Any) -> Any:
    loaded = builder.load(pointer(builder, address, type_))
    loaded.align = 64
    return loaded


def _scalar(builder: Any, address: Any, type_: Any, align: int) -> Any:
    loaded = builder.load(pointer(builder, address, type_))
    loaded.align = align
    return loaded


class _Float32(_Element):
    bytes_per_step = 4

    def load_weights(self, builder: Any, address: Any) -> Any:
        return _aligned(builder, address, V_F32)

    def load_row(self, builder: Any, address: Any) -> Any:
        return broadcast(builder, _scalar(builder, address, F32, 4))

    def accumulate(self, builder: Any, total: Any, row: Any, weights: Any) -> Any:
        return _fma(builder, row, weights, total)


class _Pairs(_Element):
    """Pairs of bfloat16 by the processor's own dot product."""

    bytes_per_step = 4

    def load_weights(self, builder: Any, address: Any) -> Any:
        return _aligned(builder, address, V_PAIRS)

    def load_row(self, builder: Any, address: Any) -> Any:
        return builder.bitcast(broadcast(builder, _scalar(builder, address, I32, 2)), V_PAIRS)

    def accumulate(self, builder: Any, total: Any, row: Any, weights: Any) -> Any:
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", V_F32, total, row, weights)


class _Widened(_Element):
    """Pairs of 16-bit numbers, widened to float32: the first of the pair, then the second."""

    bytes_per_step = 4

    def __init__(self, widen: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        self._widen = widen

    def load_weights(self, builder: Any, address: Any) -> Any:
        return self._widen(builder, _aligned(builder, address, V_I32))

    def load_row(self, builder: Any, address: Any) -> Any:
        return self._widen(builder, broadcast(builder, _scalar(builder, address, I32, 2)))

    def accumulate(self, builder: Any, total: Any, row: Any, weights: Any) -> Any:
        return _fma(builder, row[1], weights[1], _fma(builder, row[0], weights[0], total))


def _widen_bfloat16(builder: Any, pairs: Any) -> tuple[Any, Any]:
    first = builder.shl(pairs, constant(16))
    second = builder.and_(pairs, constant(0xFFFF0000))
    return builder.bitcast(first, V_F32), builder.bitcast(second, V_F32)


def _widen_float16(builder: Any, pairs: Any) -> tuple[Any, Any]:
    halves = (builder.trunc(pairs, V_I16), builder.trunc(builder.lshr(pairs, constant(16)), V_I16))
    first, second = (
        builder.fpext(builder.bitcast(half, ir.VectorType(ir.HalfType(), WIDTH)), V_F32) for half in halves
    )
    return first, second


def _emit(builder: Any, element: _Element, num_rows: int, columns: range, args: Any) -> None:
    x, x_stride, panel, num_steps, ahead, out = args
    zero = ir.Constant(V_F32, [0.0] * WIDTH)
    totals = [[cgutils.alloca_once(builder, V_F32) for _ in columns] for _ in range(num_rows)]
    for row in totals:
        for total in row:
            builder.store(zero, total)
    rows = [builder.add(x, builder.mul(x_stride, ir.Constant(I64, i))) for i in range(num_rows)]
    with cgutils.for_range(builder, num_steps) as loop:
        step = builder.add(panel, builder.shl(loop.index, ir.Constant(I64, 7)))
        offset = builder.mul(loop.index, ir.Constant(I64, element.bytes_per_step))
        weights = []
        for j in columns:
            place = builder.add(step, ir.Constant(I64, 64 * j))
            weights.append(element.load_weights(builder, place))
            if num_rows <= 4:  # the weights may come from memory
                prefetch_line(builder, builder.add(place, ahead))
        for row, parts in zip(rows, totals, strict=True):
            value = element.load_row(builder, builder.add(row, offset))
            for total, part in zip(parts, weights, strict=True):
                builder.store(element.accumulate(builder, builder.load(total), value, part), total)
    for i, parts in enumerate(totals):
        for j, total in zip(columns, parts, strict=True):
            place = builder.add(out, ir.Constant(I64, 64 * (PANEL_VECTORS * i + j)))
            stored = builder.store(builder.load(total), pointer(builder, place, V_F32))
            stored.align = 64


_WIDENED = _Widened(_widen_bfloat16)
# What the processor can't do can't be compiled either; nothing asks for it then.
_ELEMENTS = (_Float32(), _WIDENED, _Widened(_widen_float16), _Pairs() if "avx512_bf16" in cpu_flags() else _WIDENED)
PAIRS = len(_ELEMENTS) - 1
"""The element behind the kinds FLOAT32, BFLOAT16 and FLOAT16: bfloat16 by the processor's dot products of pairs."""


@intrinsic  # type: ignore[untyped-decorator]
def multiply_rows(
    typing_context: Any,
    element: Any,
    num_rows: Any,
    x: Any,
    x_stride: Any,
    panel: Any,
    num_steps: Any,
    ahead: Any,
    scratch: Any,
) -> Any:
    """Products of as many of the rows as there are registers for, at most num_rows; returns how many.

    element: FLOAT32 to PAIRS. x: address of the first row, its stride in bytes; num_steps of k or of pairs; ahead: how
    many bytes ahead to ask for weights.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        done = cgutils.alloca_once(builder, I64)

        def choose(element: _Element, blocks: tuple[int, ...]) -> None:
            if len(blocks) == 1:
                emit(element, blocks[0])
                return
            enough = builder.icmp_signed(">=", args[1], ir.Constant(I64, blocks[0]))
            with builder.if_else(enough) as (then, otherwise):
                with then:
                    emit(element, blocks[0])
                with otherwise:
                    choose(element, blocks[1:])

        def emit(element: _Element, rows: int) -> None:
            for first in range(0, PANEL_VECTORS, _COLUMN_VECTORS):
                _emit(builder, element, rows, range(first, first + _COLUMN_VECTORS), args[2:])
            builder.store(ir.Constant(I64, rows), done)

        for number, candidate in enumerate(_ELEMENTS):
            with builder.if_then(builder.icmp_signed("==", args[0], ir.Constant(I64, number))):
                choose(candidate, ROW_BLOCKS)
        return builder.load(done)

    return types.int64(*[types.int64] * 8), codegen
