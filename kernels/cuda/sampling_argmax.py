"""argmax in Triton: a program finds the largest of a segment of a row, another one the largest of the segments."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.sampling_draw import NO_TOKEN
from kernels.cuda.variant import Variant

BLOCK = 2048
MAX_SEGMENTS = 128
_NUM_PROGRAMS = 1024
"""Programs that keep the largest GPU busy: a few for each multiprocessor."""


def segments(rows: int, vocab_size: int, block: int) -> tuple[int, int]:
    """How many segments a row has, and their size in logits: few for many rows, a multiple of the block."""
    num_blocks = triton.cdiv(vocab_size, block)
    wanted = min(num_blocks, MAX_SEGMENTS, triton.cdiv(_NUM_PROGRAMS, max(rows, 1)))
    size = triton.cdiv(num_blocks, wanted) * block
    return triton.cdiv(vocab_size, size), size


@triton.jit
def ordered_bits(x):  # type: ignore[no-untyped-def]
    """float32 as int32 in the same order, the two zeros equal and NaN above all."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _segment_argmax(logits, stride, vocab_size, segment_size, keys, token_ids, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = segment * segment_size
    best, places = tl.full([BLOCK], -0x80000000, tl.int32), tl.full([BLOCK], NO_TOKEN, tl.int32)
    for first in range(start, tl.minimum(start + segment_size, vocab_size), BLOCK):
        place = first + tl.arange(0, BLOCK)
        is_inside = place < vocab_size
        key = ordered_bits(tl.load(logits + row * stride + place, is_inside, -float("inf")))
        is_better = is_inside & (key > best)
        best, places = tl.where(is_better, key, best), tl.where(is_better, place, places)
    most = tl.max(best, 0)
    out = row * tl.num_programs(1) + segment
    tl.store(keys + out, most)
    tl.store(token_ids + out, tl.min(tl.where(best == most, places, NO_TOKEN), 0))


@triton.jit(do_not_specialize=["num_segments"])
def _row_argmax(logits, stride, keys, token_ids, num_segments, out, largest, SEGMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    segment = tl.arange(0, SEGMENTS)
    is_inside = segment < num_segments
    key = tl.load(keys + row * num_segments + segment, is_inside, -0x80000000)
    token = tl.load(token_ids + row * num_segments + segment, is_inside, NO_TOKEN)
    token = tl.min(tl.where(key == tl.max(key, 0), token, NO_TOKEN), 0)
    tl.store(out + row, token.to(tl.int64))
    tl.store(largest + row, tl.load(logits + row * stride + token))


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.sampling.reference_argmax`; float32 logits whose rows are contiguous."""
    rows, vocab_size = logits.shape
    device = logits.device
    num_segments, segment_size = segments(rows, vocab_size, BLOCK)
    keys, token_ids = (torch.empty(rows, num_segments, dtype=torch.int32, device=device) for _ in range(2))
    out, largest = torch.empty(rows, dtype=torch.int64, device=device), torch.empty(rows, device=device)
    _segment_argmax[(rows, num_segments)](
        logits, logits.stride(0), vocab_size, segment_size, keys, token_ids, BLOCK=BLOCK
    )
    _row_argmax[(rows,)](
        logits, logits.stride(0), keys, token_ids, num_segments, out, largest, SEGMENTS=MAX_SEGMENTS, num_warps=1
    )
    return out, largest


def variants() -> list[Variant]:
    """Logits are always float32."""
    segment = {"logits": "*fp32", "keys": "*i32", "token_ids": "*i32"}
    return [
        Variant(
            "argmax segments",
            _segment_argmax,
            segment | dict.fromkeys(("stride", "vocab_size", "segment_size"), "i32"),
            {"BLOCK": BLOCK},
            aligned=frozenset({"stride", "vocab_size", "segment_size"}),
        ),
        Variant(
            "argmax rows",
            _row_argmax,
            segment | {"stride": "i32", "num_segments": "i32", "out": "*i64", "largest": "*fp32"},
            {"SEGMENTS": MAX_SEGMENTS},
            num_warps=1,
            aligned=frozenset({"stride"}),
        ),
    ]
