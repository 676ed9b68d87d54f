"""Attention in two parts that are merged: equal to attention to the whole."""

from __future__ import annotations

import pytest
import torch
from attention_inputs import attend, make

import kernels
from kernels.attention import torch_paged_attention
from kernels.attention_merge import reference
from kernels.cuda.attention_merge import merge_attention

IMPLEMENTATIONS = [reference, kernels.merge_attention.implementations["cpu"], merge_attention]


def test_a_shared_prefix_and_the_rest_make_the_whole() -> None:
    """Two decodes and a chunk after one prefix of 32 tokens; the sink is in the part after it."""
    rows = [(1, 50), (3, 49), (1, 33)]
    query, kv = make(rows, dtype=torch.float32, head_size=16)
    kv.block_tables[:, :2] = kv.block_tables[0, :2].clone()
    options = {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}
    whole, whole_lse = attend(torch_paged_attention, query, kv, **options)

    def part(block_tables: torch.Tensor, seq_lens: torch.Tensor, starts: torch.Tensor, **options: torch.Tensor):
        out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:2], torch.nan)
        caches = kv.key_cache, kv.value_cache
        kernels.OPERATIONS["paged_attention"].implementations["cuda"](
            query, *caches, starts, seq_lens, block_tables, 0.25, out=out, lse=lse, **options
        )
        return out, lse

    num_tokens = query.shape[0]
    # Every token is a row of its own: it sees the whole prefix.
    starts = torch.arange(num_tokens + 1, dtype=torch.int32)
    lens = torch.full((num_tokens,), 32, dtype=torch.int32)
    prefix = part(kv.block_tables[:1, :2].expand(num_tokens, 2), lens, starts)
    rest = part(kv.block_tables[:, 2:], kv.seq_lens - 32, kv.query_start_loc, **options)
    for merge in IMPLEMENTATIONS:
        out, lse = merge(*prefix, *rest)
        torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("merge", IMPLEMENTATIONS)
def test_two_empty_parts_make_nothing(merge) -> None:
    outs = torch.full((3, 2, 5), torch.nan)
    lse = torch.full((3, 2), -torch.inf)
    out, merged = merge(outs, lse, outs, lse)
    assert torch.equal(out, torch.zeros(3, 2, 5)) and merged.isneginf().all()
