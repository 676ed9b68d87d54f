"""Which KV blocks a request holds: prefix lookup, allocation, commit, release."""

from __future__ import annotations

from collections.abc import Sequence

from core_svc.block_hash import BYTES_PER_TOKEN, ROOT_HASH, hash_block, hash_chain, token_bytes
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
        self._coming: dict[bytes, int] = {}
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
        found, get_cached_block = [], self.pool.get_cached_block
        for block_hash in self._hashes(request)[: request.max_num_cached_tokens // self.block_size]:
            block = get_cached_block(block_hash)
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
        num_coming = 0
        end = request.max_num_cached_tokens // self.block_size
        for block_hash in self._hashes(request)[len(computed_blocks) : end]:
            if block_hash not in self._coming:
                break
            num_coming += 1
        return num_coming * self.block_size >= MIN_COMING_TOKENS

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
        for block in computed_blocks:
            num_from_free += block.ref_cnt == 0
        if num_from_free + num_promised_blocks > self.pool.num_free_blocks:
            return None
        self.pool.touch(computed_blocks)
        new_blocks = self.pool.get_new_blocks(self.num_blocks_for(num_tokens) - len(computed_blocks))
        request.blocks = computed_blocks + new_blocks
        request.num_cached_blocks = request.num_announced_blocks = len(computed_blocks)
        self._announce(request)
        return [block.block_id for block in request.blocks]

    def num_missing_blocks(self, request: Request) -> int:
        """Blocks that the request still needs for the tokens it has."""
        return max(0, self.num_blocks_for(request.num_tokens) - len(request.blocks))

    def cache_blocks(self, request: Request, num_committed_tokens: int) -> None:
        """Makes the request's full blocks below num_committed_tokens findable."""
        first, size = request.num_cached_blocks, self.block_size
        num_full_blocks = num_committed_tokens // self.block_size
        if self.enable_caching and num_full_blocks > first:
            tokens = request.token_ids[first * size : num_full_blocks * size]
            self.cache_next_blocks([request] * (num_full_blocks - first), tokens)

    def cache_next_blocks(self, requests: Sequence[Request], token_ids: Int32Column) -> None:
        """Makes the next full block of each request findable: the one of these tokens, block_size of them for each.

        A request may be there several times in a row. This is the inner loop of the commit, written out.
        """
        tokens, num_bytes = token_bytes(token_ids), self.block_size * BYTES_PER_TOKEN
        cache_block, is_recording_events, events = self.pool.cache_block, self._is_recording_events, self._events
        for start, request in zip(range(0, len(tokens), num_bytes), requests, strict=True):
            idx, hashes = request.num_cached_blocks, request.block_hashes
            block_tokens = tokens[start : start + num_bytes]
            parent = hashes[idx - 1] if idx else b""
            if idx < len(hashes):
                block_hash = hashes[idx]
            else:
                block_hash = hash_block(parent or ROOT_HASH, block_tokens, b"" if idx else request.extra_keys)
                hashes.append(block_hash)
            if cache_block(request.blocks[idx], block_hash) and is_recording_events:
                events.append(BlockStored((block_hash,), parent, block_tokens, self.block_size, request.adapter))
            if idx < request.num_announced_blocks:
                self._withdraw(block_hash)
            request.num_cached_blocks = idx + 1

    def free(self, request: Request) -> None:
        """Gives back all blocks of the request."""
        self.pool.free_blocks(request.blocks)
        for block_hash in request.block_hashes[request.num_cached_blocks : request.num_announced_blocks]:
            self._withdraw(block_hash)
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
            hashes, coming = self._hashes(request), self._coming
            request.num_announced_blocks = len(hashes)
            for block_hash in hashes[request.num_cached_blocks :]:
                coming[block_hash] = coming.get(block_hash, 0) + 1

    def _withdraw(self, block_hash: bytes) -> None:
        """Takes back what one request announced of a block."""
        num_coming = self._coming.pop(block_hash) - 1
        if num_coming:
            self._coming[block_hash] = num_coming

    def _hashes(self, request: Request) -> list[bytes]:
        """Names of all full blocks of the request's tokens; hashed once, for good."""
        hashes, size = request.block_hashes, self.block_size
        num_hashed, num_blocks = len(hashes), request.num_tokens // size
        if num_hashed < num_blocks:
            tokens = token_bytes(request.token_ids[num_hashed * size : num_blocks * size])
            parent, extra_keys = (hashes[-1], b"") if hashes else (ROOT_HASH, request.extra_keys)
            hashes += hash_chain(parent, tokens, size * BYTES_PER_TOKEN, extra_keys)
        return hashes
