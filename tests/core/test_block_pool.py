"""The KV pool's free list, references and hash map."""

from __future__ import annotations

import pytest

from core_svc.block_pool import BlockPool, KVCacheBlock


def free_ids(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_queue]


def hashed(pool: BlockPool, count: int, prefix: bytes = b"h") -> list[KVCacheBlock]:
    blocks = pool.get_new_blocks(count)
    for idx, block in enumerate(blocks):
        pool.cache_block(block, prefix + bytes([idx]))
    return blocks


def test_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert [block.block_id for block in pool.get_new_blocks(3)] == [1, 2, 3]
    assert pool.num_free_blocks == 0 and pool.num_used_blocks == 3
    with pytest.raises(ValueError):
        pool.get_new_blocks(1)
    with pytest.raises(RuntimeError):
        pool.cache_block(pool.null_block, b"x")


def test_a_pool_needs_a_block_beside_the_null_block() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1)


def test_failed_allocation_changes_nothing() -> None:
    pool = BlockPool(5)
    held = hashed(pool, 2)
    pool.free_blocks(held)
    before = free_ids(pool), dict(pool.cached_blocks)
    with pytest.raises(ValueError):
        pool.get_new_blocks(5)
    assert (free_ids(pool), dict(pool.cached_blocks)) == before
    assert all(block.ref_cnt == 0 for block in pool.blocks)


def test_hashed_blocks_are_freed_tail_first_behind_all_others() -> None:
    pool = BlockPool(8)
    table = hashed(pool, 3)
    pool.free_blocks(table)
    assert free_ids(pool) == [4, 5, 6, 7, 3, 2, 1]


def test_blocks_without_a_hash_are_reused_first() -> None:
    pool = BlockPool(8)
    table = pool.get_new_blocks(3)
    pool.cache_block(table[0], b"a")
    pool.free_blocks(table)
    assert free_ids(pool) == [2, 3, 4, 5, 6, 7, 1]


def test_a_block_freed_twice_is_an_error() -> None:
    pool = BlockPool(4)
    table = pool.get_new_blocks(1)
    pool.free_blocks(table)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free_blocks(table)
    assert free_ids(pool) == [1, 2, 3]


def test_a_shared_block_is_free_only_when_the_last_holder_lets_go() -> None:
    pool = BlockPool(4)
    table = hashed(pool, 1)
    pool.touch(table)
    pool.free_blocks(table)
    assert table[0].ref_cnt == 1 and 1 not in free_ids(pool)
    pool.free_blocks(table)
    assert free_ids(pool) == [2, 3, 1]


def test_touch_takes_a_free_block_out_of_the_middle() -> None:
    pool = BlockPool(5)
    table = hashed(pool, 3)
    pool.free_blocks(table)
    pool.touch([table[1]])
    assert free_ids(pool) == [4, 3, 1] and pool.num_free_blocks == 3
    assert pool.get_cached_block(b"h\x01") is table[1]


def test_a_reused_block_loses_its_hash() -> None:
    removed: list[bytes] = []
    pool = BlockPool(3, removed.extend)
    pool.free_blocks(hashed(pool, 2))
    pool.get_new_blocks(1)
    assert removed == [b"h\x01"]
    assert pool.get_cached_block(b"h\x01") is None and pool.get_cached_block(b"h\x00") is not None


def test_one_of_two_blocks_with_a_hash_may_go() -> None:
    removed: list[bytes] = []
    pool = BlockPool(3, removed.extend)
    first, second = pool.get_new_blocks(2)
    assert pool.cache_block(first, b"same") and not pool.cache_block(second, b"same")
    pool.free_blocks([first])
    pool.get_new_blocks(1)
    assert pool.get_cached_block(b"same") is second and removed == []
    pool.free_blocks([second])
    pool.get_new_blocks(1)
    assert pool.get_cached_block(b"same") is None and removed == [b"same"]


def test_of_equal_blocks_a_lookup_finds_the_oldest_whichever_goes() -> None:
    removed: list[bytes] = []
    pool = BlockPool(5, removed.extend)
    first, second, third, _ = pool.get_new_blocks(4)
    assert [pool.cache_block(block, b"same") for block in (first, second, third)] == [True, False, False]
    pool.free_blocks([second])
    pool.get_new_blocks(1)
    assert pool.get_cached_block(b"same") is first and second.block_hash is None
    pool.free_blocks([first])
    pool.get_new_blocks(1)
    assert pool.get_cached_block(b"same") is third and not pool.twin_blocks and removed == []


def test_reset_only_while_nothing_is_in_use() -> None:
    pool = BlockPool(4)
    table = hashed(pool, 2)
    assert not pool.reset() and pool.get_cached_block(b"h\x00") is table[0]
    pool.free_blocks(table)
    assert pool.reset()
    assert not pool.cached_blocks and all(block.block_hash is None for block in pool.blocks)


def test_the_free_list_refuses_a_block_twice_and_one_that_is_not_there() -> None:
    pool = BlockPool(3)
    with pytest.raises(RuntimeError):
        pool.free_queue.extend([pool.blocks[1]])
    (block,) = pool.free_queue.popleft()
    with pytest.raises(RuntimeError):
        pool.free_queue.remove(block)
    with pytest.raises(IndexError):
        pool.free_queue.popleft(2)
    pool.free_queue.popleft()
    with pytest.raises(IndexError):
        pool.free_queue.popleft()
