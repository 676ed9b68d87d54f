"""The two passes of sampling over the logits, in segments of rows: see sampling.py.

A row's line of `work` (int32, zeros at first) has its bins' counts, the weight of all its tokens as an int64, and the
number of its candidates.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cuda.sampling_draw import NO_TOKEN, draw
from kernels.cuda.sampling_math import NUM_BINS, bin_of, is_truncated, last_bin, least_scaled, scale, weigh

MAX_SEGMENTS = tl.constexpr(128)
WORK_WORDS = tl.constexpr(NUM_BINS.value + 4)
MASS_WORD, COUNT_WORD = tl.constexpr(NUM_BINS.value), tl.constexpr(NUM_BINS.value + 2)


@triton.jit
def survey(
    logits, stride, vocab_size, segment_size, temperatures, top_ks, top_ps, segment_largest, work, BLOCK: tl.constexpr
):  # type: ignore[no-untyped-def]
    """The largest logit of each segment; for rows with a threshold to search, how many logits each bin has."""
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    needs_bins = is_truncated(tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row), vocab_size)
    most = tl.full([BLOCK], -float("inf"), tl.float32)
    counts = tl.zeros([NUM_BINS], tl.int32)
    start = segment * segment_size
    for first in range(start, tl.minimum(start + segment_size, vocab_size), BLOCK):
        token_ids = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + token_ids, token_ids < vocab_size, -float("inf"))
        most = tl.maximum(most, x)
        if needs_bins:
            counts += tl.histogram(bin_of(x), NUM_BINS)
    tl.store(segment_largest + row * MAX_SEGMENTS + segment, tl.max(most, 0))
    if needs_bins:
        tl.atomic_add(work + row * WORK_WORDS + tl.arange(0, NUM_BINS), counts, counts > 0, sem="relaxed")


@triton.jit
def largest_of_row(segment_largest, row, num_segments):  # type: ignore[no-untyped-def]
    """The largest of what `survey` found."""
    segments = tl.arange(0, MAX_SEGMENTS)
    found = tl.load(segment_largest + row * MAX_SEGMENTS + segments, segments < num_segments, -float("inf"))
    return tl.max(found, 0)


@triton.jit
def _keep(list_scaled, list_tokens, count, capacity, scaled, token_ids, is_kept):  # type: ignore[no-untyped-def]
    """Appends the kept tokens of a block to the row's list, as far as they fit; their number is counted in full."""
    num_kept = tl.sum(is_kept.to(tl.int32), 0)
    if num_kept > 0:
        start = tl.atomic_add(count, num_kept, sem="relaxed")
        place = start + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        is_kept &= place < capacity
        tl.store(list_scaled + place, scaled, is_kept)
        tl.store(list_tokens + place, token_ids, is_kept)


@triton.jit
def collect(
    logits,
    stride,
    vocab_size,
    segment_size,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    child_indices,
    segment_largest,
    work,
    work64,
    segment_best,
    segment_tokens,
    list_scaled,
    list_tokens,
    capacity,
    BLOCK: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """Lists the candidates of rows with a threshold to search; draws from the segments of all others."""
    row, segment, num_segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row)
    min_p, seed = tl.load(min_ps + row), tl.load(seeds + row)
    position, child_index = tl.load(positions + row), tl.load(child_indices + row)
    largest = largest_of_row(segment_largest, row, num_segments)
    start = segment * segment_size
    end = tl.minimum(start + segment_size, vocab_size)
    line = work + row * WORK_WORDS
    if is_truncated(temperature, top_k, top_p, vocab_size):
        counts = tl.load(line + tl.arange(0, NUM_BINS))
        last = last_bin(counts, largest, temperature, top_k, top_p, vocab_size)
        mass = tl.zeros([BLOCK], tl.int64)
        for first in range(start, end, BLOCK):
            token_ids = first + tl.arange(0, BLOCK)
            x = tl.load(logits + row * stride + token_ids, token_ids < vocab_size, -float("inf"))
            scaled = scale(x, largest, temperature)
            is_kept = (bin_of(x) <= last) & (scaled > -float("inf"))
            place = row * capacity
            _keep(list_scaled + place, list_tokens + place, line + COUNT_WORD, capacity, scaled, token_ids, is_kept)
            if top_p < 1.0:
                mass += weigh(scaled)
        if top_p < 1.0:
            tl.atomic_add(work64 + row * (WORK_WORDS // 2) + MASS_WORD // 2, tl.sum(mass, 0), sem="relaxed")
    else:
        best, token = tl.full([], -float("inf"), tl.float32), tl.full([], NO_TOKEN, tl.int32)
        least = least_scaled(min_p)
        for first in range(start, end, BLOCK):
            token_ids = first + tl.arange(0, BLOCK)
            x = tl.load(logits + row * stride + token_ids, token_ids < vocab_size, -float("inf"))
            if temperature > 0.0:
                scaled = scale(x, largest, temperature)
                is_kept = (scaled >= least) & (scaled > -float("inf"))
                best, token = draw(scaled, token_ids, is_kept, position, child_index, seed, best, token)
            else:
                token = tl.minimum(token, tl.min(tl.where(x == largest, token_ids, NO_TOKEN), 0))
        best = tl.where(temperature > 0.0, best, tl.where(token == NO_TOKEN, -float("inf"), 0.0))
        tl.store(segment_best + row * MAX_SEGMENTS + segment, best)
        tl.store(segment_tokens + row * MAX_SEGMENTS + segment, token)
