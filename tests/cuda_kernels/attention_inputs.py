"""Inputs of paged attention for the tests of its Triton kernel, and the comparison with the reference."""

from __future__ import annotations

from typing import Any

import torch
from kernel_cases import Paged, paged, randn
from test_kernel_parity import error_ratio

from kernels.attention import reference
from kernels.cuda import attention
from kernels.cuda.tiles import Tiles

MIX = [(6, 45), (1, 33), (0, 7), (1, 0), (4, 2), (3, 3)]
"""A chunk, a decode, a row that is left alone, two that see nothing at first or at all, a short prompt."""
DECODES = [(1, 70), (1, 5), (1, 0), (1, 33)]
MAX_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3}
ALL_OPTIONS: dict[str, Any] = {"sliding_window": 9, "softcap": 3.0, "sinks": True, "alibi_slopes": True}


def tiles(groups: int, *, rows: int = 16, keys: int = 16, segments: int = 1) -> Tiles:
    return Tiles(max(rows, groups), max(rows, groups) // groups, keys, segments, 4, 2)


def make(
    rows: list[tuple[int, int]], *, num_heads: int = 4, num_kv_heads: int = 2, head_size: int = 64, dtype: torch.dtype,
    block_size: int = 16, seed: int = 0,
) -> tuple[torch.Tensor, Paged]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    kv = paged(
        generator, rows, block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype
    )  # fmt: skip
    return randn(generator, int(kv.query_start_loc[-1]), num_heads, head_size, dtype=dtype) * 2, kv


def options_of(names: dict[str, Any], num_heads: int) -> dict[str, Any]:
    """True is replaced by random numbers, one per head."""
    generator = torch.Generator().manual_seed(9)
    return {n: randn(generator, num_heads, dtype=torch.float32) if v is True else v for n, v in names.items()}


def attend(function: Any, query: torch.Tensor, kv: Paged, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, NaN where nothing was written."""
    out = torch.full((*query.shape[:2], kv.value_cache.shape[-1]), torch.nan, dtype=query.dtype)
    lse = torch.full(query.shape[:2], torch.nan)
    args = query, kv.key_cache, kv.value_cache, kv.query_start_loc, kv.seq_lens, kv.block_tables
    assert function(*args, query.shape[2] ** -0.5, out=out, lse=lse, **options) is out
    return out, lse


def compare(query: torch.Tensor, kv: Paged, chosen: Tiles, **options: Any) -> None:
    expected, expected_lse = attend(reference, query, kv, **options)
    out, lse = attend(attention.paged_attention, query, kv, chosen=chosen, **options)
    assert not out.isnan().any() and not lse.isnan().any()
    assert error_ratio(out, expected) <= MAX_ERROR[query.dtype]
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    assert error_ratio(lse.clamp(min=-100), expected_lse.clamp(min=-100)) <= MAX_ERROR[query.dtype]
