"""paged_attention in Triton: prefill chunks, decodes and draft verification in one launch.

A program does some query tokens of one sequence, with all query heads of one KV head as rows of its products, over a
segment of the sequence's keys. The grid comes from shapes alone: row r has at most as many tiles as lie between
query_start_loc[r] // queries + r and its successor's, and those that it does not need end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.attention_reduce import reduce_segments
from kernels.cuda.attention_rows import LOG2_E, factors, find_tile, span, walk
from kernels.cuda.tiles import Shape, Tiles, device_of, tiles
from kernels.kv_layout import block_size_of, num_kv_heads_of, value_size_of

LN_2 = tl.constexpr(0.6931471805599453)
CONVERTS_E4M3 = 89
"""The first compute capability that does."""
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit(do_not_specialize=["num_rows", "window", "table_row"])
def paged_attention_kernel(  # type: ignore[no-untyped-def]
    out, lse, partial, partial_lse, query, key_cache, value_cache, query_start_loc, seq_lens, block_tables,
    sinks, alibi_slopes, key_scale, value_scale, scale, softcap, window, num_rows, num_heads,
    out_token, out_head, query_token, query_head, key_block, key_slot, key_head,
    value_block, value_slot, value_head, table_row, key_scale_head, value_scale_head,
    HEAD_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SEGMENTS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """What is None is left out when compiling. Strides are in numbers; the last dimension's is 1."""
    # A sequence's last tiles see most keys: they begin first.
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, segment = tl.program_id(1), tl.program_id(2)
    row, start, query_len, first_query = find_tile(query_start_loc, num_rows, place, QUERIES)
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens + row)

    # Row m of the products is query token m // GROUPS and head m % GROUPS of the group.
    pairs = tl.arange(0, ROWS)
    query_index = first_query + pairs // GROUPS
    head = kv_head * GROUPS + pairs % GROUPS
    is_row = (pairs < QUERIES * GROUPS) & (query_index < query_len)
    token = (start + query_index).to(tl.int64)
    head_dims, value_dims = tl.arange(0, HEAD_PADDED), tl.arange(0, VALUE_PADDED)
    places = query + (token * query_token + head * query_head)[:, None] + head_dims[None, :]
    queries = tl.load(places, is_row[:, None] & (head_dims < HEAD_SIZE)[None, :], 0.0).to(COMPUTE)

    first_position = seq_len - query_len + first_query
    last_position = seq_len - query_len + tl.minimum(first_query + QUERIES, query_len) - 1
    positions = first_position + pairs // GROUPS
    first, limit, begin, end, num_open = span(first_position, last_position, window, segment, KEYS, SEGMENTS)
    score_scale, result_scale = factors(
        key_cache, key_scale, value_scale, scale, softcap, kv_head, key_scale_head, value_scale_head
    )
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + head, is_row, 0.0) * LOG2_E

    result = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    if sinks is not None and segment == 0:
        total += 1.0
        highest = tl.load(sinks + head, is_row, float("-inf")) * LOG2_E
    table = block_tables + row.to(tl.int64) * table_row
    keys, values = key_cache + kv_head * key_head, value_cache + kv_head * value_head
    result, total, highest = walk(
        result, total, highest, queries, positions, slopes, score_scale, softcap, window, table, keys, values,
        key_block, key_slot, value_block, value_slot, begin, tl.minimum(end, num_open), first, limit,
        HEAD_SIZE, VALUE_SIZE, BLOCK_SIZE, KEYS, COMPUTE, False,
    )  # fmt: skip
    result, total, highest = walk(
        result, total, highest, queries, positions, slopes, score_scale, softcap, window, table, keys, values,
        key_block, key_slot, value_block, value_slot, tl.maximum(begin, num_open), end, first, limit,
        HEAD_SIZE, VALUE_SIZE, BLOCK_SIZE, KEYS, COMPUTE, True,
    )  # fmt: skip

    is_any = total > 0.0
    result = result * tl.where(is_any, result_scale / tl.where(is_any, total, 1.0), 0.0)[:, None]
    log_total = tl.where(is_any, highest + tl.log2(tl.where(is_any, total, 1.0)), float("-inf"))
    is_out = is_row[:, None] & (value_dims < VALUE_SIZE)[None, :]
    if SEGMENTS > 1:
        at = (token * num_heads + head) * SEGMENTS + segment
        tl.store(partial + at[:, None] * VALUE_SIZE + value_dims[None, :], result, is_out)
        tl.store(partial_lse + at, log_total, is_row)
    else:
        places = out + (token * out_token + head * out_head)[:, None] + value_dims[None, :]
        tl.store(places, result.to(out.dtype.element_ty), is_out)
        if lse is not None:
            tl.store(lse + token * num_heads + head, log_total * LN_2, is_row)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    chosen: Tiles | None = None,
) -> torch.Tensor:
    """See `kernels.attention.reference`; `chosen` replaces what `tiles` would choose."""
    num_tokens, num_heads, head_size = query.shape
    num_rows, num_kv_heads, value_size = seq_lens.shape[0], num_kv_heads_of(key_cache), value_size_of(value_cache)
    if num_tokens == 0 or num_rows == 0:
        return out
    query = query if query.stride(-1) == 1 else query.contiguous()
    compute = _compute_type(query.dtype, key_cache.dtype)
    groups, block_size, device = num_heads // num_kv_heads, block_size_of(key_cache), device_of(query.device)
    shape = Shape(head_size, value_size, groups, compute.itemsize, key_cache.element_size())
    max_keys = block_tables.shape[1] * block_size
    cut = chosen or tiles(shape, device, num_tokens, num_rows, num_kv_heads, max_keys)
    if key_cache.dtype == torch.float8_e4m3fn and device.capability < CONVERTS_E4M3:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    partial = partial_lse = None
    if cut.segments > 1:
        sizes = (num_tokens, num_heads, cut.segments)
        partial = torch.empty(*sizes, value_size, dtype=torch.float32, device=query.device)
        partial_lse = torch.empty(sizes, dtype=torch.float32, device=query.device)
    scales = [None if x is None else x.expand(num_kv_heads) for x in (key_scale, value_scale)]
    grid = (-(-num_tokens // cut.queries) + num_rows, num_kv_heads, cut.segments)
    paged_attention_kernel[grid](
        out, lse, partial, partial_lse, query, key_cache, value_cache, query_start_loc, seq_lens, block_tables,
        _float32(sinks), _float32(alibi_slopes), *scales,
        float(scale), None if softcap is None else float(softcap), sliding_window, num_rows, num_heads,
        *out.stride()[:2], *query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
        block_tables.stride(0), *(0 if x is None else x.stride(0) for x in scales),
        HEAD_SIZE=head_size, VALUE_SIZE=value_size, HEAD_PADDED=padded(head_size), VALUE_PADDED=padded(value_size),
        GROUPS=groups, BLOCK_SIZE=block_size, ROWS=cut.rows, QUERIES=cut.queries, KEYS=cut.keys,
        SEGMENTS=cut.segments, COMPUTE=_TYPES[compute], num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    if partial is not None and partial_lse is not None:
        reduce_segments(partial, partial_lse, query_start_loc, num_rows, out, lse)
    return out


def padded(size: int) -> int:
    """Of a head: a power of two, and enough for a product on tensor cores."""
    return max(16, int(triton.next_power_of_2(size)))


def _compute_type(query: torch.dtype, cache: torch.dtype) -> torch.dtype:
    """Of the products: the query's, where a cache of its own type or of 8 bits loses nothing in it."""
    return query if cache == query or cache.itemsize == 1 else torch.float32


def _float32(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.float().contiguous()
