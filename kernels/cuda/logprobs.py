"""gather_logprobs in Triton: one pass over the logits, then the few candidates; see kernels/logprobs.py.

The likeliest tokens are those with the largest keys, int64: the logit in its order above, and below it what falls as
the token id grows. No two are equal, so that any selection of the largest finds the documented order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.sampling_argmax import MAX_SEGMENTS, ordered_bits, segments
from kernels.cuda.variant import Variant

BLOCK = 1024
WIDTH_BLOCK = 128


@triton.jit
def _scan_segment(  # type: ignore[no-untyped-def]
    logits,
    stride,
    vocab_size,
    segment_size,
    chosen,
    segment_largest,
    segment_sums,
    segment_ranks,
    keys,
    HAS_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A segment's largest logit, the sum of e ** (logit - largest), and how many are likelier than the chosen token."""
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    bound = tl.load(logits + row * stride + tl.load(chosen + row))
    start = segment * segment_size
    largest = tl.full([], -float("inf"), tl.float32)
    sums, likelier = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for first in range(start, tl.minimum(start + segment_size, vocab_size), BLOCK):
        token_ids = first + tl.arange(0, BLOCK)
        is_inside = token_ids < vocab_size
        x = tl.load(logits + row * stride + token_ids, is_inside, -float("inf"))
        before, largest = largest, tl.maximum(largest, tl.max(x, 0))
        shift = tl.where(largest == -float("inf"), 0.0, largest)
        sums = sums * tl.exp(before - shift) + tl.exp(x - shift)
        likelier += (x > bound).to(tl.int32)
        if HAS_KEYS:
            key = (ordered_bits(x).to(tl.int64) << 32) | (0x7FFFFFFF - token_ids).to(tl.int64)
            tl.store(keys + row * vocab_size + token_ids, key, is_inside)
    out = row * tl.num_programs(1) + segment
    tl.store(segment_largest + out, largest)
    tl.store(segment_sums + out, tl.sum(sums, 0))
    tl.store(segment_ranks + out, tl.sum(likelier, 0))


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    logits,
    stride,
    num_segments,
    segment_largest,
    segment_sums,
    segment_ranks,
    token_ids,
    width,
    values,
    ranks,
    SEGMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Log-probabilities of some of a row's candidates, and the chosen token's rank."""
    row = tl.program_id(0).to(tl.int64)
    segment = tl.arange(0, SEGMENTS)
    is_inside, places = segment < num_segments, row * num_segments + segment
    largest = tl.load(segment_largest + places, is_inside, -float("inf"))
    most = tl.max(largest, 0)
    sums = tl.load(segment_sums + places, is_inside, 0.0) * tl.exp(largest - most)
    normalizer = tl.log(tl.sum(sums.to(tl.float64), 0))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < width
    token = tl.load(token_ids + row * width + column, is_column, 0)
    x = tl.load(logits + row * stride + token, is_column, 0.0)
    value = x.to(tl.float64) - most.to(tl.float64) - normalizer
    tl.store(values + row * width + column, value.to(tl.float32), is_column)
    likelier = tl.sum(tl.load(segment_ranks + places, is_inside, 0), 0)
    tl.store(ranks + row, 1 + likelier.to(tl.int64), mask=tl.program_id(1) == 0)


def gather_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, num_likeliest: int, extra_token_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.logprobs.reference`; float32 logits whose rows are contiguous."""
    rows, vocab_size = logits.shape
    device = logits.device
    num_segments, segment_size = segments(rows, vocab_size, BLOCK)
    largest, sums = torch.empty(2, rows, num_segments, device=device)
    likelier = torch.empty(rows, num_segments, dtype=torch.int32, device=device)
    is_all = num_likeliest < 0 or num_likeliest >= vocab_size
    has_keys = num_likeliest != 0 and not is_all
    keys = torch.empty((rows, vocab_size) if has_keys else 1, dtype=torch.int64, device=device)
    chosen = chosen.contiguous()
    _scan_segment[(rows, num_segments)](
        logits,
        logits.stride(0),
        vocab_size,
        segment_size,
        chosen,
        largest,
        sums,
        likelier,
        keys,
        HAS_KEYS=has_keys,
        BLOCK=BLOCK,
    )
    columns = [chosen[:, None]]
    if is_all:
        columns.append(torch.sort(logits, dim=-1, descending=True, stable=True).indices)
    elif has_keys:
        columns.append(torch.topk(keys, num_likeliest, dim=-1).indices)
    if extra_token_ids is not None:
        columns.append(extra_token_ids.expand(rows, -1))
    token_ids = torch.cat(columns, dim=1)
    width = token_ids.shape[1]
    values, ranks = torch.empty(rows, width, device=device), torch.empty(rows, dtype=torch.int64, device=device)
    _gather[(rows, triton.cdiv(width, WIDTH_BLOCK))](
        logits,
        logits.stride(0),
        num_segments,
        largest,
        sums,
        likelier,
        token_ids,
        width,
        values,
        ranks,
        SEGMENTS=MAX_SEGMENTS,
        BLOCK=WIDTH_BLOCK,
        num_warps=1,
    )
    return token_ids, values, ranks


def variants() -> list[Variant]:
    """Logits are always float32; with keys for the likeliest, and without."""
    types = dict.fromkeys(("logits", "segment_largest", "segment_sums", "values"), "*fp32")
    types |= dict.fromkeys(("chosen", "keys", "token_ids", "ranks"), "*i64") | {"segment_ranks": "*i32"}
    types |= dict.fromkeys(("stride", "vocab_size", "segment_size", "num_segments", "width"), "i32")

    def variant(name: str, kernel: object, constants: dict[str, object], num_warps: int) -> Variant:
        names = kernel.arg_names  # type: ignore[attr-defined]
        aligned = frozenset({"stride", "vocab_size", "segment_size"} & set(names))
        return Variant(name, kernel, {n: types[n] for n in names if n in types}, constants, num_warps, aligned=aligned)

    return [
        variant("gather_logprobs scan", _scan_segment, {"HAS_KEYS": False, "BLOCK": BLOCK}, 4),
        variant("gather_logprobs scan with keys", _scan_segment, {"HAS_KEYS": True, "BLOCK": BLOCK}, 4),
        variant("gather_logprobs gather", _gather, {"SEGMENTS": MAX_SEGMENTS, "BLOCK": WIDTH_BLOCK}, 1),
    ]
