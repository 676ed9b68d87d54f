"""Logits processors in Triton, each in one launch and in place; see kernels/penalties.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.sampling_math import EXACT
from kernels.cuda.variant import Variant

BLOCK = 256
MASK_BLOCK = 2048


@triton.jit
def _pairs(logits, stride, rows, token_ids, num_pairs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's pairs, which of them there are, and where their logits lie."""
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = pairs < num_pairs
    return (
        pairs,
        is_inside,
        logits + tl.load(rows + pairs, is_inside, 0) * stride + tl.load(token_ids + pairs, is_inside, 0),
    )


@triton.jit
def _repetition(logits, stride, rows, token_ids, num_pairs, penalties, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    pairs, is_inside, places = _pairs(logits, stride, rows, token_ids, num_pairs, BLOCK)
    seen, penalty = tl.load(places, is_inside, 0.0), tl.load(penalties + pairs, is_inside, 1.0)
    tl.store(places, tl.where(seen > 0.0, tl.div_rn(seen, penalty), seen * penalty), is_inside)


@triton.jit
def _output(logits, stride, rows, token_ids, num_pairs, counts, frequency, presence, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    pairs, is_inside, places = _pairs(logits, stride, rows, token_ids, num_pairs, BLOCK)
    x = tl.load(places, is_inside, 0.0)
    x -= tl.load(frequency + pairs, is_inside, 0.0) * tl.load(counts + pairs, is_inside, 0.0)
    tl.store(places, x - tl.load(presence + pairs, is_inside, 0.0), is_inside)


@triton.jit
def _bias(logits, stride, rows, token_ids, num_pairs, bias, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    pairs, is_inside, places = _pairs(logits, stride, rows, token_ids, num_pairs, BLOCK)
    tl.store(places, tl.load(places, is_inside, 0.0) + tl.load(bias + pairs, is_inside, 0.0), is_inside)


@triton.jit
def _forbid(logits, stride, rows, token_ids, num_pairs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    _, is_inside, places = _pairs(logits, stride, rows, token_ids, num_pairs, BLOCK)
    tl.store(places, tl.full([BLOCK], -float("inf"), tl.float32), is_inside)


@triton.jit
def _bitmask(logits, stride, vocab_size, rows, masks, num_words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    line = tl.program_id(0).to(tl.int64)
    token_ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = token_ids < vocab_size
    words = tl.load(masks + line * num_words + token_ids // 32, is_inside, -1)
    is_forbidden = ((words >> (token_ids % 32)) & 1) == 0
    # Nothing is read of the logits, and nothing written where a token stays.
    places = logits + tl.load(rows + line) * stride + token_ids
    tl.store(places, tl.full([BLOCK], -float("inf"), tl.float32), is_inside & is_forbidden)


def _over_pairs(
    kernel: object, logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, *columns: torch.Tensor
) -> None:
    """Launches a kernel over (row, token id) pairs with columns of numbers."""
    if num_pairs := len(rows):
        arguments = (rows.contiguous(), token_ids.contiguous(), num_pairs, *(column.contiguous() for column in columns))
        kernel[(triton.cdiv(num_pairs, BLOCK),)](logits, logits.stride(0), *arguments, BLOCK=BLOCK, **EXACT)  # type: ignore[index]


def apply_repetition_penalty(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, penalties: torch.Tensor
) -> None:
    """See `kernels.penalties`; float32 logits whose rows are contiguous, here and below."""
    _over_pairs(_repetition, logits, rows, token_ids, penalties)


def apply_output_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """See `kernels.penalties`."""
    _over_pairs(_output, logits, rows, token_ids, counts, frequency, presence)


def add_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor) -> None:
    """See `kernels.penalties`."""
    _over_pairs(_bias, logits, rows, token_ids, bias)


def mask_tokens(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """See `kernels.penalties`."""
    _over_pairs(_forbid, logits, rows, token_ids)


def apply_bitmask(logits: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> None:
    """See `kernels.penalties`."""
    vocab_size = logits.shape[1]
    if len(rows) and vocab_size:
        mask = mask.contiguous()
        grid = (len(rows), triton.cdiv(vocab_size, MASK_BLOCK))
        _bitmask[grid](
            logits, logits.stride(0), vocab_size, rows.contiguous(), mask, mask.shape[1], BLOCK=MASK_BLOCK, **EXACT
        )


def variants() -> list[Variant]:
    """Logits are always float32."""
    kernels = {
        "repetition_penalty": _repetition,
        "output_penalties": _output,
        "add_bias": _bias,
        "mask_tokens": _forbid,
        "bitmask": _bitmask,
    }
    types = dict.fromkeys(("penalties", "counts", "frequency", "presence", "bias", "logits"), "*fp32")
    types |= {"rows": "*i64", "token_ids": "*i64", "masks": "*i32"}
    types |= dict.fromkeys(("stride", "vocab_size", "num_pairs", "num_words"), "i32")
    return [
        Variant(
            name,
            kernel,
            {n: types[n] for n in kernel.arg_names if n in types},
            {"BLOCK": MASK_BLOCK if kernel is _bitmask else BLOCK},
            fp_fusion=False,
            aligned=frozenset({"stride", "vocab_size"} & set(kernel.arg_names)),
        )
        for name, kernel in kernels.items()
    ]
