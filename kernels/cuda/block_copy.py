"""copy_blocks in Triton: all sources to a staging buffer, then from there to their destinations."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.cuda.variant import Variant

BLOCK = 1024
"""Words of a program."""
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def _copy_part(source, dest, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dest + columns, tl.load(source + columns, columns < size), columns < size)


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    key_cache, value_cache, ids, staging, key_stride, value_stride, key_size, value_size, BLOCK: tl.constexpr
):
    """Part of one block's keys or values into its row of staging [num_ids, key_size + value_size]."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.load(ids + row).to(tl.int64)
    staging += row * (key_size + value_size)
    if tl.program_id(2) == 0:
        _copy_part(key_cache + block * key_stride, staging, key_size, BLOCK)
    else:
        _copy_part(value_cache + block * value_stride, staging + key_size, value_size, BLOCK)


@triton.jit
def _scatter(  # type: ignore[no-untyped-def]
    key_cache, value_cache, ids, staging, key_stride, value_stride, key_size, value_size, BLOCK: tl.constexpr
):
    """What `_gather` does, the other way."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.load(ids + row).to(tl.int64)
    staging += row * (key_size + value_size)
    if tl.program_id(2) == 0:
        _copy_part(staging, key_cache + block * key_stride, key_size, BLOCK)
    else:
        _copy_part(staging + key_size, value_cache + block * value_stride, value_size, BLOCK)


def word_views(*caches: torch.Tensor) -> list[torch.Tensor]:
    """Views [num_blocks, words] of caches whose blocks lie in one run each, in the largest words that fit."""
    rows = [cache.view(cache.shape[0], -1) for cache in caches]
    places = [n * x.element_size() for x in rows for n in (x.shape[1], x.stride(0), x.storage_offset())]
    return [row.view(WORDS[math.gcd(8, *places)]) for row in rows]


def copy_blocks(
    key_cache: torch.Tensor, value_cache: torch.Tensor, source_block_ids: torch.Tensor, dest_block_ids: torch.Tensor
) -> None:
    """See `kernels.block_copy.reference`."""
    keys, values = word_views(key_cache, value_cache)
    num_copies, key_size, value_size = len(source_block_ids), keys.shape[1], values.shape[1]
    if not num_copies:
        return
    # A destination may be another copy's source: nothing is written before all is read.
    staging = torch.empty(num_copies, key_size + value_size, dtype=keys.dtype, device=keys.device)
    grid = (num_copies, triton.cdiv(max(key_size, value_size), BLOCK), 2)
    for kernel, ids in ((_gather, source_block_ids), (_scatter, dest_block_ids)):
        kernel[grid](
            keys, values, ids.contiguous(), staging, keys.stride(0), values.stride(0), key_size, value_size, BLOCK=BLOCK
        )


def variants() -> list[Variant]:
    """In words of 8 bytes, and of 2 for blocks of an odd size."""
    types = {"ids": "*i64"} | {f"{name}_{what}": "i32" for name in ("key", "value") for what in ("stride", "size")}
    return [
        Variant(
            f"copy_blocks {name} {word}",
            kernel,
            types | dict.fromkeys(("key_cache", "value_cache", "staging"), f"*{word}"),
            {"BLOCK": BLOCK},
            aligned=frozenset(types) - {"ids"} if word == "i64" else frozenset(),
        )
        for name, kernel in (("gather", _gather), ("scatter", _scatter))
        for word in ("i64", "i16")
    ]
