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
    HASHES,
    NUM_HASHES,
    ITEMS_PER_CHUNK,
    NUM_ITEMS,
    SCALE,
    SOFTCAP,
) = range(0, 8 * 42, 8)
NUM_WORDS, NUM_FLOATS = 40, 2
"""All are int64 but the last two, which are float32."""

# Words of an item.
ITEM_MEMBERS, ITEM_NUM_MEMBERS, ITEM_HEAD, ITEM_ROW, ITEM_NUM_ROWS, ITEM_TILE, ITEM_NUM_TILES = range(0, 56, 8)
ITEM_BYTES = 64
# Words that each request has in SHARED.
SHARED_TILES, SHARED_RESULT, SHARED_LEADER, SHARED_NEXT = range(0, 32, 8)
SHARED_BYTES = 32

MOST_SHARED_ROWS = MOST_ROWS
"""Rows per KV head up to which a request's prefix is looked for in other requests: decodes, not chunks."""


@jit.inlined
def put_item(
    at: int, members: int, num_members: int, head: int, row: int, num_rows: int, tile: int, num_tiles: int
) -> None:
    """Writes an item; num_tiles 0: a last one."""
    put_int64(at + ITEM_MEMBERS, members)
    put_int64(at + ITEM_NUM_MEMBERS, num_members)
    put_int64(at + ITEM_HEAD, head)
    put_int64(at + ITEM_ROW, row)
    put_int64(at + ITEM_NUM_ROWS, num_rows)
    put_int64(at + ITEM_TILE, tile)
    put_int64(at + ITEM_NUM_TILES, num_tiles)


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
def whole_tiles(args: int, row: int) -> int:
    """Tiles that each query of a request sees whole, if it has few rows; 0 for a chunk, which has work enough alone."""
    if query_len(args, row) * get_int64(args + NUM_GROUPS) > MOST_SHARED_ROWS:
        return 0
    return max(0, seq_len(args, row) - query_len(args, row)) // TILE_KEYS


@jit.inlined
def reserve_results(args: int, num_results: int, needed: int) -> int:
    """How many results are used after taking `needed` more; the same as before where there is no room."""
    return num_results + needed if num_results + needed <= get_int64(args + MOST_RESULTS) else num_results
