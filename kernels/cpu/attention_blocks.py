"""Scores and weighted sums of attention in vector registers: a few rows against 16 keys at a time, read from groups.

A row is one query head. A group is 16 keys. Its K is [head_size / pack][16 keys][pack] with a stride between the first
dimension, its V is [16 / pack][value_size][pack] without gaps; pack elements fill 32 bits. Scores of a row are 128
float32 (512 bytes). Every sum is one chain of multiply-adds over the head, or over the keys, in order: what a row gets
does not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.dots import IS_WIDE, V_PAIRS
from kernels.cpu.lanes import part
from kernels.cpu.vectors import F32, I32, I64, V_F32, V_I16, V_I32, WIDTH, broadcast, call, constant, pointer

SCORE_BYTES = 512
"""Of one row: a tile's 128 keys."""
_VECTORS = 4
_ROWS = 4 if IS_WIDE else 1
"""Rows at a time: with four vectors each they fill the registers."""


class _Element:
    """How 32 bits of K or V meet their query or weight; `pack` numbers lie in them."""

    pack = 2
    row_bytes = 8
    """Bytes of query or weights that 32 bits of K or V meet."""

    def load(self, builder: Any, address: Any) -> list[Any]:
        """16 words, one vector per number in a word."""
        raise NotImplementedError

    def load_row(self, builder: Any, address: Any) -> list[Any]:
        return [broadcast(builder, _scalar(builder, address, F32, 4 * i)) for i in range(self.pack)]

    def accumulate(self, builder: Any, total: Any, row: list[Any], words: list[Any]) -> Any:
        for a, b in zip(row, words, strict=True):
            total = call(builder, "llvm.fma.v16f32", V_F32, a, b, total)
        return total


def _scalar(builder: Any, address: Any, type_: Any, offset: int) -> Any:
    loaded = builder.load(pointer(builder, builder.add(address, ir.Constant(I64, offset)), type_))
    loaded.align = 4
    return loaded


def _words(builder: Any, address: Any) -> Any:
    loaded = builder.load(pointer(builder, address, V_I32))
    loaded.align = 64
    return loaded


class _Float32(_Element):
    pack, row_bytes = 1, 4

    def load(self, builder: Any, address: Any) -> list[Any]:
        return [builder.bitcast(_words(builder, address), V_F32)]


class _BFloat16(_Element):
    def load(self, builder: Any, address: Any) -> list[Any]:
        words = _words(builder, address)
        parts = builder.shl(words, constant(16)), builder.and_(words, constant(0xFFFF0000))
        return [builder.bitcast(part, V_F32) for part in parts]


class _Float16(_Element):
    def load(self, builder: Any, address: Any) -> list[Any]:
        words = _words(builder, address)
        parts = builder.trunc(words, V_I16), builder.trunc(builder.lshr(words, constant(16)), V_I16)
        return [builder.fpext(builder.bitcast(part, ir.VectorType(ir.HalfType(), WIDTH)), V_F32) for part in parts]


class _Pairs(_Element):
    """bfloat16 by the processor's own dot product of pairs; query and weights are bfloat16 too."""

    row_bytes = 4

    def load(self, builder: Any, address: Any) -> list[Any]:
        return [builder.bitcast(_words(builder, address), V_PAIRS)]

    def load_row(self, builder: Any, address: Any) -> list[Any]:
        return [builder.bitcast(broadcast(builder, _scalar(builder, address, I32, 0)), V_PAIRS)]

    def accumulate(self, builder: Any, total: Any, row: list[Any], words: list[Any]) -> Any:
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", V_F32, total, row[0], words[0])


class _Sums:
    """Accumulators of some rows by some vectors."""

    def __init__(self, builder: Any, element: _Element, num_rows: int, num_vectors: int) -> None:
        self._builder, self._element = builder, element
        zero = ir.Constant(V_F32, [0.0] * WIDTH)
        self._totals = [[cgutils.alloca_once(builder, V_F32) for _ in range(num_vectors)] for _ in range(num_rows)]
        for row in self._totals:
            for total in row:
                builder.store(zero, total)

    def add(self, rows: list[Any], words_at: list[Any]) -> None:
        builder, element = self._builder, self._element
        words = [element.load(builder, address) for address in words_at]
        for address, totals in zip(rows, self._totals, strict=True):
            row = element.load_row(builder, address)
            for total, vector in zip(totals, words, strict=True):
                builder.store(element.accumulate(builder, builder.load(total), row, vector), total)

    def store(self, out: Any, stride: Any) -> None:
        builder = self._builder
        for i, totals in enumerate(self._totals):
            row = builder.add(out, builder.mul(stride, ir.Constant(I64, i)))
            for j, total in enumerate(totals):
                place = builder.add(row, ir.Constant(I64, 64 * j))
                stored = builder.store(builder.load(total), pointer(builder, place, V_F32))
                stored.align = 4


def _rows_at(builder: Any, first: Any, stride: Any, num_rows: int) -> list[Any]:
    return [builder.add(first, builder.mul(stride, ir.Constant(I64, i))) for i in range(num_rows)]


def _score_block(element: _Element, num_rows: int) -> Any:
    """Scores of num_rows rows and 4 groups: (addresses of their K, stride, words of a key, query, its stride, out)."""

    @intrinsic  # type: ignore[untyped-decorator]
    def block(typing_context: Any, keys: Any, stride: Any, words: Any, query: Any, query_stride: Any, out: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            keys, stride, words, query, query_stride, out = args
            sums = _Sums(builder, element, num_rows, _VECTORS)
            groups = [_scalar(builder, keys, I64, 8 * i) for i in range(_VECTORS)]
            rows = _rows_at(builder, query, query_stride, num_rows)
            with cgutils.for_range(builder, words) as loop:
                offset = builder.mul(loop.index, stride)
                row_offset = builder.mul(loop.index, ir.Constant(I64, element.row_bytes))
                sums.add([builder.add(r, row_offset) for r in rows], [builder.add(g, offset) for g in groups])
            sums.store(out, ir.Constant(I64, SCORE_BYTES))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return block


def _value_block(element: _Element, num_rows: int, num_vectors: int) -> Any:
    """Weighted sums of num_rows rows over groups: (addresses of their V, groups, bytes into a line of V, bytes of a
    line, weights, out, its stride)."""

    @intrinsic  # type: ignore[untyped-decorator]
    def block(
        typing_context: Any, values: Any, groups: Any, inset: Any, line: Any, weights: Any, out: Any, out_stride: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values, groups, inset, line, weights, out, out_stride = args
            sums = _Sums(builder, element, num_rows, num_vectors)
            rows = _rows_at(builder, weights, ir.Constant(I64, SCORE_BYTES), num_rows)
            lines = WIDTH // element.pack
            with cgutils.for_range(builder, groups) as loop:
                group = _scalar(builder, builder.add(values, builder.shl(loop.index, ir.Constant(I64, 3))), I64, 0)
                group = builder.add(group, inset)
                first = builder.mul(loop.index, ir.Constant(I64, lines * element.row_bytes))
                with cgutils.for_range(builder, ir.Constant(I64, lines)) as inner:
                    offset = builder.add(group, builder.mul(inner.index, line))
                    row_offset = builder.add(first, builder.mul(inner.index, ir.Constant(I64, element.row_bytes)))
                    words = [builder.add(offset, ir.Constant(I64, 64 * i)) for i in range(num_vectors)]
                    sums.add([builder.add(r, row_offset) for r in rows], words)
            sums.store(out, out_stride)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return block


def _scores(element: _Element) -> Any:
    """(addresses of K, stride, words of a key, query, its stride, rows, fours of groups, scores)."""
    one, two, three, four = (_score_block(element, n) for n in (1, 2, 3, 4))

    @part
    def scores(keys, stride, words, query, query_stride, rows, fours, out):  # type: ignore[no-untyped-def]
        row = 0
        while row < rows:
            at, to = query + row * query_stride, out + row * SCORE_BYTES
            left = min(rows - row, _ROWS)
            for i in range(fours):
                groups, place = keys + 32 * i, to + 256 * i
                if left == 4:
                    four(groups, stride, words, at, query_stride, place)
                elif left == 3:
                    three(groups, stride, words, at, query_stride, place)
                elif left == 2:
                    two(groups, stride, words, at, query_stride, place)
                else:
                    one(groups, stride, words, at, query_stride, place)
            row += left

    return scores


def _values(element: _Element) -> Any:
    """(addresses of V, groups, bytes of a line, weights, rows, vectors of a value, out, its stride)."""
    one, two, three, four = (_value_block(element, n, _VECTORS) for n in (1, 2, 3, 4))
    narrow = _value_block(element, 1, 1)

    @part
    def values(at, groups, line, weights, rows, vectors, out, out_stride):  # type: ignore[no-untyped-def]
        row = 0
        while row < rows:
            of, to = weights + row * SCORE_BYTES, out + row * out_stride
            left = min(rows - row, _ROWS)
            vector = 0
            while vector + _VECTORS <= vectors:
                inset, place = vector * 64, to + vector * 64
                if left == 4:
                    four(at, groups, inset, line, of, place, out_stride)
                elif left == 3:
                    three(at, groups, inset, line, of, place, out_stride)
                elif left == 2:
                    two(at, groups, inset, line, of, place, out_stride)
                else:
                    one(at, groups, inset, line, of, place, out_stride)
                vector += _VECTORS
            while vector < vectors:
                for i in range(left):
                    narrow(at, groups, vector * 64, line, of + i * SCORE_BYTES, to + i * out_stride + vector * 64, 0)
                vector += 1
            row += left

    return values


scores_float32, scores_bfloat16, scores_float16, scores_pairs = (
    _scores(element()) for element in (_Float32, _BFloat16, _Float16, _Pairs)
)
values_float32, values_bfloat16, values_float16, values_pairs = (
    _values(element()) for element in (_Float32, _BFloat16, _Float16, _Pairs)
)
