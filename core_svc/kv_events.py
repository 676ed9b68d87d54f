"""Changes of the prefix cache, for routers that send a prompt where its prefix is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pagewire.engine import Adapter


class BlockStored(NamedTuple):
    """Blocks that a lookup can find from now on, in the order of their chain.

    A named tuple, because one is made for every block that fills: it takes a third of a frozen dataclass's time.
    """

    block_hashes: tuple[bytes, ...]
    """Sha256 of each block, 32 bytes."""
    parent_block_hash: bytes
    """Hash of the block before the first; empty at the start of a prompt."""
    token_ids: bytes
    """Tokens of all the blocks, int32 LE: a tuple of them would take six times the memory."""
    block_size: int
    adapter: Adapter | None = None


class BlockRemoved(NamedTuple):
    """Hashes that no block holds any more."""

    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing can be found any more."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
