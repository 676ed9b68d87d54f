"""KV blocks: who holds them, which are free, and under which hash they can be found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence


class KVCacheBlock:
    """One block of the pool; its neighbours in the free list live in the block itself."""

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        """Set only while the block is full, its KV is committed, and a lookup may find it."""
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, hashed={self.block_hash is not None})"


class FreeBlockQueue:
    """A doubly linked list through the blocks themselves: O(1) at both ends and from the middle."""

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._ends = KVCacheBlock(-1)
        self._ends.prev_free = self._ends.next_free = self._ends
        self.num_blocks = 0
        self.extend(blocks)

    def extend(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Makes the blocks the last ones to be reused, in their order."""
        last = self._ends.prev_free
        assert last is not None
        for block in blocks:
            if block.next_free is not None:
                raise RuntimeError(f"block {block.block_id} is in the free list already")
            # Whole at every moment: a block that is refused leaves those before it in the list.
            last.next_free = self._ends.prev_free = block
            block.prev_free, block.next_free = last, self._ends
            last = block
            self.num_blocks += 1

    def prepend(self, block: KVCacheBlock) -> None:
        """Makes the block the next one to be reused."""
        first = self._ends.next_free
        assert first is not None
        if block.next_free is not None:
            raise RuntimeError(f"block {block.block_id} is in the free list already")
        block.prev_free, block.next_free = self._ends, first
        self._ends.next_free = first.prev_free = block
        self.num_blocks += 1

    def remove(self, block: KVCacheBlock) -> None:
        """Takes a block out from wherever it stands."""
        previous, following = block.prev_free, block.next_free
        if previous is None or following is None:
            raise RuntimeError(f"block {block.block_id} is not in the free list")
        previous.next_free, following.prev_free = following, previous
        block.prev_free = block.next_free = None
        self.num_blocks -= 1

    def popleft(self, num_blocks: int = 1) -> list[KVCacheBlock]:
        """Takes the least recently used blocks. Raises IndexError, and changes nothing, when there are too few."""
        if num_blocks > self.num_blocks:
            raise IndexError(f"{num_blocks} blocks wanted, {self.num_blocks} free")
        taken, block = [], self._ends.next_free
        for _ in range(num_blocks):
            assert block is not None
            taken.append(block)
            following = block.next_free
            block.prev_free = block.next_free = None
            block = following
        assert block is not None
        self._ends.next_free, block.prev_free = block, self._ends
        self.num_blocks -= num_blocks
        return taken

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._ends.next_free
        while block is not None and block is not self._ends:
            yield block
            block = block.next_free


class BlockPool:
    """All blocks of the KV pool. Block 0 is the null block: never handed out, never cached, never counted.

    A block is free exactly when its ref_cnt is 0; a free block may still be found by its hash until it is reused.
    `on_removed` hears of hashes that no block holds any more.
    """

    def __init__(self, num_blocks: int, on_removed: Callable[[list[bytes]], None] | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}: must be at least 2, block 0 is the null block")
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.free_queue = FreeBlockQueue(self.blocks[1:])
        self.cached_blocks: dict[bytes, KVCacheBlock] = {}
        """Blocks by hash: the one that a lookup finds."""
        self.twin_blocks: dict[bytes, dict[int, KVCacheBlock]] = {}
        """Further blocks with the hash of one in cached_blocks, by id, oldest first: equal blocks are not merged, since
        block tables only grow. Most hashes have none, which saves a dict for each."""
        self._on_removed = on_removed

    @property
    def num_usable_blocks(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        return self.free_queue.num_blocks

    @property
    def num_used_blocks(self) -> int:
        return self.num_usable_blocks - self.num_free_blocks

    def get_cached_block(self, block_hash: bytes) -> KVCacheBlock | None:
        """A block with this hash, or None."""
        return self.cached_blocks.get(block_hash)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Takes free blocks, least recently used first. Raises ValueError, and changes nothing, if too few are free."""
        if num_blocks > self.num_free_blocks:
            raise ValueError(f"{num_blocks} blocks wanted, {self.num_free_blocks} free")
        blocks = self.free_queue.popleft(num_blocks)
        self._forget_hashes(blocks)
        for block in blocks:
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Takes one more reference on blocks that a lookup found."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Gives back one reference on each block of a table.

        Blocks go tail first, because a prefix is worth more than what follows it; blocks without a hash are of no
        use to anybody and are reused first. Raises RuntimeError for a block that nobody holds.
        """
        freed = []
        for block in reversed(blocks):
            if block.ref_cnt <= 0:
                raise RuntimeError(f"block {block.block_id} is freed twice")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.block_hash is None:
                    self.free_queue.prepend(block)
                else:
                    freed.append(block)
        self.free_queue.extend(freed)

    def cache_block(self, block: KVCacheBlock, block_hash: bytes) -> bool:
        """Makes a full, committed block findable; returns whether its hash is new to the pool."""
        if block.block_hash is not None or block is self.null_block:
            raise RuntimeError(f"block {block.block_id} can't be cached")
        block.block_hash = block_hash
        if self.cached_blocks.setdefault(block_hash, block) is block:
            return True
        self.twin_blocks.setdefault(block_hash, {})[block.block_id] = block
        return False

    def reset(self) -> bool:
        """Forgets every hash; False, and nothing changes, while a block is in use."""
        if self.num_used_blocks:
            return False
        for block in self.blocks:
            block.block_hash = None
        self.cached_blocks.clear()
        self.twin_blocks.clear()
        return True

    def _forget_hashes(self, blocks: Iterable[KVCacheBlock]) -> None:
        removed = []
        for block in blocks:
            block_hash = block.block_hash
            if block_hash is not None:
                block.block_hash = None
                if block_hash in self.twin_blocks:
                    self._forget_twin(block, block_hash)
                else:
                    del self.cached_blocks[block_hash]
                    removed.append(block_hash)
        if removed and self._on_removed is not None:
            self._on_removed(removed)

    def _forget_twin(self, block: KVCacheBlock, block_hash: bytes) -> None:
        """Takes a block from those that share its hash; a lookup finds the oldest of the others."""
        twins = self.twin_blocks[block_hash]
        if self.cached_blocks[block_hash] is block:
            self.cached_blocks[block_hash] = twins.pop(next(iter(twins)))
        else:
            del twins[block.block_id]
        if not twins:
            del self.twin_blocks[block_hash]
