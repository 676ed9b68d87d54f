"""Products of bfloat16 in tiles: 32 rows at a time, then what is left.

What a tile has just stored can't be read at once, and rounding, above all a gate, takes as long as the tiles: so a
block's sums wait in memory and become results row by row between the tiles' steps of the next block.

Measured: milliseconds of processor time for the 120 products of SmolLM2-135M's layers, one thread, old and new in turns
on a shared machine, the least of 24. Before, each block was finished at once, and all blocks asked for their weights:

    rows      1     8    16    32    48    64   128   256
    before  15.9  15.7  17.1  20.0  40.5  36.0  81.8  88.4
    now     15.6  15.8  16.5  18.4  36.8  27.5  43.0  62.0

(Memory alone takes 15 for one thread; the speed changed twofold between 32 and 48 rows.) 30 gated products of 256 rows:
48.1 before, 34.6 with rows finished between steps, 29.9 with `exp_of_numbers`.

Tiles take operands from the first-level cache as fast as they multiply, and from the second a third more slowly. So
where a panel is small enough, rows are loaded in passing (TILELOADDT1) and the panel stays. Measured: TFLOP/s of one
thread in the machine's fast minutes, before and after, in turns (in its slow ones, all at 0.3 to 0.4: 0 to 8 % more,
but 5 % less where 64 to 256 rows of 1536 took the same instructions as before):

    rows                  64          128          512         2048
    960 x 576      0.89 1.06    1.05 1.28    1.04 1.26    0.98 1.28
    576 x 576      0.88 1.00    1.08 1.26    1.05 1.32    0.90 1.15
    3072 x 576     0.66 0.74    0.82 0.93    1.00 1.20    0.73 0.82    (gated)
    576 x 1536     0.82 0.83    0.95 0.93    0.94 1.04    0.86 0.96    (no panel that stays; fewer rows in a chunk)

A loop of nothing but tiles reaches 2.4 with such numbers. Cutting k so that parts of larger panels stay, their sums
between parts in memory, gained 3 to 8 % in fast minutes and lost 3 to 7 in slow ones.
"""

from __future__ import annotations

from typing import Any

from kernels.cpu import jit
from kernels.cpu.lanes import part, scratch_memory
from kernels.cpu.product_sums import OTHER, finish, finish_row, way_to_finish
from kernels.cpu.product_work import (
    IS_GATED,
    NUM_PANELS,
    NUM_THREADS,
    OUT,
    OUT_STRIDE,
    OUT_TYPE,
    PANEL_BYTES,
    PANELS,
    STEPS,
    WEIGHT,
    X_STRIDE,
    X,
    argument,
    span,
)
from kernels.cpu.tiles import (
    add_first_half,
    add_passing_half,
    add_second_half,
    clear_sums,
    configure,
    release,
    store_sums,
)
from kernels.cpu.vectors import FLOAT32, prefetch_later, prefetch_run

AHEAD_BYTES = 4096
"""How far ahead of their reading weights are asked for that nobody asked for before."""
_BLOCK, _LINES = 32, 32
"""Rows of a block; cache lines of weights that a step of tiles reads."""
_STEP_BYTES = 64 * _LINES
_STAYING_BYTES = 40 << 10
"""Of a panel that stays in the first-level cache from one block to the next, if the rows do not."""
_FOUR_BYTES = 4 * 64
_SUMS, _TWO_SUMS = 128 * _BLOCK, 2 * 128 * _BLOCK


def _make_multiply(num_row_tiles: int, is_cold: bool, add_first: Any = add_first_half) -> Any:
    """Of 16 or 32 rows; is_cold: asks for the weights that it reads itself, else for some that come later."""

    @part
    def multiply(  # type: ignore[no-untyped-def]
        x, stride, weights, steps, sums, later, fours, way, before, num_rows, place, out_stride
    ):
        """Sums of a block; meanwhile finishes the rows of the block before, whose sums lie at `before`, which may be
        the same place.

        later: what else to ask for, `fours` of four lines at each step.
        """
        clear_sums(num_row_tiles)
        last, end = before + 128 * num_rows, weights + _STEP_BYTES * steps
        while weights < end:
            add_first(num_row_tiles, x, stride, weights)
            if is_cold:
                prefetch_run(weights + AHEAD_BYTES, 16)
            else:
                for _ in range(fours):
                    prefetch_later(later, 4)
                    later += _FOUR_BYTES
            for _ in range(2):
                if before < last:
                    finish_row(way, before, place)
                    before += 128
                    place += out_stride
            add_second_half(num_row_tiles, weights + 64)
            if is_cold:
                prefetch_run(weights + AHEAD_BYTES + 1024, 16)
            x += 64
            weights += _STEP_BYTES
        while before < last:
            finish_row(way, before, place)
            before += 128
            place += out_stride
        store_sums(num_row_tiles, sums)

    return multiply


_one_cold, _two_cold = _make_multiply(1, True), _make_multiply(2, True)
_one_warm, _two_warm = _make_multiply(1, False), _make_multiply(2, False)
_two_passing = _make_multiply(2, False, add_passing_half)


@part
def _multiply_block(num_rows, is_cold, is_passing, *block):  # type: ignore[no-untyped-def]
    """A block of so many rows, or of 32; is_passing: the weights shall stay for the next one, the rows need not."""
    if num_rows > 16 and is_cold:
        _two_cold(*block)
    elif num_rows > 16 and is_passing:
        _two_passing(*block)
    elif num_rows > 16:
        _two_warm(*block)
    elif is_cold:
        _one_cold(*block)
    else:
        _one_warm(*block)


@part
def _multiply_rows(args, panel, last_panel, first_row, last_row, next_panel, is_first):  # type: ignore[no-untyped-def]
    """Some rows, blocks of 32 or one smaller block, times some panels.

    next_panel: the one that this thread is likely to take after these, -1: none; -2: all panels were read just now.
    is_first: nobody has asked for the first panel.
    """
    memory = scratch_memory(_TWO_SUMS)
    weight, panel_bytes, steps = argument(args, WEIGHT), argument(args, PANEL_BYTES), argument(args, STEPS) // 16
    x, stride = argument(args, X), argument(args, X_STRIDE)
    out, out_stride = argument(args, OUT), argument(args, OUT_STRIDE)
    width = (4 if argument(args, OUT_TYPE) == FLOAT32 else 2) * (16 if argument(args, IS_GATED) else 32)
    num_rows = last_row - first_row
    num_blocks = -(-num_rows // _BLOCK)
    is_passing = num_blocks > 1 and panel_bytes <= _STAYING_BYTES
    # All blocks of a panel together ask for the next one, into the second-level cache: no burst that they wait for.
    fours_per_step = -(-_LINES // (4 * num_blocks))
    configure(min(num_rows, 16), min(max(num_rows - 16, 0), 16))
    sums, way, before_rows, before_row, before_panel, place = memory, OTHER, 0, 0, 0, out
    for p in range(panel, last_panel):
        here, following = weight + p * panel_bytes, p + 1 if p + 1 < last_panel else next_panel
        later, later_end = weight + following * panel_bytes, weight + (following + 1) * panel_bytes
        if following < 0 or next_panel == -2:
            later_end = later
        for row in range(first_row, last_row, _BLOCK):
            before = sums
            # Where sums are finished row by row the next ones may take their place: the cache has more for weights.
            if not is_passing or way == OTHER:
                sums = memory + _SUMS - (sums - memory)
            fours = fours_per_step if later < later_end else 0
            rows = 0 if way == OTHER else before_rows
            is_cold = next_panel != -2 and (num_blocks == 1 or (is_first and p == panel and row == first_row))
            _multiply_block(
                num_rows, is_cold, is_passing,
                x + row * stride, stride, here, steps, sums, later, fours, way, before, rows, place, out_stride,
            )  # fmt: skip
            if way == OTHER and before_rows > 0:
                finish(before, before_row, before_rows, before_panel, args)
            before_rows, before_row, before_panel, way = min(_BLOCK, num_rows), row, p, way_to_finish(p, args)
            place = out + row * out_stride + p * width
            later += _FOUR_BYTES * fours * steps
    finish(sums, before_row, before_rows, before_panel, args)


@jit.chunks
def tile_chunk(args, chunk):  # type: ignore[no-untyped-def]
    """Rows and panels of a chunk."""
    panel, last_panel, first_row, last_row = span(args, chunk)
    whole = first_row + (last_row - first_row) // _BLOCK * _BLOCK
    next_panel = panel + argument(args, PANELS) * argument(args, NUM_THREADS)
    if next_panel >= argument(args, NUM_PANELS):
        next_panel = -1
    is_first = chunk < argument(args, NUM_THREADS)
    if whole > first_row:
        _multiply_rows(args, panel, last_panel, first_row, whole, next_panel, is_first)
        next_panel = -2
    if whole < last_row:
        _multiply_rows(args, panel, last_panel, whole, last_row, next_panel, is_first)
    release()
