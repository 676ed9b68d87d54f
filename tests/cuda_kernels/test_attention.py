"""Paged attention's Triton kernel in the interpreter: sizes, tiles, caches and outputs beyond the table's own cases."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_inputs import ALL_OPTIONS, DECODES, MAX_ERROR, MIX, attend, compare, make, options_of, tiles
from kernel_cases import Paged, randn
from test_kernel_parity import error_ratio

from kernels.attention import reference, torch_paged_attention
from kernels.cuda import attention
from kernels.cuda.tiles import Device


@pytest.mark.parametrize("dtype", MAX_ERROR, ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_head_sizes(head_size: int, dtype: torch.dtype) -> None:
    query, kv = make(MIX, head_size=head_size, dtype=dtype)
    compare(query, kv, tiles(2, rows=32, keys=32))


@pytest.mark.parametrize("groups", range(1, 9))
def test_groups(groups: int) -> None:
    query, kv = make(MIX, num_heads=2 * groups, dtype=torch.float32, head_size=16, seed=groups)
    compare(query, kv, tiles(groups))
    compare(query, kv, tiles(groups, rows=64), **options_of(ALL_OPTIONS, 2 * groups))


def test_more_heads_in_a_group_than_the_least_rows() -> None:
    query, kv = make(MIX, num_heads=20, num_kv_heads=1, dtype=torch.float32, head_size=16)
    compare(query, kv, tiles(20, rows=32), **options_of(ALL_OPTIONS, 20))


@pytest.mark.parametrize("name", ALL_OPTIONS)
def test_options(name: str) -> None:
    query, kv = make(MIX, dtype=torch.float32, head_size=16, block_size=5)
    compare(query, kv, tiles(2), **options_of({name: ALL_OPTIONS[name]}, 4))


@pytest.mark.parametrize("block_size", [4, 16, 24])
def test_page_sizes(block_size: int) -> None:
    query, kv = make(MIX, dtype=torch.float32, head_size=16, block_size=block_size, num_heads=2, num_kv_heads=1)
    compare(query, kv, tiles(2, segments=4))
    compare(query, kv, tiles(2), **options_of(ALL_OPTIONS, 2))


@pytest.mark.parametrize("dtype", MAX_ERROR, ids=str)
def test_segments_make_the_whole(dtype: torch.dtype) -> None:
    """More segments than tiles of keys, too; the sink counts once."""
    query, kv = make(DECODES, dtype=dtype, head_size=16)
    for options in ({}, options_of(ALL_OPTIONS, 4)):
        whole, whole_lse = attend(reference, query, kv, **options)
        for segments in (2, 8) if dtype == torch.float32 else (4,):
            out, lse = attend(attention.paged_attention, query, kv, chosen=tiles(2, segments=segments), **options)
            assert error_ratio(out, whole) <= MAX_ERROR[dtype]
            torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("segments", [1, 4])
def test_tokens_outside_the_rows_are_left_alone(segments: int) -> None:
    """As in a captured batch that is padded: rows without tokens, and tokens of no row."""
    query, kv = make([*DECODES, (0, 0), (0, 0)], dtype=torch.float32, head_size=16)
    padded = torch.cat([query, query[:3]])
    out, lse = attend(attention.paged_attention, padded, kv, chosen=tiles(2, segments=segments))
    expected, expected_lse = attend(reference, query, kv)
    assert out[len(query) :].isnan().all() and lse[len(query) :].isnan().all()
    torch.testing.assert_close(out[: len(query)], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[: len(query)], expected_lse, rtol=1e-5, atol=1e-5)


def test_query_and_output_with_strides() -> None:
    query, kv = make(MIX, dtype=torch.float32, head_size=16)
    expected, _ = attend(reference, query, kv)
    wide = torch.full((query.shape[0], 9, 40), torch.nan)
    wide[:, 2:6, 8:24] = query
    out = torch.full((query.shape[0], 7, 16), torch.nan)
    args = kv.key_cache, kv.value_cache, kv.query_start_loc, kv.seq_lens, kv.block_tables, 0.25
    attention.paged_attention(wide[:, 2:6, 8:24], *args, out=out[:, 1:5], chosen=tiles(2))
    torch.testing.assert_close(out[:, 1:5], expected, rtol=1e-5, atol=1e-5)
    assert out[:, [0, 5, 6]].isnan().all()


@pytest.mark.parametrize("freed", [1, 2])
def test_blocks_that_the_window_left_are_not_read(freed: int) -> None:
    """They are given to others: their entries point to a block of NaN."""
    query, kv = make([(3, 60), (1, 58)], dtype=torch.float32, head_size=16)
    expected, _ = attend(reference, query, kv, sliding_window=20)
    kv.block_tables[:, :freed] = 0
    assert kv.key_cache[0].isnan().all() and kv.value_cache[0].isnan().all()
    for segments in (1, 2):
        chosen = tiles(2, keys=32, segments=segments)
        out, _ = attend(attention.paged_attention, query, kv, chosen=chosen, sliding_window=20)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("per_head", [False, True])
def test_float8_caches_with_scales(per_head: bool, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before sm_89 by their bits, in the type of the products."""
    monkeypatch.setattr(attention, "device_of", lambda device: Device(capability, 132))
    query, kv = make(MIX, dtype=torch.float32, block_size=5)
    smallest = torch.tensor([2.0**-9, -(2.0**-6), 448.0, -0.0])  # a subnormal number, the least normal one, the largest
    block, offset = int(kv.block_tables[0, 0]), 1
    kv.key_cache[block, offset, :, :4] = kv.value_cache[block, offset, :, :4] = smallest
    kv.key_cache, kv.value_cache = (x.to(torch.float8_e4m3fn) for x in (kv.key_cache, kv.value_cache))
    key_scale, value_scale = (
        torch.tensor(x if per_head else x[:1]) for x in ([0.02, 0.5], [1.5, 0.25])
    )  # fmt: skip
    compare(query, kv, tiles(2, segments=2), key_scale=key_scale, value_scale=value_scale)
    compare(query, kv, tiles(2), key_scale=key_scale, softcap=2.0)
    expected, expected_lse = attend(reference, query, kv, key_scale=key_scale, value_scale=value_scale)
    out, lse = attend(torch_paged_attention, query, kv, key_scale=key_scale, value_scale=value_scale)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_every_byte_of_e4m3_by_its_bits() -> None:
    """A cache whose values are every finite number; with one key of weight 1 the output is the value itself."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = numbers[~numbers.float().isnan()]
    assert len(numbers) == 254
    values = torch.nn.functional.pad(numbers.view(torch.uint8), (0, 2)).view(1, 1, 1, 256)
    keys = torch.zeros(1, 1, 1, 256, dtype=torch.uint8)
    kv = Paged(keys, values, *(torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [1], [[0]])))
    out, _ = attend(attention.paged_attention, torch.ones(1, 1, 256), kv, chosen=tiles(1))
    assert torch.equal(out[0, 0, :254], numbers.float())


def test_bfloat16_cache_for_a_float32_query() -> None:
    query, kv = make(MIX, dtype=torch.float32, head_size=16)
    kv = dataclasses.replace(kv, key_cache=kv.key_cache.bfloat16(), value_cache=kv.value_cache.bfloat16())
    compare(query, kv, tiles(2))


def test_a_cache_beyond_two_to_the_31() -> None:
    """32,768 blocks of 65,536 numbers each, of which a row owns the first, the last, and two between."""
    num_blocks, block_size, num_kv_heads, head_size = 32768 + 1, 64, 4, 256
    shape = num_blocks, block_size, num_kv_heads, head_size
    assert (num_blocks - 1) * block_size * num_kv_heads * head_size >= 2**31
    # Untouched pages of zeros take no memory.
    caches = [torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    blocks = [0, 20_000, num_blocks - 2, num_blocks - 1]
    small = [randn(generator, 4, *shape[1:], dtype=torch.float32).to(torch.float8_e4m3fn) for _ in range(2)]
    for cache, part in zip(caches, small, strict=True):
        for place, block in enumerate(blocks):
            cache[block].copy_(part[place])
    query = randn(generator, 1, num_kv_heads, head_size, dtype=torch.float32)
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([201], dtype=torch.int32)
    far = Paged(*caches, starts, lens, torch.tensor([blocks], dtype=torch.int32))
    near = Paged(*small, starts, lens, torch.arange(4, dtype=torch.int32).unsqueeze(0))
    out, _ = attend(attention.paged_attention, query, far, chosen=tiles(1, keys=64))
    expected, _ = attend(torch_paged_attention, query, near)
    assert error_ratio(out, expected) <= 1e-5


def test_default_tiles_serve_every_batch() -> None:
    """Also a single row in a table that is wide enough for splitting."""
    for rows in (MIX, [(1, 300)], [(3, 300)]):
        query, kv = make(rows, dtype=torch.float32, head_size=16, num_heads=2, num_kv_heads=1)
        expected, _ = attend(torch_paged_attention, query, kv)
        out, _ = attend(attention.paged_attention, query, kv)
        assert error_ratio(out, expected) <= 1e-5
