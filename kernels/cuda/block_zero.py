"""zero_blocks in Triton: a program fills a part of one block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.block_copy import BLOCK, word_views
from kernels.cuda.variant import Variant


@triton.jit
def _zero_part(dest, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dest + columns, tl.zeros([BLOCK], dest.dtype.element_ty), columns < size)


@triton.jit
def _zero_blocks(  # type: ignore[no-untyped-def]
    key_cache, value_cache, ids, key_stride, value_stride, key_size, value_size, BLOCK: tl.constexpr
):
    block = tl.load(ids + tl.program_id(0)).to(tl.int64)
    if tl.program_id(2) == 0:
        _zero_part(key_cache + block * key_stride, key_size, BLOCK)
    else:
        _zero_part(value_cache + block * value_stride, value_size, BLOCK)


def zero_blocks(key_cache: torch.Tensor, value_cache: torch.Tensor, block_ids: torch.Tensor) -> None:
    """See `kernels.block_zero.reference`."""
    keys, values = word_views(key_cache, value_cache)
    key_size, value_size = keys.shape[1], values.shape[1]
    if len(block_ids):
        grid = (len(block_ids), triton.cdiv(max(key_size, value_size), BLOCK), 2)
        _zero_blocks[grid](
            keys, values, block_ids.contiguous(), keys.stride(0), values.stride(0), key_size, value_size, BLOCK=BLOCK
        )


def variants() -> list[Variant]:
    """In words of 8 bytes, and of 2 for blocks of an odd size."""
    types = {"ids": "*i64"} | {f"{name}_{what}": "i32" for name in ("key", "value") for what in ("stride", "size")}
    return [
        Variant(
            f"zero_blocks {word}",
            _zero_blocks,
            types | {"key_cache": f"*{word}", "value_cache": f"*{word}"},
            {"BLOCK": BLOCK},
            aligned=frozenset(types) - {"ids"} if word == "i64" else frozenset(),
        )
        for word in ("i64", "i16")
    ]
