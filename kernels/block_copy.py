"""copy_blocks: copies whole KV blocks inside a cache."""

from __future__ import annotations

import torch

from kernels.compiled import compiled_for_cuda


def reference(
    key_cache: torch.Tensor, value_cache: torch.Tensor, source_block_ids: torch.Tensor, dest_block_ids: torch.Tensor
) -> None:
    """Copies block source_block_ids[i] to dest_block_ids[i], in order, in both caches.

    Caches [num_blocks, ...], ids [num_copies] of any integer type. Sources are read
    as they are before the call; no destination may come twice.
    """
    for cache in (key_cache, value_cache):
        before = cache.clone()
        for source, dest in zip(source_block_ids.tolist(), dest_block_ids.tolist(), strict=True):
            cache[dest] = before[source]


def torch_copy_blocks(
    key_cache: torch.Tensor, value_cache: torch.Tensor, source_block_ids: torch.Tensor, dest_block_ids: torch.Tensor
) -> None:
    """See `reference`."""
    sources, dests = source_block_ids.long(), dest_block_ids.long()
    for cache in (key_cache, value_cache):
        cache.index_copy_(0, dests, cache.index_select(0, sources))


def cuda_copy_blocks(
    key_cache: torch.Tensor, value_cache: torch.Tensor, source_block_ids: torch.Tensor, dest_block_ids: torch.Tensor
) -> None:
    """See `reference`."""
    module = compiled_for_cuda("block_copy")
    copy = torch_copy_blocks if module is None else module.copy_blocks
    copy(key_cache, value_cache, source_block_ids, dest_block_ids)
