"""write_kv: puts the keys and values of a step into the paged cache."""

from __future__ import annotations

import torch

from kernels.compiled import compiled, compiled_for_cuda
from kernels.kv_layout import block_size_of, num_kv_heads_of, write_keys, write_values

MAX_E4M3 = 448.0


def reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """Writes token t to slot slot_mapping[t] of both caches, converted to the cache's type.

    key and value [num_tokens, num_kv_heads, head_size], caches as `kv_layout` says, slot_mapping [num_tokens] int64,
    block * block_size + offset; a negative slot is skipped. A cache of float8_e4m3fn takes what is beyond its range
    as its largest number, 448, after a division by a scale: float32 [1] or [num_kv_heads], None is 1. Raises ValueError
    for scales of another shape, and of caches of other types.
    """
    block_size = block_size_of(key_cache)
    for t, slot in enumerate(slot_mapping):
        if slot >= 0:
            write_keys(key_cache, slot[None], as_cached(key[t : t + 1], key_cache, key_scale))
            write_values(value_cache, slot[None], as_cached(value[t : t + 1], value_cache, value_scale), block_size)


def torch_write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """See `reference`."""
    if slot_mapping.numel() and int(slot_mapping.min()) < 0:
        is_kept = slot_mapping >= 0
        key, value, slot_mapping = key[is_kept], value[is_kept], slot_mapping[is_kept]
    write_keys(key_cache, slot_mapping, as_cached(key, key_cache, key_scale))
    write_values(value_cache, slot_mapping, as_cached(value, value_cache, value_scale), block_size_of(key_cache))


def cpu_write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """See `reference`."""
    has_scale = key_scale is not None or value_scale is not None
    module = None if has_scale else compiled("rotary")
    if module is not None and module.can_write(key, key_cache, value_cache):
        module.write_kv(key, value, key_cache, value_cache, slot_mapping)
    else:
        scales = {"key_scale": key_scale, "value_scale": value_scale}
        torch_write_kv(key, value, key_cache, value_cache, slot_mapping, **scales)


def cuda_write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """See `reference`."""
    module = compiled_for_cuda("kv_write")
    write = torch_write_kv if module is None else module.write_kv
    write(key, value, key_cache, value_cache, slot_mapping, key_scale=key_scale, value_scale=value_scale)


def as_cached(x: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Keys or values [num_tokens, num_kv_heads, size] in the cache's type; see `reference`."""
    check_scale(cache, scale)
    if cache.dtype != torch.float8_e4m3fn:
        return x.to(cache.dtype)
    values = x.float() if scale is None else x.float() / scale[:, None]
    return values.clamp(-MAX_E4M3, MAX_E4M3).to(cache.dtype)


def check_scale(cache: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Raises ValueError for a scale that a cache does not take; see `reference`."""
    if scale is None:
        return
    if cache.dtype != torch.float8_e4m3fn:
        raise ValueError(f"a cache of {cache.dtype} has no scale")
    shapes, shape = ((1,), (num_kv_heads_of(cache),)), tuple(scale.shape)
    if scale.dtype != torch.float32 or shape not in shapes:
        raise ValueError(f"a scale must be float32 of shape {shapes[0]} or {shapes[1]}, not {scale.dtype} of {shape}")
