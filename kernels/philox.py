"""Counter-based sampling noise: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011).

The noise of a token is a pure function of (seed, position, token id, child index), so a request that was preempted,
resumed, moved to another core or batched with others samples what it would have sampled.

    key     = (seed's low 32 bits, seed's high 32 bits)
    counter = (position, token id, child index, 0)
    noise   = the first of the four output words
"""

from __future__ import annotations

import math

import torch

ROUNDS = 10
M0, M1 = 0xD2511F53, 0xCD9E8D57
W0, W1 = 0x9E3779B9, 0xBB67AE85
MASK = 0xFFFFFFFF
_UNIT = 2.0**-32
_CHUNK = 1 << 14
"""Elements worked on at a time: the six int64 buffers of the rounds then stay in a core's own cache."""

MAX_GUMBEL = 22.8739
"""No noise is above this: word 0 gives -ln(-ln(1 - 2**-33)) = 22.87386."""

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Philox4x32-10 of counters and keys, int64 tensors of one shape that hold unsigned 32-bit words.

    The counter's tensors are overwritten; the results are unsigned 32-bit words too.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    p0, p1 = torch.empty_like(c0), torch.empty_like(c0)
    for i in range(ROUNDS):
        # An int64 product wraps modulo 2**64, which keeps exactly the bits needed: the high word is masked after the
        # arithmetic shift. c1 and c3 keep garbage above bit 31, because they only meet in a xor that is masked.
        torch.mul(c0, M0, out=p0)
        torch.mul(c2, M1, out=p1)
        torch.bitwise_right_shift(p1, 32, out=c0)
        torch.bitwise_right_shift(p0, 32, out=c2)
        c0.bitwise_xor_(c1).bitwise_xor_(k0 + i * W0).bitwise_and_(MASK)
        c2.bitwise_xor_(c3).bitwise_xor_(k1 + i * W1).bitwise_and_(MASK)
        c1, c3, p0, p1 = p1, p0, c3, c1
    return c0, c1 & MASK, c2, c3 & MASK


def reference_philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The same for one counter and key in plain integers, for reading."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = divmod(M0 * c0, 1 << 32)
        high1, low1 = divmod(M1 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + W0) % (1 << 32), (k1 + W1) % (1 << 32)
    return c0, c1, c2, c3


def noise_words(
    seeds: torch.Tensor, positions: torch.Tensor, child_indices: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """The noise as unsigned 32-bit words, int64 [rows, candidates].

    seeds, positions, child_indices: int64 [rows]; a seed holds its 64 unsigned bits, a position is the number of
    tokens before the sampled one. token_ids: int64 [rows, candidates].
    """
    rows, candidates = token_ids.shape
    words = torch.empty_like(token_ids)
    position, child = positions[:, None], child_indices[:, None]
    key = ((seeds & MASK)[:, None], ((seeds >> 32) & MASK)[:, None])
    step = max(1, _CHUNK // max(rows, 1))
    for start in range(0, candidates, step):
        token = token_ids[:, start : start + step]
        counter = (position.expand_as(token).clone(), token.clone(), child.expand_as(token).clone())
        words[:, start : start + step] = philox4x32((*counter, torch.zeros_like(counter[1])), key)[0]
    return words


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, child_indices: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Standard Gumbel noise, float32 [rows, candidates]; arguments as for `noise_words`.

    With u = (word + 1/2) / 2**32 it is -ln(-ln(1 - u)): large noise comes from small u, where floating point is
    finest. Computed in float64 and rounded once, so that libraries that differ in a logarithm's last bit agree.
    """
    u = noise_words(seeds, positions, child_indices, token_ids).to(torch.float64).add_(0.5).mul_(_UNIT)
    return u.neg_().log1p_().neg_().log_().neg_().to(torch.float32)


def reference_gumbel_noise(seed: int, position: int, child_index: int, token_id: int) -> float:
    """The noise of one token in plain Python, before rounding to float32; `seed` is unsigned."""
    word = reference_philox4x32((position, token_id, child_index, 0), (seed & MASK, seed >> 32))[0]
    return -math.log(-math.log1p(-(word + 0.5) / 2**32))
