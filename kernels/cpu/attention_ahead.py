"""Asks for the keys and values that attention needs next, for items of few rows: memory is what they wait for.

Keys of a tile are asked for while the scores of the one before it are made, values during its weighted sums, and an
item's first tile during the last one of the item before it. 16 decodes of 300 tokens, 30 layers of SmolLM2-135M, two
threads: 9.6 ms where a tile asks for itself, 8.2 so (medians of 3 in turns; about 15 GB/s of 26).
"""

from __future__ import annotations

from kernels.cpu import attention_work as work
from kernels.cpu.attention_work import TILE_KEYS
from kernels.cpu.lanes import part, prefetch_lines
from kernels.cpu.vectors import get_int32, get_int64

GROUP_KEYS = 16


@part
def prefetch(args, item, tile, pack, line, of_keys):  # type: ignore[no-untyped-def]
    """Asks for the keys, or the values, of one tile, as far as they are known to be needed."""
    row = get_int64(get_int64(args + work.MEMBERS) + get_int64(item + work.ITEM_MEMBERS) * 8)
    table = get_int64(args + work.TABLES) + row * get_int64(args + work.TABLE_BYTES)
    head, block_size = get_int64(item + work.ITEM_HEAD), get_int64(args + work.BLOCK_SIZE)
    words = get_int64(args + work.HEAD_SIZE) // pack
    for position in range(tile * TILE_KEYS, min((tile + 1) * TILE_KEYS, work.seq_len(args, row)), GROUP_KEYS):
        block, offset = get_int32(table + position // block_size * 4), position % block_size
        if of_keys:
            keys = get_int64(args + work.KEYS) + block * get_int64(args + work.KEY_BLOCK_BYTES)
            keys += head * get_int64(args + work.KEY_HEAD_BYTES) + offset * 4
            prefetch_lines(keys, words, block_size * 4)
        else:
            values = get_int64(args + work.VALUES) + block * get_int64(args + work.VALUE_BLOCK_BYTES)
            values += head * get_int64(args + work.VALUE_HEAD_BYTES) + offset // pack * line
            prefetch_lines(values, GROUP_KEYS // pack * line // 64, 64)


@part
def first_tile(args, item):  # type: ignore[no-untyped-def]
    """The tile that an item of few rows begins with."""
    if get_int64(item + work.ITEM_NUM_TILES) > 0:
        return get_int64(item + work.ITEM_TILE)
    row = get_int64(get_int64(args + work.MEMBERS) + get_int64(item + work.ITEM_MEMBERS) * 8)
    position, window = work.seq_len(args, row) - work.query_len(args, row), get_int64(args + work.WINDOW)
    shared = get_int64(get_int64(args + work.SHARED) + row * work.SHARED_BYTES + work.SHARED_TILES)
    return max(shared, max(0, position - window + 1) // TILE_KEYS if window > 0 else 0)


@part
def _end_tile(args, item):  # type: ignore[no-untyped-def]
    """The tile after the last one of an item of few rows."""
    if get_int64(item + work.ITEM_NUM_TILES) > 0:
        return get_int64(item + work.ITEM_TILE) + get_int64(item + work.ITEM_NUM_TILES)
    row = get_int64(get_int64(args + work.MEMBERS) + get_int64(item + work.ITEM_MEMBERS) * 8)
    return -(-work.seq_len(args, row) // TILE_KEYS)


@part
def prefetch_next(args, item, end, tile, pack, line, of_keys):  # type: ignore[no-untyped-def]
    """Asks for the tile after this one, which behind an item's last is the next item's first.

    end: address after the items that this thread does one after another.
    """
    if tile + 1 < _end_tile(args, item):
        prefetch(args, item, tile + 1, pack, line, of_keys)
    elif item + work.ITEM_BYTES < end:
        prefetch(args, item + work.ITEM_BYTES, first_tile(args, item + work.ITEM_BYTES), pack, line, of_keys)
