"""Which KV blocks a request holds: prefix lookup, allocation, commit, release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from core_svc.block_hash import BYTES_PER_TOKEN, ROOT_HASH, hash_block, token_bytes
from core_svc.block_pool import BlockPool, KVCacheBlock
from core_svc.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from core_svc.request import Request
from pagewire.columns import Int32Column

MIN_COMING_TOKENS = 64
"""So much of a prompt must be under way in another request for it to be waited for."""


class KVCacheManager:
    """The KV pool as the scheduler sees it. A failed allocation changes nothing.

    A block gets its hash in `cache_blocks`, after the step that filled it was committed, never earlier.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_caching: bool = True, is_recording_events: bool = False
    ) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        self._is_recording_events = is_recording_events
        self._events: list[KvEvent] = []
        self._coming: Counter[bytes] = Counter()
        """Hashes of the full blocks that admitted requests are about to compute, by number of requests."""
        on_removed = (lambda hashes: self._events.append(BlockRemoved(tuple(hashes)))) if is_recording_events else None
        self.pool = BlockPool(num_blocks, on_removed)

    @property
    def max_num_tokens(self) -> int:
        """Positions that one request alone can have KV for."""
        return self.pool.num_usable_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many positions take."""
        return -(-num_tokens // self.block_size)

    def get_computed_blocks(self, request: Request) -> list[KVCacheBlock]:
        """The longest cached prefix of the request, in whole blocks.

        It ends before the last token at the latest: that one is computed anew to sample from.
        """
        if not self.enable_caching:
            return []
        found, token_ids = [], request.token_ids
        for idx in range(request.max_num_cached_tokens // self.block_size):
            block = self.pool.get_cached_block(self._block_hash(request, idx, token_ids))
            if block is None:
                break
            found.append(block)
        return found

    def is_prefix_coming(self, request: Request, computed_blocks: list[KVCacheBlock]) -> bool:
        """Whether other requests compute at least MIN_COMING_TOKENS tokens behind the cached prefix already.

        Waiting for them costs a step or a few; computing them again costs their time and their memory twice.
        """
        if not self._coming:
            return False
        idx, end = len(computed_blocks), request.max_num_cached_tokens // self.block_size
        while idx < end and self._block_hash(request, idx, request.token_ids) in self._coming:
            idx += 1
        return (idx - len(computed_blocks)) * self.block_size >= MIN_COMING_TOKENS

    def allocate(self, requests: Sequence[Request], num_new_blocks: Sequence[int]) -> list[int]:
        """Ids of the blocks that each request gets, in order.

        Raises ValueError, and changes nothing, if too few are free.
        """
        blocks = self.pool.get_new_blocks(sum(num_new_blocks))
        start = 0
        for request, num_blocks in zip(requests, num_new_blocks, strict=True):
            request.blocks += blocks[start : start + num_blocks]
            start += num_blocks
        return [block.block_id for block in blocks]

    def admit(
        self, request: Request, computed_blocks: list[KVCacheBlock], num_tokens: int, num_promised_blocks: int
    ) -> list[int] | None:
        """Ids of the request's first blocks, cached ones included, for num_tokens positions.

        None unless the whole sequence fits beside the blocks promised to prefills that are still under way.
        """
        num_from_free = self.num_blocks_for(request.num_tokens) - len(computed_blocks)
        num_from_free += sum(block.ref_cnt == 0 for block in computed_blocks)
        if num_from_free + num_promised_blocks > self.pool.num_free_blocks:
            return None
        self.pool.touch(computed_blocks)
        request.blocks = list(computed_blocks)
        request.num_cached_blocks = request.num_announced_blocks = len(computed_blocks)
        self._announce(request)
        new_block_ids = self.allocate([request], [self.num_blocks_for(num_tokens) - len(computed_blocks)])
        return [block.block_id for block in computed_blocks] + new_block_ids

    def num_missing_blocks(self, request: Request) -> int:
        """Blocks that the request still needs for the tokens it has."""
        return max(0, self.num_blocks_for(request.num_tokens) - len(request.blocks))

    def cache_blocks(self, request: Request, num_committed_tokens: int) -> None:
        """Makes the request's full blocks below num_committed_tokens findable."""
        first = request.num_cached_blocks
        num_full_blocks = num_committed_tokens // self.block_size
        if not self.enable_caching or num_full_blocks <= first:
            return
        token_ids = request.token_ids
        size = self.block_size
        for idx in range(first, num_full_blocks):
            self._cache_block(request, idx, token_bytes(token_ids[idx * size : (idx + 1) * size]))
        self._withdraw(request, num_full_blocks)
        request.num_cached_blocks = num_full_blocks

    def cache_next_blocks(self, requests: Sequence[Request], token_ids: Int32Column) -> None:
        """Makes one more full block of each request findable: the one of these tokens, [requests, block_size]."""
        tokens, num_bytes = token_bytes(token_ids), self.block_size * BYTES_PER_TOKEN
        for start, request in zip(range(0, len(tokens), num_bytes), requests, strict=True):
            idx = request.num_cached_blocks
            self._cache_block(request, idx, tokens[start : start + num_bytes])
            if idx < request.num_announced_blocks:
                self._withdraw(request, idx + 1)
            request.num_cached_blocks = idx + 1

    def _cache_block(self, request: Request, idx: int, tokens: bytes) -> None:
        """Makes a block findable; those before it have their hashes."""
        hashes = request.block_hashes
        if idx == len(hashes):
            hashes.append(self._next_hash(request, tokens))
        is_new = self.pool.cache_block(request.blocks[idx], hashes[idx])
        if is_new and self._is_recording_events:
            parent = hashes[idx - 1] if idx else b""
            self._events.append(BlockStored((hashes[idx],), parent, tokens, self.block_size, request.adapter))

    def free(self, request: Request) -> None:
        """Gives back all blocks of the request."""
        self.pool.free_blocks(request.blocks)
        self._withdraw(request, request.num_announced_blocks)
        request.num_announced_blocks = 0
        request.blocks = []
        request.num_cached_blocks = 0

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached block; False, and nothing changes, while any block is in use."""
        if not self.pool.reset():
            return False
        if self._is_recording_events:
            self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[KvEvent]:
        """The changes since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _announce(self, request: Request) -> None:
        """Notes the full blocks that a request will have computed before it samples."""
        if self.enable_caching:
            request.num_announced_blocks = request.num_tokens // self.block_size
            token_ids = request.token_ids
            for idx in range(request.num_cached_blocks, request.num_announced_blocks):
                self._coming[self._block_hash(request, idx, token_ids)] += 1

    def _withdraw(self, request: Request, end: int) -> None:
        """Takes back what was announced of the request's blocks that have no hash yet and are before `end`."""
        for block_hash in request.block_hashes[request.num_cached_blocks : min(end, request.num_announced_blocks)]:
            self._coming[block_hash] -= 1
            if not self._coming[block_hash]:
                del self._coming[block_hash]

    def _block_hash(self, request: Request, idx: int, token_ids: Int32Column) -> bytes:
        hashes, size = request.block_hashes, self.block_size
        for start in range(len(hashes) * size, (idx + 1) * size, size):
            hashes.append(self._next_hash(request, token_bytes(token_ids[start : start + size])))
        return hashes[idx]

    def _next_hash(self, request: Request, tokens: bytes) -> bytes:
        hashes = request.block_hashes
        return hash_block(hashes[-1], tokens) if hashes else hash_block(ROOT_HASH, tokens, request.extra_keys)
