"""Names of KV blocks: a chain, and extra keys that can't be mistaken for one another."""

from __future__ import annotations

import hashlib
import struct

import numpy as np

from core_svc.block_hash import (
    ROOT_HASH,
    adapter_key,
    cache_salt_key,
    extra_key,
    hash_block,
    hash_chain,
    media_key,
    request_extra_keys,
    token_bytes,
)
from pagewire.engine import Adapter

TOKENS = np.array([1, 2, 300, 70000], np.int32)


def test_the_hash_is_sha256_over_parent_count_and_little_endian_tokens() -> None:
    data = ROOT_HASH + struct.pack("<I", 4) + struct.pack("<4i", *TOKENS)
    assert hash_block(ROOT_HASH, token_bytes(TOKENS)) == hashlib.sha256(data).digest()


def test_parent_tokens_and_order_count() -> None:
    first = hash_block(ROOT_HASH, token_bytes(TOKENS))
    both = token_bytes(np.concatenate((TOKENS, TOKENS)))
    assert hash_chain(ROOT_HASH, both, len(both) // 2) == [first, hash_block(first, token_bytes(TOKENS))]
    salted = hash_block(ROOT_HASH, token_bytes(TOKENS), b"x")
    assert hash_chain(ROOT_HASH, both, len(both) // 2, b"x") == [salted, hash_block(salted, token_bytes(TOKENS))]
    others = [
        hash_block(first, token_bytes(TOKENS)),
        hash_block(ROOT_HASH, token_bytes(TOKENS[::-1])),
        hash_block(ROOT_HASH, token_bytes(TOKENS[:3])),
        hash_block(ROOT_HASH, token_bytes(TOKENS), b"x"),
    ]
    assert len({first, *others}) == 5


def test_a_salt_never_collides_with_an_adapter_of_that_name() -> None:
    """Extra keys are tagged by domain, and an adapter's version counts.

    Case: vllm#44701
    """
    keys = {
        request_extra_keys(None, ""),
        request_extra_keys(None, "legal"),
        request_extra_keys(Adapter("legal", 1), ""),
        request_extra_keys(Adapter("legal", 2), ""),
        request_extra_keys(Adapter("legal", 1), "legal"),
        media_key("00" * 32, 0),
        media_key("00" * 32, 1),
    }
    assert len(keys) == 7
    assert adapter_key(Adapter("a", 0)) != cache_salt_key("a")


def test_lengths_keep_parts_apart() -> None:
    assert extra_key("d", b"ab", b"c") != extra_key("d", b"a", b"bc")
    assert cache_salt_key("ab") + cache_salt_key("c") != cache_salt_key("a") + cache_salt_key("bc")
