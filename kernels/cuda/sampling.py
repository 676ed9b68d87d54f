"""sample in Triton, in two passes over the logits and without a sort; see kernels/sampling.py for what is chosen.

    survey   a program per segment of a row: the largest logit; for top-k and top-p, how many logits each bin has
    collect  a program per segment: rows with top-k or top-p list the few tokens that the bins leave, and sum the
             weight of all; the other rows draw from the segment, since their threshold is known
    narrow   a program per segment of the rows whose list overflowed (flat logits, top-p): lists only the tokens about
             the threshold, which finer bins and the exact weight tell
    choose   a program per row: exact thresholds by bisection over the list, and the draw; or the best segment's token

Where still more tokens remain than a list holds (a large top-k, equal logits) `choose` reads the row itself. Counts are
whole numbers and so are weights: no outcome depends on the order in which programs run. A temperature of 0 takes
the likeliest token, of equal ones the lowest id.
"""

from __future__ import annotations

import torch

from kernels.cuda.sampling_argmax import argmax, segments
from kernels.cuda.sampling_choose import choose
from kernels.cuda.sampling_collect import MAX_SEGMENTS, WORK_WORDS, collect, narrow, survey
from kernels.cuda.sampling_math import EXACT
from kernels.cuda.variant import Variant
from kernels.sampling import Draws

__all__ = ["argmax", "sample", "variants"]

BLOCK = 1024
CAPACITY = 8192
"""Candidates that a row's list holds at most."""


def sample(logits: torch.Tensor, draws: Draws, capacity: int = CAPACITY) -> torch.Tensor:
    """See `kernels.sampling.reference`; float32 logits whose rows are contiguous; a temperature may be 0."""
    rows, vocab_size = logits.shape
    device = logits.device
    num_segments, segment_size = segments(rows, vocab_size, BLOCK)
    grid = (rows, num_segments)
    work = torch.zeros(rows, WORK_WORDS.value, dtype=torch.int32, device=device)
    segment_largest, segment_best = torch.empty(2, rows, MAX_SEGMENTS.value, device=device)
    segment_tokens = torch.empty(rows, MAX_SEGMENTS.value, dtype=torch.int32, device=device)
    list_scaled = torch.empty(rows, capacity, device=device)
    list_tokens = torch.empty(rows, capacity, dtype=torch.int32, device=device)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    truncation = (draws.temperature.contiguous(), draws.top_k.contiguous(), draws.top_p.contiguous())
    noise = (draws.seeds.contiguous(), draws.positions.contiguous(), draws.child_indices.contiguous())
    columns = (*truncation, draws.min_p.contiguous(), *noise)
    head = (logits, logits.stride(0), vocab_size)
    survey[grid](*head, segment_size, *truncation, segment_largest, work, BLOCK=BLOCK, **EXACT)
    found = (segment_largest, work, segment_best, segment_tokens)
    lists = (list_scaled, list_tokens, capacity)
    collect[grid](*head, segment_size, *columns, *found, *lists, BLOCK=BLOCK, **EXACT)
    narrow[grid](
        *head,
        segment_size,
        truncation[0],
        truncation[2],
        segment_largest,
        work,
        *lists,
        BLOCK=BLOCK,
        num_warps=8,
        **EXACT,
    )
    choose[(rows,)](*head, num_segments, *columns, *found, *lists, out, BLOCK=BLOCK, num_warps=8, **EXACT)
    return out


_TYPES = {
    "logits": "*fp32",
    "temperatures": "*fp32",
    "top_ks": "*i64",
    "top_ps": "*fp64",
    "min_ps": "*fp64",
    "seeds": "*i64",
    "positions": "*i64",
    "child_indices": "*i64",
    "segment_largest": "*fp32",
    "work": "*i32",
    "segment_best": "*fp32",
    "segment_tokens": "*i32",
    "list_scaled": "*fp32",
    "list_tokens": "*i32",
    "out": "*i64",
} | dict.fromkeys(("stride", "vocab_size", "segment_size", "num_segments", "capacity"), "i32")


def variants() -> list[Variant]:
    """Logits are always float32."""
    aligned = frozenset({"stride", "vocab_size", "segment_size", "capacity"})
    kernels = (("survey", survey, 4), ("collect", collect, 4), ("narrow", narrow, 8), ("choose", choose, 8))
    return [
        Variant(
            f"sample {name}",
            kernel,
            {n: _TYPES[n] for n in kernel.arg_names if n in _TYPES},
            {"BLOCK": BLOCK},
            num_warps,
            fp_fusion=False,
            aligned=aligned & set(kernel.arg_names),
        )
        for name, kernel, num_warps in kernels
    ]
