"""Makes the full blocks of running requests findable, and notes when each request has its next one.

A request's own column, `next_full_tokens`, says from how many committed tokens on it has to be looked at; between two
full blocks no step does.
"""

from __future__ import annotations

import numpy as np

from core_svc.kv_cache_manager import KVCacheManager
from core_svc.request import Request
from core_svc.slot_table import NEVER, Slots, SlotTable
from pagewire.columns import Int32Column


def next_full_tokens(kv: KVCacheManager, request: Request) -> int:
    """Committed tokens from which on a request has one more full block than are findable."""
    return (request.num_cached_blocks + 1) * kv.block_size if kv.enable_caching else NEVER


def cache_blocks(kv: KVCacheManager, table: SlotTable, request: Request, num_committed_tokens: int) -> None:
    """Makes a running request's full blocks findable."""
    kv.cache_blocks(request, num_committed_tokens)
    table.next_full_tokens[request.slot] = next_full_tokens(kv, request)


def cache_blocks_of(kv: KVCacheManager, table: SlotTable, slots: Slots, num_committed_tokens: Int32Column) -> None:
    """The same for running requests with at least one more full block each; decodes have just one."""
    size = kv.block_size
    has_one = num_committed_tokens < table.next_full_tokens[slots] + size
    decodes = slots[has_one]
    first_tokens = table.next_full_tokens[decodes] - size
    tokens = table.token_ids[decodes[:, None], first_tokens[:, None] + np.arange(size)]
    kv.cache_next_blocks(table.requests[decodes].tolist(), tokens)
    table.next_full_tokens[decodes] = first_tokens + 2 * size
    if len(decodes) < len(slots):
        others = zip(table.requests[slots[~has_one]], num_committed_tokens[~has_one].tolist(), strict=True)
        for request, num_committed in others:
            cache_blocks(kv, table, request, num_committed)
