"""The Gumbel argmax of a block of tokens: noise is drawn as words, and becomes a logarithm only where it may win."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels import philox
from kernels.cuda.philox import gumbel, gumbel_bound, noise_words

NO_TOKEN = tl.constexpr(0x7FFFFFFF)
_MAX_GUMBEL = tl.constexpr(philox.MAX_GUMBEL + 1e-3)


@triton.jit
def better(best, token, other_best, other_token):  # type: ignore[no-untyped-def]
    """The larger of two values with its token; of equal ones the lower token."""
    is_better = (other_best > best) | ((other_best == best) & (other_token < token))
    return tl.where(is_better, other_best, best), tl.where(is_better, other_token, token)


@triton.jit
def best_of(values, token_ids):  # type: ignore[no-untyped-def]
    """The largest of a block's values with its token; of equal ones the lowest token."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, token_ids, NO_TOKEN), 0)


@triton.jit
def draw(scaled, token_ids, is_kept, position, child_index, seed, best, token):  # type: ignore[no-untyped-def]
    """`better` of what was best so far (at first -inf and NO_TOKEN) and the kept tokens of a block with their noise."""
    is_kept &= scaled >= best - _MAX_GUMBEL
    if tl.max(is_kept.to(tl.int32), 0) > 0:
        words = noise_words(token_ids, position, child_index, seed)
        is_kept &= scaled + gumbel_bound(words) >= best
        if tl.max(is_kept.to(tl.int32), 0) > 0:
            here, token_here = best_of(tl.where(is_kept, scaled + gumbel(words), -float("inf")), token_ids)
            best, token = better(best, token, here, token_here)
    return best, token
