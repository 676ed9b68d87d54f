"""What attention and the small operations need of 16 lanes besides `vectors`: parts of vectors, masks, powers of two.

A `kind` says how numbers lie in memory, one of FLOAT32, BFLOAT16 and FLOAT16; a kernel that takes kinds at run time is
compiled once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu import jit
from kernels.cpu.features import cpu_flags
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
    float32x16,
    load_bfloat16,
    load_float16,
    load_float32,
    narrow_float16,
    pointer,
    round_bfloat16,
    round_float16,
    round_to_bfloat16,
    store_bfloat16,
    store_float16,
    store_float32,
    widen_bfloat16,
    widen_float16,
)

F = TypeVar("F", bound=Callable[..., Any])
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_HAS_PARTS = {"avx512f", "avx512dq"} <= cpu_flags()
_V_BOOL = ir.VectorType(ir.IntType(1), WIDTH)
_LANES = ir.Constant(V_I32, list(range(WIDTH)))


def part(function: F) -> F:
    """A part of a kernel that is made in a function or takes other parts as arguments: kept in its callers' cache only.

    numba finds neither of them again in a cache of its own.
    """
    jit.name_by_content(function)
    compiled: Any = numba.njit(nogil=True, error_model="numpy", fastmath={"contract"})(function)
    return compiled


def _first_lanes(builder: Any, count: Any) -> Any:
    return builder.icmp_signed("<", _LANES, broadcast(builder, builder.trunc(count, I32)))


def _load_first(name: str, element: Any, vector: Any, widen: Callable[[Any, Any], Any]) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def load(typing_context: Any, address: Any, count: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            place = pointer(builder, args[0], vector)
            rest = ir.Constant(vector, [0] * WIDTH if isinstance(element, ir.IntType) else [0.0] * WIDTH)
            align = ir.Constant(I32, 4 if element is F32 else 2)
            mask = _first_lanes(builder, args[1])
            return widen(builder, call(builder, f"llvm.masked.load.{name}.p0", vector, place, align, mask, rest))

        return float32x16(types.int64, types.int64), codegen

    return load


def _store_first(name: str, element: Any, narrow: Callable[[Any, Any], Any]) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def store(typing_context: Any, address: Any, vector: Any, count: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = narrow(builder, args[1])
            place = pointer(builder, args[0], value.type)
            align = ir.Constant(I32, 4 if element is F32 else 2)
            mask = _first_lanes(builder, args[2])
            call(builder, f"llvm.masked.store.{name}.p0", ir.VoidType(), value, place, align, mask)
            return context.get_dummy_value()

        return types.void(types.int64, float32x16, types.int64), codegen

    return store


def _same(builder: Any, vector: Any) -> Any:
    return vector


# The first `count` lanes alone touch memory; the others are 0.
_load_first_float32 = _load_first("v16f32", F32, V_F32, _same)
_load_first_bfloat16 = _load_first("v16i16", I16, V_I16, widen_bfloat16)
_load_first_float16 = _load_first("v16i16", I16, V_I16, widen_float16)
_store_first_float32 = _store_first("v16f32", F32, _same)
_store_first_bfloat16 = _store_first("v16i16", I16, round_to_bfloat16)
_store_first_float16 = _store_first("v16i16", I16, narrow_float16)


@jit.inlined
def item_bytes(kind: int) -> int:
    """Bytes of a number."""
    return 4 if kind == FLOAT32 else 2


@jit.inlined
def load(kind, address, count):  # type: ignore[no-untyped-def]
    """The first `count` of 16 numbers as float32; 16 or more: all of them."""
    if count >= WIDTH:
        if kind == BFLOAT16:
            return load_bfloat16(address)
        if kind == FLOAT16:
            return load_float16(address)
        return load_float32(address)
    if kind == BFLOAT16:
        return _load_first_bfloat16(address, count)
    if kind == FLOAT16:
        return _load_first_float16(address, count)
    return _load_first_float32(address, count)


@jit.inlined
def store(kind, address, vector, count):  # type: ignore[no-untyped-def]
    """Rounds 16 numbers to a kind and stores the first `count` of them; 16 or more: all."""
    if count >= WIDTH:
        if kind == BFLOAT16:
            store_bfloat16(address, vector)
        elif kind == FLOAT16:
            store_float16(address, vector)
        else:
            store_float32(address, vector)
    elif kind == BFLOAT16:
        _store_first_bfloat16(address, vector, count)
    elif kind == FLOAT16:
        _store_first_float16(address, vector, count)
    else:
        _store_first_float32(address, vector, count)


def _one_vector(emit: Callable[[Any, Any], Any]) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def operation(typing_context: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, args[0])

        return float32x16(float32x16), codegen

    return operation


@jit.inlined
def rounded(kind, vector):  # type: ignore[no-untyped-def]
    """float32 to the nearest numbers of a kind, as float32."""
    if kind == BFLOAT16:
        return round_bfloat16(vector)
    if kind == FLOAT16:
        return round_float16(vector)
    return vector


def _splat(value: float) -> Any:
    return ir.Constant(V_F32, [value] * WIDTH)


def _greater(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic  # type: ignore[untyped-decorator]
def greater(typing_context: Any, a: Any, b: Any) -> Any:
    """The greater of each lane; b where one is NaN. One instruction, unlike `maximum`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _greater(builder, *args)

    return float32x16(float32x16, float32x16), codegen


_NEAREST: tuple[float, ...] = 1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2
_NEAREST += 2.402264791363012e-1, 6.931472028550421e-1, 1.0
_FLOOR: tuple[float, ...] = 1.8671300495043397e-3, 9.017030708491802e-3, 5.579991266131401e-2, 2.4016444385051727e-1
_FLOOR += 6.931512951850891e-1, 1.0
"""Coefficients for 2 ** f, the highest first: f to the nearest whole number, and above the one below."""


def _polynomial(builder: Any, x: Any, coefficients: tuple[float, ...]) -> Any:
    """By Horner's rule."""
    value = _splat(coefficients[0])
    for coefficient in coefficients[1:]:
        value = call(builder, "llvm.fma.v16f32", V_F32, value, x, _splat(coefficient))
    return value


def _power_of_two(builder: Any, x: Any) -> Any:
    """2 ** x for x <= 0 to about 1e-7 of the result; exactly 0 from -127 down, 1 at 0.

    x = n + f with |f| <= 1/2; a polynomial of degree 6 for 2 ** f (Cephes' exp2f), n added to the exponent's bits.
    """
    bounded = _greater(builder, x, _splat(-127.0))
    n = call(builder, "llvm.rint.v16f32", V_F32, bounded)
    f = builder.fsub(bounded, n)
    p = _polynomial(builder, f, _NEAREST)
    # At -127 the polynomial is exactly 1, and 127 taken from its exponent leaves no bit set.
    exponent = builder.shl(builder.fptosi(n, V_I32), constant(23))
    return builder.bitcast(builder.add(builder.bitcast(p, V_I32), exponent), V_F32)


power_of_two = _one_vector(_power_of_two)


@_one_vector
def power_of_two_of_floor(builder: Any, x: Any) -> Any:
    """2 ** x for x <= 0 to about 1.5e-7 of the result; 0 at minus infinity, 1 at 0.

    x = n + f with 0 <= f < 1; a polynomial of degree 5 for 2 ** f. AVX-512's own instructions take x apart and put the
    result together, in half of the time of `power_of_two`, which other processors use.
    """
    if not _HAS_PARTS:
        return _power_of_two(builder, x)
    nothing, all_lanes, as_ever = _splat(0.0), ir.Constant(I16, -1), ir.Constant(I32, 4)
    floor = ir.Constant(I32, 9)  # no exception, downwards
    f = call(builder, "llvm.x86.avx512.mask.reduce.ps.512", V_F32, x, floor, nothing, all_lanes, as_ever)
    p = _polynomial(builder, f, _FLOOR)
    return call(builder, "llvm.x86.avx512.mask.scalef.ps.512", V_F32, p, x, nothing, all_lanes, as_ever)


@intrinsic  # type: ignore[untyped-decorator]
def keep_between(typing_context: Any, x: Any, first: Any, low: Any, high: Any) -> Any:
    """Lane i of x where low <= first + i <= high, minus infinity elsewhere."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, first, low, high = (args[0], *(broadcast(builder, builder.trunc(a, I32)) for a in args[1:]))
        place = builder.add(first, _LANES)
        is_kept = builder.and_(builder.icmp_signed(">=", place, low), builder.icmp_signed("<=", place, high))
        return builder.select(is_kept, x, _splat(float("-inf")))

    return float32x16(float32x16, types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def count_from(typing_context: Any, first: Any) -> Any:
    """first, first + 1, ... as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sitofp(builder.add(broadcast(builder, builder.trunc(args[0], I32)), _LANES), V_F32)

    return float32x16(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def copy_masked(typing_context: Any, source: Any, dest: Any, num_bytes: Any, mask: Any) -> Any:
    """Copies 32-bit words, 16 at a time, each with a mask of bits to keep."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, dest, num_bytes, mask = args
        bits = broadcast(builder, builder.trunc(mask, I32))
        start, step = ir.Constant(num_bytes.type, 0), ir.Constant(num_bytes.type, 64)
        with cgutils.for_range_slice(builder, start, num_bytes, step, inc=True) as (offset, _):
            words = builder.load(pointer(builder, builder.add(source, offset), V_I32))
            words.align = 4
            stored = builder.store(builder.and_(words, bits), pointer(builder, builder.add(dest, offset), V_I32))
            stored.align = 4
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def scratch_memory(typing_context: Any, num_bytes: Any) -> Any:
    """The address of so many bytes (a literal) of this call's own memory, aligned to 64, not initialized."""
    size = num_bytes.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # numba's own way would clear it, a store per byte.
        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(ir.IntType(8), size))
        memory.align = 64
        return builder.ptrtoint(memory, I64)

    return types.int64(num_bytes), codegen


@intrinsic  # type: ignore[untyped-decorator]
def merge_halves(typing_context: Any, low: Any, high: Any, dest: Any, num_vectors: Any) -> Any:
    """32-bit words from two runs of 16-bit numbers: the lower half of each word from one, the upper from the other."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low, high, dest, num_vectors = args
        with cgutils.for_range(builder, num_vectors) as loop:
            offset = builder.shl(loop.index, ir.Constant(I64, 5))
            halves = []
            for run in (low, high):
                loaded = builder.load(pointer(builder, builder.add(run, offset), V_I16))
                loaded.align = 2
                halves.append(builder.zext(loaded, V_I32))
            words = builder.or_(halves[0], builder.shl(halves[1], constant(16)))
            place = builder.add(dest, builder.shl(loop.index, ir.Constant(I64, 6)))
            stored = builder.store(words, pointer(builder, place, V_I32))
            stored.align = 4
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_lines(typing_context: Any, address: Any, num_lines: Any, stride: Any) -> Any:
    """Asks for cache lines, a stride apart; a hint, any address is allowed."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, num_lines, stride = args
        with cgutils.for_range(builder, num_lines) as loop:
            place = builder.inttoptr(builder.add(address, builder.mul(loop.index, stride)), ir.PointerType(I16))
            call(builder, "llvm.prefetch.p0", ir.VoidType(), place, *(ir.Constant(I32, flag) for flag in (0, 3, 1)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen
