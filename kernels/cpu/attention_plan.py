"""The items of a call to attention, in the order in which threads take them."""

from __future__ import annotations

from kernels.cpu import jit
from kernels.cpu.attention_sharing import plan_sharing
from kernels.cpu.attention_work import (
    ITEM_BYTES,
    ITEMS,
    MEMBERS,
    MOST_FIRST_ITEMS,
    MOST_ROWS,
    NUM_GROUPS,
    NUM_KV_HEADS,
    NUM_ROWS,
    NUM_THREADS,
    SHARED,
    SHARED_BYTES,
    SHARED_RESULT,
    SHARED_TILES,
    WINDOW,
    put_item,
    query_len,
    reserve_results,
    whole_tiles,
)
from kernels.cpu.vectors import get_int64, put_int64

FEW_ITEMS = 4
"""Items per thread below which a request's tiles are shared out."""
LONG_TILES = 16
"""Tiles of a request from which they are shared out however many requests there are."""
SPLIT_TILES = 2


@jit.inlined
def _split(args: int, row: int, at: int, end: int, num_results: int) -> tuple[int, int]:
    """First items of one request's tiles; returns the address after them and results used."""
    heads, tiles = get_int64(args + NUM_KV_HEADS), whole_tiles(args, row)
    rows = query_len(args, row) * get_int64(args + NUM_GROUPS)
    reserved = reserve_results(args, num_results, tiles * rows * heads)
    if reserved == num_results or at + tiles * heads * ITEM_BYTES > end:
        return at, num_results
    shared = get_int64(args + SHARED) + row * SHARED_BYTES
    put_int64(shared + SHARED_TILES, tiles)
    put_int64(shared + SHARED_RESULT, num_results)
    for tile in range(0, tiles, SPLIT_TILES):
        for head in range(heads):
            put_item(at, row, 1, head, 0, rows, tile, min(SPLIT_TILES, tiles - tile))
            at += ITEM_BYTES
    return at, reserved


@jit.inlined
def plan(args: int) -> tuple[int, int]:
    """Fills ITEMS, MEMBERS and SHARED; returns how many first items there are, and how many after them."""
    num_requests, heads, groups = (
        get_int64(args + NUM_ROWS),
        get_int64(args + NUM_KV_HEADS),
        get_int64(args + NUM_GROUPS),
    )
    members, shared, threads = get_int64(args + MEMBERS), get_int64(args + SHARED), get_int64(args + NUM_THREADS)
    at, num_last, num_results = get_int64(args + ITEMS), 0, 0
    for row in range(num_requests):
        put_int64(members + row * 8, row)
        put_int64(shared + row * SHARED_BYTES + SHARED_TILES, 0)
        num_last += heads * -(-query_len(args, row) * groups // MOST_ROWS)
    if get_int64(args + WINDOW) == 0:
        end = at + get_int64(args + MOST_FIRST_ITEMS) * ITEM_BYTES
        if num_requests > 1:
            at, num_results = plan_sharing(args, at, end, num_results)
        for row in range(num_requests):
            tiles = whole_tiles(args, row)
            is_split = tiles >= LONG_TILES or (tiles > 0 and num_last < FEW_ITEMS * threads)
            if threads > 1 and is_split and get_int64(shared + row * SHARED_BYTES + SHARED_TILES) == 0:
                at, num_results = _split(args, row, at, end, num_results)
    num_first = (at - get_int64(args + ITEMS)) // ITEM_BYTES
    for row in range(num_requests):
        rows = query_len(args, row) * groups
        for first in range(0, rows, MOST_ROWS):
            for head in range(heads):
                put_item(at, row, 1, head, first, min(MOST_ROWS, rows - first), 0, 0)
                at += ITEM_BYTES
    return num_first, num_last
