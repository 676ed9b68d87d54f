"""Products with quantized weights: activations to bytes, then the panels, chunk by chunk (see team.py)."""

from __future__ import annotations

import numpy as np

from kernels.cpu import jit
from kernels.cpu.lanes import item_bytes, load, store
from kernels.cpu.quant_dots import GROUP, channel_pair, grouped_panel, load_int32_as_float32
from kernels.cpu.quant_rows import quantize_groups, quantize_row, round_row
from kernels.cpu.quant_tiles import BLOCK, TILE, configure_tiles, release_tiles, tile_product, unpack_panel
from kernels.cpu.team import share
from kernels.cpu.vectors import exp, get_float32, get_int32, get_int64, load_float32, put_int64, splat, stack

FIELDS = 8
"""Words that describe a weight: see WEIGHT and the following."""
# A weight: address of the first panel, bytes and (even) number of panels, its kind in KINDS or -1 for one scale per
# row, the number that stands for 0, whether panels of gate and up lie by turns, columns of the product. Then a call:
# addresses and types, the tile configuration or 0, the records' address and size, and how work is cut.
WEIGHT, PANEL_BYTES, NUM_PANELS, IN_FEATURES, KIND, ZERO, IS_GATED, COLUMNS = (8 * i for i in range(FIELDS))
_X, _X_TYPE, _ROWS, _BIAS, _BIAS_TYPE, _OUT, _OUT_TYPE = (8 * i for i in range(FIELDS, FIELDS + 7))
_TILES, _RECORDS, _RECORD_BYTES, _SPARE_BYTES, _CHUNKS = (8 * i for i in range(FIELDS + 7, FIELDS + 12))
NUM_WORDS = FIELDS + 12
ROWS_PER_CHUNK = 16
"""Activations that one chunk prepares; fewer are not worth a second thread."""
ONE, NOTHING = np.float32(1), np.float32(0)


@jit.inlined
def _prepare(args, row):  # type: ignore[no-untyped-def]
    """One activation's record: bytes and scales; for a grouped weight on tiles, bfloat16."""
    k, kind, zero = get_int64(args + IN_FEATURES), get_int64(args + _X_TYPE), get_int64(args + ZERO)
    x = get_int64(args + _X) + row * k * item_bytes(kind)
    record = get_int64(args + _RECORDS) + row * get_int64(args + _RECORD_BYTES)
    if get_int64(args + KIND) < 0:
        quantize_row(kind, x, k // TILE, record, zero)
    elif get_int64(args + _TILES):
        round_row(kind, x, k, record)
    else:
        quantize_groups(kind, x, k // GROUP, record, zero)


@jit.inlined
def _emit(args, pair, row, low, high):  # type: ignore[no-untyped-def]
    """Adds the bias to one activation's results of a pair of panels, gates where the weight is gated, and stores."""
    columns, is_gated, kind = get_int64(args + COLUMNS), get_int64(args + IS_GATED), get_int64(args + _OUT_TYPE)
    column = pair * TILE if is_gated else pair * BLOCK
    bias = get_int64(args + _BIAS)
    if bias:
        bias_type = get_int64(args + _BIAS_TYPE)
        second = columns + column if is_gated else column + TILE
        end = 2 * columns if is_gated else columns
        low = low + load(bias_type, bias + column * item_bytes(bias_type), columns - column)
        high = high + load(bias_type, bias + second * item_bytes(bias_type), end - second)
    size = item_bytes(kind)
    out = get_int64(args + _OUT) + (row * columns + column) * size
    if is_gated:
        store(kind, out, low / (splat(ONE) + exp(splat(NOTHING) - low)) * high, columns - column)
    else:
        store(kind, out, low, columns - column)
        if column + TILE < columns:
            store(kind, out + TILE * size, high, columns - column - TILE)


@jit.inlined
def _emit_scaled(args, pair, row, products, start, panel):  # type: ignore[no-untyped-def]
    """Integers to results: start is added, then the activation's scale applied, then the weight's."""
    k = (get_int64(args + IN_FEATURES) + 63) // 64 * 64
    record = get_int64(args + _RECORDS) + row * get_int64(args + _RECORD_BYTES) + k
    factor = splat(get_float32(record))
    low = load_int32_as_float32(products, start) * factor * load_float32(panel)
    high = load_int32_as_float32(products + 64, start) * factor * load_float32(panel + get_int64(args + PANEL_BYTES))
    _emit(args, pair, row, low, high)


@jit.inlined
def _grouped_dots(args, pair):  # type: ignore[no-untyped-def]
    products = stack(512)
    k, panel_bytes, stride = (
        get_int64(args + IN_FEATURES),
        get_int64(args + PANEL_BYTES),
        get_int64(args + _RECORD_BYTES),
    )
    panel, kind = get_int64(args + WEIGHT) + 2 * pair * panel_bytes, get_int64(args + KIND)
    row, num_rows = 0, get_int64(args + _ROWS)
    while row < num_rows:
        left = num_rows - row
        count = 4 if left >= 4 else 2 if left >= 2 else 1
        record = get_int64(args + _RECORDS) + row * stride
        grouped_panel(count, kind, record, record + k, stride, panel, k // GROUP, products)
        grouped_panel(count, kind, record, record + k, stride, panel + panel_bytes, k // GROUP, products + 256)
        for r in range(count):
            _emit(args, pair, row + r, load_float32(products + 64 * r), load_float32(products + 256 + 64 * r))
        row += count


@jit.inlined
def _channel_dots(args, pair):  # type: ignore[no-untyped-def]
    products = stack(512)
    k, panel_bytes = (get_int64(args + IN_FEATURES) + 63) // 64 * 64, get_int64(args + PANEL_BYTES)
    panel, stride = get_int64(args + WEIGHT) + 2 * pair * panel_bytes, get_int64(args + _RECORD_BYTES)
    row, num_rows = 0, get_int64(args + _ROWS)
    while row < num_rows:
        left = num_rows - row
        count = 4 if left >= 4 else 2 if left >= 2 else 1
        record = get_int64(args + _RECORDS) + row * stride
        channel_pair(count, record, record + k + 4, stride, panel + 64, panel_bytes, k // 4, products)
        for r in range(count):
            _emit_scaled(args, pair, row + r, products + 128 * r, np.int32(0), panel)
        row += count


@jit.inlined
def _channel_tiles(args, pair):  # type: ignore[no-untyped-def]
    products = stack(4096)
    k, panel_bytes = (get_int64(args + IN_FEATURES) + 63) // 64 * 64, get_int64(args + PANEL_BYTES)
    panel, stride = get_int64(args + WEIGHT) + 2 * pair * panel_bytes, get_int64(args + _RECORD_BYTES)
    row, num_rows = 0, get_int64(args + _ROWS)
    while row < num_rows:
        tiles = 2 if num_rows - row > TILE else 1
        record = get_int64(args + _RECORDS) + row * stride
        tile_product(tiles, 1, record, stride, panel + 64, panel_bytes, k // 64, products)
        for r in range(min(num_rows - row, TILE * tiles)):
            _emit_scaled(args, pair, row + r, products + 128 * r, get_int32(record + r * stride + k + 4), panel)
        row += TILE * tiles


@jit.inlined
def _grouped_tiles(args, pair, unpacked):  # type: ignore[no-untyped-def]
    products = stack(4096)
    k, panel_bytes, kind = get_int64(args + IN_FEATURES), get_int64(args + PANEL_BYTES), get_int64(args + KIND)
    panel, stride = get_int64(args + WEIGHT) + 2 * pair * panel_bytes, get_int64(args + _RECORD_BYTES)
    unpack_panel(kind, panel, k // GROUP, unpacked)
    unpack_panel(kind, panel + panel_bytes, k // GROUP, unpacked + 32 * k)
    row, num_rows = 0, get_int64(args + _ROWS)
    while row < num_rows:
        tiles = 2 if num_rows - row > TILE else 1
        tile_product(
            tiles, 0, get_int64(args + _RECORDS) + row * stride, stride, unpacked, 32 * k, k // GROUP, products
        )
        for r in range(min(num_rows - row, TILE * tiles)):
            _emit(args, pair, row + r, load_float32(products + 128 * r), load_float32(products + 128 * r + 64))
        row += TILE * tiles


@jit.chunks
def prepare_chunk(args, chunk):  # type: ignore[no-untyped-def]
    """The records of some activations."""
    for row in range(chunk * ROWS_PER_CHUNK, min((chunk + 1) * ROWS_PER_CHUNK, get_int64(args + _ROWS))):
        _prepare(args, row)


@jit.chunks
def product_chunk(args, chunk):  # type: ignore[no-untyped-def]
    """All activations times some pairs of panels."""
    num_pairs, num_chunks = get_int64(args + NUM_PANELS) // 2, get_int64(args + _CHUNKS)
    configuration, kind = get_int64(args + _TILES), get_int64(args + KIND)
    if configuration:
        configure_tiles(configuration)
    for pair in range(chunk * num_pairs // num_chunks, (chunk + 1) * num_pairs // num_chunks):
        if kind < 0 and configuration:
            _channel_tiles(args, pair)
        elif kind < 0:
            _channel_dots(args, pair)
        elif configuration:
            records = (get_int64(args + _ROWS) + TILE - 1) // TILE * TILE * get_int64(args + _RECORD_BYTES)
            _grouped_tiles(args, pair, get_int64(args + _RECORDS) + records + chunk * get_int64(args + _SPARE_BYTES))
        else:
            _grouped_dots(args, pair)
    if configuration:
        release_tiles()


@jit.inlined
def multiply(  # type: ignore[no-untyped-def]
    state,
    prepare,
    product,
    weight,
    x,
    x_type,
    num_rows,
    bias,
    bias_type,
    out,
    out_type,
    tiles,
    records,
    record_bytes,
    spare_bytes,
    num_chunks,
):
    """The whole product; addresses and types as `_X` and the following say. Scratch lies at `records`: a record per
    activation, in whole tiles, then spare_bytes per chunk."""
    args = stack(8 * 20)
    for i in range(FIELDS):
        put_int64(args + 8 * i, get_int64(weight + 8 * i))
    put_int64(args + _X, x)
    put_int64(args + _X_TYPE, x_type)
    put_int64(args + _ROWS, num_rows)
    put_int64(args + _BIAS, bias)
    put_int64(args + _BIAS_TYPE, bias_type)
    put_int64(args + _OUT, out)
    put_int64(args + _OUT_TYPE, out_type)
    put_int64(args + _TILES, tiles)
    put_int64(args + _RECORDS, records)
    put_int64(args + _RECORD_BYTES, record_bytes)
    put_int64(args + _SPARE_BYTES, spare_bytes)
    put_int64(args + _CHUNKS, num_chunks)
    share(state, prepare, args, (num_rows + ROWS_PER_CHUNK - 1) // ROWS_PER_CHUNK)
    share(state, product, args, num_chunks)
