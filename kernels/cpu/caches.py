"""What kernels ask of a layer's caches, looked up once: a step asks for it in every layer."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.cpu.lanes import KINDS

_ATTRIBUTE = "_pagewire_caches"


class Caches(NamedTuple):
    """A layer's caches as on a CPU (see kernels/kv_layout.py); sizes in bytes unless they say otherwise."""

    value_cache_id: int
    kind: int
    num_kv_heads: int
    block_size: int
    """Tokens."""
    pack: int
    """Numbers in 32 bits."""
    most_head_size: int
    """Numbers, an odd head's padding too."""
    value_size: int
    """Numbers."""
    key_block: int
    key_head: int
    value_block: int
    value_head: int


def caches(key_cache: torch.Tensor, value_cache: torch.Tensor) -> Caches | None:
    """Their description, kept with the key cache; None where they do not lie as on a CPU or in no known type."""
    found: Caches | None = getattr(key_cache, _ATTRIBUTE, None)
    if found is not None and found.value_cache_id == id(value_cache):
        return found
    if key_cache.dim() != 5 or key_cache.dtype not in KINDS or key_cache.dtype is not value_cache.dtype:
        return None
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        return None
    _, num_kv_heads, words, block_size, pack = key_cache.shape
    lines, value_size = value_cache.shape[2:4]
    key_head, value_head = words * block_size * 4, lines * value_size * 4
    found = Caches(
        id(value_cache),
        KINDS[key_cache.dtype],
        num_kv_heads,
        block_size,
        pack,
        words * pack,
        value_size,
        num_kv_heads * key_head,
        key_head,
        num_kv_heads * value_head,
        value_head,
    )
    setattr(key_cache, _ATTRIBUTE, found)
    return found
