"""The name of a full KV block: a sha256 chain over its parent's name, its tokens and its extra keys.

Extra keys are tagged by domain and length-prefixed, so that a cache salt can't collide with an adapter's name and two
versions of one adapter never share KV. They enter the first block that they concern; the chain carries them on.
"""

from __future__ import annotations

import struct
import sys
from hashlib import sha256

from pagewire.columns import Int32Column
from pagewire.engine import Adapter

ROOT_HASH = sha256(b"pagewire.block_hash.v1").digest()
"""Parent of every first block; fixed, so that all processes agree."""
_IS_LITTLE_ENDIAN = sys.byteorder == "little"
BYTES_PER_TOKEN = 4
_LENGTH = struct.Struct("<I")


def extra_key(domain: str, *parts: bytes) -> bytes:
    """One extra key: its domain and parts, each with its length in front."""
    return b"".join(struct.pack("<I", len(part)) + part for part in (domain.encode(), *parts))


def adapter_key(adapter: Adapter) -> bytes:
    """Extra key of an adapter: its name and version."""
    return extra_key("adapter", adapter.name.encode(), struct.pack("<Q", adapter.version))


def cache_salt_key(cache_salt: str) -> bytes:
    """Extra key of a cache salt."""
    return extra_key("cache_salt", cache_salt.encode())


def media_key(content_sha256: str, offset_in_block: int) -> bytes:
    """Extra key of an attachment that touches a block; its offset is relative to the block's start."""
    return extra_key("media", bytes.fromhex(content_sha256), struct.pack("<q", offset_in_block))


def request_extra_keys(adapter: Adapter | None, cache_salt: str) -> bytes:
    """The extra keys of a prompt's first block."""
    keys = b"" if adapter is None else adapter_key(adapter)
    return keys + cache_salt_key(cache_salt) if cache_salt else keys


def token_bytes(token_ids: Int32Column) -> bytes:
    """Tokens as they are hashed and told: int32 LE."""
    return (token_ids if _IS_LITTLE_ENDIAN else token_ids.byteswap()).tobytes()


def hash_chain(parent_hash: bytes, tokens: bytes, block_bytes: int, extra_keys: bytes = b"") -> list[bytes]:
    """Names of full blocks in a row: `tokens` in parts of block_bytes each; the extra keys enter the first one."""
    hashes = []
    for start in range(0, len(tokens), block_bytes):
        parent_hash = hash_block(parent_hash, tokens[start : start + block_bytes], extra_keys)
        extra_keys = b""
        hashes.append(parent_hash)
    return hashes


def hash_block(parent_hash: bytes, tokens: bytes, extra_keys: bytes = b"") -> bytes:
    """Sha256 of a full block: parent (32 bytes), number of tokens, tokens as int32 LE, extra keys."""
    return sha256(parent_hash + _LENGTH.pack(len(tokens) // BYTES_PER_TOKEN) + tokens + extra_keys).digest()
