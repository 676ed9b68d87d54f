"""Finds requests of a batch whose first keys lie in the same blocks, so that these are read once for all of them.

A request joins the first one before it that has the same query length and the same blocks in the first tile; they form
a group. What a group shares is counted in whole tiles that each of its queries sees whole.
"""

from __future__ import annotations

from kernels.cpu import jit
from kernels.cpu.attention_work import (
    BLOCK_SIZE,
    HASHES,
    ITEM_BYTES,
    MEMBERS,
    MOST_ROWS,
    NUM_GROUPS,
    NUM_HASHES,
    NUM_KV_HEADS,
    NUM_ROWS,
    SHARED,
    SHARED_BYTES,
    SHARED_LEADER,
    SHARED_NEXT,
    SHARED_RESULT,
    SHARED_TILES,
    TABLE_BYTES,
    TABLES,
    TILE_KEYS,
    put_item,
    query_len,
    reserve_results,
    whole_tiles,
)
from kernels.cpu.vectors import get_int32, get_int64, put_int64

_NOBODY = -1


@jit.inlined
def _shared(args: int, row: int) -> int:
    return get_int64(args + SHARED) + row * SHARED_BYTES


@jit.inlined
def _common_tiles(args: int, row: int, leader: int) -> int:
    """Whole tiles from the first on whose blocks are the same."""
    block_size, table_bytes = get_int64(args + BLOCK_SIZE), get_int64(args + TABLE_BYTES)
    one, other = get_int64(args + TABLES) + row * table_bytes, get_int64(args + TABLES) + leader * table_bytes
    most = min(whole_tiles(args, row), whole_tiles(args, leader))
    block = 0
    for tile in range(most):
        last = ((tile + 1) * TILE_KEYS - 1) // block_size
        while block <= last:
            if get_int32(one + block * 4) != get_int32(other + block * 4):
                return tile
            block += 1
    return most


@jit.inlined
def _join(args: int, row: int, leader: int) -> bool:
    """Puts a request behind a leader if they share tiles; whether they do."""
    if query_len(args, leader) != query_len(args, row):
        return False
    tiles, shared = _common_tiles(args, row, leader), _shared(args, row)
    if tiles == 0:
        return False
    put_int64(shared + SHARED_LEADER, leader)
    put_int64(shared + SHARED_TILES, tiles)
    put_int64(shared + SHARED_NEXT, get_int64(_shared(args, leader) + SHARED_NEXT))
    put_int64(_shared(args, leader) + SHARED_NEXT, row)
    return True


@jit.inlined
def _find_leaders(args: int) -> None:
    """Gives each request its leader (itself where it joins none) and the tiles that they share."""
    hashes, size = get_int64(args + HASHES), get_int64(args + NUM_HASHES)
    for i in range(size):
        put_int64(hashes + i * 8, _NOBODY)
    for row in range(get_int64(args + NUM_ROWS)):
        shared = _shared(args, row)
        put_int64(shared + SHARED_LEADER, row)
        put_int64(shared + SHARED_NEXT, _NOBODY)
        if whole_tiles(args, row) == 0:
            continue
        first_block = get_int32(get_int64(args + TABLES) + row * get_int64(args + TABLE_BYTES))
        place = (first_block * 0x9E3779B1 + query_len(args, row)) & (size - 1)
        leader = get_int64(hashes + place * 8)
        while leader != _NOBODY and not _join(args, row, leader):
            place = (place + 1) & (size - 1)
            leader = get_int64(hashes + place * 8)
        if leader == _NOBODY:
            put_int64(hashes + place * 8, row)


@jit.inlined
def _sort_group(args: int, leader: int, begin: int) -> int:
    """Lists a group's members from place `begin` of MEMBERS on, those that share most first; returns how many."""
    members, count, row = get_int64(args + MEMBERS), 0, leader
    while row != _NOBODY:
        tiles, place = get_int64(_shared(args, row) + SHARED_TILES), begin + count
        while place > begin:
            before = get_int64(members + (place - 1) * 8)
            if get_int64(_shared(args, before) + SHARED_TILES) >= tiles:
                break
            put_int64(members + place * 8, before)
            place -= 1
        put_int64(members + place * 8, row)
        count, row = count + 1, get_int64(_shared(args, row) + SHARED_NEXT)
    return count


@jit.inlined
def _put_group(args: int, at: int, begin: int, count: int, rows: int) -> int:
    """Items of a group's shared tiles; returns the address after them."""
    members, heads, per_item = get_int64(args + MEMBERS), get_int64(args + NUM_KV_HEADS), MOST_ROWS // rows
    for tile in range(get_int64(_shared(args, get_int64(members + begin * 8)) + SHARED_TILES)):
        while get_int64(_shared(args, get_int64(members + (begin + count - 1) * 8)) + SHARED_TILES) <= tile:
            count -= 1
        for first in range(0, count, per_item):
            for head in range(heads):
                put_item(at, begin + first, min(per_item, count - first), head, 0, rows, tile, 1)
                at += ITEM_BYTES
    return at


@jit.inlined
def plan_sharing(args: int, at: int, end: int, num_results: int) -> tuple[int, int]:
    """Puts items of shared tiles from address `at` up to `end`; returns the address after them and results used."""
    num_rows, heads = get_int64(args + NUM_ROWS), get_int64(args + NUM_KV_HEADS)
    _find_leaders(args)
    listed = num_rows
    for leader in range(num_rows):
        shared = _shared(args, leader)
        if get_int64(shared + SHARED_LEADER) != leader or get_int64(shared + SHARED_NEXT) == _NOBODY:
            continue
        rows, most, size, needed = query_len(args, leader) * get_int64(args + NUM_GROUPS), 0, 1, 0
        row = get_int64(shared + SHARED_NEXT)
        while row != _NOBODY:
            tiles = get_int64(_shared(args, row) + SHARED_TILES)
            most, size, needed = max(most, tiles), size + 1, needed + tiles
            row = get_int64(_shared(args, row) + SHARED_NEXT)
        put_int64(shared + SHARED_TILES, most)
        num_items = heads * most * -(-size // (MOST_ROWS // rows))
        reserved = reserve_results(args, num_results, (needed + most) * rows * heads)
        is_planned = reserved > num_results and at + num_items * ITEM_BYTES <= end
        row = leader
        while row != _NOBODY:
            if is_planned:
                tiles = get_int64(_shared(args, row) + SHARED_TILES)
                put_int64(_shared(args, row) + SHARED_RESULT, num_results)
                num_results += tiles * rows * heads
            else:
                put_int64(_shared(args, row) + SHARED_TILES, 0)
            row = get_int64(_shared(args, row) + SHARED_NEXT)
        if is_planned:
            count = _sort_group(args, leader, listed)
            at = _put_group(args, at, listed, count, rows)
            listed += count
    return at, num_results
