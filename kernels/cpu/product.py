"""x @ weight.T for packed weights: how a call is cut into chunks, and the chunks in vector registers.

The order over k is one per output, row and instruction set, so a row has the same bits in every batch.
"""

from __future__ import annotations

from kernels.cpu import jit
from kernels.cpu.dots import MAX_ROWS, multiply_rows
from kernels.cpu.product_sums import finish
from kernels.cpu.product_work import (
    BIAS,
    CHUNK_ROWS,
    COLUMNS,
    ELEMENT,
    FUNCTION,
    NUM_PANELS,
    NUM_THREADS,
    NUM_WORDS,
    OUT,
    OUT_STRIDE,
    OUT_TYPE,
    PANEL_BYTES,
    PANEL_CHUNKS,
    PANELS,
    ROWS,
    STEPS,
    TEAM,
    THREADS,
    WEIGHT,
    X_STRIDE,
    X,
    argument,
    rows_per_chunk,
    span,
)
from kernels.cpu.team import share
from kernels.cpu.vectors import FLOAT32, get_int64, put_int64, stack

AHEAD_BYTES = 4096
"""How far ahead of their reading weights are asked for."""
PANEL_BYTES_PER_CHUNK = 128 << 10
CHUNKS_PER_THREAD = 8
_SCRATCH = 128 * MAX_ROWS
_ARGUMENTS_BYTES = 8 * NUM_WORDS


@jit.chunks
def vector_chunk(args, chunk):  # type: ignore[no-untyped-def]
    """Rows and panels of a chunk in vector registers."""
    scratch = stack(_SCRATCH)
    panel, last_panel, first_row, last_row = span(args, chunk)
    weight, panel_bytes, steps = argument(args, WEIGHT), argument(args, PANEL_BYTES), argument(args, STEPS)
    x, stride, element = argument(args, X), argument(args, X_STRIDE), argument(args, ELEMENT)
    for p in range(panel, last_panel):
        place, row = weight + p * panel_bytes, first_row
        while row < last_row:
            done = multiply_rows(element, last_row - row, x + row * stride, stride, place, steps, AHEAD_BYTES, scratch)
            finish(scratch, row, done, p, args)
            row += done


@jit.chunks
def multiply(call, unused):  # type: ignore[no-untyped-def]
    """The whole product. A call's words: the weight (address of the twelve words that describe it), x, rows, bias, out,
    and whether out is float32. x and out are contiguous."""
    weight, x, num_rows = argument(call, 0), argument(call, 1), argument(call, 2)
    bias, out, is_float32 = argument(call, 3), argument(call, 4), argument(call, 5)
    args = stack(_ARGUMENTS_BYTES)
    for i in range(9):
        put_int64(args + 8 * i, get_int64(weight + 8 * i))
    panels, panel_bytes = argument(weight, NUM_PANELS), argument(weight, PANEL_BYTES)
    even = panels // (CHUNKS_PER_THREAD * argument(weight, THREADS))
    per_chunk = max(1, min(PANEL_BYTES_PER_CHUNK // panel_bytes, even))
    panel_chunks = -(-panels // per_chunk)
    if is_float32 != 0:
        put_int64(args + 8 * OUT_TYPE, FLOAT32)
    width = 4 if argument(args, OUT_TYPE) == FLOAT32 else 2
    put_int64(args + 8 * X, x)
    put_int64(args + 8 * ROWS, num_rows)
    put_int64(args + 8 * BIAS, bias)
    put_int64(args + 8 * OUT, out)
    put_int64(args + 8 * OUT_STRIDE, width * argument(args, COLUMNS))
    put_int64(args + 8 * PANELS, per_chunk)
    put_int64(args + 8 * PANEL_CHUNKS, panel_chunks)
    put_int64(args + 8 * NUM_THREADS, argument(weight, THREADS))
    chunk_rows = rows_per_chunk(num_rows, argument(args, X_STRIDE))
    put_int64(args + 8 * CHUNK_ROWS, chunk_rows)
    num_chunks = panel_chunks * -(-num_rows // chunk_rows)
    share(argument(weight, TEAM), argument(weight, FUNCTION), args, num_chunks)
