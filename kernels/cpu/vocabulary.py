"""Vector operations of the kernels over a vocabulary: comparisons as bit masks, weights in float64, noise.

Everything here rounds as its torch counterpart does, so no product may be fused with a sum: kernels that use it are
compiled by `exact`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from kernels import philox, weights
from kernels.cpu import jit
from kernels.cpu.vectors import F32, I16, I32, I64, V_F32, V_I32, WIDTH, broadcast, call, float32x16, pointer

F = TypeVar("F", bound=Callable[..., Any])
F64 = ir.DoubleType()
V_F64, V_I64 = ir.VectorType(F64, WIDTH), ir.VectorType(I64, WIDTH)

jit._prepare(numba)


def exact(function: F) -> F:
    """Compiles at the first call; every operation is rounded by itself."""
    jit.name_by_content(function)
    compiled: Any = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    return compiled


def exact_chunks(function: Callable[..., Any]) -> Any:
    """The same for the work of a team (see team.py), compiled here and now."""
    jit.name_by_content(function)
    return numba.cfunc("void(int64, int64)", cache=True, error_model="numpy")(function)


class Float64x16(types.Type):
    """The numba type of sixteen float64."""

    def __init__(self) -> None:
        super().__init__(name="Float64x16")


float64x16 = Float64x16()


@register_model(Float64x16)
class _Float64x16Model(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, V_F64)


def _operation(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes an intrinsic of a function of the builder and the arguments' values."""

    def decorate(emit: Callable[..., Any]) -> Any:
        @functools.wraps(emit)
        def typed(typing_context: Any, *types_: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                value = emit(builder, *values)
                return context.get_dummy_value() if value is None else value

            return result(*arguments), codegen

        return intrinsic(typed)

    return decorate


def _bits(builder: Any, is_set: Any) -> Any:
    """A comparison's outcome as an int64, lane i in bit i."""
    return builder.zext(builder.bitcast(is_set, I16), I64)


def _splat64(value: float) -> Any:
    return ir.Constant(V_F64, [value] * WIDTH)


@_operation(float32x16, float32x16, float32x16)
def larger(builder: Any, a: Any, b: Any) -> Any:
    """a where it is larger, else b (so a NaN in a is passed over)."""
    return builder.select(builder.fcmp_ordered("ogt", a, b), a, b)


@_operation(types.int64, float32x16)
def nan_lanes(builder: Any, x: Any) -> Any:
    """Bits of the lanes that are NaN."""
    return _bits(builder, builder.fcmp_unordered("uno", x, x))


@_operation(types.int64, float32x16, float32x16)
def lanes_at_least(builder: Any, x: Any, bound: Any) -> Any:
    """Bits of the lanes with x >= bound."""
    return _bits(builder, builder.fcmp_ordered("oge", x, bound))


@_operation(types.int64, float32x16, float32x16)
def lanes_above(builder: Any, x: Any, bound: Any) -> Any:
    """Bits of the lanes with x > bound."""
    return _bits(builder, builder.fcmp_ordered("ogt", x, bound))


@_operation(types.int64, types.int64)
def count_bits(builder: Any, bits: Any) -> Any:
    """How many bits are set."""
    return builder.ctpop(bits)


@_operation(types.int64, types.int64)
def first_bit(builder: Any, bits: Any) -> Any:
    """The place of the lowest bit that is set; not for 0."""
    return builder.cttz(bits, ir.Constant(ir.IntType(1), 1))


@_operation(types.int64, types.int64, float32x16, float32x16)
def keep_at_least(builder: Any, address: Any, x: Any, bound: Any) -> Any:
    """Writes the lanes with x >= bound one behind the other; returns how many."""
    is_kept = builder.fcmp_ordered("oge", x, bound)
    place = pointer(builder, address, F32)
    call(builder, "llvm.masked.compressstore.v16f32", ir.VoidType(), x, place, is_kept)
    return builder.ctpop(_bits(builder, is_kept))


@_operation(types.float32, types.int64)
def float_of_key(builder: Any, key: Any) -> Any:
    """The float32 whose place in the order of all float32 is the key (see key_of_float)."""
    short = builder.trunc(key, I32)
    flipped = builder.and_(builder.ashr(short, ir.Constant(I32, 31)), ir.Constant(I32, 0x7FFFFFFF))
    return builder.bitcast(builder.xor(short, flipped), F32)


@_operation(types.int64, types.float32)
def key_of_float(builder: Any, x: Any) -> Any:
    """A float32's bits as an integer that grows with it: magnitudes of negative numbers are turned round."""
    bits = builder.bitcast(x, I32)
    flipped = builder.and_(builder.ashr(bits, ir.Constant(I32, 31)), ir.Constant(I32, 0x7FFFFFFF))
    return builder.sext(builder.xor(bits, flipped), I64)


@_operation(float64x16)
def zeros64(builder: Any) -> Any:
    """Sixteen zeros."""
    return _splat64(0.0)


@_operation(float64x16, float64x16, float64x16)
def add64(builder: Any, a: Any, b: Any) -> Any:
    """a + b."""
    return builder.fadd(a, b)


@_operation(float64x16, float32x16)
def widen64(builder: Any, x: Any) -> Any:
    """float32 to float64."""
    return builder.fpext(x, V_F64)


@_operation(float64x16, float64x16, float64x16, float32x16, float32x16)
def add_where_at_least(builder: Any, total: Any, w: Any, x: Any, bound: Any) -> Any:
    """total + w in the lanes with x >= bound, total elsewhere."""
    return builder.fadd(total, builder.select(builder.fcmp_ordered("oge", x, bound), w, _splat64(0.0)))


@_operation(float64x16, types.int64)
def load64(builder: Any, address: Any) -> Any:
    """Sixteen float64."""
    loaded = builder.load(pointer(builder, address, V_F64))
    loaded.align = 8
    return loaded


@_operation(types.void, types.int64, float64x16)
def store64(builder: Any, address: Any, vector: Any) -> Any:
    """Writes sixteen float64."""
    stored = builder.store(vector, pointer(builder, address, V_F64))
    stored.align = 8


@_operation(types.float64, float64x16)
def sum64(builder: Any, vector: Any) -> Any:
    """The sum of the lanes, by halves."""
    value, width = vector, WIDTH
    while width > 1:
        width //= 2
        index = [ir.Constant(ir.VectorType(I32, width), [i * width + j for j in range(width)]) for i in range(2)]
        undefined = ir.Constant(value.type, ir.Undefined)
        value = builder.fadd(*(builder.shuffle_vector(value, undefined, half) for half in index))
    return builder.extract_element(value, ir.Constant(I32, 0))


@_operation(float64x16, float32x16)
def weigh(builder: Any, x: Any) -> Any:
    """The weights of scaled logits: see weights.py, whose operations these are one by one."""
    wide = builder.fpext(x, V_F64)
    low = _splat64(weights.LOWEST)
    wide = builder.select(builder.fcmp_ordered("ogt", wide, low), wide, low)
    n = call(builder, "llvm.rint.v16f64", V_F64, builder.fmul(wide, _splat64(weights.LOG2_E)))
    r = builder.fsub(wide, builder.fmul(n, _splat64(math.log(2.0))))
    p = _splat64(weights.COEFFICIENTS[0])
    for coefficient in weights.COEFFICIENTS[1:]:
        p = builder.fadd(builder.fmul(p, r), _splat64(coefficient))
    exponent = builder.sext(builder.fptosi(n, V_I32), V_I64)
    bias = ir.Constant(V_I64, [1023 + weights.UNIT_BITS] * WIDTH)
    power = builder.bitcast(builder.shl(builder.add(exponent, bias), ir.Constant(V_I64, [52] * WIDTH)), V_F64)
    return call(builder, "llvm.rint.v16f64", V_F64, builder.fmul(p, power))


@_operation(types.void, types.int64, types.int64, types.int64, types.int64, types.int64)
def noise_words(builder: Any, address: Any, first_token: Any, position: Any, child_index: Any, seed: Any) -> Any:
    """Writes the noise words, int32, of sixteen tokens in a row: see philox.py."""
    low32 = ir.Constant(V_I64, [philox.MASK] * WIDTH)

    def lanes(scalar: Any) -> Any:
        return builder.and_(broadcast(builder, scalar), low32)

    def shifted(vector: Any) -> Any:
        return builder.lshr(vector, ir.Constant(V_I64, [32] * WIDTH))

    def word(value: int) -> Any:
        return ir.Constant(V_I64, [value & philox.MASK] * WIDTH)

    c0, c2, c3 = lanes(position), lanes(child_index), word(0)
    c1 = builder.add(lanes(first_token), ir.Constant(V_I64, list(range(WIDTH))))
    k0, k1 = lanes(seed), shifted(broadcast(builder, seed))
    for i in range(philox.ROUNDS):
        p0, p1 = builder.mul(c0, word(philox.M0)), builder.mul(c2, word(philox.M1))
        key0 = builder.and_(builder.add(k0, word(i * philox.W0)), low32)
        key1 = builder.and_(builder.add(k1, word(i * philox.W1)), low32)
        # c1 and c3 keep the products' upper halves, which the mask drops when they meet the others.
        c0, c1 = builder.and_(builder.xor(builder.xor(shifted(p1), c1), key0), low32), p1
        c2, c3 = builder.and_(builder.xor(builder.xor(shifted(p0), c3), key1), low32), p0
    stored = builder.store(builder.trunc(c0, V_I32), pointer(builder, address, V_I32))
    stored.align = 4


@_operation(types.int64, types.int64, float32x16, float32x16)
def contenders(builder: Any, words: Any, x: Any, best: Any) -> Any:
    """Bits of the lanes whose logit plus noise may reach `best`; never misses one.

    The noise -ln(-ln(1 - u)) is at most -ln(u), and log2 of a float32 is at least its bits / 2**23 - 127.
    """
    loaded = builder.load(pointer(builder, words, V_I32))
    loaded.align = 4
    number = builder.fadd(builder.uitofp(loaded, V_F32), ir.Constant(V_F32, [0.5] * WIDTH))
    bits = builder.sitofp(builder.bitcast(number, V_I32), V_F32)
    slope = ir.Constant(V_F32, [math.log(2.0) / 2**23] * WIDTH)
    most = ir.Constant(V_F32, [(127 + 32) * math.log(2.0) + 1e-3] * WIDTH)
    bound = builder.fadd(x, builder.fsub(most, builder.fmul(bits, slope)))
    return _bits(builder, builder.fcmp_ordered("oge", bound, best))


@_operation(types.int64, types.int64)
def get_word(builder: Any, address: Any) -> Any:
    """The unsigned 32-bit word at an address."""
    return builder.zext(builder.load(pointer(builder, address, I32)), I64)


@_operation(types.float64, types.int64)
def get_float64(builder: Any, address: Any) -> Any:
    """The float64 at an address."""
    return builder.load(pointer(builder, address, F64))
