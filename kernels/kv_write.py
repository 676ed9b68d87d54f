"""write_kv: puts the keys and values of a step into the paged cache."""

from __future__ import annotations

import torch

from kernels.compiled import compiled
from kernels.kv_layout import block_size_of, write_keys, write_values


def reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Writes token t to slot slot_mapping[t] of both caches, converted to the cache's type.

    key and value [num_tokens, num_kv_heads, head_size], caches as `kv_layout` says, slot_mapping [num_tokens] int64,
    block * block_size + offset; a negative slot is skipped.
    """
    block_size = block_size_of(key_cache)
    for t, slot in enumerate(slot_mapping):
        if slot >= 0:
            write_keys(key_cache, slot[None], key[t : t + 1])
            write_values(value_cache, slot[None], value[t : t + 1], block_size)


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
    write_keys(key_cache, slot_mapping, key)
    write_values(value_cache, slot_mapping, value, block_size_of(key_cache))


def cpu_write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `reference`."""
    module = compiled("rotary")
    write = torch_write_kv
    if module is not None and module.can_write(key, key_cache, value_cache):
        write = module.write_kv
    write(key, value, key_cache, value_cache, slot_mapping)
