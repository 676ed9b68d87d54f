"""The passes of sampling over the logits, in segments of rows: see sampling.py.

A row's line of `work` (int32, zeros at first) has the counts of its bins and of its fine bins, then, as int64, the
weight of all its tokens, of those before the bracket, and of those of the bracket before its fine one; the number of
its candidates, whether it is wide, and the bracket's first and last bin.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cuda.sampling_draw import NO_TOKEN, draw
from kernels.cuda.sampling_math import (
    NUM_BINS,
    UNIT_WEIGHT,
    bin_of,
    bracket,
    fine_bin_of,
    fine_bracket,
    is_truncated,
    least_scaled,
    scale,
    weigh,
)

MAX_SEGMENTS = tl.constexpr(128)
_FINE_WORD = tl.constexpr(NUM_BINS.value)
_MASS_WORD, _BEFORE_WORD, _FINE_BEFORE_WORD, COUNT_WORD = (tl.constexpr(2 * NUM_BINS.value + i) for i in (0, 2, 4, 6))
WIDE_WORD, _FIRST_WORD, _LAST_WORD = (tl.constexpr(2 * NUM_BINS.value + i) for i in (7, 8, 9))
WORK_WORDS = tl.constexpr(2 * NUM_BINS.value + 10)


@triton.jit
def survey(  # type: ignore[no-untyped-def]
    logits, stride, vocab_size, segment_size, temperatures, top_ks, top_ps, segment_largest, work, BLOCK: tl.constexpr
):
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
def _load(logits, first, vocab_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of a row's logits, -inf behind its end, and their tokens."""
    token_ids = first + tl.arange(0, BLOCK)
    return tl.load(logits + token_ids, token_ids < vocab_size, -float("inf")), token_ids


@triton.jit
def _add_weight(work, word, weights):  # type: ignore[no-untyped-def]
    tl.atomic_add((work + word).to(tl.pointer_type(tl.int64), bitcast=True), tl.sum(weights, 0), sem="relaxed")


@triton.jit
def candidates_of_row(work):  # type: ignore[no-untyped-def]
    """A row's number of candidates, the weight of all its tokens and of those before, and whether it is wide."""
    mass = tl.load((work + _MASS_WORD).to(tl.pointer_type(tl.int64), bitcast=True))
    before = tl.load((work + _BEFORE_WORD).to(tl.pointer_type(tl.int64), bitcast=True))
    before += tl.load((work + _FINE_BEFORE_WORD).to(tl.pointer_type(tl.int64), bitcast=True))
    return tl.load(work + COUNT_WORD), mass, before, tl.load(work + WIDE_WORD) != 0


@triton.jit
def _list_segment(  # type: ignore[no-untyped-def]
    logits,
    start,
    end,
    vocab_size,
    last,
    largest,
    temperature,
    top_p,
    work,
    list_scaled,
    list_tokens,
    capacity,
    BLOCK: tl.constexpr,
):
    """Lists the tokens of the bins up to `last`, and sums the weight of all."""
    mass = tl.zeros([BLOCK], tl.int64)
    for first in range(start, end, BLOCK):
        x, token_ids = _load(logits, first, vocab_size, BLOCK)
        scaled = scale(x, largest, temperature)
        is_kept = (bin_of(x) <= last) & (scaled > -float("inf"))
        _keep(list_scaled, list_tokens, work + COUNT_WORD, capacity, scaled, token_ids, is_kept)
        if top_p < 1.0:
            mass += weigh(scaled)
    if top_p < 1.0:
        _add_weight(work, _MASS_WORD, mass)


@triton.jit
def _refine_segment(  # type: ignore[no-untyped-def]
    logits, start, end, vocab_size, first_bin, last_bin, largest, temperature, work, BLOCK: tl.constexpr
):
    """Counts the tokens of the bracket by fine bins, and sums the weight of all and of those before it."""
    mass, before = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    counts = tl.zeros([NUM_BINS], tl.int32)
    for first in range(start, end, BLOCK):
        x, _ = _load(logits, first, vocab_size, BLOCK)
        place, weight = bin_of(x), weigh(scale(x, largest, temperature))
        mass += weight
        before += tl.where(place < first_bin, weight, 0)
        is_inside = (place >= first_bin) & (place <= last_bin)
        counts += tl.histogram(tl.where(is_inside, fine_bin_of(x, first_bin, last_bin), 0), NUM_BINS)
        num_outside = tl.sum((~is_inside).to(tl.int32), 0)
        counts -= tl.where(tl.arange(0, NUM_BINS) == 0, num_outside, 0)
    tl.atomic_add(work + _FINE_WORD + tl.arange(0, NUM_BINS), counts, counts > 0, sem="relaxed")
    _add_weight(work, _MASS_WORD, mass)
    _add_weight(work, _BEFORE_WORD, before)


@triton.jit
def _draw_segment(  # type: ignore[no-untyped-def]
    logits, start, end, vocab_size, largest, temperature, min_p, position, child_index, seed, BLOCK: tl.constexpr
):
    """The token that wins a segment, and its logit with noise; without noise where the temperature is 0."""
    best, token = tl.full([], -float("inf"), tl.float32), tl.full([], NO_TOKEN, tl.int32)
    least = least_scaled(min_p)
    for first in range(start, end, BLOCK):
        x, token_ids = _load(logits, first, vocab_size, BLOCK)
        if temperature > 0.0:
            scaled = scale(x, largest, temperature)
            is_kept = (scaled >= least) & (scaled > -float("inf"))
            best, token = draw(scaled, token_ids, is_kept, position, child_index, seed, best, token)
        else:
            token = tl.minimum(token, tl.min(tl.where(x == largest, token_ids, NO_TOKEN), 0))
    return tl.where((temperature > 0.0) | (token == NO_TOKEN), best, 0.0), token


@triton.jit
def collect(  # type: ignore[no-untyped-def]
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
    segment_best,
    segment_tokens,
    list_scaled,
    list_tokens,
    capacity,
    BLOCK: tl.constexpr,
):
    """Lists the candidates of rows with a threshold to search; draws from the segments of all others.

    A row with more candidates than a list holds is wide if it has top-p alone: `narrow` lists them.
    """
    row, segment, num_segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row)
    largest = largest_of_row(segment_largest, row, num_segments)
    logits += row * stride
    start = segment * segment_size
    end = tl.minimum(start + segment_size, vocab_size)
    if is_truncated(temperature, top_k, top_p, vocab_size):
        work += row * WORK_WORDS
        bins = tl.arange(0, NUM_BINS)
        counts = tl.load(work + bins)
        first, last = bracket(counts, largest, temperature, top_k, top_p, vocab_size)
        num_candidates = tl.sum(tl.where(bins <= last, counts, 0), 0)
        if (num_candidates > capacity) & ((top_k <= 0) | (top_k >= vocab_size)):
            _refine_segment(logits, start, end, vocab_size, first, last, largest, temperature, work, BLOCK)
            tl.store(work + WIDE_WORD, 1)
            tl.store(work + _FIRST_WORD, first)
            tl.store(work + _LAST_WORD, last)
        else:
            list_scaled += row * capacity
            list_tokens += row * capacity
            _list_segment(
                logits,
                start,
                end,
                vocab_size,
                last,
                largest,
                temperature,
                top_p,
                work,
                list_scaled,
                list_tokens,
                capacity,
                BLOCK,
            )
    else:
        min_p, seed = tl.load(min_ps + row), tl.load(seeds + row)
        position, child_index = tl.load(positions + row), tl.load(child_indices + row)
        best, token = _draw_segment(
            logits, start, end, vocab_size, largest, temperature, min_p, position, child_index, seed, BLOCK
        )
        tl.store(segment_best + row * MAX_SEGMENTS + segment, best)
        tl.store(segment_tokens + row * MAX_SEGMENTS + segment, token)


@triton.jit
def narrow(  # type: ignore[no-untyped-def]
    logits,
    stride,
    vocab_size,
    segment_size,
    temperatures,
    top_ps,
    segment_largest,
    work,
    list_scaled,
    list_tokens,
    capacity,
    BLOCK: tl.constexpr,
):
    """Lists the tokens of wide rows that lie in the fine bins of the threshold, and sums the weight before them."""
    row, segment, num_segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    work += row * WORK_WORDS
    if tl.load(work + WIDE_WORD) != 0:
        temperature = tl.load(temperatures + row)
        largest = largest_of_row(segment_largest, row, num_segments)
        mass = tl.load((work + _MASS_WORD).to(tl.pointer_type(tl.int64), bitcast=True)).to(tl.float64)
        before = tl.load((work + _BEFORE_WORD).to(tl.pointer_type(tl.int64), bitcast=True)).to(tl.float64)
        first_bin, last_bin = tl.load(work + _FIRST_WORD), tl.load(work + _LAST_WORD)
        counts = tl.load(work + _FINE_WORD + tl.arange(0, NUM_BINS))
        wanted = (tl.load(top_ps + row) * mass - before) * UNIT_WEIGHT
        fine_first, fine_last = fine_bracket(counts, first_bin, last_bin, wanted, largest, temperature)
        logits += row * stride
        list_scaled += row * capacity
        list_tokens += row * capacity
        weights = tl.zeros([BLOCK], tl.int64)
        start = segment * segment_size
        for first in range(start, tl.minimum(start + segment_size, vocab_size), BLOCK):
            x, token_ids = _load(logits, first, vocab_size, BLOCK)
            scaled = scale(x, largest, temperature)
            place, fine_place = bin_of(x), fine_bin_of(x, first_bin, last_bin)
            is_inside = (place >= first_bin) & (place <= last_bin) & (scaled > -float("inf"))
            is_kept = is_inside & (fine_place >= fine_first) & (fine_place <= fine_last)
            _keep(list_scaled, list_tokens, work + COUNT_WORD, capacity, scaled, token_ids, is_kept)
            weights += tl.where(is_inside & (fine_place < fine_first), weigh(scaled), 0)
        _add_weight(work, _FINE_BEFORE_WORD, weights)
