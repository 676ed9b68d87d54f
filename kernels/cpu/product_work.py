"""The arguments of a product, a block of int64 words, and the part of the work that a chunk is."""

from __future__ import annotations

from kernels.cpu import jit
from kernels.cpu.vectors import get_int64

ROWS_PER_CHUNK = 512

# First what a weight says (its own block goes on with how to run), then a call.
WEIGHT, PANEL_BYTES, NUM_PANELS, STEPS, COLUMNS, IS_GATED, ELEMENT, OUT_TYPE, X_STRIDE = range(9)
FUNCTION, TEAM, THREADS = range(9, 12)
X, ROWS, BIAS, OUT, OUT_STRIDE, PANELS, PANEL_CHUNKS, NUM_THREADS = range(9, 17)
NUM_WORDS = 17


@jit.inlined
def argument(args, place):  # type: ignore[no-untyped-def]
    """A word of a block."""
    return get_int64(args + 8 * place)


@jit.inlined
def span(args, chunk):  # type: ignore[no-untyped-def]
    """First and last panel, first and last row of a chunk."""
    per_chunk, panel_chunks = argument(args, PANELS), argument(args, PANEL_CHUNKS)
    panel, row = chunk % panel_chunks * per_chunk, chunk // panel_chunks * ROWS_PER_CHUNK
    last_panel = min(panel + per_chunk, argument(args, NUM_PANELS))
    return panel, last_panel, row, min(row + ROWS_PER_CHUNK, argument(args, ROWS))
