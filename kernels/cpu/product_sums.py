"""What becomes of a product's sums: bias, gate, rounding, and their place."""

from __future__ import annotations

import numba

from kernels.cpu import jit
from kernels.cpu.dots import PAIRS
from kernels.cpu.product_work import BIAS, COLUMNS, ELEMENT, IS_GATED, OUT, OUT_STRIDE, OUT_TYPE, argument
from kernels.cpu.vectors import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    exp_of_numbers,
    get_float32,
    get_uint16,
    load_bfloat16,
    load_float16,
    load_float32,
    put_float32,
    put_uint16,
    round_bfloat16,
    round_float16,
    splat,
    stack,
    store_bfloat16,
    store_float16,
    store_float32,
)

OTHER, PLAIN, GATE, FLOATS = range(4)
"""Ways to finish a row: not row by row, two vectors of bfloat16, a gate of bfloat16, two vectors of float32."""


# Like lanes.rounded, load and store, which have masks for parts of vectors: with those in the epilogue products of 64
# rows took 7 to 20 % longer (three pairs of runs).
@jit.inlined
def _rounded(vector, element_type):  # type: ignore[no-untyped-def]
    if element_type == BFLOAT16:
        return round_bfloat16(vector)
    if element_type == FLOAT16:
        return round_float16(vector)
    return vector


@jit.inlined
def _load(address, element_type):  # type: ignore[no-untyped-def]
    if element_type in (BFLOAT16, PAIRS):
        return load_bfloat16(address)
    if element_type == FLOAT16:
        return load_float16(address)
    return load_float32(address)


@jit.inlined
def _store(vector, address, element_type):  # type: ignore[no-untyped-def]
    if element_type == BFLOAT16:
        store_bfloat16(address, vector)
    elif element_type == FLOAT16:
        store_float16(address, vector)
    else:
        store_float32(address, vector)


@jit.inlined
def _put(vector, place, left, element_type):  # type: ignore[no-untyped-def]
    """16 results to their place, or as many as are left there."""
    if left >= 16:
        _store(vector, place, element_type)
        return
    some = stack(64)
    _store(vector, some, element_type)
    for i in range(left):
        if element_type == FLOAT32:
            put_float32(place + 4 * i, get_float32(some + 4 * i))
        else:
            put_uint16(place + 2 * i, get_uint16(some + 2 * i))


@jit.inlined
def _gated(gate, up, element_type):  # type: ignore[no-untyped-def]
    """silu(gate) * up, rounded where the models' own code rounds. A gate that is NaN makes NaN as the dividend."""
    gate, up = _rounded(gate, element_type), _rounded(up, element_type)
    one, zero = splat(numba.float32(1)), splat(numba.float32(0))
    return _rounded(gate / (one + exp_of_numbers(zero - gate)), element_type) * up


@jit.inlined
def finish(scratch, first_row, num_rows, panel, args):  # type: ignore[no-untyped-def]
    """The sums of some rows and one panel: bias, gate, rounding, and to their place."""
    columns, out_type = argument(args, COLUMNS), argument(args, OUT_TYPE)
    stride, is_gated = argument(args, OUT_STRIDE), argument(args, IS_GATED)
    column, width = panel * (16 if is_gated else 32), 4 if out_type == FLOAT32 else 2
    place = argument(args, OUT) + first_row * stride + column * width
    if argument(args, BIAS) != 0:
        _add_bias(scratch, num_rows, column, args)
    last = scratch + 128 * num_rows
    if is_gated and column + 16 <= columns and out_type == BFLOAT16:
        while scratch < last:
            store_bfloat16(place, _gated(load_float32(scratch), load_float32(scratch + 64), BFLOAT16))
            scratch += 128
            place += stride
    elif is_gated:
        while scratch < last:
            value = _gated(load_float32(scratch), load_float32(scratch + 64), out_type)
            _put(value, place, columns - column, out_type)
            scratch += 128
            place += stride
    elif column + 32 <= columns and out_type == BFLOAT16:
        while scratch < last:
            store_bfloat16(place, load_float32(scratch))
            store_bfloat16(place + 32, load_float32(scratch + 64))
            scratch += 128
            place += stride
    else:
        while scratch < last:
            _put(load_float32(scratch), place, columns - column, out_type)
            _put(load_float32(scratch + 64), place + 16 * width, columns - column - 16, out_type)
            scratch += 128
            place += stride


@jit.inlined
def _add_bias(scratch, num_rows, column, args):  # type: ignore[no-untyped-def]
    element_type = argument(args, ELEMENT)
    width = 4 if element_type == FLOAT32 else 2
    second_column = column + (argument(args, COLUMNS) if argument(args, IS_GATED) else 16)
    first = _load(argument(args, BIAS) + column * width, element_type)
    second = _load(argument(args, BIAS) + second_column * width, element_type)
    for i in range(num_rows):
        place = scratch + 128 * i
        store_float32(place, load_float32(place) + first)
        store_float32(place + 64, load_float32(place + 64) + second)


@jit.inlined
def finish_row(how, scratch, place):  # type: ignore[no-untyped-def]
    """One row's sums of a whole panel to their place."""
    if how == PLAIN:
        store_bfloat16(place, load_float32(scratch))
        store_bfloat16(place + 32, load_float32(scratch + 64))
    elif how == GATE:
        store_bfloat16(place, _gated(load_float32(scratch), load_float32(scratch + 64), BFLOAT16))
    else:
        store_float32(place, load_float32(scratch))
        store_float32(place + 64, load_float32(scratch + 64))


@jit.inlined
def way_to_finish(panel, args):  # type: ignore[no-untyped-def]
    """How the rows of a panel can be finished one by one."""
    is_gated, out_type = argument(args, IS_GATED), argument(args, OUT_TYPE)
    end = panel * (16 if is_gated else 32) + (16 if is_gated else 32)
    if end > argument(args, COLUMNS) or argument(args, BIAS) != 0 or (is_gated and out_type != BFLOAT16):
        return OTHER
    return GATE if is_gated else PLAIN if out_type == BFLOAT16 else FLOATS
