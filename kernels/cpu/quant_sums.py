"""The arguments of a product with a quantized weight, and what becomes of its sums."""

from __future__ import annotations

import numpy as np

from kernels.cpu import jit
from kernels.cpu.lanes import item_bytes, load, store
from kernels.cpu.quant_dots import load_int32_as_float32
from kernels.cpu.quant_tiles import BLOCK, TILE
from kernels.cpu.vectors import (
    BFLOAT16,
    exp_of_numbers,
    get_float32,
    get_int32,
    get_int64,
    load_float32,
    splat,
    store_bfloat16,
)

FIELDS = 8
"""Words that describe a weight: see WEIGHT and the following."""
# A weight: address of the first panel, bytes and (even) number of panels, its kind in KINDS or -1 for one scale per
# row, the number that stands for 0, whether panels of gate and up lie by turns, columns of the product. Then a call:
# addresses and types, the tile configuration or 0, the records' address and size, and how work is cut.
WEIGHT, PANEL_BYTES, NUM_PANELS, IN_FEATURES, KIND, ZERO, IS_GATED, COLUMNS = (8 * i for i in range(FIELDS))
X, X_TYPE, ROWS, BIAS, BIAS_TYPE, OUT, OUT_TYPE = (8 * i for i in range(FIELDS, FIELDS + 7))
TILES, RECORDS, RECORD_BYTES, SPARE_BYTES, CHUNKS = (8 * i for i in range(FIELDS + 7, FIELDS + 12))
NUM_WORDS = FIELDS + 12
ONE, NOTHING = np.float32(1), np.float32(0)
OTHER, PLAIN, GATE = range(3)
"""Ways to finish a row: `emit`, two vectors of bfloat16, a gate of bfloat16."""


@jit.inlined
def _gated(low, high):  # type: ignore[no-untyped-def]
    """silu(low) * high; what is NaN makes NaN as the dividend."""
    return low / (splat(ONE) + exp_of_numbers(splat(NOTHING) - low)) * high


@jit.inlined
def _scaled(products, start, factor, scales):  # type: ignore[no-untyped-def]
    """16 integers to results; start is added, then the activation's scale applied, then the weight's."""
    return load_int32_as_float32(products, start) * splat(get_float32(factor)) * load_float32(scales)


@jit.inlined
def emit(args, pair, row, low, high):  # type: ignore[no-untyped-def]
    """Adds the bias to one activation's results of a pair of panels, gates where the weight is gated, and stores."""
    columns, is_gated, kind = get_int64(args + COLUMNS), get_int64(args + IS_GATED), get_int64(args + OUT_TYPE)
    column = pair * TILE if is_gated else pair * BLOCK
    bias = get_int64(args + BIAS)
    if bias:
        bias_type = get_int64(args + BIAS_TYPE)
        second = columns + column if is_gated else column + TILE
        end = 2 * columns if is_gated else columns
        low = low + load(bias_type, bias + column * item_bytes(bias_type), columns - column)
        high = high + load(bias_type, bias + second * item_bytes(bias_type), end - second)
    size = item_bytes(kind)
    out = get_int64(args + OUT) + (row * columns + column) * size
    if is_gated:
        store(kind, out, _gated(low, high), columns - column)
    else:
        store(kind, out, low, columns - column)
        if column + TILE < columns:
            store(kind, out + TILE * size, high, columns - column - TILE)


@jit.inlined
def emit_scaled(args, pair, row, products, start, panel):  # type: ignore[no-untyped-def]
    """As `emit`, of integers."""
    k = (get_int64(args + IN_FEATURES) + 63) // 64 * 64
    record = get_int64(args + RECORDS) + row * get_int64(args + RECORD_BYTES) + k
    low = _scaled(products, start, record, panel)
    high = _scaled(products + 64, start, record, panel + get_int64(args + PANEL_BYTES))
    emit(args, pair, row, low, high)


@jit.inlined
def way_to_finish(args, pair):  # type: ignore[no-untyped-def]
    """How the rows of a pair of panels can be finished one by one."""
    is_gated = get_int64(args + IS_GATED)
    end = (pair + 1) * (TILE if is_gated else BLOCK)
    if end > get_int64(args + COLUMNS) or get_int64(args + BIAS) or get_int64(args + OUT_TYPE) != BFLOAT16:
        return OTHER
    return GATE if is_gated else PLAIN


@jit.inlined
def _finish(way, low, high, place):  # type: ignore[no-untyped-def]
    if way == GATE:
        store_bfloat16(place, _gated(low, high))
    else:
        store_bfloat16(place, low)
        store_bfloat16(place + 32, high)


@jit.inlined
def finish_float32(way, products, factor, scales, panel_bytes, place):  # type: ignore[no-untyped-def]
    """One activation's results of a pair of panels, from sums that need no scale."""
    _finish(way, load_float32(products), load_float32(products + 64), place)


@jit.inlined
def finish_int32(way, products, factor, scales, panel_bytes, place):  # type: ignore[no-untyped-def]
    """The same from integers; factor: address of the activation's scale and start, scales: of the first panel's."""
    start = get_int32(factor + 4)
    low = _scaled(products, start, factor, scales)
    _finish(way, low, _scaled(products + 64, start, factor, scales + panel_bytes), place)
