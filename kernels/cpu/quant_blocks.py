"""Many activations times pairs of panels of a quantized weight, in tiles: bytes as they lie, or bfloat16.

As in `product_tiles` a block's sums become results between the tiles' steps of the next block.

Measured: milliseconds of processor time for the products of SmolLM2-135M's layers (4-bit with minima: of a third of
them), one thread, old and new in turns on a shared machine, the least of 24. Before, blocks were finished at once:

    rows             1     8    16    32    64   128   256
    int8, before  11.4  14.5  15.6  22.5  20.3  48.7  59.1
    int8, now     11.5  12.7  13.1  16.5  14.4  32.4  39.1
    4-bit, before              8.0        12.1        27.5
    4-bit, now                 7.5        11.0        22.5

Bytes of activations are loaded in passing (see product_tiles): with that, in turns with what was before, products of 64
to 512 rows took 0 to 8 % less time (median of each shape), of one row as long.
"""

from __future__ import annotations

from typing import Any

from kernels.cpu.lanes import part
from kernels.cpu.quant_dots import GROUP
from kernels.cpu.quant_sums import (
    COLUMNS,
    IN_FEATURES,
    IS_GATED,
    KIND,
    OTHER,
    OUT,
    PANEL_BYTES,
    RECORD_BYTES,
    RECORDS,
    ROWS,
    WEIGHT,
    emit,
    emit_scaled,
    finish_float32,
    finish_int32,
    way_to_finish,
)
from kernels.cpu.quant_tiles import BLOCK, TILE, unpack_panel
from kernels.cpu.tiles import (
    add_first_bytes,
    add_first_panel,
    add_second_bytes,
    add_second_panel,
    clear_sums,
    store_sums,
)
from kernels.cpu.vectors import get_int32, get_int64, load_float32, prefetch_later, prefetch_run, stack

_LINES = 32
"""Cache lines of weights that a step of tiles reads."""
_AHEAD_BYTES = 2048
"""How far ahead of their reading weights are asked for that nobody asked for before, in each panel."""
_SUMS, _TWO_SUMS = 128 * BLOCK, 2 * 128 * BLOCK


def _make_multiply(num_row_tiles: int, add_first: Any, add_second: Any, finish_row: Any) -> Any:
    """Of 16 or 32 activations, whose sums become results by finish_row."""

    @part
    def multiply(  # type: ignore[no-untyped-def]
        x,
        stride,
        weights,
        panel_stride,
        steps,
        sums,
        is_cold,
        later,
        fours,
        way,
        before,
        num_rows,
        per_step,
        factor,
        scales,
        panel_bytes,
        place,
        out_stride,
    ):
        """Sums of a block; meanwhile finishes the rows of the block before, whose sums lie at `before`.

        is_cold: asks for the weights that it reads itself; later: what else to ask for, `fours` of four lines at each
        step. per_step: rows to finish at each step. factor, scales, place: see finish_row.
        """
        clear_sums(num_row_tiles)
        last, end = before + 128 * num_rows, weights + 1024 * steps
        while weights < end:
            add_first(num_row_tiles, x, stride, weights)
            if is_cold:
                prefetch_run(weights + _AHEAD_BYTES, 16)
                prefetch_run(weights + panel_stride + _AHEAD_BYTES, 16)
            for _ in range(fours):
                prefetch_later(later, 4)
                later += 256
            add_second(num_row_tiles, weights + panel_stride)
            for _ in range(per_step):
                if before < last:
                    finish_row(way, before, factor, scales, panel_bytes, place)
                    before += 128
                    factor += stride
                    place += out_stride
            x += 64
            weights += 1024
        store_sums(num_row_tiles, sums)
        while before < last:
            finish_row(way, before, factor, scales, panel_bytes, place)
            before += 128
            factor += stride
            place += out_stride

    return multiply


_bytes_1, _bytes_2 = (_make_multiply(n, add_first_bytes, add_second_bytes, finish_int32) for n in (1, 2))
_floats_1, _floats_2 = (_make_multiply(n, add_first_panel, add_second_panel, finish_float32) for n in (1, 2))


@part
def _finish_block(args, is_bytes, sums, pair, row, num_rows):  # type: ignore[no-untyped-def]
    """Results of a block that can't be finished row by row."""
    k, panel_bytes = (get_int64(args + IN_FEATURES) + 63) // 64 * 64, get_int64(args + PANEL_BYTES)
    panel, stride = get_int64(args + WEIGHT) + 2 * pair * panel_bytes, get_int64(args + RECORD_BYTES)
    start = get_int64(args + RECORDS) + row * stride + k + 4
    for r in range(num_rows):
        if is_bytes:
            emit_scaled(args, pair, row + r, sums + 128 * r, get_int32(start + r * stride), panel)
        else:
            emit(args, pair, row + r, load_float32(sums + 128 * r), load_float32(sums + 128 * r + 64))


@part
def tile_pairs(args, first_pair, last_pair, unpacked):  # type: ignore[no-untyped-def]
    """All activations times some pairs of panels; unpacked: room for a pair in bfloat16, if the weight is grouped."""
    scratch = stack(_TWO_SUMS)
    features, panel_bytes, is_bytes = (
        get_int64(args + IN_FEATURES),
        get_int64(args + PANEL_BYTES),
        get_int64(args + KIND) < 0,
    )
    k, stride, num_rows = (features + 63) // 64 * 64, get_int64(args + RECORD_BYTES), get_int64(args + ROWS)
    steps = k // 64 if is_bytes else features // GROUP
    per_step = -(-BLOCK // steps)
    columns = get_int64(args + COLUMNS)
    width, num_blocks = 2 * (TILE if get_int64(args + IS_GATED) else BLOCK), -(-num_rows // BLOCK)
    fours_per_step = -(-_LINES // (4 * num_blocks))
    sums, way, before_rows, before_row, before_pair = scratch, OTHER, 0, 0, first_pair
    factor, scales, place = 0, 0, 0
    for pair in range(first_pair, last_pair):
        panel = get_int64(args + WEIGHT) + 2 * pair * panel_bytes
        later = panel + 2 * panel_bytes
        later_end = later + 2 * panel_bytes if pair + 1 < last_pair else later
        weights, panel_stride = panel + 64, panel_bytes
        if not is_bytes:
            unpack_panel(get_int64(args + KIND), panel, features // GROUP, unpacked)
            unpack_panel(get_int64(args + KIND), panel + panel_bytes, features // GROUP, unpacked + 32 * features)
            weights, panel_stride = unpacked, 32 * features
        for row in range(0, num_rows, BLOCK):
            before, sums = sums, scratch + _SUMS - (sums - scratch)
            rows = 0 if way == OTHER else before_rows
            is_cold = is_bytes and (num_blocks == 1 or (pair == first_pair and row == 0))
            fours = fours_per_step if later < later_end and not is_cold else 0
            x = get_int64(args + RECORDS) + row * stride
            if is_bytes and num_rows - row > TILE:
                _bytes_2(
                    x, stride, weights, panel_stride, steps, sums, is_cold, later, fours,
                    way, before, rows, per_step, factor, scales, panel_bytes, place, 2 * columns,
                )  # fmt: skip
            elif is_bytes:
                _bytes_1(
                    x, stride, weights, panel_stride, steps, sums, is_cold, later, fours,
                    way, before, rows, per_step, factor, scales, panel_bytes, place, 2 * columns,
                )  # fmt: skip
            elif num_rows - row > TILE:
                _floats_2(
                    x, stride, weights, panel_stride, steps, sums, is_cold, later, fours,
                    way, before, rows, per_step, factor, scales, panel_bytes, place, 2 * columns,
                )  # fmt: skip
            else:
                _floats_1(
                    x, stride, weights, panel_stride, steps, sums, is_cold, later, fours,
                    way, before, rows, per_step, factor, scales, panel_bytes, place, 2 * columns,
                )  # fmt: skip
            if way == OTHER and before_rows > 0:
                _finish_block(args, is_bytes, before, before_pair, before_row, before_rows)
            before_rows, before_row, before_pair = min(BLOCK, num_rows - row), row, pair
            way, factor, scales = way_to_finish(args, pair), x + k, panel
            place = get_int64(args + OUT) + row * 2 * columns + pair * width
            later += 256 * fours * steps
    if before_rows > 0:
        _finish_block(args, is_bytes, sums, before_pair, before_row, before_rows)
