"""The compiled attention: a row has the same bits in any batch, chunk, block size and number of threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import Paged, paged, randn

from kernels.attention import torch_paged_attention
from kernels.cpu import attention, features
from kernels.cpu.team import Team
from kernels.kv_layout import cache_shapes, read_keys, read_values, write_keys, write_values

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCALE = 0.125
OPTIONS: list[dict[str, Any]] = [{}, {"sliding_window": 100}, {"sliding_window": 300, "softcap": 3.0}]
LESSER_ISAS = features.ISAS[features.ISAS.index(features.isa()) :]


def attend(query: torch.Tensor, kv: Paged, rows: list[int], **options: Any) -> torch.Tensor:
    """Attention of some of a batch's rows; query holds theirs only."""
    starts = kv.query_start_loc
    counts = torch.stack([starts[row + 1] - starts[row] for row in rows])
    start_loc = torch.cat([starts.new_zeros(1), counts.cumsum(0).int()])
    return attention.paged_attention(
        query, kv.key_cache, kv.value_cache, start_loc, kv.seq_lens[rows], kv.block_tables[rows], SCALE, **options
    )


def moved(kv: Paged, block_size: int, sizes: tuple[int, int]) -> Paged:
    """The same keys and values in blocks of another size, in order."""
    width = -(-int(kv.seq_lens.max()) // block_size)
    num_rows, dtype = len(kv.seq_lens), kv.key_cache.dtype
    old_size, num_kv_heads = kv.key_cache.shape[3], kv.key_cache.shape[1]
    shapes = cache_shapes(
        1 + num_rows * width,
        block_size,
        num_kv_heads,
        sizes[0],
        value_size=sizes[1],
        dtype=dtype,
        device=torch.device("cpu"),
    )
    caches = [torch.full(shape, torch.nan, dtype=dtype) for shape in shapes]
    tables = 1 + torch.arange(num_rows * width, dtype=torch.int32).view(num_rows, width)
    for row, seq_len in enumerate(kv.seq_lens.tolist()):
        at = torch.arange(seq_len)
        old = kv.block_tables[row][at // old_size].long() * old_size + at % old_size
        new = tables[row][at // block_size].long() * block_size + at % block_size
        write_keys(caches[0], new, read_keys(kv.key_cache, old, sizes[0]))
        write_values(caches[1], new, read_values(kv.value_cache, old, old_size), block_size)
    return Paged(caches[0], caches[1], kv.query_start_loc, kv.seq_lens, tables)


def batch(dtype: torch.dtype, rows: list[tuple[int, int]], num_heads: int = 9) -> tuple[torch.Tensor, Paged]:
    generator = torch.Generator().manual_seed(7)
    kv = paged(generator, rows, block_size=16, num_kv_heads=3, head_size=64, dtype=dtype)
    return randn(generator, int(kv.query_start_loc[-1]), num_heads, 64, dtype=dtype) * 2, kv


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_chunk(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """As a whole prompt, in chunks, and token by token.

    Case: vllm#5898
    """
    query, kv = batch(dtype, [(300, 300)])
    whole = attend(query, kv, [0], **options)
    for size in (1, 37, 128):
        for start in range(0, 300, size):
            end = min(start + size, 300)
            part = Paged(
                kv.key_cache, kv.value_cache, torch.tensor([0, end - start]).int(), torch.tensor([end]).int(),
                kv.block_tables,
            )  # fmt: skip
            assert torch.equal(attend(query[start:end], part, [0], **options), whole[start:end]), (size, start)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    rows = [(1, 40), (1, 700), (0, 0), (9, 30), (1, 3), (200, 456), (1, 2500), (3, 130)]
    query, kv = batch(dtype, rows)
    together = attend(query, kv, list(range(len(rows))))
    for row in range(len(rows)):
        tokens = slice(int(kv.query_start_loc[row]), int(kv.query_start_loc[row + 1]))
        assert torch.equal(attend(query[tokens], kv, [row]), together[tokens]), f"row {row}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_with_shared_blocks_have_the_same_bits_alone(dtype: torch.dtype) -> None:
    """Requests whose prefix lies in the same blocks, for some of them longer than for others; tails of any length."""
    query, kv = batch(dtype, [(1, 700)] * 6 + [(1, 200), (2, 690), (40, 600), (1, 513)])
    for row in range(1, 10):
        kv.block_tables[row, : (38, 38, 38, 20, 38, 9, 12, 38, 30, 32)[row]] = kv.block_tables[
            0, : (38, 38, 38, 20, 38, 9, 12, 38, 30, 32)[row]
        ]
    kv.block_tables[4, 20:30] = kv.block_tables[3, 20:30]
    rows = list(range(10))
    together = attend(query, kv, rows)
    expected = torch_paged_attention(
        query.float(), kv.key_cache.float(), kv.value_cache.float(), kv.query_start_loc, kv.seq_lens, kv.block_tables,
        SCALE,
    ) if dtype == torch.float32 else None  # fmt: skip
    if expected is not None:
        torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-5)
    for row in rows:
        tokens = slice(int(kv.query_start_loc[row]), int(kv.query_start_loc[row + 1]))
        assert torch.equal(attend(query[tokens], kv, [row]), together[tokens]), f"row {row}"


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_nothing(dtype: torch.dtype, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread takes all tiles in turn; several share out the tiles of few and of long requests."""
    for rows in ([(1, 1000)], [(1, 3000), (1, 5), (70, 300)], [(1, 200 + i) for i in range(40)]):
        query, kv = batch(dtype, rows)
        results = []
        for size in (1, num_threads):
            team = Team(size)
            with monkeypatch.context() as patch:
                patch.setattr(attention, "team", lambda team=team: team)
                results.append(attend(query, kv, list(range(len(rows)))))
        assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("block_size", [5, 8, 32, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_block_size_changes_nothing(dtype: torch.dtype, block_size: int) -> None:
    """Keys that lie in whole groups of 16 are read in place, others are gathered."""
    query, kv = batch(dtype, [(1, 300), (20, 150), (1, 17)])
    rows = [0, 1, 2]
    other = moved(kv, block_size, (64, 64))
    for options in OPTIONS:
        assert torch.equal(attend(query, kv, rows, **options), attend(query, other, rows, **options))


@pytest.mark.parametrize("isa", LESSER_ISAS)
def test_every_instruction_set_agrees_in_bfloat16(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query, kv = batch(torch.bfloat16, [(1, 300), (150, 280), (1, 17)])
    monkeypatch.setattr(attention, "isa", lambda: isa)
    got = attend(query, kv, [0, 1, 2]).float()
    expected = torch_paged_attention(
        query.float(), kv.key_cache.float(), kv.value_cache.float(), kv.query_start_loc, kv.seq_lens, kv.block_tables,
        SCALE,
    )  # fmt: skip
    assert float((got - expected).square().mean().sqrt() / expected.square().mean().sqrt()) < 4e-3
    assert not torch.equal(got, expected)


@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
def test_cache_of_another_type_than_the_model(kv_dtype: torch.dtype) -> None:
    for dtype in DTYPES:
        query, kv = batch(kv_dtype, [(1, 300), (15, 28)])
        got = attend(query.to(dtype), kv, [0, 1])
        expected = torch_paged_attention(
            query.to(dtype).float(), kv.key_cache.float(), kv.value_cache.float(), kv.query_start_loc, kv.seq_lens,
            kv.block_tables, SCALE,
        )  # fmt: skip
        assert got.dtype == dtype
        assert float((got.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()) < 4e-3


def test_strided_query_and_output() -> None:
    query, kv = batch(torch.float32, [(1, 30), (5, 28)])
    wide = torch.full((6, 3, 9, 80), torch.nan)
    wide[:, 1, :, 3:67] = query
    out = torch.full((6, 9, 2, 64), torch.nan)[:, :, 1]
    plain = attend(query, kv, [0, 1])
    assert torch.equal(attend(wide[:, 1, :, 3:67], kv, [0, 1], out=out), plain) and torch.equal(out, plain)
    assert torch.equal(attend(query.transpose(0, 2).contiguous().transpose(0, 2), kv, [0, 1]), plain)
