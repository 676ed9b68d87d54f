"""Does one item of attention: tile after tile, scores, weights and weighted sums of up to 64 rows."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from kernels.cpu import attention_work as work
from kernels.cpu.attention_ahead import GROUP_KEYS, first_tile, prefetch, prefetch_next
from kernels.cpu.attention_blocks import SCORE_BYTES
from kernels.cpu.attention_rows import LOG2_E, RESULT_EXTRA_BYTES, finish, join, make_weigh, transform
from kernels.cpu.attention_work import MOST_ROWS, TILE_KEYS
from kernels.cpu.lanes import copy_masked, item_bytes, load, part, scratch_memory
from kernels.cpu.vectors import (
    get_float32,
    get_int32,
    get_int64,
    get_uint16,
    put_float32,
    put_int32,
    put_int64,
    splat,
    store_bfloat16,
    store_float32,
)

_f32 = numba.float32
MOST_HEAD_SIZE = 256
_STREAMED_ROWS = 16
"""Rows up to which keys and values come from memory faster when they are asked for ahead."""
_ROW_BYTES = MOST_HEAD_SIZE * 4
_STATE_BYTES = MOST_ROWS * (_ROW_BYTES + RESULT_EXTRA_BYTES)
_TILE_BYTES = TILE_KEYS * _ROW_BYTES

# Words that each row of an item has: the last and first position that it sees, where its next result lies, its output.
_HIGH, _LOW, _RESULT, _OUT, _HEAD = range(0, 40, 8)
_ROW_WORDS = 40
# Words of an item's scratch.
_ROWS, _QUERY, _SCORES, _STATE, _TILE_RESULTS, _KEY_GROUPS, _VALUE_GROUPS, _KEY_COPY, _VALUE_COPY = range(0, 72, 8)
_FLOATS = 72  # factor, scale, softcap: float32
_END = 88  # of the chunk's items
_SIZES = (128, MOST_ROWS * _ROW_WORDS, MOST_ROWS * _ROW_BYTES, MOST_ROWS * SCORE_BYTES, _STATE_BYTES, _STATE_BYTES)
_PLACES = tuple(sum((*_SIZES, 64, 64, _TILE_BYTES, _TILE_BYTES)[:i]) for i in range(1, 11))
_SCRATCH_BYTES = _PLACES[-1]


def _make_collect(store_query: Any) -> Any:
    """With queries as store_query puts them."""

    @part
    def collect(args, item, scratch, num_words, query_bytes):  # type: ignore[no-untyped-def]
        """Copies the queries of an item's rows and fills their words; returns how many rows there are."""
        groups, head = get_int64(args + work.NUM_GROUPS), get_int64(item + work.ITEM_HEAD)
        kind, head_size = get_int64(args + work.QUERY_KIND), get_int64(args + work.HEAD_SIZE)
        window = get_int64(args + work.WINDOW)
        row, query = get_int64(scratch + _ROWS), get_int64(scratch + _QUERY)
        first, count = get_int64(item + work.ITEM_ROW), get_int64(item + work.ITEM_NUM_ROWS)
        num_rows = 0
        for member in range(get_int64(item + work.ITEM_NUM_MEMBERS)):
            place = get_int64(args + work.MEMBERS) + (get_int64(item + work.ITEM_MEMBERS) + member) * 8
            request = get_int64(place)
            token = get_int32(get_int64(args + work.QUERY_START_LOC) + request * 4)
            rows = work.query_len(args, request) * groups
            position = work.seq_len(args, request) - work.query_len(args, request)
            shared = get_int64(args + work.SHARED) + request * work.SHARED_BYTES
            tiles = get_int64(shared + work.SHARED_TILES)
            results = get_int64(shared + work.SHARED_RESULT) + head * rows * tiles
            for i in range(first, first + count):
                query_head = head * groups + i % groups
                of = token + i // groups
                high = position + i // groups
                put_int64(row + _HIGH, high)
                put_int64(row + _LOW, max(0, high - window + 1) if window > 0 else 0)
                put_int64(
                    row + _RESULT,
                    get_int64(args + work.RESULTS) + (results + i * tiles) * get_int64(args + work.RESULT_BYTES),
                )
                out = get_int64(args + work.OUT) + of * get_int64(args + work.OUT_TOKEN_BYTES)
                put_int64(row + _OUT, out + query_head * get_int64(args + work.OUT_HEAD_BYTES))
                put_int64(row + _HEAD, query_head)
                source = get_int64(args + work.QUERY) + of * get_int64(args + work.QUERY_TOKEN_BYTES)
                source += query_head * get_int64(args + work.QUERY_HEAD_BYTES)
                for vector in range(num_words):
                    left = head_size - vector * 16
                    numbers = load(kind, source + vector * 16 * item_bytes(kind), max(left, 0))
                    store_query(query + vector * query_bytes, numbers)
                query += num_words * query_bytes
                row += _ROW_WORDS
                num_rows += 1
        return num_rows

    return collect


@part
def _copy_keys(args, table, head, first, begin, end, pack, dest):  # type: ignore[no-untyped-def]
    """A group's keys one by one, zeros for those outside begin..end."""
    block_size, words = get_int64(args + work.BLOCK_SIZE), -(-get_int64(args + work.HEAD_SIZE) // pack)
    is_odd = pack == 2 and get_int64(args + work.HEAD_SIZE) % 2 == 1
    for i in range(GROUP_KEYS):
        key = first + i
        if key < begin or key >= end:
            for word in range(words):
                put_int32(dest + (word * GROUP_KEYS + i) * 4, numba.int32(0))
            continue
        block, offset = get_int32(table + key // block_size * 4), key % block_size
        source = get_int64(args + work.KEYS) + block * get_int64(args + work.KEY_BLOCK_BYTES)
        source += head * get_int64(args + work.KEY_HEAD_BYTES) + offset * 4
        for word in range(words):
            bits = get_int32(source + word * block_size * 4)
            if is_odd and word == words - 1:
                bits &= numba.int32(0xFFFF)
            put_int32(dest + (word * GROUP_KEYS + i) * 4, bits)


@part
def _copy_values(args, table, head, first, begin, end, pack, line, dest):  # type: ignore[no-untyped-def]
    """A group's values one by one, zeros for those outside begin..end and behind a value's last number."""
    block_size, size = get_int64(args + work.BLOCK_SIZE), get_int64(args + work.VALUE_SIZE)
    for place in range(dest, dest + GROUP_KEYS // pack * line, 4):
        put_int32(place, numba.int32(0))
    for i in range(GROUP_KEYS):
        key = first + i
        if key < begin or key >= end:
            continue
        block, offset = get_int32(table + key // block_size * 4), key % block_size
        source = get_int64(args + work.VALUES) + block * get_int64(args + work.VALUE_BLOCK_BYTES)
        source += head * get_int64(args + work.VALUE_HEAD_BYTES) + offset // pack * size * 4
        to = dest + i // pack * line
        for word in range(size):
            bits = get_int32(source + word * 4)
            if pack == 2:
                half = numba.int32(get_uint16(source + word * 4 + offset % 2 * 2))
                bits = get_int32(to + word * 4) | (half << numba.int32(i % 2 * 16))
            put_int32(to + word * 4, bits)


@part
def _mask_values(source, dest, first, begin, end, pack, line):  # type: ignore[no-untyped-def]
    """A group's values as they lie, zeros for keys outside begin..end."""
    for i in range(GROUP_KEYS // pack):
        mask = 0
        for j in range(pack):
            if begin <= first + i * pack + j < end:
                mask |= 0xFFFFFFFF if pack == 1 else 0xFFFF << 16 * j
        copy_masked(source + i * line, dest + i * line, line, mask)


@part
def _gather(args, item, scratch, first, begin, end, pack, is_direct, line):  # type: ignore[no-untyped-def]
    """Finds the groups of 16 keys from position `first` on that hold begin..end; returns how many."""
    row = get_int64(get_int64(args + work.MEMBERS) + get_int64(item + work.ITEM_MEMBERS) * 8)
    table = get_int64(args + work.TABLES) + row * get_int64(args + work.TABLE_BYTES)
    head, block_size = get_int64(item + work.ITEM_HEAD), get_int64(args + work.BLOCK_SIZE)
    num_groups = -(-(end - first) // GROUP_KEYS)
    for group in range(num_groups):
        position = first + group * GROUP_KEYS
        is_whole = begin <= position and position + GROUP_KEYS <= end
        if is_direct:
            block, offset = get_int32(table + position // block_size * 4), position % block_size
            keys = get_int64(args + work.KEYS) + block * get_int64(args + work.KEY_BLOCK_BYTES)
            keys += head * get_int64(args + work.KEY_HEAD_BYTES) + offset * 4
            values = get_int64(args + work.VALUES) + block * get_int64(args + work.VALUE_BLOCK_BYTES)
            values += head * get_int64(args + work.VALUE_HEAD_BYTES) + offset // pack * line
            if not is_whole:
                copy = get_int64(scratch + _VALUE_COPY) + group * GROUP_KEYS * _ROW_BYTES
                _mask_values(values, copy, position, begin, end, pack, line)
                values = copy
        else:
            keys = get_int64(scratch + _KEY_COPY) + group * GROUP_KEYS * _ROW_BYTES
            values = get_int64(scratch + _VALUE_COPY) + group * GROUP_KEYS * _ROW_BYTES
            _copy_keys(args, table, head, position, begin, end, pack, keys)
            _copy_values(args, table, head, position, begin, end, pack, line, values)
        put_int64(get_int64(scratch + _KEY_GROUPS) + group * 8, keys)
        put_int64(get_int64(scratch + _VALUE_GROUPS) + group * 8, values)
    # Scores are made for four groups at a time: the last one again stands for those that are not there.
    for group in range(num_groups, -(-num_groups // 4) * 4):
        put_int64(get_int64(scratch + _KEY_GROUPS) + group * 8, get_int64(scratch + _KEY_GROUPS) + 0 * 8)
        put_int64(
            get_int64(scratch + _KEY_GROUPS) + group * 8,
            get_int64(get_int64(scratch + _KEY_GROUPS) + (num_groups - 1) * 8),
        )
    return num_groups


def _make_attend_tile(scores: Any, values: Any, store_weights: Any) -> Any:
    """With the products of one type."""

    weigh = make_weigh(store_weights)

    @part
    def attend_tile(  # type: ignore[no-untyped-def]
        args, item, scratch, num_rows, tile, results, result_bytes, layout
    ):
        """Results of an item's rows for one tile, at `results`; False where no row sees a key of it."""
        pack, query_bytes, weight_bytes = layout
        is_direct = get_int64(args + work.IS_DIRECT) != 0
        begin, end = (tile + 1) * TILE_KEYS, tile * TILE_KEYS
        rows_at = get_int64(scratch + _ROWS)
        for i in range(num_rows):
            begin = min(begin, get_int64(rows_at + i * _ROW_WORDS + _LOW))
            end = max(end, get_int64(rows_at + i * _ROW_WORDS + _HIGH) + 1)
        begin, end = max(begin, tile * TILE_KEYS), min(end, (tile + 1) * TILE_KEYS)
        if begin >= end:
            return False
        vectors = -(-get_int64(args + work.VALUE_SIZE) // 16)
        first = begin // GROUP_KEYS * GROUP_KEYS
        is_streamed = is_direct and num_rows <= _STREAMED_ROWS
        if is_streamed:
            prefetch_next(args, item, get_int64(scratch + _END), tile, pack, vectors * 64, True)
        num_groups = _gather(args, item, scratch, first, begin, end, pack, is_direct, vectors * 64)
        key_stride = get_int64(args + work.BLOCK_SIZE) * 4 if is_direct else GROUP_KEYS * 4
        words = -(-get_int64(args + work.HEAD_SIZE) // pack)
        scores_at, fours = get_int64(scratch + _SCORES), -(-num_groups // 4)
        scores(
            get_int64(scratch + _KEY_GROUPS),
            key_stride,
            words,
            get_int64(scratch + _QUERY),
            query_bytes,
            num_rows,
            fours,
            scores_at,
        )
        factor = get_float32(scratch + _FLOATS)
        for i in range(num_rows):
            row = rows_at + i * _ROW_WORDS
            place = scores_at + i * SCORE_BYTES
            if get_int64(args + work.IS_TRANSFORMED) != 0:
                _transform_row(args, scratch, row, place, num_groups, first)
            low, high = get_int64(row + _LOW), get_int64(row + _HIGH)
            at = results + i * result_bytes + vectors * 64
            weigh(place, num_groups, first, low, high, factor, at, weight_bytes)
        if is_streamed:
            prefetch_next(args, item, get_int64(scratch + _END), tile, pack, vectors * 64, False)
        values(
            get_int64(scratch + _VALUE_GROUPS),
            num_groups,
            vectors * 64,
            scores_at,
            num_rows,
            vectors,
            results,
            result_bytes,
        )
        return True

    return attend_tile


@part
def _place_scratch(args, scratch):  # type: ignore[no-untyped-def]
    """Fills the words of an item's scratch; returns the factor of scores in powers of two."""
    for i in range(9):
        put_int64(scratch + i * 8, scratch + _PLACES[i])
    scale = get_float32(args + work.SCALE)
    factor = _f32(LOG2_E) if get_int64(args + work.IS_TRANSFORMED) != 0 else scale * _f32(LOG2_E)
    put_float32(scratch + _FLOATS, factor)
    put_float32(scratch + _FLOATS + 4, scale)
    put_float32(scratch + _FLOATS + 8, get_float32(args + work.SOFTCAP))
    return factor


@part
def _transform_row(args, scratch, row, place, num_groups, first):  # type: ignore[no-untyped-def]
    """Scores of a row to logits."""
    slopes, slope = get_int64(args + work.SLOPES), _f32(0)
    if slopes != 0:
        slope = get_float32(slopes + get_int64(row + _HEAD) * 4)
    scale, softcap = get_float32(scratch + _FLOATS + 4), get_float32(scratch + _FLOATS + 8)
    transform(place, num_groups, first, scale, softcap, slope, get_int64(row + _HIGH))


@part
def _clear(results, num_rows, vectors, result_bytes):  # type: ignore[no-untyped-def]
    """Results that stand for no key."""
    for i in range(num_rows):
        for vector in range(vectors + 1):
            store_float32(results + i * result_bytes + vector * 64, splat(_f32(0)))
        put_float32(results + i * result_bytes + vectors * 64 + 64, _f32(-np.inf))


@part
def _finish_rows(args, rows_at, state, num_rows, vectors, result_bytes, factor):  # type: ignore[no-untyped-def]
    """Writes the outputs of an item's rows."""
    for i in range(num_rows):
        row = rows_at + i * _ROW_WORDS
        sinks, sink = get_int64(args + work.SINKS), 0
        if sinks != 0:
            sink = sinks + get_int64(row + _HEAD) * 4
        finish(
            state + i * result_bytes,
            vectors,
            factor,
            sink,
            get_int64(args + work.QUERY_KIND),
            get_int64(row + _OUT),
            get_int64(args + work.VALUE_SIZE),
        )


def _make_attend_item(
    scores: Any, values: Any, store_query: Any, store_weights: Any, pack: int, head_align: int
) -> Any:
    """The function that does one item, first or last; see make_attend."""

    collect, attend_tile = _make_collect(store_query), _make_attend_tile(scores, values, store_weights)
    query_bytes, weight_bytes = (32 if x is store_bfloat16 else 64 for x in (store_query, store_weights))

    @part
    def attend_item(args, item, scratch, factor):  # type: ignore[no-untyped-def]
        vectors = -(-get_int64(args + work.VALUE_SIZE) // 16)
        num_words = -(-get_int64(args + work.HEAD_SIZE) // head_align) * (head_align // 16)
        result_bytes = vectors * 64 + RESULT_EXTRA_BYTES
        num_rows = collect(args, item, scratch, num_words, query_bytes)
        layout = (pack, num_words * query_bytes, weight_bytes)
        rows_at, state, results = (
            get_int64(scratch + _ROWS),
            get_int64(scratch + _STATE),
            get_int64(scratch + _TILE_RESULTS),
        )
        num_tiles = get_int64(item + work.ITEM_NUM_TILES)
        if num_tiles > 0:
            first = get_int64(item + work.ITEM_TILE)
            for tile in range(first, first + num_tiles):
                attend_tile(args, item, scratch, num_rows, tile, results, result_bytes, layout)
                for i in range(num_rows):
                    dest = get_int64(rows_at + i * _ROW_WORDS + _RESULT) + tile * result_bytes
                    copy_masked(results + i * result_bytes, dest, result_bytes, 0xFFFFFFFF)
            return
        request = get_int64(get_int64(args + work.MEMBERS) + get_int64(item + work.ITEM_MEMBERS) * 8)
        shared = get_int64(get_int64(args + work.SHARED) + request * work.SHARED_BYTES + work.SHARED_TILES)
        if shared > 0:
            _clear(state, num_rows, vectors, result_bytes)
        for i in range(num_rows):
            for tile in range(shared):
                source = get_int64(rows_at + i * _ROW_WORDS + _RESULT) + tile * result_bytes
                join(state + i * result_bytes, source, vectors, factor)
        begin = max(get_int64(rows_at + _LOW), 0) // TILE_KEYS
        end = get_int64(rows_at + (num_rows - 1) * _ROW_WORDS + _HIGH) // TILE_KEYS + 1
        if shared == 0:
            # Joined to nothing a result stays as it is, to the bit.
            if not attend_tile(args, item, scratch, num_rows, begin, state, result_bytes, layout):
                _clear(state, num_rows, vectors, result_bytes)
            begin += 1
        for tile in range(max(begin, shared), end):
            if attend_tile(args, item, scratch, num_rows, tile, results, result_bytes, layout):
                for i in range(num_rows):
                    join(state + i * result_bytes, results + i * result_bytes, vectors, factor)
        _finish_rows(args, rows_at, state, num_rows, vectors, result_bytes, factor)

    return attend_item


def make_attend(scores: Any, values: Any, store_query: Any, store_weights: Any, pack: int, head_align: int) -> Any:
    """The function that does a chunk's items, with the products of one type of cache.

    pack: numbers in 32 bits of the cache; head_align: what the head size is padded to, in numbers.
    """

    attend_item = _make_attend_item(scores, values, store_query, store_weights, pack, head_align)

    @part
    def attend(args, chunk):  # type: ignore[no-untyped-def]
        per_chunk = get_int64(args + work.ITEMS_PER_CHUNK)
        first, end = chunk * per_chunk, min((chunk + 1) * per_chunk, get_int64(args + work.NUM_ITEMS))
        scratch = scratch_memory(_SCRATCH_BYTES)
        factor = _place_scratch(args, scratch)
        put_int64(scratch + _END, get_int64(args + work.ITEMS) + end * work.ITEM_BYTES)
        item = get_int64(args + work.ITEMS) + first * work.ITEM_BYTES
        num_rows = get_int64(item + work.ITEM_NUM_ROWS) * get_int64(item + work.ITEM_NUM_MEMBERS)
        if get_int64(args + work.IS_DIRECT) != 0 and num_rows <= _STREAMED_ROWS:
            tile, line = first_tile(args, item), -(-get_int64(args + work.VALUE_SIZE) // 16) * 64
            prefetch(args, item, tile, pack, line, True)
            prefetch(args, item, tile, pack, line, False)
        for number in range(first, end):
            attend_item(args, get_int64(args + work.ITEMS) + number * work.ITEM_BYTES, scratch, factor)

    return attend
