"""What a live view asks of an engine: its requests and KV pool as columns, made on the engine's thread when asked."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable

import numpy as np

from core_svc.block_pool import BlockPool
from core_svc.request import Request, RequestStatus
from core_svc.scheduler import Scheduler
from pagewire.columns import Int32Column, int32
from pagewire.stats import (
    MAX_BLOCKS,
    MAX_REQUESTS,
    BlockColumns,
    BlockState,
    CoreDetail,
    DetailWanted,
    RequestColumns,
    RequestState,
)

_STATES = {
    RequestStatus.WAITING: RequestState.WAITING,
    RequestStatus.RUNNING: RequestState.RUNNING,
    RequestStatus.PREEMPTED: RequestState.PREEMPTED,
}


def detail_of(scheduler: Scheduler, wanted: DetailWanted) -> CoreDetail:
    """Requests and blocks within the bounds; the rest of a CoreDetail is the edge's to fill."""
    return CoreDetail(
        requests=request_columns(scheduler, min(wanted.max_requests, MAX_REQUESTS)),
        blocks=block_columns(scheduler.kv.pool, min(wanted.max_blocks, MAX_BLOCKS)),
    )


def request_columns(scheduler: Scheduler, max_requests: int) -> RequestColumns:
    """Those that run, first served first, then those that wait, in order."""
    requests = scheduler.running[:max_requests]
    if len(requests) < max_requests:
        waiting = (r for r in scheduler.requests.values() if r.status is not RequestStatus.RUNNING)
        requests += heapq.nsmallest(max_requests - len(requests), waiting, key=lambda request: request.order)
    now_ns = time.monotonic_ns()

    def column(number: Callable[[Request], int]) -> Int32Column:
        return int32(number(request) for request in requests)

    return RequestColumns(
        num_total=len(scheduler.requests),
        external_request_ids=[request.external_request_id for request in requests],
        request_ids=np.array([request.key[1] for request in requests], np.uint64),
        child_indices=column(lambda r: r.child_index),
        states=column(lambda r: _STATES[r.status]),
        priorities=column(lambda r: r.priority),
        ages_ms=np.array([(now_ns - r.queued_ns) // 1_000_000 for r in requests], np.uint64),
        num_prompt_tokens=column(lambda r: r.num_prompt_tokens),
        num_output_tokens=column(lambda r: r.num_output_tokens),
        num_draft_tokens=column(lambda r: len(r.spec_token_ids)),
        num_placeholder_tokens=column(lambda r: r.num_output_placeholders),
        num_computed_tokens=column(lambda r: r.num_computed_tokens),
        max_num_tokens=column(lambda r: r.max_num_tokens),
        num_cached_tokens=column(lambda r: r.num_hit_tokens),
        num_blocks=column(lambda r: len(r.blocks)),
        num_preemptions=column(lambda r: r.num_preemptions),
    )


def block_columns(pool: BlockPool, max_blocks: int) -> BlockColumns:
    """The state of every block, or of every so many-th one of a pool with more than max_blocks."""
    num_blocks = pool.num_usable_blocks
    if max_blocks <= 0:
        return BlockColumns(num_blocks)
    stride = -(-num_blocks // max_blocks)
    free, cached, used, shared = (int(state) for state in BlockState)
    # Written out: the engine waits meanwhile, and a call per block would triple that.
    states = [
        (used if block.ref_cnt == 1 else shared) if block.ref_cnt else (free if block.block_hash is None else cached)
        for block in pool.blocks[1::stride]
    ]
    return BlockColumns(num_blocks, stride, bytes(states))
