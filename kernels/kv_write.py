"""write_kv: puts the keys and values of a step into the paged cache."""

from __future__ import annotations

import torch


def reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Writes token t to slot slot_mapping[t] of both caches, converted to the cache's type.

    key and value [num_tokens, num_kv_heads, head_size], caches [num_blocks, block_size, num_kv_heads, head_size],
    slot_mapping [num_tokens] int64, block * block_size + offset; a negative slot is skipped.
    """
    block_size = key_cache.shape[1]
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, slot % block_size] = key[t].to(key_cache.dtype)
            value_cache[slot // block_size, slot % block_size] = value[t].to(value_cache.dtype)


def torch_write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `reference`."""
    if slot_mapping.numel() and int(slot_mapping.min()) < 0:
        is_kept = slot_mapping >= 0
        key, value, slot_mapping = key[is_kept], value[is_kept], slot_mapping[is_kept]
    # view, not flatten: a cache that can't be viewed as slots must fail, not be copied.
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slot_mapping, key.to(key_cache.dtype))
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slot_mapping, value.to(value_cache.dtype))
