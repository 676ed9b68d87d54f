"""write_kv in Triton: a program puts some heads of one token's keys and values into the paged cache."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.cuda.variant import FLOATS, Variant
from kernels.kv_write import check_scale

TILE = 2048
"""Numbers of a program's heads."""


@triton.jit
def _e4m3(x):  # type: ignore[no-untyped-def]
    """Bits of float32 x as float8_e4m3fn: the nearest, of two the even one, and at most 448.

    By integers, so that it is exact on every GPU (compute capability 80 has no instruction for it) and interpreted.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Exponents are counted from 7 instead of 127, and 20 of the fraction's 23 bits go.
    normal = (magnitude - (120 << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    # Below 2**-6 steps are 2**-9, as those of float32 are from 2**14 on: the addition rounds.
    shifted = tl.minimum(magnitude, 121 << 23).to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.int32, bitcast=True) - (141 << 23)
    code = tl.minimum(tl.where(magnitude < (121 << 23), small, normal), 0x7E)
    code = tl.where(magnitude > (255 << 23), 0x7F, code)  # not a number
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def put_heads(  # type: ignore[no-untyped-def]
    values, heads, num_heads, size, cache, head_stride, scale, scale_stride, BLOCK: tl.constexpr
):
    """Stores values [heads, BLOCK] float32, of which `size` and heads below num_heads count, in the type of a cache.

    cache points to where head 0 begins; uint8 stands for float8_e4m3fn.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    is_head = heads < num_heads
    is_stored = is_head[:, None] & (columns < size)
    place = cache + heads.to(tl.int64)[:, None] * head_stride + columns
    if cache.dtype.element_ty == tl.uint8:
        if scale is not None:
            values = tl.div_rn(values, tl.load(scale + heads * scale_stride, is_head, 1.0)[:, None])
        tl.store(place, _e4m3(values), is_stored)
    else:
        tl.store(place, values.to(cache.dtype.element_ty), is_stored)


@triton.jit
def slot_place(slot, block_size, block_stride, slot_stride):  # type: ignore[no-untyped-def]
    """Where an int64 slot, not negative, begins in a cache."""
    return slot // block_size * block_stride + slot % block_size * slot_stride


@triton.jit
def _copy_heads(  # type: ignore[no-untyped-def]
    x,
    head_stride,
    cache,
    cache_head_stride,
    scale,
    scale_stride,
    num_heads,
    size,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Heads of one token, from x to cache, which point to its first."""
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, BLOCK)
    is_inside = (heads < num_heads)[:, None] & (columns < size)[None, :]
    place = heads.to(tl.int64)[:, None] * head_stride + columns[None, :]
    values = tl.load(x + place, is_inside, 0.0).to(tl.float32)
    put_heads(values, heads, num_heads, size, cache, cache_head_stride, scale, scale_stride, BLOCK)


@triton.jit
def _write_kv(  # type: ignore[no-untyped-def]
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_scale,
    value_scale,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_block_stride,
    key_slot_stride,
    key_cache_head_stride,
    value_block_stride,
    value_slot_stride,
    value_cache_head_stride,
    key_scale_stride,
    value_scale_stride,
    block_size,
    num_kv_heads,
    head_size,
    value_size,
    HEADS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        key += token * key_token_stride
        key_cache += slot_place(slot, block_size, key_block_stride, key_slot_stride)
        value += token * value_token_stride
        value_cache += slot_place(slot, block_size, value_block_stride, value_slot_stride)
        _copy_heads(
            key,
            key_head_stride,
            key_cache,
            key_cache_head_stride,
            key_scale,
            key_scale_stride,
            num_kv_heads,
            head_size,
            HEADS,
            KEY_BLOCK,
        )
        _copy_heads(
            value,
            value_head_stride,
            value_cache,
            value_cache_head_stride,
            value_scale,
            value_scale_stride,
            num_kv_heads,
            value_size,
            HEADS,
            VALUE_BLOCK,
        )


def heads_per_program(num_heads: int, head_size: int, tile: int = TILE) -> int:
    """A power of two: as many as fill a program's tile."""
    return min(triton.next_power_of_2(num_heads), max(1, tile // triton.next_power_of_2(head_size)))


def cache_arguments(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> dict[str, Any]:
    """Caches, their strides and scales, by the kernels' names for them; float8_e4m3fn goes by its bits."""
    arguments: dict[str, Any] = {"block_size": key_cache.shape[1]}
    for name, cache, scale in (("key", key_cache, key_scale), ("value", value_cache, value_scale)):
        check_scale(cache, scale)
        assert cache.stride(3) == 1, "a head's numbers follow one another"
        arguments[f"{name}_cache"] = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
        strides = (f"{name}_block_stride", f"{name}_slot_stride", f"{name}_cache_head_stride")
        arguments |= zip(strides, cache.stride()[:3], strict=True)
        arguments |= {f"{name}_scale": scale, f"{name}_scale_stride": int(scale is not None and scale.numel() > 1)}
    return arguments


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """See `kernels.kv_write.reference`."""
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    num_tokens, num_kv_heads, head_size = key.shape
    value_size = value.shape[2]
    arguments = cache_arguments(key_cache, value_cache, key_scale, value_scale)
    if not num_tokens:
        return
    heads = heads_per_program(num_kv_heads, max(head_size, value_size))
    _write_kv[(num_tokens, triton.cdiv(num_kv_heads, heads))](
        key=key,
        value=value,
        slot_mapping=slot_mapping.contiguous(),
        key_token_stride=key.stride(0),
        key_head_stride=key.stride(1),
        value_token_stride=value.stride(0),
        value_head_stride=value.stride(1),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        value_size=value_size,
        HEADS=heads,
        KEY_BLOCK=triton.next_power_of_2(head_size),
        VALUE_BLOCK=triton.next_power_of_2(value_size),
        **arguments,
    )


_CACHE_STRIDES = ("block", "slot", "cache_head", "scale")
CACHE_TYPES = {f"{name}_{what}_stride": "i32" for name in ("key", "value") for what in _CACHE_STRIDES}
CACHE_TYPES |= {"block_size": "i32", "num_kv_heads": "i32"}
"""Of what `cache_arguments` gives besides pointers, and of the number of heads."""
WRITES = [(kind, kind) for kind in FLOATS] + [("bf16", "u8"), ("fp16", "u8"), ("bf16", "fp16")]
"""Types of what is written and of the cache; float8 with scales."""
UNSCALED = [("bf16", "u8"), ("fp16", "u8")]
"""The same, float8 without."""


def variants() -> list[Variant]:
    """Heads of 128 numbers, of every type, to caches of the same type, of float8, and of another type."""
    found = []
    for kind, cache, has_scales in [(*types, types[1] == "u8") for types in WRITES] + [(*x, False) for x in UNSCALED]:
        types = CACHE_TYPES | {"key": f"*{kind}", "value": f"*{kind}", "slot_mapping": "*i64"}
        types |= {"key_cache": f"*{cache}", "value_cache": f"*{cache}", "head_size": "i32", "value_size": "i32"}
        types |= {f"{name}_{what}_stride": "i32" for name in ("key", "value") for what in ("token", "head")}
        constants: dict[str, Any] = {"HEADS": 8, "KEY_BLOCK": 128, "VALUE_BLOCK": 128}
        if has_scales:
            types |= {"key_scale": "*fp32", "value_scale": "*fp32"}
        else:
            constants |= {"key_scale": None, "value_scale": None}
        aligned = frozenset(name for name in types if name.endswith(("_stride", "_size")) and "scale" not in name)
        name = f"write_kv {kind} to {cache}{' scaled' if has_scales else ''}"
        found.append(Variant(name, _write_kv, types, constants, aligned=aligned))
    return found
