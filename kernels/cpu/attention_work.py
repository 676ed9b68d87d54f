"""Cuts a ragged batch's attention into items that threads take one by one, and finds work that rows share.

A row of an item is one query head of one token; rows of one KV head lie beside each other, token after token. An item
is up to MOST_ROWS of them, of one request or of several whose keys up to there lie in the same blocks, against some
tiles of TILE_KEYS keys. First come items whose results wait in memory: tiles that several requests share, and tiles of
few and long requests, so that all threads have work. Then come items that start from those results and end with output.
"""

from __future__ import annotations

from kernels.cpu import jit
from kernels.cpu.vectors import get_int32, get_int64, put_int64

TILE_KEYS = 128
MOST_ROWS = 64

# Words of the arguments, by their byte.
(
    QUERY,
    QUERY_TOKEN_BYTES,
    QUERY_HEAD_BYTES,
    QUERY_KIND,
    KEYS,
    KEY_BLOCK_BYTES,
    KEY_HEAD_BYTES,
    VALUES,
    VALUE_BLOCK_BYTES,
    VALUE_HEAD_BYTES,
    BLOCK_SIZE,
    HEAD_SIZE,
    VALUE_SIZE,
    TABLES,
    TABLE_BYTES,
    QUERY_START_LOC,
    SEQ_LENS,
    OUT,
    OUT_TOKEN_BYTES,
    OUT_HEAD_BYTES,
    NUM_GROUPS,
    NUM_KV_HEADS,
    NUM_ROWS,
    WINDOW,
    SINKS,
    SLOPES,
    IS_TRANSFORMED,
    ITEMS,
    MEMBERS,
    SHARED,
    RESULTS,
    RESULT_BYTES,
    MOST_RESULTS,
    MOST_FIRST_ITEMS,
    NUM_THREADS,
    IS_DIRECT,
    SCALE,
    SOFTCAP,
) = range(0, 8 * 38, 8)
ARGUMENTS = "<36qf4xf4x"
"""As struct packs them: all are int64 but the last two, which are float32."""

# Words of an item.
ITEM_MEMBERS, ITEM_NUM_MEMBERS, ITEM_HEAD, ITEM_ROW, ITEM_NUM_ROWS, ITEM_TILE, ITEM_NUM_TILES = range(0, 56, 8)
ITEM_BYTES = 64
# Words that each request has in SHARED.
SHARED_TILES, SHARED_RESULT = 0, 8
SHARED_BYTES = 16

FEW_ITEMS = 4
"""Items per thread below which a request's tiles are shared out."""
LONG_TILES = 16
"""Tiles of a request from which they are shared out however many requests there are."""
SPLIT_TILES = 2
MOST_SHARED_ROWS = 16
"""Rows per KV head up to which a request's prefix is looked for in other requests: decodes, not chunks."""


@jit.inlined
def _put_item(at: int, members: int, num_members: int, head: int, row: int, num_rows: int) -> None:
    put_int64(at + ITEM_MEMBERS, members)
    put_int64(at + ITEM_NUM_MEMBERS, num_members)
    put_int64(at + ITEM_HEAD, head)
    put_int64(at + ITEM_ROW, row)
    put_int64(at + ITEM_NUM_ROWS, num_rows)
    put_int64(at + ITEM_TILE, 0)
    put_int64(at + ITEM_NUM_TILES, 0)


@jit.inlined
def query_len(args: int, row: int) -> int:
    """Query tokens of a request."""
    starts = get_int64(args + QUERY_START_LOC) + row * 4
    return get_int32(starts + 4) - get_int32(starts)


@jit.inlined
def seq_len(args: int, row: int) -> int:
    """Keys of a request."""
    return get_int32(get_int64(args + SEQ_LENS) + row * 4)


@jit.inlined
def _plan_split(args: int, row: int, num_results: int) -> int:
    """Says where a request's tiles but the last wait for their joining; returns how many results are used now."""
    rows = query_len(args, row) * get_int64(args + NUM_GROUPS)
    # Every tile but the last is seen whole by every query; that one may begin anywhere in the last tile.
    tiles = max(0, (seq_len(args, row) - query_len(args, row)) // TILE_KEYS)
    needed = tiles * rows * get_int64(args + NUM_KV_HEADS)
    if rows > MOST_SHARED_ROWS or num_results + needed > get_int64(args + MOST_RESULTS):
        return num_results
    shared = get_int64(args + SHARED) + row * SHARED_BYTES
    put_int64(shared + SHARED_TILES, tiles)
    put_int64(shared + SHARED_RESULT, num_results)
    return num_results + needed


@jit.inlined
def _put_tiles(args: int, at: int, members: int, num_members: int, tile: int, num_tiles: int) -> int:
    """First items of some requests' tiles, for every KV head; returns the address after the last one."""
    row = get_int64(get_int64(args + MEMBERS) + members * 8)
    rows = query_len(args, row) * get_int64(args + NUM_GROUPS)
    for head in range(get_int64(args + NUM_KV_HEADS)):
        _put_item(at, members, num_members, head, 0, rows)
        put_int64(at + ITEM_TILE, tile)
        put_int64(at + ITEM_NUM_TILES, num_tiles)
        at += ITEM_BYTES
    return at


@jit.inlined
def plan(args: int) -> tuple[int, int]:
    """Fills ITEMS, MEMBERS and SHARED; returns how many first items there are, and how many after them."""
    num_requests, heads, groups = (
        get_int64(args + NUM_ROWS),
        get_int64(args + NUM_KV_HEADS),
        get_int64(args + NUM_GROUPS),
    )
    members, shared = get_int64(args + MEMBERS), get_int64(args + SHARED)
    num_last = 0
    for row in range(num_requests):
        put_int64(members + row * 8, row)
        put_int64(shared + row * SHARED_BYTES + SHARED_TILES, 0)
        num_last += heads * -(-query_len(args, row) * groups // MOST_ROWS)
    at = get_int64(args + ITEMS)
    threads = get_int64(args + NUM_THREADS)
    if get_int64(args + WINDOW) == 0 and threads > 1:
        last_first = at + get_int64(args + MOST_FIRST_ITEMS) * ITEM_BYTES
        num_results = 0
        for row in range(num_requests):
            tiles = seq_len(args, row) // TILE_KEYS
            is_split = tiles >= LONG_TILES or (tiles > 1 and num_last < FEW_ITEMS * threads)
            if is_split and at + tiles * heads * ITEM_BYTES <= last_first:
                num_results = _plan_split(args, row, num_results)
                split = get_int64(shared + row * SHARED_BYTES + SHARED_TILES)
                for tile in range(0, split, SPLIT_TILES):
                    at = _put_tiles(args, at, row, 1, tile, min(SPLIT_TILES, split - tile))
    num_first = (at - get_int64(args + ITEMS)) // ITEM_BYTES
    for row in range(num_requests):
        rows = query_len(args, row) * groups
        for first in range(0, rows, MOST_ROWS):
            for head in range(heads):
                _put_item(at, row, 1, head, first, min(MOST_ROWS, rows - first))
                at += ITEM_BYTES
    return num_first, num_last
