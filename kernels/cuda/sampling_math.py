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
_UNIT_WEIGHT = tl.constexpr(2.0**-34)
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
    place = (_TOP - x) * _BINS_PER_UNIT
    return tl.minimum(tl.maximum(place, 0.0), NUM_BINS - 1.0).to(tl.int32)


@triton.jit
def last_bin(counts, largest, temperature, top_k, top_p, vocab_size):  # type: ignore[no-untyped-def]
    """The last bin whose tokens top-k, or top-p alone, may keep; counts int32 [NUM_BINS].

    The tokens behind it weigh at most what top-p leaves out: counted with the most that a token of their bin can
    weigh, against the least that all weigh.
    """
    bins = tl.arange(0, NUM_BINS)
    if (top_k > 0) & (top_k < vocab_size):
        found = tl.sum((tl.cumsum(counts, 0) < top_k).to(tl.int32), 0)
    else:
        upper = _TOP - bins / _BINS_PER_UNIT + _EDGE_SLACK
        lower = _TOP - (bins + 1) / _BINS_PER_UNIT - _EDGE_SLACK
        upper = tl.minimum((upper - largest) / temperature, 0.0)
        lower = tl.minimum((lower - largest) / temperature, 0.0)
        most = tl.where(upper < _NO_WEIGHT, 0.0, tl.exp(upper) * 1.001 + _UNIT_WEIGHT)
        least = tl.where(bins == NUM_BINS - 1, 0.0, tl.maximum(tl.exp(lower) * 0.999 - _UNIT_WEIGHT, 0.0))
        wide = counts.to(tl.float64)
        heaviest = wide * most.to(tl.float64)
        total = tl.sum(heaviest, 0)
        behind = total - tl.cumsum(heaviest, 0)
        may_lack = (1.0 - top_p) * tl.maximum(tl.sum(wide * least.to(tl.float64), 0), 1.0) * 0.99 - total * 1e-9
        found = tl.sum((behind > may_lack).to(tl.int32), 0)
    return tl.minimum(found, NUM_BINS - 1)
