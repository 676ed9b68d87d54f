"""Activations for quantized products: to signed bytes with a scale per row or per group of 32.

A row's record: its bytes, then per group the scales (float32), the start sums (int32, -zero * the sum of the bytes) and
the group sums (float32, scale * the sum of the bytes), each in one run; with one scale per row, bytes for whole tiles,
the scale and the start sum. The largest number of a group becomes 127 or -127; a group that has NaN or infinity gets
such a scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu import jit
from kernels.cpu.features import cpu_flags
from kernels.cpu.lanes import item_bytes, load
from kernels.cpu.quant_dots import GROUP, I8, V_I8, load_as, offset, one_of
from kernels.cpu.vectors import (
    BFLOAT16,
    F32,
    FLOAT16,
    FLOAT32,
    I16,
    I32,
    I64,
    V_F32,
    V_I16,
    V_I32,
    WIDTH,
    broadcast,
    call,
    constant,
    pointer,
    store_bfloat16,
    widen_bfloat16,
    widen_float16,
)

HAS_AVX512 = "avx512f" in cpu_flags()
MOST = 127.0
_MAGNITUDE = 0x7FFFFFFF
_ITEM_BYTES = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2}


def _widen(builder: Any, address: Any, kind: int) -> Any:
    """16 numbers of a kind as float32."""
    if kind == FLOAT32:
        return load_as(builder, address, V_F32)
    bits = load_as(builder, address, V_I16, 2)
    if kind == BFLOAT16:
        return widen_bfloat16(builder, bits)
    return widen_float16(builder, bits)


def _larger(builder: Any, most: Any, vector: Any) -> Any:
    """Magnitudes as integers, which are in the numbers' order, NaN above all."""
    magnitude = builder.and_(builder.bitcast(vector, V_I32), constant(_MAGNITUDE))
    return call(builder, "llvm.umax.v16i32", V_I32, most, magnitude)


def _store_scale(builder: Any, magnitudes: Any, address: Any) -> tuple[Any, Any]:
    """Writes the scale; returns it and what to multiply by, 0 for a group of zeros or NaN."""
    most = builder.bitcast(call(builder, "llvm.vector.reduce.umax.v16i32", I32, magnitudes), F32)
    scale = builder.fdiv(most, ir.Constant(F32, MOST))
    builder.store(scale, pointer(builder, address, F32)).align = 4
    zero = ir.Constant(F32, 0.0)
    factor = builder.fdiv(ir.Constant(F32, MOST), most)
    return scale, builder.select(builder.fcmp_ordered(">", most, zero), factor, zero)


def _store_bytes(builder: Any, vector: Any, factor: Any, address: Any) -> Any:
    """Rounds vector * factor to nearest, ties to even, stores 16 bytes and returns them as int32."""
    scaled = builder.fmul(vector, broadcast(builder, factor))
    if HAS_AVX512:
        lanes, rounding = ir.Constant(I16, -1), ir.Constant(I32, 4)
        wide = call(
            builder, "llvm.x86.avx512.mask.cvtps2dq.512", V_I32, scaled, ir.Constant(V_I32, None), lanes, rounding
        )
    else:
        # Saturating, so that NaN becomes a number and not what the optimizer likes.
        wide = call(builder, "llvm.fptosi.sat.v16i32.v16f32", V_I32, call(builder, "llvm.rint.v16f32", V_F32, scaled))
    narrow = builder.trunc(wide, V_I8)
    builder.store(narrow, pointer(builder, address, V_I8)).align = 1
    return builder.sext(narrow, V_I32)


def _store_start(builder: Any, total: Any, zero: Any, address: Any) -> None:
    start = builder.mul(builder.neg(builder.trunc(zero, I32)), total)
    builder.store(start, pointer(builder, address, I32)).align = 4


def _groups(builder: Any, kind: int, x: Any, num_groups: Any, record: Any, zero: Any) -> None:
    scales = builder.add(record, builder.mul(num_groups, ir.Constant(I64, GROUP)))
    four_bytes = builder.shl(num_groups, ir.Constant(I64, 2))
    with cgutils.for_range(builder, num_groups) as loop:
        of_group = builder.add(scales, builder.shl(loop.index, ir.Constant(I64, 2)))
        place = builder.add(record, builder.mul(loop.index, ir.Constant(I64, GROUP)))
        first = builder.add(x, builder.mul(loop.index, ir.Constant(I64, GROUP * _ITEM_BYTES[kind])))
        vectors = [_widen(builder, offset(builder, first, i * WIDTH * _ITEM_BYTES[kind]), kind) for i in range(2)]
        magnitudes = _larger(builder, _larger(builder, constant(0), vectors[0]), vectors[1])
        scale, factor = _store_scale(builder, magnitudes, of_group)
        values = [_store_bytes(builder, v, factor, offset(builder, place, WIDTH * i)) for i, v in enumerate(vectors)]
        total = call(builder, "llvm.vector.reduce.add.v16i32", I32, builder.add(*values))
        start = builder.add(of_group, four_bytes)
        _store_start(builder, total, zero, start)
        group_sum = builder.fmul(scale, builder.sitofp(total, F32))
        builder.store(group_sum, pointer(builder, builder.add(start, four_bytes), F32)).align = 4


def _row(builder: Any, kind: int, x: Any, num_vectors: Any, record: Any, zero: Any) -> None:
    size = _ITEM_BYTES[kind]
    magnitudes, total = cgutils.alloca_once(builder, V_I32), cgutils.alloca_once(builder, V_I32)
    builder.store(constant(0), magnitudes)
    builder.store(constant(0), total)
    padded = builder.and_(
        builder.add(builder.shl(num_vectors, ir.Constant(I64, 4)), ir.Constant(I64, 63)), ir.Constant(I64, -64)
    )
    with cgutils.for_range(builder, num_vectors) as loop:
        vector = _widen(builder, builder.add(x, builder.mul(loop.index, ir.Constant(I64, WIDTH * size))), kind)
        builder.store(_larger(builder, builder.load(magnitudes), vector), magnitudes)
    scales = builder.add(record, padded)
    _, factor = _store_scale(builder, builder.load(magnitudes), scales)
    with cgutils.for_range(builder, builder.lshr(padded, ir.Constant(I64, 4))) as loop:
        place = builder.add(record, builder.shl(loop.index, ir.Constant(I64, 4)))
        with builder.if_else(builder.icmp_signed("<", loop.index, num_vectors)) as (inside, behind):
            with inside:
                first = builder.add(x, builder.mul(loop.index, ir.Constant(I64, WIDTH * size)))
                values = _store_bytes(builder, _widen(builder, first, kind), factor, place)
                builder.store(builder.add(builder.load(total), values), total)
            with behind:
                builder.store(ir.Constant(V_I8, None), pointer(builder, place, V_I8)).align = 1
    of_row = call(builder, "llvm.vector.reduce.add.v16i32", I32, builder.load(total))
    _store_start(builder, of_row, zero, offset(builder, scales, 4))


def _of_kind(emit: Callable[..., None]) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def quantize(typing_context: Any, kind: Any, x: Any, count: Any, record: Any, zero: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind_, *rest = args
            kinds = (FLOAT32, BFLOAT16, FLOAT16)
            one_of(builder, kind_, {k: lambda k=k: emit(builder, k, *rest) for k in kinds})  # type: ignore[misc]
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return quantize


quantize_groups = _of_kind(_groups)
"""One row with a scale per group. Kind and address of the numbers, number of groups, address of the record, and the
number that stands for 0 in the weight."""
quantize_row = _of_kind(_row)
"""One row with one scale; as quantize_groups, but the count is that of vectors of 16."""


@jit.inlined
def round_row(kind, x, in_features, record):  # type: ignore[no-untyped-def]
    """One row as bfloat16."""
    for k in range(0, in_features, WIDTH):
        store_bfloat16(record + 2 * k, load(kind, x + k * item_bytes(kind), WIDTH))


__all__ = ["I8", "quantize_groups", "quantize_row", "round_row"]
