"""zero_blocks: fills whole KV blocks with zeros."""

from __future__ import annotations

import torch

from kernels.compiled import compiled_for_cuda


def reference(key_cache: torch.Tensor, value_cache: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Sets the blocks of both caches to zero.

    Caches [num_blocks, ...], block_ids [num_ids] of any integer type.
    """
    for block_id in block_ids.tolist():
        key_cache[block_id] = 0
        value_cache[block_id] = 0


def torch_zero_blocks(key_cache: torch.Tensor, value_cache: torch.Tensor, block_ids: torch.Tensor) -> None:
    """See `reference`."""
    ids = block_ids.long()
    key_cache.index_fill_(0, ids, 0)
    value_cache.index_fill_(0, ids, 0)


def cuda_zero_blocks(key_cache: torch.Tensor, value_cache: torch.Tensor, block_ids: torch.Tensor) -> None:
    """See `reference`."""
    module = compiled_for_cuda("block_zero")
    zero = torch_zero_blocks if module is None else module.zero_blocks
    zero(key_cache, value_cache, block_ids)
