"""Sampling noise in Triton: Philox4x32-10 and the Gumbel noise made of its words; see kernels/philox.py."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from kernels import philox

_ROUNDS, _MASK = tl.constexpr(philox.ROUNDS), tl.constexpr(philox.MASK)
_M0, _M1 = tl.constexpr(philox.M0), tl.constexpr(philox.M1)
_W0, _W1 = tl.constexpr(philox.W0), tl.constexpr(philox.W1)
_UNIT = tl.constexpr(2.0**-32)
_MOST_OF_UNIT = tl.constexpr(32 * math.log(2.0) + 1e-3)


@triton.jit
def noise_words(token_ids, position, child_index, seed):  # type: ignore[no-untyped-def]
    """The noise of tokens as uint32; position, child_index and seed are int64 scalars, of which low bits count."""
    # What is the same for all tokens stays scalar: the first round and a half are then nearly free.
    c0, c1 = position.to(tl.uint32), token_ids.to(tl.uint32)
    c2, c3 = child_index.to(tl.uint32), tl.full([], 0, tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for i in tl.static_range(_ROUNDS):
        high0, low0 = tl.umulhi(c0, _M0), c0 * _M0
        high1, low1 = tl.umulhi(c2, _M1), c2 * _M1
        c0 = high1 ^ c1 ^ (k0 + ((i * _W0) & _MASK))
        c2 = high0 ^ c3 ^ (k1 + ((i * _W1) & _MASK))
        c1, c3 = low1, low0
    return c0


@triton.jit
def gumbel(words):  # type: ignore[no-untyped-def]
    """The noise of words, float32; in float64 until the end, so that it is the CPU's to the last bit.

    1 - u has 33 bits and is exact in float64, so that the plain logarithm loses nothing to log1p.
    """
    u = (words.to(tl.float64) + 0.5) * _UNIT
    return (-tl.log(-tl.log(1.0 - u))).to(tl.float32)


@triton.jit
def gumbel_bound(words):  # type: ignore[no-untyped-def]
    """What the noise of words is not above, float32: -ln(-ln(1 - u)) <= -ln(u), nearly equal where it is large."""
    return -tl.log(words.to(tl.float32) + 0.5) + _MOST_OF_UNIT
