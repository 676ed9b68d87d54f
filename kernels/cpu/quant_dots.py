"""Dot products of quantized numbers for kernels: 16 weight rows at once, one lane each.

A panel is 16 rows of a weight. Its 8-bit numbers lie as [k / 4, 16 rows, 4], unsigned; 4-bit ones as [k / 8, 16, 4]
bytes whose low halves are k .. k + 3 and whose high halves are k + 4 .. k + 7. Activations are signed bytes. Sums of
int32 are exact, whatever the instructions: AVX512-VNNI's where there are some, else shifts and multiplications.
"""

from __future__ import annotations

import functools
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
    V_I32,
    WIDTH,
    broadcast,
    call,
    constant,
    float32x16,
    pointer,
)

I8 = ir.IntType(8)
V_I8 = ir.VectorType(I8, WIDTH)
GROUP = 32
"""Numbers along k that share a scale in a grouped weight; GGUF's block."""
HAS_VNNI = {"avx512f", "avx512_vnni"} <= cpu_flags()
"""Whether the processor sums four products of bytes by one instruction. What is compiled depends on the processor and
not on `features.isa()`: compiled kernels are kept, and both ways give the same bits."""
KINDS = ((4, False), (4, True), (8, False), (8, True))
"""Of grouped weights: bits, and whether a group has a minimum too. Without, 8 or 128 stands for 0."""
ROW_COUNTS = (1, 2, 4)
"""Activations of one product."""


def load_as(builder: Any, address: Any, type_: Any, align: int = 4) -> Any:
    loaded = builder.load(pointer(builder, address, type_))
    loaded.align = align
    return loaded


def offset(builder: Any, address: Any, num_bytes: int) -> Any:
    return builder.add(address, ir.Constant(I64, num_bytes)) if num_bytes else address


def dot_fours(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """total + the sum over each lane's four bytes, unsigned weights times signed activations."""
    if HAS_VNNI:
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", V_I32, total, unsigned, signed)
    for byte in range(4):
        weight = builder.and_(builder.lshr(unsigned, constant(8 * byte)), constant(255))
        value = builder.ashr(builder.shl(signed, constant(24 - 8 * byte)), constant(24))
        total = builder.add(total, builder.mul(weight, value))
    return total


def parts_of_panel(builder: Any, panel: Any, groups: Any, has_mins: bool) -> tuple[Any, Any]:
    """Addresses of a panel's minima and of its numbers; scales and minima fill whole cache lines."""
    lines = builder.lshr(builder.add(groups, ir.Constant(I64, 1)), ir.Constant(I64, 1))
    mins = builder.add(panel, builder.shl(lines, ir.Constant(I64, 6)))
    return mins, builder.add(mins, builder.shl(lines, ir.Constant(I64, 6))) if has_mins else mins


def load_half(builder: Any, address: Any) -> Any:
    """16 float16 as float32."""
    return builder.fpext(load_as(builder, address, ir.VectorType(ir.HalfType(), WIDTH), 2), V_F32)


def fours_of_group(builder: Any, weights: Any, bits: int) -> list[Any]:
    """A group's weights as 8 vectors: 16 rows of four unsigned bytes, k ascending."""
    if bits == 8:
        return [load_as(builder, offset(builder, weights, 64 * i), V_I32) for i in range(8)]
    found = []
    for i in range(4):
        both = load_as(builder, offset(builder, weights, 64 * i), V_I32)
        found.append(builder.and_(both, constant(0x0F0F0F0F)))
        found.append(builder.and_(builder.lshr(both, constant(4)), constant(0x0F0F0F0F)))
    return found


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call(builder, "llvm.fma.v16f32", V_F32, a, b, c)


def one_of(builder: Any, value: Any, cases: dict[int, Callable[[], None]]) -> None:
    """Code that does the case of a value known at run time; nothing for another value."""
    for number, emit in cases.items():
        with builder.if_then(builder.icmp_signed("==", value, ir.Constant(I64, number))):
            emit()


@intrinsic  # type: ignore[untyped-decorator]
def grouped_panel(
    typing_context: Any,
    num_rows: Any,
    kind: Any,
    x: Any,
    x_groups: Any,
    x_stride: Any,
    panel: Any,
    num_groups: Any,
    out: Any,
) -> Any:
    """1, 2 or 4 activations times one panel of a weight with a scale per row and group.

    num_rows; the index of the weight's kind in KINDS; address of the first activation's bytes, of its scales, start
    sums and group sums (float32, int32 and float32, one per group each, one after the other), bytes from one activation
    to the next; address of the panel's scales, behind which its minima and its numbers lie; number of groups; address
    of the result, 16 float32 per activation. Per group and row:
    result += (start + dot) * activation's scale * weight's scale [+ minimum * group sum], in that order.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, kind_, *rest = args

        def of_kind(number: int) -> None:
            one_of(builder, rows, {n: lambda n=n: _grouped(builder, n, *KINDS[number], *rest) for n in ROW_COUNTS})  # type: ignore[misc]

        one_of(builder, kind_, {number: lambda number=number: of_kind(number) for number in range(len(KINDS))})  # type: ignore[misc]
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


def _grouped(
    builder: Any,
    num_rows: int,
    bits: int,
    has_mins: bool,
    x: Any,
    x_groups: Any,
    stride: Any,
    panel: Any,
    groups: Any,
    out: Any,
) -> None:
    four_bytes = builder.shl(groups, ir.Constant(I64, 2))
    starts, sums = (
        builder.add(x_groups, four_bytes),
        builder.add(x_groups, builder.mul(four_bytes, ir.Constant(I64, 2))),
    )
    mins, weights = parts_of_panel(builder, panel, groups, has_mins)
    totals = [cgutils.alloca_once_value(builder, ir.Constant(V_F32, [0.0] * WIDTH)) for _ in range(num_rows)]
    rows = [builder.mul(stride, ir.Constant(I64, r)) for r in range(num_rows)]
    with cgutils.for_range(builder, groups) as loop:
        g4, g32 = (builder.shl(loop.index, ir.Constant(I64, n)) for n in (2, 5))
        fours = fours_of_group(
            builder, builder.add(weights, builder.shl(loop.index, ir.Constant(I64, 8 if bits == 4 else 9))), bits
        )
        scale = load_half(builder, builder.add(panel, g32))
        low = load_half(builder, builder.add(mins, g32)) if has_mins else None
        for row, total in zip(rows, totals, strict=True):
            of_group = builder.add(row, g4)
            dot = broadcast(builder, load_as(builder, builder.add(starts, of_group), I32))
            values = builder.add(x, builder.add(row, g32))
            for i, four in enumerate(fours):
                value = load_as(builder, offset(builder, values, 4 * i), I32)
                dot = dot_fours(builder, dot, four, broadcast(builder, value))
            factor = broadcast(builder, load_as(builder, builder.add(x_groups, of_group), F32))
            result = fma(builder, builder.fmul(builder.sitofp(dot, V_F32), factor), scale, builder.load(total))
            if low is not None:
                group_sum = broadcast(builder, load_as(builder, builder.add(sums, of_group), F32))
                result = fma(builder, low, group_sum, result)
            builder.store(result, total)
    for r, total in enumerate(totals):
        builder.store(builder.load(total), pointer(builder, offset(builder, out, 4 * WIDTH * r), V_F32)).align = 4


@intrinsic  # type: ignore[untyped-decorator]
def channel_pair(
    typing_context: Any,
    num_rows: Any,
    x: Any,
    x_starts: Any,
    x_stride: Any,
    weights: Any,
    panel_stride: Any,
    num_fours: Any,
    out: Any,
) -> Any:
    """1, 2 or 4 activations times two panels of a weight with one scale per row.

    num_rows; address of the first activation's bytes, of its start sum (int32), bytes from one activation to the next;
    address of the first panel's numbers, bytes from panel to panel; number of fours along k (a multiple of 4); address
    of the result, int32, [num_rows, 2, 16]. Per row: start + dot, exactly.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, *rest = args
        one_of(builder, rows, {n: lambda n=n: _channel(builder, n, *rest) for n in ROW_COUNTS})  # type: ignore[misc]
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


def _channel(
    builder: Any, num_rows: int, x: Any, starts: Any, stride: Any, weights: Any, panel_stride: Any, fours: Any, out: Any
) -> None:
    rows = [builder.mul(stride, ir.Constant(I64, r)) for r in range(num_rows)]
    panels = [weights, builder.add(weights, panel_stride)]
    # A single activation has two sums per panel: one would wait for itself.
    num_chains = 2 if num_rows == 1 else 1
    totals = [[[cgutils.alloca_once(builder, V_I32) for _ in range(num_chains)] for _ in panels] for _ in rows]
    for row, of_row in zip(rows, totals, strict=True):
        start = broadcast(builder, load_as(builder, builder.add(starts, row), I32))
        for chains in of_row:
            for chain, total in enumerate(chains):
                builder.store(start if chain == 0 else ir.Constant(V_I32, None), total)
    with cgutils.for_range(builder, builder.lshr(fours, ir.Constant(I64, 2))) as loop:
        k, line = (builder.shl(loop.index, ir.Constant(I64, n)) for n in (4, 8))
        for i in range(4):
            weight = [load_as(builder, offset(builder, builder.add(p, line), 64 * i), V_I32) for p in panels]
            for row, of_row in zip(rows, totals, strict=True):
                address = offset(builder, builder.add(x, builder.add(row, k)), 4 * i)
                value = broadcast(builder, load_as(builder, address, I32))
                for w, chains in zip(weight, of_row, strict=True):
                    total = chains[i % num_chains]
                    builder.store(dot_fours(builder, builder.load(total), w, value), total)
    for i, chains in enumerate(chains for of_row in totals for chains in of_row):
        result = functools.reduce(builder.add, [builder.load(total) for total in chains])
        builder.store(result, pointer(builder, offset(builder, out, 64 * i), V_I32)).align = 4


@intrinsic  # type: ignore[untyped-decorator]
def load_int32_as_float32(typing_context: Any, address: Any, added: Any) -> Any:
    """16 int32, each with a number added, as float32, rounded to nearest."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sitofp(builder.add(load_as(builder, args[0], V_I32), broadcast(builder, args[1])), V_F32)

    return float32x16(types.int64, types.int32), codegen
