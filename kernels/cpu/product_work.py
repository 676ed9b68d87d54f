"""The arguments of a product, a block of int64 words, and the part of the work that a chunk is."""

from __future__ import annotations

from kernels.cpu import jit
from kernels.cpu.vectors import get_int64

MOST_ROWS, LEAST_ROWS = 512, 128
"""Of a chunk, where there are so many."""
X_BYTES_PER_CHUNK = 768 << 10
"""So that x and two panels stay in a second-level cache of 2 MiB. In tiles, 512 to 2048 rows of 1536 took 10 to 14 %
less time in chunks of 256 rows than of 512; rows of 576 took 3 to 8 % more, so those keep 512."""

# First what a weight says (its own block goes on with how to run), then a call.
WEIGHT, PANEL_BYTES, NUM_PANELS, STEPS, COLUMNS, IS_GATED, ELEMENT, OUT_TYPE, X_STRIDE = range(9)
FUNCTION, TEAM, THREADS = range(9, 12)
X, ROWS, BIAS, OUT, OUT_STRIDE, PANELS, PANEL_CHUNKS, NUM_THREADS, CHUNK_ROWS = range(9, 18)
NUM_WORDS = 18


@jit.inlined
def argument(args, place):  # type: ignore[no-untyped-def]
    """A word of a block."""
    return get_int64(args + 8 * place)


@jit.inlined
def span(args, chunk):  # type: ignore[no-untyped-def]
    """First and last panel, first and last row of a chunk."""
    per_chunk, panel_chunks = argument(args, PANELS), argument(args, PANEL_CHUNKS)
    rows = argument(args, CHUNK_ROWS)
    panel, row = chunk % panel_chunks * per_chunk, chunk // panel_chunks * rows
    last_panel = min(panel + per_chunk, argument(args, NUM_PANELS))
    return panel, last_panel, row, min(row + rows, argument(args, ROWS))


@jit.inlined
def rows_per_chunk(num_rows, x_stride):  # type: ignore[no-untyped-def]
    """So many that x stays in the second-level cache, in chunks of about one size, of whole blocks of 32."""
    most = max(LEAST_ROWS, min(MOST_ROWS, X_BYTES_PER_CHUNK // x_stride // 32 * 32))
    num_chunks = -(-num_rows // most)
    return -(-num_rows // (32 * num_chunks)) * 32
