"""Tiles of paged attention: what every launch relies on, and what was chosen for the batches that matter."""

from __future__ import annotations

import itertools

import pytest

from kernels.cuda.tiles import MOST_SEGMENTS, Device, Shape, tiles

H200 = Device(90, 132)
LLAMA = Shape(128, 128, 4, 2, 2)


def is_power_of_two(x: int) -> bool:
    return x > 0 and x & (x - 1) == 0


@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
def test_every_choice_can_be_launched(capability: int) -> None:
    sizes = itertools.product((8, 64, 80, 96, 128, 192, 256), (1, 3, 4, 8, 71), (2, 4), (1, 2, 4))
    batches = [(1, 1), (0, 0), (7, 7), (256, 256), (12, 3), (300, 7), (8192, 1), (5, 8), (100, 1)]
    for (size, groups, compute, cache), (tokens, rows), max_keys in itertools.product(sizes, batches, (0, 64, 131072)):
        cut = tiles(Shape(size, size, groups, compute, cache), Device(capability, 100), tokens, rows, 2, max_keys)
        assert is_power_of_two(cut.rows) and is_power_of_two(cut.keys) and is_power_of_two(cut.segments)
        assert cut.rows >= 16 and cut.keys >= 16 and cut.num_warps in (4, 8) and cut.num_stages >= 1
        assert cut.queries >= 1 and cut.queries * groups <= cut.rows
        assert cut.segments <= MOST_SEGMENTS and cut.segments <= max(1, max_keys // 128)


def test_a_decode_fills_the_least_product() -> None:
    cut = tiles(LLAMA, H200, 128, 128, 8, 32768)
    assert (cut.rows, cut.queries, cut.keys, cut.segments) == (16, 4, 64, 1)


def test_a_verification_reads_the_keys_once() -> None:
    """Eight heads in a group and four tokens: 32 rows."""
    cut = tiles(Shape(128, 128, 8, 2, 2), H200, 4 * 64, 64, 8, 32768)
    assert cut.rows == 32 and cut.queries == 4


def test_small_batches_share_out_a_rows_keys() -> None:
    found = [tiles(LLAMA, H200, rows, rows, 8, 32768).segments for rows in (1, 4, 16, 32, 64, 256)]
    assert found == [64, 32, 8, 4, 2, 1]
    assert tiles(LLAMA, H200, 1, 1, 8, 512).segments == 4  # a segment has 128 keys at least
    assert tiles(LLAMA, H200, 1, 1, 8, 128).segments == 1


def test_a_prefill_takes_wide_tiles_and_splits_only_to_fill_the_gpu() -> None:
    assert tiles(LLAMA, H200, 8192, 2, 8, 32768).rows == 128
    assert tiles(LLAMA, H200, 8192, 2, 8, 32768).segments == 1
    assert tiles(LLAMA, H200, 128, 1, 8, 32768).segments == 8
    assert tiles(LLAMA, H200, 301, 64, 8, 32768).rows == 64  # mostly decodes: half of 128 would be padding


def test_shared_memory_of_small_gpus_takes_fewer_stages() -> None:
    stages = [tiles(Shape(256, 256, 4, 2, 2), Device(c, 100), 8192, 2, 8, 32768).num_stages for c in (90, 86)]
    assert stages[0] > stages[1]
