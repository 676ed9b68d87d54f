"""What a program of paged attention does with a tile of queries: finds it, walks the block table, sums up its keys."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_tile(query_start_loc, num_rows, place, QUERIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row whose tiles hold `place`, its first token, its number of tokens, and which of them the tile begins with.

    Row r's tiles begin at query_start_loc[r] // QUERIES + r, which needs no table; the last may lie after its tokens.
    """
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // QUERIES + middle <= place:
            low = middle + 1
        else:
            high = middle
    row = low - 1
    start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - start
    return row, start, query_len, (place - start // QUERIES - row) * QUERIES


@triton.jit
def span(  # type: ignore[no-untyped-def]
    first_position, last_position, window, segment, KEYS: tl.constexpr, SEGMENTS: tl.constexpr
):
    """What queries at these positions see: keys first..limit, in tiles begin..end of this segment.

    Also how many tiles, counted from the sequence's first, every query sees whole: they need no masks.
    """
    limit = tl.maximum(last_position + 1, 0)
    if window is None:
        first = 0
        num_open = tl.maximum(first_position + 1, 0) // KEYS
    else:
        first = tl.maximum(first_position - window + 1, 0)
        num_open = 0
    begin = first // KEYS
    end = tl.cdiv(limit, KEYS)
    if SEGMENTS > 1:
        per_segment = tl.cdiv(tl.maximum(end - begin, 0), SEGMENTS)
        begin += segment * per_segment
        end = tl.minimum(begin + per_segment, end)
    return first, limit, begin, end, num_open


@triton.jit
def factors(key_cache, key_scale, value_scale, scale, softcap, kv_head, key_scale_head, value_scale_head):  # type: ignore[no-untyped-def]
    """What products with keys, and results, are multiplied by: scores then count in powers of two, or in caps."""
    score_scale = scale
    result_scale = 1.0
    if key_cache.dtype.element_ty == tl.uint8:
        score_scale *= 256.0
        result_scale *= 256.0
    if key_scale is not None:
        score_scale *= tl.load(key_scale + kv_head * key_scale_head)
    if value_scale is not None:
        result_scale *= tl.load(value_scale + kv_head * value_scale_head)
    if softcap is None:
        score_scale *= LOG2_E
    else:
        score_scale /= softcap
    return score_scale, result_scale


@triton.jit
def _load(pointers, is_first, is_second, HAS_FIRST: tl.constexpr, HAS_SECOND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zero where a mask says no; a load without masks is cheaper."""
    if HAS_FIRST and HAS_SECOND:
        return tl.load(pointers, is_first & is_second, 0.0)
    elif HAS_FIRST:
        return tl.load(pointers, is_first, 0.0)
    elif HAS_SECOND:
        return tl.load(pointers, is_second, 0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _widen(x, COMPUTE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of a cache in the type of the products; bytes are e4m3, and give 1 / 256 of what they stand for.

    A GPU before sm_89 does not convert e4m3. Its bits, moved into those of a float16, are the number over 2 ** 8,
    subnormal ones too: the exponents' biases differ by 8.
    """
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(COMPUTE)
    else:
        return x.to(COMPUTE)


@triton.jit
def walk(  # type: ignore[no-untyped-def]
    result, total, highest, queries, positions, slopes, score_scale, softcap, window, table, keys, values,
    key_block, key_slot, value_block, value_slot, begin, end, first, limit,
    HEAD_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    COMPUTE: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Adds tiles begin..end of a sequence's keys to the sums of an online softmax, in float32 and powers of two.

    Masked tiles read keys first..limit only, and see what position and window let them; others see everything.
    """
    HEAD_PADDED: tl.constexpr = queries.shape[1]
    VALUE_PADDED: tl.constexpr = result.shape[1]
    PRECISION: tl.constexpr = "ieee" if tl.float32 == COMPUTE else "tf32"
    head_dims = tl.arange(0, HEAD_PADDED)[:, None]
    value_dims = tl.arange(0, VALUE_PADDED)[None, :]
    for tile in range(begin, end):
        key_positions = tile * KEYS + tl.arange(0, KEYS)
        is_read = (key_positions >= first) & (key_positions < limit)
        blocks = _load(table + key_positions // BLOCK_SIZE, is_read, is_read, IS_MASKED, False).to(tl.int64)
        offsets = key_positions % BLOCK_SIZE
        # [HEAD_PADDED, KEYS]
        places = keys + (blocks * key_block + offsets * key_slot)[None, :] + head_dims
        key = _load(places, is_read[None, :], head_dims < HEAD_SIZE, IS_MASKED, HEAD_SIZE != HEAD_PADDED)
        scores = tl.dot(queries, _widen(key, COMPUTE), input_precision=PRECISION) * score_scale
        if softcap is not None:
            # tanh of scores that come divided by the cap
            scores = softcap * LOG2_E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E)) + 1.0))
        distance = positions[:, None] - key_positions[None, :]
        if slopes is not None:
            scores -= slopes[:, None] * distance.to(tl.float32)
        if IS_MASKED:
            is_seen = (distance >= 0) & (key_positions < limit)[None, :]
            if window is not None:
                is_seen = is_seen & (distance < window)
            scores = tl.where(is_seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        base = new_highest
        if IS_MASKED:
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # nothing seen yet: not inf - inf
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        highest = new_highest
        # [KEYS, VALUE_PADDED]
        places = values + (blocks * value_block + offsets * value_slot)[:, None] + value_dims
        value = _load(places, is_read[:, None], value_dims < VALUE_SIZE, IS_MASKED, VALUE_SIZE != VALUE_PADDED)
        result = result * shrink[:, None]
        result = tl.dot(weights.to(COMPUTE), _widen(value, COMPUTE), result, input_precision=PRECISION)
    return result, total, highest
