"""How keys and values lie in the caches of a device, and how to read and write them there with torch.

On a CPU a head's block lies in one run, and `pack` numbers (as many as fill 32 bits) of what a product adds up lie
beside each other: 16 keys then meet a query's pair in one instruction.

    keys    [num_blocks, num_kv_heads, ceil(head_size / pack), block_size, pack]
    values  [num_blocks, num_kv_heads, ceil(block_size / pack), value_size, pack]

Elsewhere both are [num_blocks, block_size, num_kv_heads, size]. A slot is block * block_size + offset.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.dispatch import is_interpreting

_PACKED_DIMS = 5


def cache_shapes(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    *,
    value_size: int | None = None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a layer's key and value cache; value_size defaults to head_size."""
    value_size = head_size if value_size is None else value_size
    if device.type != "cpu" or is_interpreting():
        shapes = ((num_blocks, block_size, num_kv_heads, size) for size in (head_size, value_size))
        return next(shapes), next(shapes)
    pack = 4 // dtype.itemsize
    return (
        (num_blocks, num_kv_heads, -(-head_size // pack), block_size, pack),
        (num_blocks, num_kv_heads, -(-block_size // pack), value_size, pack),
    )


def is_packed(cache: torch.Tensor) -> bool:
    """Whether a cache lies as on a CPU."""
    return cache.dim() == _PACKED_DIMS


def block_size_of(key_cache: torch.Tensor) -> int:
    """Tokens of a block."""
    return key_cache.shape[3 if is_packed(key_cache) else 1]


def num_kv_heads_of(cache: torch.Tensor) -> int:
    """Heads of either cache."""
    return cache.shape[1 if is_packed(cache) else 2]


def value_size_of(value_cache: torch.Tensor) -> int:
    """Numbers of a head's value."""
    return value_cache.shape[3]


def read_keys(key_cache: torch.Tensor, slots: torch.Tensor, head_size: int) -> torch.Tensor:
    """Keys [*slots.shape, num_kv_heads, head_size] of int64 slots, copied."""
    block_size = block_size_of(key_cache)
    blocks, offsets = slots // block_size, slots % block_size
    if is_packed(key_cache):
        return key_cache[blocks, :, :, offsets].flatten(-2)[..., :head_size]
    return key_cache[blocks, offsets]


def read_values(value_cache: torch.Tensor, slots: torch.Tensor, block_size: int) -> torch.Tensor:
    """Values [*slots.shape, num_kv_heads, value_size] of int64 slots, copied."""
    blocks, offsets = slots // block_size, slots % block_size
    if is_packed(value_cache):
        pack = value_cache.shape[4]
        return value_cache[blocks, :, offsets // pack, :, offsets % pack]
    return value_cache[blocks, offsets]


def write_keys(key_cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """Puts keys [num_tokens, num_kv_heads, head_size] into int64 slots, none of them twice."""
    block_size = block_size_of(key_cache)
    blocks, offsets = slots // block_size, slots % block_size
    keys = keys.to(key_cache.dtype)
    if is_packed(key_cache):
        words, pack = key_cache.shape[2], key_cache.shape[4]
        key_cache[blocks, :, :, offsets] = F.pad(keys, (0, words * pack - keys.shape[2])).unflatten(2, (words, pack))
    else:
        key_cache[blocks, offsets] = keys


def write_values(value_cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, block_size: int) -> None:
    """Puts values [num_tokens, num_kv_heads, value_size] into int64 slots, none of them twice."""
    blocks, offsets = slots // block_size, slots % block_size
    values = values.to(value_cache.dtype)
    if is_packed(value_cache):
        pack = value_cache.shape[4]
        value_cache[blocks, :, offsets // pack, :, offsets % pack] = values
    else:
        value_cache[blocks, offsets] = values
