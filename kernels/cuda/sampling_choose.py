"""The last step of sampling, a program per row: exact thresholds over the candidates, and the draw; see sampling.py."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cuda.sampling_collect import MAX_SEGMENTS, WORK_WORDS, candidates_of_row, largest_of_row
from kernels.cuda.sampling_draw import NO_TOKEN, best_of, draw
from kernels.cuda.sampling_math import MAX_FINITE, distance, is_truncated, least_scaled, scale, weigh


@triton.jit
def _candidates(  # type: ignore[no-untyped-def]
    first, count, is_listed, list_scaled, list_tokens, logits, largest, temperature, BLOCK: tl.constexpr
):
    """A block of scaled logits and their tokens: of the list, or of the row itself where the list was too short."""
    places = first + tl.arange(0, BLOCK)
    is_inside = places < count
    if is_listed:
        scaled = tl.load(list_scaled + places, is_inside, -float("inf"))
        token_ids = tl.load(list_tokens + places, is_inside, 0)
    else:
        scaled = scale(tl.load(logits + places, is_inside, -float("inf")), largest, temperature)
        token_ids = places
    return scaled, token_ids


@triton.jit
def _reach(  # type: ignore[no-untyped-def]
    wanted,
    before,
    limit,
    count,
    is_listed,
    list_scaled,
    list_tokens,
    logits,
    largest,
    temperature,
    BY_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The least distance within which the tokens are `wanted` many, or weigh so much; `limit` where none is enough.

    before: what the tokens weigh that are nearer than all candidates.
    By bisection over distances; each question also tells the distances next to the middle, so that their number is
    about the logarithm of the number of candidates.
    """
    low, high = -1, limit
    while high - low > 1:
        middle = low + (high - low) // 2
        sums = tl.zeros([BLOCK], tl.int64)
        farthest = tl.full([BLOCK], -1, tl.int32)
        nearest = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        for first in range(0, count, BLOCK):
            scaled, _ = _candidates(
                first, count, is_listed, list_scaled, list_tokens, logits, largest, temperature, BLOCK
            )
            far = distance(scaled)
            is_within = far <= middle
            if BY_WEIGHT:
                sums += tl.where(is_within, weigh(scaled), 0)
            else:
                sums += is_within.to(tl.int64)
            farthest = tl.maximum(farthest, tl.where(is_within, far, -1))
            nearest = tl.minimum(nearest, tl.where(is_within, 0x7FFFFFFF, far))
        is_enough = (tl.sum(sums, 0) + before).to(tl.float64) >= wanted
        high = tl.where(is_enough, tl.max(farthest, 0), high)
        low = tl.where(is_enough, low, tl.min(nearest, 0) - 1)
    return high


@triton.jit
def _weight_within(  # type: ignore[no-untyped-def]
    limit, count, is_listed, list_scaled, list_tokens, logits, largest, temperature, BLOCK: tl.constexpr
):
    """What the tokens within a distance weigh together."""
    sums = tl.zeros([BLOCK], tl.int64)
    for first in range(0, count, BLOCK):
        scaled, _ = _candidates(first, count, is_listed, list_scaled, list_tokens, logits, largest, temperature, BLOCK)
        sums += tl.where(distance(scaled) <= limit, weigh(scaled), 0)
    return tl.sum(sums, 0)


@triton.jit
def _limit(  # type: ignore[no-untyped-def]
    top_k,
    top_p,
    mass,
    before,
    vocab_size,
    count,
    is_listed,
    list_scaled,
    list_tokens,
    logits,
    largest,
    temperature,
    BLOCK: tl.constexpr,
):
    """The largest distance that top-k and then top-p keep; mass: the weight of all tokens."""
    limit = tl.full([], MAX_FINITE, tl.int32)
    if (top_k > 0) & (top_k < vocab_size):
        wanted = top_k.to(tl.float64)
        limit = _reach(
            wanted,
            before,
            limit,
            count,
            is_listed,
            list_scaled,
            list_tokens,
            logits,
            largest,
            temperature,
            False,
            BLOCK,
        )
        if top_p < 1.0:
            mass = _weight_within(
                limit, count, is_listed, list_scaled, list_tokens, logits, largest, temperature, BLOCK
            )
    if top_p < 1.0:
        wanted = top_p * mass.to(tl.float64)
        limit = _reach(
            wanted, before, limit, count, is_listed, list_scaled, list_tokens, logits, largest, temperature, True, BLOCK
        )
    return limit


@triton.jit(do_not_specialize=["num_segments"])
def choose(  # type: ignore[no-untyped-def]
    logits,
    stride,
    vocab_size,
    num_segments,
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
    out,
    BLOCK: tl.constexpr,
):
    """One token per row, int64; 0 where no token can be drawn, so that it is a token whatever the logits were."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row)
    if is_truncated(temperature, top_k, top_p, vocab_size):
        largest = largest_of_row(segment_largest, row, num_segments)
        min_p, seed = tl.load(min_ps + row), tl.load(seeds + row)
        position, child_index = tl.load(positions + row), tl.load(child_indices + row)
        logits += row * stride
        list_scaled += row * capacity
        list_tokens += row * capacity
        count, mass, before, is_wide = candidates_of_row(work + row * WORK_WORDS)
        is_listed = count <= capacity
        before = tl.where(is_listed, before, 0)
        count = tl.where(is_listed, count, vocab_size)
        limit = _limit(
            top_k,
            top_p,
            mass,
            before,
            vocab_size,
            count,
            is_listed,
            list_scaled,
            list_tokens,
            logits,
            largest,
            temperature,
            BLOCK,
        )
        least = least_scaled(min_p)
        best, token = tl.full([], -float("inf"), tl.float32), tl.full([], NO_TOKEN, tl.int32)
        # A wide row's list has only those about the threshold.
        is_listed &= ~is_wide
        count = tl.where(is_listed, count, vocab_size)
        for first in range(0, count, BLOCK):
            scaled, token_ids = _candidates(
                first, count, is_listed, list_scaled, list_tokens, logits, largest, temperature, BLOCK
            )
            is_kept = (distance(scaled) <= limit) & (scaled >= least)
            best, token = draw(scaled, token_ids, is_kept, position, child_index, seed, best, token)
    else:
        segments = tl.arange(0, MAX_SEGMENTS)
        is_inside = segments < num_segments
        values = tl.load(segment_best + row * MAX_SEGMENTS + segments, is_inside, -float("inf"))
        token_ids = tl.load(segment_tokens + row * MAX_SEGMENTS + segments, is_inside, NO_TOKEN)
        _, token = best_of(values, token_ids)
    tl.store(out + row, tl.where(token == NO_TOKEN, 0, token).to(tl.int64))
