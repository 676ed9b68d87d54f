"""Prefix lookup, admission, commit and events of the KV manager, without an engine."""

from __future__ import annotations

from core_support import FRONTEND, make_request, params

from core_svc.kv_cache_manager import KVCacheManager
from core_svc.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from core_svc.request import Request
from pagewire.columns import pack_int32
from pagewire.engine import Adapter
from pagewire.sampling import SamplingParams


def request(
    prompt: list[int], request_id: int = 0, sampling: SamplingParams | None = None, **changes: object
) -> Request:
    engine_request = make_request(request_id, prompt, sampling or params(20), **changes)
    return Request.from_engine_request(engine_request, FRONTEND, max_model_len=100, sequence=request_id, now_ns=0)


def admitted(kv: KVCacheManager, asked: Request, num_tokens: int | None = None) -> list[int]:
    block_ids = kv.admit(asked, kv.get_computed_blocks(asked), num_tokens or asked.num_tokens, 0)
    assert block_ids is not None
    return block_ids


PROMPT = list(range(10, 22))


def test_a_prefix_is_found_in_whole_blocks_and_never_the_last_token() -> None:
    kv = KVCacheManager(20, 4)
    first = request(PROMPT)
    assert admitted(kv, first) == [1, 2, 3]
    kv.cache_blocks(first, 12)
    assert [b.block_id for b in kv.get_computed_blocks(request(PROMPT, 1))] == [1, 2]
    assert [b.block_id for b in kv.get_computed_blocks(request([*PROMPT, 99], 1))] == [1, 2, 3]
    assert [b.block_id for b in kv.get_computed_blocks(request([*PROMPT[:8], 99, 98], 1))] == [1, 2]
    assert kv.get_computed_blocks(request([99, *PROMPT[1:]], 1)) == []


def test_only_full_committed_blocks_get_a_hash() -> None:
    kv = KVCacheManager(20, 4)
    first = request(PROMPT)
    admitted(kv, first)
    assert kv.get_computed_blocks(request(PROMPT, 1)) == []
    kv.cache_blocks(first, 7)
    assert [b.block_hash is not None for b in first.blocks] == [True, False, False]
    kv.cache_blocks(first, 8)
    assert [b.block_hash is not None for b in first.blocks] == [True, True, False]


def test_a_request_that_reads_nothing_still_writes() -> None:
    kv = KVCacheManager(20, 4)
    first = request(PROMPT)
    admitted(kv, first)
    kv.cache_blocks(first, 12)
    skipping = request(PROMPT, 1, params(20, skip_reading_prefix_cache=True))
    logprobs = request(PROMPT, 2, params(20, prompt_logprobs=0))
    for asked in (skipping, logprobs):
        assert kv.get_computed_blocks(asked) == []
        admitted(kv, asked)
        kv.cache_blocks(asked, 12)
        assert [b.block_hash for b in asked.blocks] == [b.block_hash for b in first.blocks]
    assert list(kv.pool.cached_blocks.values()) == first.blocks
    assert [len(kv.pool.twin_blocks[block_hash]) for block_hash in kv.pool.cached_blocks] == [2, 2, 2]


def test_prompt_logprobs_that_were_delivered_need_not_be_computed_again() -> None:
    kv = KVCacheManager(20, 4)
    first = request(PROMPT)
    admitted(kv, first)
    kv.cache_blocks(first, 12)
    asked = request([*PROMPT, 5, 6], 1, params(20, prompt_logprobs=0))
    asked.next_prompt_logprob = 10
    assert len(kv.get_computed_blocks(asked)) == 2
    asked.next_prompt_logprob = 14
    assert len(kv.get_computed_blocks(asked)) == 3


def test_salts_and_adapters_keep_prefixes_apart() -> None:
    """A salt isolates tenants, and an adapter's version its KV.

    Case: vllm#16016
    Case: vllm#44701
    """
    kv = KVCacheManager(40, 4)
    kinds: list[dict[str, object]] = [
        {},
        {"cache_salt": "x"},
        {"adapter": Adapter("x", 1)},
        {"adapter": Adapter("x", 2)},
    ]
    for idx, kind in enumerate(kinds):
        asked = request(PROMPT, idx, **kind)
        assert kv.get_computed_blocks(asked) == []
        admitted(kv, asked)
        kv.cache_blocks(asked, 12)
    for idx, kind in enumerate(kinds):
        assert len(kv.get_computed_blocks(request(PROMPT, 10 + idx, **kind))) == 2


def test_admission_takes_the_whole_sequence_into_account_and_changes_nothing_on_failure() -> None:
    kv = KVCacheManager(5, 4)
    first = request(PROMPT[:4])
    admitted(kv, first)
    kv.cache_blocks(first, 4)
    kv.free(first)
    long = request([*PROMPT, *PROMPT], 1)
    hits = kv.get_computed_blocks(long)
    assert len(hits) == 1
    assert kv.admit(long, hits, 8, 0) is None
    assert long.blocks == [] and hits[0].ref_cnt == 0 and kv.pool.num_free_blocks == 4
    fitting = request([*PROMPT, 1, 2, 3, 4], 2)
    assert kv.admit(fitting, kv.get_computed_blocks(fitting), 8, 1) is None
    assert kv.admit(fitting, kv.get_computed_blocks(fitting), 8, 0) == [1, 2]
    assert kv.num_missing_blocks(fitting) == 2


def test_blocks_that_were_hit_are_not_evicted_by_the_same_allocation() -> None:
    kv = KVCacheManager(4, 4)
    first = request(PROMPT[:8])
    admitted(kv, first)
    kv.cache_blocks(first, 8)
    kv.free(first)
    again = request(PROMPT, 1)
    assert admitted(kv, again) == [1, 2, 3]
    assert [b.block_id for b in again.blocks] == [1, 2, 3]


def test_without_caching_nothing_is_found_or_hashed() -> None:
    kv = KVCacheManager(20, 4, enable_caching=False)
    first = request(PROMPT)
    admitted(kv, first)
    kv.cache_blocks(first, 12)
    assert kv.get_computed_blocks(request(PROMPT, 1)) == [] and not kv.pool.cached_blocks


def test_events_tell_what_can_be_found() -> None:
    kv = KVCacheManager(4, 4, is_recording_events=True)
    adapter = Adapter("x", 3)
    first = request(PROMPT, adapter=adapter)
    admitted(kv, first)
    kv.cache_blocks(first, 11)
    stored = kv.take_events()
    hashes = [block.block_hash for block in first.blocks[:2]]
    assert stored == [
        BlockStored((hashes[0],), b"", pack_int32(PROMPT[:4]), 4, adapter),
        BlockStored((hashes[1],), hashes[0], pack_int32(PROMPT[4:8]), 4, adapter),
    ]
    kv.free(first)
    other = request(list(range(50, 62)), 1)
    admitted(kv, other)
    assert kv.take_events() == [BlockRemoved((hashes[1], hashes[0]))]
    kv.free(other)
    assert kv.reset_prefix_cache()
    assert kv.take_events() == [AllBlocksCleared()] and kv.take_events() == []
