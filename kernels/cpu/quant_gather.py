"""Rows of quantized weights as plain numbers, gathered: the embedding, where it is the output matrix too."""

from __future__ import annotations

import numpy as np

from kernels.cpu import jit
from kernels.cpu.call import SharedCall
from kernels.cpu.lanes import item_bytes, store
from kernels.cpu.quant_dots import GROUP
from kernels.cpu.quant_sums import IN_FEATURES, KIND, PANEL_BYTES, WEIGHT, ZERO
from kernels.cpu.vectors import (
    get_float32,
    get_int32,
    get_int64,
    load_float16,
    load_float32,
    put_float32,
    splat,
    stack,
    store_float32,
)

ROWS_PER_CHUNK = 8
_LANES = 16


@jit.inlined
def _lane_of_halves(address, lane):  # type: ignore[no-untyped-def]
    halves = stack(64)
    store_float32(halves, load_float16(address))
    return get_float32(halves + 4 * lane)


@jit.inlined
def _numbers(numbers, lane, k, bits, zero, out):  # type: ignore[no-untyped-def]
    """Numbers k .. k + 15 of a row of a panel, less what stands for 0, as float32."""
    step = 32 // bits
    for first in range(0, _LANES, step):
        word = np.int64(get_int32(numbers + (k + first) * 2 * bits + 4 * lane))
        for i in range(step):
            # Four bits: the low halves of the four bytes come first.
            shift = 8 * (i & 3) + (4 if i > 3 else 0)
            number = (word >> shift) & ((1 << bits) - 1)
            put_float32(out + 4 * (first + i), np.float32(number - zero))


@jit.inlined
def _channel_row(weight, panel, lane, kind, out):  # type: ignore[no-untyped-def]
    values = stack(64)
    scale = splat(get_float32(panel + 4 * lane))
    for k in range(0, get_int64(weight + IN_FEATURES), _LANES):
        _numbers(panel + 64, lane, k, 8, get_int64(weight + ZERO), values)
        store(kind, out + k * item_bytes(kind), load_float32(values) * scale, _LANES)


@jit.inlined
def _grouped_row(weight, panel, lane, kind, out):  # type: ignore[no-untyped-def]
    values = stack(64)
    num_groups, weight_kind = get_int64(weight + IN_FEATURES) // GROUP, get_int64(weight + KIND)
    block = (num_groups + 1) // 2 * 64
    has_mins, bits = weight_kind & 1, 4 if weight_kind < 2 else 8
    numbers = panel + (2 * block if has_mins else block)
    for g in range(num_groups):
        scale = splat(_lane_of_halves(panel + 32 * g, lane))
        low = splat(_lane_of_halves(panel + block + 32 * g, lane) if has_mins else np.float32(0))
        for k in range(GROUP * g, GROUP * (g + 1), _LANES):
            _numbers(numbers, lane, k, bits, get_int64(weight + ZERO), values)
            store(kind, out + k * item_bytes(kind), load_float32(values) * scale + low, _LANES)


@jit.chunks
def _gather_chunk(args, chunk):  # type: ignore[no-untyped-def]
    weight, ids, num_ids = get_int64(args), get_int64(args + 8), get_int64(args + 16)
    kind, out = get_int64(args + 24), get_int64(args + 32)
    row_bytes = get_int64(weight + IN_FEATURES) * item_bytes(kind)
    for i in range(chunk * ROWS_PER_CHUNK, min((chunk + 1) * ROWS_PER_CHUNK, num_ids)):
        row = get_int64(ids + 8 * i)
        panel = get_int64(weight + WEIGHT) + row // _LANES * get_int64(weight + PANEL_BYTES)
        if get_int64(weight + KIND) < 0:
            _channel_row(weight, panel, row % _LANES, kind, out + i * row_bytes)
        else:
            _grouped_row(weight, panel, row % _LANES, kind, out + i * row_bytes)


_gather = SharedCall(_gather_chunk, 5)


def gather(weight: int, ids: int, num_ids: int, kind: int, out: int) -> None:
    """Writes rows to out as numbers of a kind; all but num_ids and kind are addresses, weight's that of its words.

    ids are int64 and within the weight, which is not gated. number * scale, plus the minimum where there is one, in
    float32, then rounded.
    """
    _gather(-(-num_ids // ROWS_PER_CHUNK), weight, ids, num_ids, kind, out)
