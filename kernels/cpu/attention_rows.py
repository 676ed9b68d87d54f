"""What attention does with a row between its products: weights of a tile, joining tiles, the output.

A result of a row is its weighted sum (float32), 16 sums of weights, and the highest score; it stands for some keys.
Joining results in the order of their keys is the only way that tiles meet, so a row has the same bits however its tiles
were shared out.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from kernels.cpu.lanes import count_from, greater, keep_between, part, power_of_two, power_of_two_of_floor, store
from kernels.cpu.vectors import (
    divide,
    exp,
    fma,
    get_float32,
    load_float32,
    max_lanes,
    put_float32,
    splat,
    store_float32,
    sum_lanes,
)

RESULT_EXTRA_BYTES = 128
"""Of a result, after its weighted sum: 64 of sums, 64 of which the first 4 are the highest score."""
_f32 = numba.float32
LEAST = -3.0e38
"""A highest score below this means that no key was seen."""
LOG2_E = 1.4426950408889634


@part
def _finite(highest):  # type: ignore[no-untyped-def]
    """The highest score, or 0 where no key was seen: minus infinity must not be taken from itself."""
    return highest if highest > _f32(LEAST) else _f32(0)


@part
def transform(scores, groups, first, scale, softcap, slope, position):  # type: ignore[no-untyped-def]
    """Scores to logits, in place: scaled, capped, shifted by their distance. first: the position of the first key."""
    one, two = splat(_f32(1)), splat(_f32(2))
    for group in range(groups):
        place = scores + group * 64
        x = load_float32(place) * splat(scale)
        if softcap > 0:
            # tanh(x) = 1 - 2 / (e ** 2x + 1)
            x = splat(softcap) * (one - divide(two, exp(two * divide(x, splat(softcap))) + one))
        if slope != 0:
            x = fma(splat(slope), count_from(first + group * 16 - position), x)
        store_float32(place, x)


def make_weigh(store_weights: Any) -> Any:
    """With weights as store_weights puts them."""

    @part
    def weigh(scores, groups, first, low, high, factor, result, weight_bytes):  # type: ignore[no-untyped-def]
        """Scores of one row to weights 2 ** ((score - highest) * factor), in place; the rest of the row's result.

        first: the position of the first key; keys outside low..high get no weight. weight_bytes: of 16 weights.
        """
        # A chunk's last tile has, for most rows, groups that they do not see.
        begin, end = max(low - first, 0) // 16, min(max(high - first + 16, 0) // 16, groups)
        highest = splat(_f32(-np.inf))
        for group in range(begin, end):
            x, position = load_float32(scores + group * 64), first + group * 16
            if position < low or position + 15 > high:
                x = keep_between(x, position, low, high)
                store_float32(scores + group * 64, x)
            highest = greater(x, highest)
        top = max_lanes(highest)
        shift, scale = splat(_finite(top)), splat(factor)
        total, zero = splat(_f32(0)), splat(_f32(0))
        for group in range(begin, end):
            weight = power_of_two_of_floor((load_float32(scores + group * 64) - shift) * scale)
            store_weights(scores + group * weight_bytes, weight)
            total = total + weight
        for group in range(begin):
            store_weights(scores + group * weight_bytes, zero)
        for group in range(end, groups):
            store_weights(scores + group * weight_bytes, zero)
        store_float32(result, total)
        put_float32(result + 64, top)

    return weigh


@part
def join(state, source, vectors, factor):  # type: ignore[no-untyped-def]
    """Joins the result at source, of later keys, to the one at state."""
    sums = vectors * 64
    old, new = get_float32(state + sums + 64), get_float32(source + sums + 64)
    highest = max(old, new)
    shift = _finite(highest)
    keep = power_of_two(splat((old - shift) * factor))
    take = power_of_two(splat((new - shift) * factor))
    for vector in range(vectors + 1):
        place = state + vector * 64
        store_float32(place, fma(load_float32(source + vector * 64), take, load_float32(place) * keep))
    put_float32(state + sums + 64, highest)


@part
def finish(state, vectors, factor, sink_at, kind, out, size):  # type: ignore[no-untyped-def]
    """Writes a row's output; sink_at: address of the logit that takes weight and gives no value, or 0."""
    sums = vectors * 64
    total = sum_lanes(load_float32(state + sums))
    ratio = _f32(1)
    if sink_at != 0:
        highest, sink = get_float32(state + sums + 64), get_float32(sink_at)
        shift = _finite(max(highest, sink))
        # In lanes, for the same power of two everywhere; a row that saw nothing has no weight to give.
        keep = power_of_two(splat((highest - shift) * factor))
        taken = power_of_two(splat((sink - shift) * factor))
        seen = total
        total = max_lanes(fma(splat(total), keep, taken))
        ratio = max_lanes(keep) if seen > 0 else _f32(0)
    elif total == 0:
        total, ratio = _f32(1), _f32(0)
    width = 4 if kind == 0 else 2
    for vector in range(vectors):
        value = load_float32(state + vector * 64)
        store(kind, out + vector * 16 * width, divide(value * splat(ratio), splat(total)), size - vector * 16)
