"""paged_attention on a CPU: one call over a ragged batch, for every type of cache; `attention_work` cuts it up."""

from __future__ import annotations

import threading

import torch

from kernels.cpu import attention_work as work
from kernels.cpu import jit
from kernels.cpu.attention_blocks import (
    scores_bfloat16,
    scores_float16,
    scores_float32,
    scores_pairs,
    values_bfloat16,
    values_float16,
    values_float32,
    values_pairs,
)
from kernels.cpu.attention_items import MOST_HEAD_SIZE, make_attend
from kernels.cpu.attention_plan import plan
from kernels.cpu.attention_rows import RESULT_EXTRA_BYTES
from kernels.cpu.attention_tiles import scores_tiles, values_tiles
from kernels.cpu.caches import caches
from kernels.cpu.call import Call
from kernels.cpu.features import isa
from kernels.cpu.lanes import KINDS
from kernels.cpu.recorder import empty, is_recording
from kernels.cpu.team import share, team
from kernels.cpu.vectors import BFLOAT16, get_int32, get_int64, put_int64, store_bfloat16, store_float32

_MOST_FIRST_ITEMS = 4096
_RESULTS_BYTES = 8 << 20
MOST_ITEMS_PER_CHUNK, CHUNKS_PER_THREAD = 8, 4
"""Room for results that wait; what does not fit is not shared out."""


_attend_float32 = make_attend(scores_float32, values_float32, store_float32, store_float32, 1, 16)
_attend_bfloat16 = make_attend(scores_bfloat16, values_bfloat16, store_float32, store_float32, 2, 16)
_attend_float16 = make_attend(scores_float16, values_float16, store_float32, store_float32, 2, 16)
_attend_pairs = make_attend(scores_pairs, values_pairs, store_bfloat16, store_bfloat16, 2, 16)
_attend_tiles = make_attend(scores_tiles, values_tiles, store_bfloat16, store_bfloat16, 2, 32)


def _float32(args: int, chunk: int) -> None:
    _attend_float32(args, chunk)


def _bfloat16(args: int, chunk: int) -> None:
    _attend_bfloat16(args, chunk)


def _float16(args: int, chunk: int) -> None:
    _attend_float16(args, chunk)


def _pairs(args: int, chunk: int) -> None:
    _attend_pairs(args, chunk)


def _tiles(args: int, chunk: int) -> None:
    _attend_tiles(args, chunk)


_BY_KIND = tuple(jit.chunks(function) for function in (_float32, _bfloat16, _float16))
_WITH_PAIRS, _WITH_TILES = jit.chunks(_pairs), jit.chunks(_tiles)


@jit.inlined
def _share_items(state, function, args, num_items):  # type: ignore[no-untyped-def]
    """Decodes take several items at a time, so that a thread knows which keys it needs next."""
    requests, threads = get_int64(args + work.NUM_ROWS), get_int64(args + work.NUM_THREADS)
    is_decode = get_int32(get_int64(args + work.QUERY_START_LOC) + requests * 4) == requests
    per_chunk = max(1, min(MOST_ITEMS_PER_CHUNK, num_items // (CHUNKS_PER_THREAD * threads))) if is_decode else 1
    put_int64(args + work.ITEMS_PER_CHUNK, per_chunk)
    put_int64(args + work.NUM_ITEMS, num_items)
    share(state, function, args, -(-num_items // per_chunk))


@jit.chunks
def _attend_call(call, unused):  # type: ignore[no-untyped-def]
    state, function, args = get_int64(call), get_int64(call + 8), call + 16
    num_first, num_last = plan(args)
    if num_first > 0:
        _share_items(state, function, args, num_first)
        items = get_int64(args + work.ITEMS)
        put_int64(args + work.ITEMS, items + num_first * work.ITEM_BYTES)
        _share_items(state, function, args, num_last)
        put_int64(args + work.ITEMS, items)  # a program calls with the same arguments again
    else:
        _share_items(state, function, args, num_last)


class _Memory(threading.local):
    """What a calling thread keeps from call to call."""

    def __init__(self) -> None:
        self.results = torch.empty(_RESULTS_BYTES, dtype=torch.uint8)
        self.room = 0
        self.plan = torch.empty(0, dtype=torch.int64)

    def results_at(self) -> int:
        """Address of _RESULTS_BYTES."""
        results = empty((_RESULTS_BYTES,), torch.uint8) if is_recording() else self.results
        return results.data_ptr()

    def plan_at(self, num_words: int) -> int:
        """Address of so many words."""
        if is_recording():
            return empty((num_words,), torch.int64).data_ptr()
        if num_words > self.room:
            self.room = 2 * num_words
            self.plan = torch.empty(self.room, dtype=torch.int64)
        return self.plan.data_ptr()


_memory = _Memory()
_attend = Call(_attend_call, 2 + work.NUM_WORDS, work.NUM_FLOATS)


def can_attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
) -> bool:
    """Whether `paged_attention` serves these: caches of one type as on a CPU, heads up to MOST_HEAD_SIZE."""
    described = caches(key_cache, value_cache)
    return (
        described is not None and query.dtype in KINDS and max(query.shape[2], described.value_size) <= MOST_HEAD_SIZE
    )


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `kernels.attention.reference`; what `can_attend` allows. out's last dimension must lie in one run."""
    num_tokens, num_heads, head_size = query.shape
    described = caches(key_cache, value_cache)
    assert described is not None
    _, cache_kind, num_kv_heads, block_size, pack, _, value_size, key_block, key_head, value_block, value_head = (
        described
    )
    dtype = query.dtype
    if out is None:
        out = empty((num_tokens, num_heads, value_size), dtype)
    out_token, out_head, _ = out.stride()
    token_stride, head_stride, stride = query.stride()
    if stride != 1:
        query = query.contiguous()
        token_stride, head_stride, _ = query.stride()
    width, groups = dtype.itemsize, num_heads // num_kv_heads
    is_direct = block_size % 16 == 0 and value_size % 16 == 0 and head_size % pack == 0
    function, is_direct = _function(KINDS[dtype], cache_kind, is_direct, head_size)
    sinks = None if sinks is None else sinks.float().contiguous()
    alibi_slopes = None if alibi_slopes is None else alibi_slopes.float().contiguous()
    num_rows = seq_lens.shape[0]
    most_items = _MOST_FIRST_ITEMS + num_kv_heads * (num_rows + num_tokens * groups // work.MOST_ROWS + 1)
    memory, item_words = _memory, most_items * work.ITEM_BYTES // 8
    num_hashes = 2 << num_rows.bit_length()
    plan_at = memory.plan_at(item_words + 6 * num_rows + num_hashes)
    members_at = plan_at + item_words * 8
    shared_at = members_at + num_rows * 16
    result_bytes = -(-value_size // 16) * 64 + RESULT_EXTRA_BYTES
    is_transformed = scale <= 0 or softcap is not None or sinks is not None or alibi_slopes is not None
    the_team = team()
    _attend(
        the_team.state, function,
        query.data_ptr(), token_stride * width, head_stride * width, KINDS[dtype],
        key_cache.data_ptr(), key_block, key_head,
        value_cache.data_ptr(), value_block, value_head,
        block_size, head_size, value_size,
        block_tables.data_ptr(), block_tables.stride(0) * 4, query_start_loc.data_ptr(), seq_lens.data_ptr(),
        out.data_ptr(), out_token * width, out_head * width,
        groups, num_kv_heads, num_rows, sliding_window or 0,
        0 if sinks is None else sinks.data_ptr(), 0 if alibi_slopes is None else alibi_slopes.data_ptr(),
        is_transformed,
        plan_at, members_at, shared_at,
        memory.results_at(), result_bytes, _RESULTS_BYTES // result_bytes, _MOST_FIRST_ITEMS,
        the_team.size, is_direct, shared_at + num_rows * 32, num_hashes, 0, 0, scale, softcap or 0.0,
    )  # fmt: skip
    return out


def _function(query_kind: int, cache_kind: int, is_direct: bool, head_size: int) -> tuple[int, bool]:
    """The best compiled function for these types."""
    if query_kind == cache_kind == BFLOAT16 and (best := isa()) != "generic":
        if best == "amx" and is_direct and head_size % 32 == 0:
            return _WITH_TILES.address, True
        return _WITH_PAIRS.address, is_direct
    return _BY_KIND[cache_kind].address, is_direct
