"""rotate_and_write_kv in Triton: a program does some query heads, key heads or value heads of one token."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.cuda.kv_write import CACHE_TYPES, UNSCALED, cache_arguments, heads_per_program, put_heads, slot_place
from kernels.cuda.variant import FLOATS, Variant

TILE = 2048
"""Numbers of a program's heads: 16 per thread."""


@triton.jit
def _weighted(values, inverse, norm, columns, is_column, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """values * inverse * norm in float32, rounded to a type after each product."""
    weight = tl.load(norm + columns, is_column, 0.0).to(tl.float32)
    normalized = (values * inverse[:, None]).to(kind).to(tl.float32)
    return (normalized * weight[None, :]).to(kind).to(tl.float32)


@triton.jit
def _turn_heads(  # type: ignore[no-untyped-def]
    x,
    heads,
    num_heads,
    norm,
    eps,
    cos,
    sin,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Norms and turns heads of the token at x in place; returns both halves of what turns and the rest, float32."""
    kind = x.dtype.element_ty
    columns, rest_columns = tl.arange(0, HALF_BLOCK), tl.arange(0, REST_BLOCK)
    is_column, is_rest_column = columns < HALF, rest_columns < HEAD_SIZE - 2 * HALF
    is_head = (heads < num_heads)[:, None]
    is_inside, is_rest = is_head & is_column[None, :], is_head & is_rest_column[None, :]
    place = x + heads[:, None] * HEAD_SIZE + columns[None, :]
    rest_place = x + heads[:, None] * HEAD_SIZE + 2 * HALF + rest_columns[None, :]
    a = tl.load(place, is_inside, 0.0).to(tl.float32)
    b = tl.load(place + HALF, is_inside, 0.0).to(tl.float32)
    rest = tl.load(rest_place, is_rest, 0.0).to(tl.float32)
    if norm is not None:
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(rest * rest, axis=1)
        inverse = tl.rsqrt(squares / HEAD_SIZE + eps)
        a = _weighted(a, inverse, norm, columns, is_column, kind)
        b = _weighted(b, inverse, norm + HALF, columns, is_column, kind)
        rest = _weighted(rest, inverse, norm + 2 * HALF, rest_columns, is_rest_column, kind)
    c = tl.load(cos + columns, is_column, 0.0)[None, :]
    s = tl.load(sin + columns, is_column, 0.0)[None, :]
    first, second = (a * c - b * s).to(kind), (b * c + a * s).to(kind)
    # Threads may share an element of a small tile: none stores it before all have loaded it.
    tl.debug_barrier()
    tl.store(place, first, is_inside)
    tl.store(place + HALF, second, is_inside)
    if norm is not None:
        tl.store(rest_place, rest.to(kind), is_rest)
    return first.to(tl.float32), second.to(tl.float32), rest


@triton.jit
def _rotate_and_write_kv(  # type: ignore[no-untyped-def]
    qkv,
    positions,
    cos_table,
    sin_table,
    query_norm,
    key_norm,
    eps,
    key_cache,
    value_cache,
    slot_mapping,
    key_scale,
    value_scale,
    token_stride,
    table_stride,
    key_block_stride,
    key_slot_stride,
    key_cache_head_stride,
    value_block_stride,
    value_slot_stride,
    value_cache_head_stride,
    key_scale_stride,
    value_scale_stride,
    block_size,
    num_heads,
    num_kv_heads,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group, num_kv_groups = tl.program_id(1), tl.cdiv(num_kv_heads, HEADS)
    # Keys and values come first: queries have less to do, and end the launch.
    query_group = group - 2 * num_kv_groups
    position = tl.load(positions + token).to(tl.int64) * table_stride
    cos, sin = cos_table + position, sin_table + position
    x = qkv + token * token_stride
    if query_group >= 0:
        heads = query_group * HEADS + tl.arange(0, HEADS)
        _turn_heads(x, heads, num_heads, query_norm, eps, cos, sin, HEAD_SIZE, HALF, HALF_BLOCK, REST_BLOCK)
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        heads = group % num_kv_groups * HEADS + tl.arange(0, HEADS)
        num_stored = tl.where(slot >= 0, num_kv_heads, 0)
        if group < num_kv_groups:
            keys, rest_size = x + num_heads * HEAD_SIZE, HEAD_SIZE - 2 * HALF
            first, second, rest = _turn_heads(
                keys, heads, num_kv_heads, key_norm, eps, cos, sin, HEAD_SIZE, HALF, HALF_BLOCK, REST_BLOCK
            )
            keys_at = key_cache + slot_place(slot, block_size, key_block_stride, key_slot_stride)
            for_keys = (key_cache_head_stride, key_scale, key_scale_stride)
            put_heads(first, heads, num_stored, HALF, keys_at, *for_keys, HALF_BLOCK)
            put_heads(second, heads, num_stored, HALF, keys_at + HALF, *for_keys, HALF_BLOCK)
            put_heads(rest, heads, num_stored, rest_size, keys_at + 2 * HALF, *for_keys, REST_BLOCK)
        else:
            columns = tl.arange(0, VALUE_BLOCK)[None, :]
            is_value = (heads < num_stored)[:, None] & (columns < VALUE_SIZE)
            values = x + (num_heads + num_kv_heads) * HEAD_SIZE + heads[:, None] * VALUE_SIZE + columns
            numbers = tl.load(values, is_value, 0.0).to(tl.float32)
            values_at = value_cache + slot_place(slot, block_size, value_block_stride, value_slot_stride)
            for_values = (value_cache_head_stride, value_scale, value_scale_stride)
            put_heads(numbers, heads, num_stored, VALUE_SIZE, values_at, *for_values, VALUE_BLOCK)


def _blocks(head_size: int, value_size: int, half: int) -> dict[str, int]:
    """What the kernel knows of sizes when it is compiled."""
    return {
        "HEAD_SIZE": head_size,
        "VALUE_SIZE": value_size,
        "HALF": half,
        "HALF_BLOCK": triton.next_power_of_2(half),
        "REST_BLOCK": triton.next_power_of_2(max(1, head_size - 2 * half)),
        "VALUE_BLOCK": triton.next_power_of_2(value_size),
    }


def rotate_and_write_kv(
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
    """See `kernels.rotary_write.reference`."""
    num_tokens, width = qkv.shape
    num_kv_heads, value_size = value_cache.shape[2:]
    num_heads = (width - num_kv_heads * (head_size + value_size)) // head_size
    query = qkv[:, : num_heads * head_size].unflatten(1, (num_heads, head_size))
    arguments = cache_arguments(key_cache, value_cache, key_scale, value_scale)
    if not num_tokens:
        return query
    assert qkv.stride(1) == 1, "a token's numbers follow one another"
    cos, sin = (table.contiguous() for table in tables)
    query_norm, key_norm = (None, None) if norms is None else norms
    heads = heads_per_program(max(num_heads, num_kv_heads), max(head_size, value_size), TILE)
    _rotate_and_write_kv[(num_tokens, 2 * triton.cdiv(num_kv_heads, heads) + triton.cdiv(num_heads, heads))](
        qkv=qkv,
        positions=positions.contiguous(),
        cos_table=cos,
        sin_table=sin,
        query_norm=query_norm,
        key_norm=key_norm,
        eps=eps,
        slot_mapping=slot_mapping.contiguous(),
        token_stride=qkv.stride(0),
        table_stride=cos.stride(0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        HEADS=heads,
        **_blocks(head_size, value_size, cos.shape[1]),
        **arguments,
    )
    return query


def variants() -> list[Variant]:
    """Head sizes of models, with norms and without, partial rotary, and every kind of cache."""
    whole, normed = (128, 64, False), (128, 64, True)
    wanted = [(kind, kind, shape) for kind in FLOATS for shape in (whole, normed)]
    wanted += [
        ("bf16", "bf16", shape) for shape in ((64, 32, False), (80, 16, False), (96, 48, False), (256, 128, True))
    ]
    wanted += [(kind, "u8", shape) for kind in ("bf16", "fp16") for shape in (whole, normed)]
    found = [_variant(kind, cache, *shape, cache == "u8") for kind, cache, shape in wanted]
    return found + [_variant(kind, cache, *shape, False) for kind, cache in UNSCALED for shape in (whole, normed)]


def _variant(kind: str, cache: str, head_size: int, half: int, has_norms: bool, has_scales: bool) -> Variant:
    types = CACHE_TYPES | {"qkv": f"*{kind}", "positions": "*i64", "slot_mapping": "*i64", "eps": "fp32"}
    types |= {"cos_table": "*fp32", "sin_table": "*fp32", "token_stride": "i32", "table_stride": "i32"}
    types |= {"key_cache": f"*{cache}", "value_cache": f"*{cache}", "num_heads": "i32"}
    optional = {"query_norm": f"*{kind}" if has_norms else None, "key_scale": "*fp32" if has_scales else None}
    optional |= {"key_norm": optional["query_norm"], "value_scale": optional["key_scale"]}
    constants: dict[str, Any] = {name: None for name, kind in optional.items() if kind is None}
    types |= {name: kind for name, kind in optional.items() if kind is not None}
    constants |= {"HEADS": heads_per_program(32, head_size, TILE)} | _blocks(head_size, head_size, half)
    aligned = frozenset(name for name in types if name.endswith("_stride") and "scale" not in name)
    what = f"{kind} to {cache} {head_size} turned {2 * half}"
    what += (" normed" if has_norms else "") + (" scaled" if has_scales else "")
    return Variant(f"rotate_and_write_kv {what}", _rotate_and_write_kv, types, constants, aligned=aligned)
