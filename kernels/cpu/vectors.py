"""Vectors of 16 float32 for kernels: LLVM maps them onto AVX-512, AVX2, SSE or NEON registers, whatever there is.

Addresses are int64 and in bytes. Operators +, -, * work on two vectors; `fma`, `splat` and the like are functions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from kernels.cpu import jit
from kernels.cpu.features import cpu_flags

F32, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
WIDTH = 16
V_F32, V_I16, V_I32 = (ir.VectorType(element, WIDTH) for element in (F32, I16, I32))
FLOAT32, BFLOAT16, FLOAT16 = range(3)
"""Kinds: how numbers lie in memory, where a kernel is told so at run time."""


class Float32x16(types.Type):
    """The numba type of a vector."""

    def __init__(self) -> None:
        super().__init__(name="Float32x16")


float32x16 = Float32x16()


@register_model(Float32x16)
class _Float32x16Model(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, V_F32)


def pointer(builder: Any, address: Any, pointee: Any) -> Any:
    """An address as a typed pointer."""
    return builder.inttoptr(address, ir.PointerType(pointee))


def constant(value: int, type_: Any = V_I32) -> Any:
    """One integer in all lanes."""
    return ir.Constant(type_, [value] * WIDTH)


def broadcast(builder: Any, scalar: Any) -> Any:
    """A scalar in all lanes."""
    vector = ir.VectorType(scalar.type, WIDTH)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), constant(0))


def call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """Calls an LLVM intrinsic."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args)


def _unary_load(widen: Callable[[Any, Any], Any], element: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def load(typing_context: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            loaded = builder.load(pointer(builder, args[0], ir.VectorType(element, WIDTH)))
            loaded.align = element.width // 8 if isinstance(element, ir.IntType) else 4
            return widen(builder, loaded)

        return float32x16(types.int64), codegen

    return load


def widen_bfloat16(builder: Any, bits: Any) -> Any:
    """16 bfloat16 as bits to float32: the upper half of the word."""
    return builder.bitcast(builder.shl(builder.zext(bits, V_I32), constant(16)), V_F32)


class BFloat(ir.types._BaseFloatType):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not know."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


BFloat._create_instance()
_HAS_BFLOAT16 = "avx512_bf16" in cpu_flags()


def round_to_bfloat16(builder: Any, vector: Any) -> Any:
    """float32 to the bits of the nearest bfloat16, ties to even, as torch does; NaN stays NaN.

    The processor's own instruction, where there is one, takes what is below 2 ** -126 for 0.
    """
    if _HAS_BFLOAT16:
        name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        return builder.bitcast(call(builder, name, ir.VectorType(BFloat(), WIDTH), vector), V_I16)
    bits = builder.bitcast(vector, V_I32)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, constant(0x7FFF))), constant(16))
    is_nan = builder.fcmp_unordered("uno", vector, vector)
    return builder.trunc(builder.select(is_nan, constant(0x7FC0), rounded), V_I16)


def widen_float16(builder: Any, bits: Any) -> Any:
    """16 float16 as bits to float32."""
    return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), WIDTH)), V_F32)


def narrow_float16(builder: Any, vector: Any) -> Any:
    """float32 to the bits of the nearest float16."""
    return builder.bitcast(builder.fptrunc(vector, ir.VectorType(ir.HalfType(), WIDTH)), V_I16)


load_float32 = _unary_load(lambda builder, loaded: loaded, F32)
load_bfloat16 = _unary_load(widen_bfloat16, I16)
load_float16 = _unary_load(widen_float16, I16)


def _store(narrow: Callable[[Any, Any], Any], align: int) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def store(typing_context: Any, address: Any, vector: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = narrow(builder, args[1])
            stored = builder.store(value, pointer(builder, args[0], value.type))
            stored.align = align
            return context.get_dummy_value()

        return types.void(types.int64, float32x16), codegen

    return store


store_float32 = _store(lambda builder, vector: vector, 4)
store_bfloat16 = _store(round_to_bfloat16, 2)
store_float16 = _store(narrow_float16, 2)


@intrinsic  # type: ignore[untyped-decorator]
def splat(typing_context: Any, value: Any) -> Any:
    """A float32 in all lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return broadcast(builder, args[0])

    return float32x16(types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return call(builder, "llvm.fma.v16f32", V_F32, *args)

    return float32x16(float32x16, float32x16, float32x16), codegen


def _binary(emit: Callable[[Any, Any, Any], Any]) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def operation(typing_context: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, *args)

        return float32x16(float32x16, float32x16), codegen

    return operation


add = _binary(lambda builder, a, b: builder.fadd(a, b))
subtract = _binary(lambda builder, a, b: builder.fsub(a, b))
multiply = _binary(lambda builder, a, b: builder.fmul(a, b))
divide = _binary(lambda builder, a, b: builder.fdiv(a, b))
maximum = _binary(lambda builder, a, b: call(builder, "llvm.maxnum.v16f32", V_F32, a, b))
minimum = _binary(lambda builder, a, b: call(builder, "llvm.minnum.v16f32", V_F32, a, b))


def _operator(python_operator: Any, operation: Any) -> None:
    # Without annotations: numba compares them with those of what is returned.
    @overload(python_operator)  # type: ignore[untyped-decorator]
    def overloaded(a, b):  # type: ignore[no-untyped-def]
        if a is float32x16 and b is float32x16:

            def operate(a, b):  # type: ignore[no-untyped-def]
                return operation(a, b)

            jit.name_by_content(operate)
            return operate
        return None


for _python_operator, _operation in (
    (operator.add, add),
    (operator.sub, subtract),
    (operator.mul, multiply),
    (operator.truediv, divide),
):
    _operator(_python_operator, _operation)


def _reduce(emit: Callable[[Any, Any, Any], Any]) -> Any:
    """Halves the vector four times: one order, whatever the machine."""

    @intrinsic  # type: ignore[untyped-decorator]
    def reduction(typing_context: Any, vector: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value, width = args[0], WIDTH
            while width > 1:
                width //= 2
                undefined = ir.Constant(value.type, ir.Undefined)
                halves = [
                    builder.shuffle_vector(
                        value,
                        undefined,
                        ir.Constant(ir.VectorType(I32, width), list(range(i * width, i * width + width))),
                    )
                    for i in range(2)
                ]
                value = emit(builder, *halves)
            return builder.extract_element(value, ir.Constant(I32, 0))

        return types.float32(float32x16), codegen

    return reduction


sum_lanes = _reduce(lambda builder, a, b: builder.fadd(a, b))
max_lanes = _reduce(lambda builder, a, b: call(builder, f"llvm.maxnum.v{a.type.count}f32", a.type, a, b))


def _exp_parts(builder: Any, bounded: Any) -> tuple[Any, Any]:
    """n and e ** r, where x = n ln 2 + r with |r| <= ln 2 / 2: a polynomial of degree 6 (Cephes' expf)."""

    def splat_(value: float) -> Any:
        return ir.Constant(V_F32, [value] * WIDTH)

    def fma_(a: Any, b: Any, c: Any) -> Any:
        return call(builder, "llvm.fma.v16f32", V_F32, a, b, c)

    n = call(builder, "llvm.rint.v16f32", V_F32, builder.fmul(bounded, splat_(1.4426950216293335)))
    r = fma_(n, splat_(-0.693359375), bounded)
    r = fma_(n, splat_(2.12194440e-4), r)
    p = splat_(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma_(p, r, splat_(coefficient))
    p = builder.fadd(fma_(p, builder.fmul(r, r), r), splat_(1.0))
    return builder.fptosi(n, V_I32), p


@intrinsic  # type: ignore[untyped-decorator]
def exp(typing_context: Any, x: Any) -> Any:
    """e ** x to about 1 unit in the last place; 0 below -87.3, infinity above 88.7, NaN for NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def fconst(value: float) -> Any:
            return ir.Constant(V_F32, [value] * WIDTH)

        (x_,) = args
        low = builder.fcmp_ordered("olt", x_, fconst(-87.3365478515625))
        high = builder.fcmp_ordered("ogt", x_, fconst(88.72283172607422))
        bounded = call(
            builder,
            "llvm.minnum.v16f32",
            V_F32,
            call(builder, "llvm.maxnum.v16f32", V_F32, x_, fconst(-87.3365478515625)),
            fconst(88.72283172607422),
        )
        exponent, p = _exp_parts(builder, bounded)
        # In two steps: 2 ** 128 is not a float32, 2 ** 127 * 2 is the product that overflows when it should.
        half = builder.ashr(exponent, constant(1))
        for part in (half, builder.sub(exponent, half)):
            power = builder.shl(builder.add(part, constant(127)), constant(23))
            p = builder.fmul(p, builder.bitcast(power, V_F32))
        p = builder.select(low, fconst(0.0), p)
        p = builder.select(high, fconst(float("inf")), p)
        return builder.select(builder.fcmp_unordered("uno", x_, x_), x_, p)

    return float32x16(float32x16), codegen


@intrinsic  # type: ignore[untyped-decorator]
def exp_of_numbers(typing_context: Any, x: Any) -> Any:
    """`exp` in two thirds of its time: the same bits from -87 to 88, e ** -87 below and for NaN, infinity above."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lowest, highest, infinity = (ir.Constant(V_F32, [x] * WIDTH) for x in (-87.0, 88.0, float("inf")))
        bounded = call(builder, "llvm.maxnum.v16f32", V_F32, args[0], lowest)
        exponent, p = _exp_parts(builder, bounded)
        # p is about 1, so that its exponent has room for -126 to 127.
        p = builder.bitcast(builder.add(builder.bitcast(p, V_I32), builder.shl(exponent, constant(23))), V_F32)
        return builder.select(builder.fcmp_ordered(">", bounded, highest), infinity, p)

    return float32x16(float32x16), codegen


def prefetch_line(builder: Any, address: Any, locality: int = 3) -> None:
    """Asks for the cache line at an address; locality 3: into all caches, 2: not into the first."""
    place = builder.inttoptr(address, ir.PointerType(ir.IntType(8)))
    call(builder, "llvm.prefetch.p0", ir.VoidType(), place, *(ir.Constant(I32, flag) for flag in (0, locality, 1)))


def _prefetch(locality: int) -> Any:
    @intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
    def ask(typing_context: Any, address: Any, num_lines: Any) -> Any:
        count = num_lines.literal_value

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            for line in range(count):
                prefetch_line(builder, builder.add(args[0], ir.Constant(I64, 64 * line)), locality)
            return context.get_dummy_value()

        return types.void(types.int64, num_lines), codegen

    return ask


prefetch_run = _prefetch(3)
"""Asks for cache lines one after the other: an address, how many (a literal); a hint, any address is allowed."""
prefetch_later = _prefetch(2)
"""The same, into the second-level cache only."""


def _scalar_load(name: str, element: Any, numba_type: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def load(typing_context: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(pointer(builder, args[0], element))

        return numba_type(types.int64), codegen

    return load


def _scalar_store(element: Any, numba_type: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[1], pointer(builder, args[0], element))
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), codegen

    return store


get_float32 = _scalar_load("float32", F32, types.float32)
get_int32 = _scalar_load("int32", I32, types.int32)
get_int64 = _scalar_load("int64", I64, types.int64)
get_uint16 = _scalar_load("uint16", I16, types.uint16)
put_uint16 = _scalar_store(I16, types.uint16)
put_float32 = _scalar_store(F32, types.float32)
put_int32 = _scalar_store(I32, types.int32)
put_int64 = _scalar_store(I64, types.int64)


def _rounding(narrow: Callable[[Any, Any], Any], widen: Callable[[Any, Any], Any]) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def rounded(typing_context: Any, vector: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return widen(builder, narrow(builder, args[0]))

        return float32x16(float32x16), codegen

    return rounded


round_bfloat16 = _rounding(round_to_bfloat16, widen_bfloat16)
"""To the nearest bfloat16, as float32."""
round_float16 = _rounding(narrow_float16, widen_float16)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def stack(typing_context: Any, num_bytes: Any) -> Any:
    """The address of so many bytes (a literal) of this call's own memory, aligned to 64, not initialized."""
    size = num_bytes.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(8), size))
        memory.align = 64
        return builder.ptrtoint(memory, I64)

    return types.int64(num_bytes), codegen
