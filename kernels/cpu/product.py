"""x @ weight.T for packed weights: the chunks that threads take, and what becomes of the sums.

The order over k is one per output, row and instruction set, so a row has the same bits in every batch.
"""

from __future__ import annotations

import numba

from kernels.cpu import jit
from kernels.cpu.dots import MAX_ROWS, PAIRS, multiply_rows
from kernels.cpu.team import share
from kernels.cpu.tiles import bfloat16_tiles_1, bfloat16_tiles_2, configure, release
from kernels.cpu.vectors import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    exp,
    get_float32,
    get_int64,
    get_uint16,
    load_bfloat16,
    load_float16,
    load_float32,
    put_float32,
    put_int64,
    put_uint16,
    round_bfloat16,
    round_float16,
    splat,
    stack,
    store_bfloat16,
    store_float16,
    store_float32,
)

AHEAD_BYTES = 4096
"""How far ahead of a small product's reading the weights are asked for."""

TILE_STEP_BYTES = 2048
"""Weights of one step of tiles: how far ahead they are asked for where they lie in the second-level cache already."""
PANEL_BYTES_PER_CHUNK = 128 << 10
ROWS_PER_CHUNK = 512
CHUNKS_PER_THREAD = 8

_ROWS_SCRATCH, _TILES_SCRATCH, _TWO_SCRATCHES = 128 * MAX_ROWS, 128 * 32, 2 * 128 * 32

# The arguments, words of a block. First what a weight says (its own block goes on with how to run), then a call.
WEIGHT, PANEL_BYTES, NUM_PANELS, STEPS, COLUMNS, IS_GATED, ELEMENT, _OUT_TYPE, _X_STRIDE = range(9)
_FUNCTION, _TEAM, _THREADS = range(9, 12)
_X, _ROWS, _BIAS, _OUT, _OUT_STRIDE, _PANELS, _PANEL_CHUNKS = range(9, 16)


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
def _argument(args, place):  # type: ignore[no-untyped-def]
    return get_int64(args + 8 * place)


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
    """silu(gate) * up, rounded where the models' own code rounds."""
    gate, up = _rounded(gate, element_type), _rounded(up, element_type)
    one, zero = splat(numba.float32(1)), splat(numba.float32(0))
    return _rounded(gate / (one + exp(zero - gate)), element_type) * up


@jit.inlined
def _finish(scratch, first_row, num_rows, panel, args):  # type: ignore[no-untyped-def]
    """The sums of some rows and one panel: bias, gate, rounding, and to their place."""
    columns, out_type = _argument(args, COLUMNS), _argument(args, _OUT_TYPE)
    stride, is_gated = _argument(args, _OUT_STRIDE), _argument(args, IS_GATED)
    column, width = panel * (16 if is_gated else 32), 4 if out_type == FLOAT32 else 2
    place = _argument(args, _OUT) + first_row * stride + column * width
    if _argument(args, _BIAS) != 0:
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
    element_type = _argument(args, ELEMENT)
    width = 4 if element_type == FLOAT32 else 2
    second_column = column + (_argument(args, COLUMNS) if _argument(args, IS_GATED) else 16)
    first = _load(_argument(args, _BIAS) + column * width, element_type)
    second = _load(_argument(args, _BIAS) + second_column * width, element_type)
    for i in range(num_rows):
        place = scratch + 128 * i
        store_float32(place, load_float32(place) + first)
        store_float32(place + 64, load_float32(place + 64) + second)


@jit.inlined
def _span(args, chunk):  # type: ignore[no-untyped-def]
    """First and last panel, first and last row of a chunk."""
    per_chunk, panel_chunks = _argument(args, _PANELS), _argument(args, _PANEL_CHUNKS)
    panel, row = chunk % panel_chunks * per_chunk, chunk // panel_chunks * ROWS_PER_CHUNK
    last_panel = min(panel + per_chunk, _argument(args, NUM_PANELS))
    return panel, last_panel, row, min(row + ROWS_PER_CHUNK, _argument(args, _ROWS))


@jit.chunks
def vector_chunk(args, chunk):  # type: ignore[no-untyped-def]
    """Rows and panels of a chunk in vector registers."""
    scratch = stack(_ROWS_SCRATCH)
    panel, last_panel, first_row, last_row = _span(args, chunk)
    weight, panel_bytes, steps = _argument(args, WEIGHT), _argument(args, PANEL_BYTES), _argument(args, STEPS)
    x, stride, element = _argument(args, _X), _argument(args, _X_STRIDE), _argument(args, ELEMENT)
    for p in range(panel, last_panel):
        place, row = weight + p * panel_bytes, first_row
        while row < last_row:
            done = multiply_rows(element, last_row - row, x + row * stride, stride, place, steps, AHEAD_BYTES, scratch)
            _finish(scratch, row, done, p, args)
            row += done


@jit.chunks
def tile_chunk(args, chunk):  # type: ignore[no-untyped-def]
    """Rows and panels of a chunk in tiles: 32 rows at a time, then what is left."""
    scratch = stack(_TWO_SCRATCHES)
    panel, last_panel, first_row, last_row = _span(args, chunk)
    weight, panel_bytes, steps = _argument(args, WEIGHT), _argument(args, PANEL_BYTES), _argument(args, STEPS) // 16
    x, stride = _argument(args, _X), _argument(args, _X_STRIDE)
    whole = first_row + (last_row - first_row) // 32 * 32
    if whole > first_row:
        configure(16, 16)
        for p in range(panel, last_panel):
            for row in range(first_row, whole, 32):
                ahead = AHEAD_BYTES if row == first_row else TILE_STEP_BYTES
                bfloat16_tiles_2(x + row * stride, stride, weight + p * panel_bytes, steps, ahead, scratch)
                _finish(scratch, row, 32, p, args)
    left = last_row - whole
    if left > 0:
        configure(min(left, 16), max(left - 16, 0))
        ahead = AHEAD_BYTES if whole == first_row else TILE_STEP_BYTES
        here = scratch
        for p in range(panel, last_panel):
            here = scratch + (p & 1) * _TILES_SCRATCH
            if left > 16:
                bfloat16_tiles_2(x + whole * stride, stride, weight + p * panel_bytes, steps, ahead, here)
            else:
                bfloat16_tiles_1(x + whole * stride, stride, weight + p * panel_bytes, steps, ahead, here)
            if p > panel:
                # A panel later: what a tile has just stored can't be read at once, and the next weights would wait.
                _finish(scratch + (p - 1 & 1) * _TILES_SCRATCH, whole, left, p - 1, args)
        _finish(here, whole, left, last_panel - 1, args)
    release()


@jit.inlined
def multiply(weight, x, num_rows, bias, out, is_float32):  # type: ignore[no-untyped-def]
    """The whole product. weight: address of the twelve words that describe it; x and out are contiguous."""
    args = stack(128)
    for i in range(9):
        put_int64(args + 8 * i, get_int64(weight + 8 * i))
    panels, panel_bytes = _argument(weight, NUM_PANELS), _argument(weight, PANEL_BYTES)
    even = panels // (CHUNKS_PER_THREAD * _argument(weight, _THREADS))
    per_chunk = max(1, min(PANEL_BYTES_PER_CHUNK // panel_bytes, even))
    panel_chunks = -(-panels // per_chunk)
    if is_float32:
        put_int64(args + 8 * _OUT_TYPE, FLOAT32)
    width = 4 if _argument(args, _OUT_TYPE) == FLOAT32 else 2
    put_int64(args + 8 * _X, x)
    put_int64(args + 8 * _ROWS, num_rows)
    put_int64(args + 8 * _BIAS, bias)
    put_int64(args + 8 * _OUT, out)
    put_int64(args + 8 * _OUT_STRIDE, width * _argument(args, COLUMNS))
    put_int64(args + 8 * _PANELS, per_chunk)
    put_int64(args + 8 * _PANEL_CHUNKS, panel_chunks)
    num_chunks = panel_chunks * -(-num_rows // ROWS_PER_CHUNK)
    share(_argument(weight, _TEAM), _argument(weight, _FUNCTION), args, num_chunks)
