"""rotate_and_write_kv: what lies between the qkv product and attention, in one call.

Root mean square norms of query and key heads (Qwen3), rotary positions (see `rotary`) and the write of keys and values
into the paged cache (see `kv_write`).
"""

from __future__ import annotations

import torch

from kernels import kv_write, norm, rotary
from kernels.compiled import compiled, compiled_for_cuda
from kernels.kv_layout import num_kv_heads_of, value_size_of


def reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    head_size: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Query [num_tokens, num_heads, head_size], normed and turned; it lies in qkv, which is overwritten.

    qkv [num_tokens, num_heads * head_size + num_kv_heads * (head_size + value size)] with query, key and value beside
    each other; positions [num_tokens] int64; tables cosine and sine [max_position, half] float32; caches as `kv_layout`
    says; slot_mapping [num_tokens] int64, negative: not written; norms: weights [head_size] of query's and key's norm;
    scales as in `kv_write`.
    """
    query, key, value = _split(qkv, key_cache, value_cache, head_size)
    if norms is not None:
        query.copy_(norm.reference(query, norms[0], eps)[0])
        key.copy_(norm.reference(key, norms[1], eps)[0])
    for x, turned in zip((query, key), rotary.reference(query, key, positions, *tables), strict=True):
        x.copy_(turned)
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    kv_write.reference(key, value, key_cache, value_cache, slot_mapping, **scales)
    return query


def torch_rotate_and_write_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    head_size: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference`."""
    query, key, value = _split(qkv, key_cache, value_cache, head_size)
    if norms is not None:
        query.copy_(norm.torch_rms_norm(query, norms[0], eps)[0])
        key.copy_(norm.torch_rms_norm(key, norms[1], eps)[0])
    for x, turned in zip((query, key), rotary.torch_rotary_embedding(query, key, positions, *tables), strict=True):
        x.copy_(turned)
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    kv_write.torch_write_kv(key, value, key_cache, value_cache, slot_mapping, **scales)
    return query


def cpu_rotate_and_write_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    head_size: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference`."""
    if key_scale is None and value_scale is None:
        module = compiled("rotary")
        if module is not None and module.can_write(qkv, key_cache, value_cache):
            turned: torch.Tensor = module.rotate_and_write_kv(
                qkv, positions, tables, key_cache, value_cache, slot_mapping, head_size, norms, eps
            )
            return turned
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    return torch_rotate_and_write_kv(
        qkv, positions, tables, key_cache, value_cache, slot_mapping, head_size, norms, eps, **scales
    )


def cuda_rotate_and_write_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    head_size: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference`."""
    module = compiled_for_cuda("rotary")
    run = torch_rotate_and_write_kv if module is None else module.rotate_and_write_kv
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    turned: torch.Tensor = run(
        qkv, positions, tables, key_cache, value_cache, slot_mapping, head_size, norms, eps, **scales
    )
    return turned


def _split(
    qkv: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, head_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of query, key and value, head by head."""
    num_kv_heads, value_size = num_kv_heads_of(key_cache), value_size_of(value_cache)
    sizes = [qkv.shape[1] - num_kv_heads * (head_size + value_size), num_kv_heads * head_size]
    query, key, value = qkv.split([*sizes, num_kv_heads * value_size], dim=1)
    return query.unflatten(1, (-1, head_size)), key.unflatten(1, (-1, head_size)), value.unflatten(1, (-1, value_size))
