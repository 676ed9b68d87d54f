"""Numbers of a scaled logit: its weight, its distance from the likeliest, its bin; see kernels/sampling.py.

The kernels that use these are launched with `EXACT`: no product is fused with a sum, so that all rounds as on the CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels import weights

EXACT = {"enable_fp_fusion": False}
"""Options of a launch."""

NUM_BINS = tl.constexpr(1024)
_BINS_PER_UNIT = tl.constexpr(8.0)
_TOP = tl.constexpr(64.0)
"""Bins are 1/8 wide from 64 down to -64; the outermost ones are open."""
_EDGE_SLACK = tl.constexpr(1e-4)
"""More than what rounding moves a logit out of its bin."""
UNIT_WEIGHT = tl.constexpr(2.0**-weights.UNIT_BITS)
_NO_WEIGHT = tl.constexpr(-24.4)
"""Below it a weight is 0."""

_LOWEST, _LOG2_E, _LN2 = tl.constexpr(weights.LOWEST), tl.constexpr(weights.LOG2_E), tl.constexpr(weights.LN2)
_EXPONENT = tl.constexpr(1023 + weights.UNIT_BITS)
_ROUND = tl.constexpr(1.5 * 2.0**52)
"""Added and subtracted, it leaves the nearest whole number, of two the even one."""
_C10, _C9, _C8, _C7, _C6, _C5, _C4, _C3, _C2, _C1, _C0 = (tl.constexpr(c) for c in weights.COEFFICIENTS)

MAX_FINITE = tl.constexpr(0x7F7FFFFF)
"""The largest distance of a finite logit."""


@triton.jit
def is_truncated(temperature, top_k, top_p, vocab_size):  # type: ignore[no-untyped-def]
    """Whether a row needs a threshold that must be searched; min-p's is known."""
    return (temperature > 0.0) & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0))


@triton.jit
def scale(x, largest, temperature):  # type: ignore[no-untyped-def]
    """(x - largest) / temperature, each rounded as IEEE 754 has it."""
    return tl.div_rn(x - largest, temperature)


@triton.jit
def least_scaled(min_p):  # type: ignore[no-untyped-def]
    """The least scaled logit that min-p, a float64, keeps."""
    return tl.where(min_p > 0.0, tl.log(tl.where(min_p > 0.0, min_p, 1.0)).to(tl.float32), -float("inf"))


@triton.jit
def distance(scaled):  # type: ignore[no-untyped-def]
    """The bits of -scaled, int32 that grow as the logit falls: 0 for the likeliest, above MAX_FINITE for -inf."""
    return scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def weigh(scaled):  # type: ignore[no-untyped-def]
    """The weight as int64: see kernels/weights.py, whose operations these are one by one."""
    x = tl.maximum(scaled.to(tl.float64), _LOWEST)
    n = (x * _LOG2_E + _ROUND) - _ROUND
    r = x - n * _LN2
    p = _C10 * r + _C9
    p = p * r + _C8
    p = p * r + _C7
    p = p * r + _C6
    p = p * r + _C5
    p = p * r + _C4
    p = p * r + _C3
    p = p * r + _C2
    p = p * r + _C1
    p = p * r + _C0
    power = ((n.to(tl.int64) + _EXPONENT) << 52).to(tl.float64, bitcast=True)
    return ((p * power + _ROUND) - _ROUND).to(tl.int64)


@triton.jit
def bin_of(x):  # type: ignore[no-untyped-def]
    """The bin of logits (not scaled), int32; it grows as the logit falls."""
    below = tl.minimum(tl.maximum(_TOP - x, 0.0), NUM_BINS / _BINS_PER_UNIT)
    return tl.minimum((below * _BINS_PER_UNIT).to(tl.int32), NUM_BINS - 1)


@triton.jit
def fine_bin_of(x, first, last):  # type: ignore[no-untyped-def]
    """The fine bin of logits that lie in bins first to last, which NUM_BINS fine ones divide."""
    below = tl.minimum(tl.maximum(_TOP - first / _BINS_PER_UNIT - x, 0.0), NUM_BINS / _BINS_PER_UNIT)
    return tl.minimum((below * (NUM_BINS * _BINS_PER_UNIT / (last - first + 1))).to(tl.int32), NUM_BINS - 1)


@triton.jit
def _weights_of_bins(counts, top, width, is_outermost, largest, temperature):  # type: ignore[no-untyped-def]
    """The least and the most that the tokens of NUM_BINS bins weigh together, float64; the likeliest token weighs 1.

    top, width: where the bins begin, and their width. is_outermost: whether the last one is open below.
    """
    bins = tl.arange(0, NUM_BINS)
    upper = tl.minimum((top - bins * width + _EDGE_SLACK - largest) / temperature, 0.0)
    lower = tl.minimum((top - (bins + 1) * width - _EDGE_SLACK - largest) / temperature, 0.0)
    most = tl.where(upper < _NO_WEIGHT, 0.0, tl.exp(upper) * 1.00001 + UNIT_WEIGHT)
    least = tl.maximum(tl.exp(lower) * 0.99999 - UNIT_WEIGHT, 0.0)
    least = tl.where((bins == NUM_BINS - 1) & is_outermost, 0.0, least)
    wide = counts.to(tl.float64)
    return wide * least.to(tl.float64), wide * most.to(tl.float64)


@triton.jit
def bracket(counts, largest, temperature, top_k, top_p, vocab_size):  # type: ignore[no-untyped-def]
    """The first and the last bin where the threshold of top-k, or of top-p alone, may lie; counts int32 [NUM_BINS].

    What a bin weighs is not known: the tokens behind the last bin weigh at most what top-p leaves out if all tokens
    weigh the least that their bins allow, and those before the first one less than what top-p wants of it.
    """
    if (top_k > 0) & (top_k < vocab_size):
        last = tl.sum((tl.cumsum(counts, 0) < top_k).to(tl.int32), 0)
        first = last
    else:
        least, most = _weights_of_bins(counts, _TOP, 1.0 / _BINS_PER_UNIT, True, largest, temperature)
        total, before = tl.sum(most, 0), tl.cumsum(most, 0)
        all_weigh = tl.maximum(tl.sum(least, 0), 1.0) * (1.0 - 1e-6)
        last = tl.sum((total - before > (1.0 - top_p) * all_weigh - total * 1e-9).to(tl.int32), 0)
        first = tl.sum((before < top_p * all_weigh).to(tl.int32), 0)
    last = tl.minimum(last, NUM_BINS - 1)
    return tl.minimum(first, last), last


@triton.jit
def fine_bracket(counts, first, last, wanted, largest, temperature):  # type: ignore[no-untyped-def]
    """The first and the last fine bin where the threshold lies; wanted: what the tokens of these bins must weigh."""
    top, width = _TOP - first / _BINS_PER_UNIT, (last - first + 1) / (NUM_BINS * _BINS_PER_UNIT)
    least, most = _weights_of_bins(counts, top, width, last == NUM_BINS - 1, largest, temperature)
    # In the topmost bin a logit may lie far above the edge; in the others the edges bound it.
    most = tl.where((first == 0) & (tl.arange(0, NUM_BINS) == 0), counts.to(tl.float64) * 1.001, most)
    fine_first = tl.sum((tl.cumsum(most, 0) < wanted - 1e-9).to(tl.int32), 0)
    fine_last = tl.sum((tl.cumsum(least, 0) < wanted + 1e-9).to(tl.int32), 0)
    fine_last = tl.minimum(fine_last, NUM_BINS - 1)
    return tl.minimum(fine_first, fine_last), fine_last
