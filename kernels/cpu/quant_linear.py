"""Products with quantized weights: activations to bytes, then the panels, chunk by chunk (see team.py)."""

from __future__ import annotations

import numpy as np

from kernels.cpu import jit
from kernels.cpu.lanes import item_bytes
from kernels.cpu.quant_blocks import tile_pairs
from kernels.cpu.quant_dots import GROUP, channel_pair, grouped_panel
from kernels.cpu.quant_rows import quantize_groups, quantize_row, round_row
from kernels.cpu.quant_sums import (
    CHUNKS,
    FIELDS,
    IN_FEATURES,
    KIND,
    NUM_PANELS,
    PANEL_BYTES,
    RECORD_BYTES,
    RECORDS,
    ROWS,
    SPARE_BYTES,
    TILES,
    WEIGHT,
    X_TYPE,
    ZERO,
    X,
    emit,
    emit_scaled,
)
from kernels.cpu.quant_tiles import TILE, configure_tiles, release_tiles
from kernels.cpu.team import share
from kernels.cpu.vectors import get_int64, load_float32, put_int64, stack

ROWS_PER_CHUNK = 16
"""Activations that one chunk prepares; fewer are not worth a second thread."""


@jit.inlined
def _prepare(args, row):  # type: ignore[no-untyped-def]
    """One activation's record: bytes and scales; for a grouped weight on tiles, bfloat16."""
    k, kind, zero = get_int64(args + IN_FEATURES), get_int64(args + X_TYPE), get_int64(args + ZERO)
    x = get_int64(args + X) + row * k * item_bytes(kind)
    record = get_int64(args + RECORDS) + row * get_int64(args + RECORD_BYTES)
    if get_int64(args + KIND) < 0:
        quantize_row(kind, x, k // TILE, record, zero)
    elif get_int64(args + TILES):
        round_row(kind, x, k, record)
    else:
        quantize_groups(kind, x, k // GROUP, record, zero)


@jit.inlined
def _grouped_dots(args, pair):  # type: ignore[no-untyped-def]
    products = stack(512)
    k, panel_bytes, stride = (
        get_int64(args + IN_FEATURES),
        get_int64(args + PANEL_BYTES),
        get_int64(args + RECORD_BYTES),
    )
    panel, kind = get_int64(args + WEIGHT) + 2 * pair * panel_bytes, get_int64(args + KIND)
    row, num_rows = 0, get_int64(args + ROWS)
    while row < num_rows:
        left = num_rows - row
        count = 4 if left >= 4 else 2 if left >= 2 else 1
        record = get_int64(args + RECORDS) + row * stride
        grouped_panel(count, kind, record, record + k, stride, panel, k // GROUP, products)
        grouped_panel(count, kind, record, record + k, stride, panel + panel_bytes, k // GROUP, products + 256)
        for r in range(count):
            emit(args, pair, row + r, load_float32(products + 64 * r), load_float32(products + 256 + 64 * r))
        row += count


@jit.inlined
def _channel_dots(args, pair):  # type: ignore[no-untyped-def]
    products = stack(512)
    k, panel_bytes = (get_int64(args + IN_FEATURES) + 63) // 64 * 64, get_int64(args + PANEL_BYTES)
    panel, stride = get_int64(args + WEIGHT) + 2 * pair * panel_bytes, get_int64(args + RECORD_BYTES)
    row, num_rows = 0, get_int64(args + ROWS)
    while row < num_rows:
        left = num_rows - row
        count = 4 if left >= 4 else 2 if left >= 2 else 1
        record = get_int64(args + RECORDS) + row * stride
        channel_pair(count, record, record + k + 4, stride, panel + 64, panel_bytes, k // 4, products)
        for r in range(count):
            emit_scaled(args, pair, row + r, products + 128 * r, np.int32(0), panel)
        row += count


@jit.chunks
def prepare_chunk(args, chunk):  # type: ignore[no-untyped-def]
    """The records of some activations."""
    for row in range(chunk * ROWS_PER_CHUNK, min((chunk + 1) * ROWS_PER_CHUNK, get_int64(args + ROWS))):
        _prepare(args, row)


@jit.chunks
def product_chunk(args, chunk):  # type: ignore[no-untyped-def]
    """All activations times some pairs of panels."""
    num_pairs, num_chunks = get_int64(args + NUM_PANELS) // 2, get_int64(args + CHUNKS)
    configuration, kind = get_int64(args + TILES), get_int64(args + KIND)
    first, last = chunk * num_pairs // num_chunks, (chunk + 1) * num_pairs // num_chunks
    if configuration:
        configure_tiles(configuration)
        records = (get_int64(args + ROWS) + TILE - 1) // TILE * TILE * get_int64(args + RECORD_BYTES)
        spare = get_int64(args + RECORDS) + records + chunk * get_int64(args + SPARE_BYTES)
        tile_pairs(args, first, last, spare)
        release_tiles()
        return
    for pair in range(first, last):
        if kind < 0:
            _channel_dots(args, pair)
        else:
            _grouped_dots(args, pair)


@jit.chunks
def multiply(call, unused):  # type: ignore[no-untyped-def]
    """The whole product. A call's words: the team, the functions that prepare and multiply, the address of the weight's
    words, and those from `X` to `CHUNKS`. Scratch lies at `RECORDS`: a record per activation, in whole tiles, then
    SPARE_BYTES per chunk."""
    state, prepare, product, weight = get_int64(call), get_int64(call + 8), get_int64(call + 16), get_int64(call + 24)
    args = stack(8 * 20)
    for i in range(FIELDS):
        put_int64(args + 8 * i, get_int64(weight + 8 * i))
    for place in range(X, CHUNKS + 8, 8):
        put_int64(args + place, get_int64(call + 32 + place - X))
    share(state, prepare, args, (get_int64(args + ROWS) + ROWS_PER_CHUNK - 1) // ROWS_PER_CHUNK)
    share(state, product, args, get_int64(args + CHUNKS))
