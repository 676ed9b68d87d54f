"""Log-probabilities without a sorted vocabulary: see kernels/logprobs.py for what they are."""

from __future__ import annotations

import math

import numpy as np
import torch

from kernels.cpu.sampling import kth_largest, row_maximum, row_scratch, team_state
from kernels.cpu.team import share, team
from kernels.cpu.vectors import (
    exp,
    get_float32,
    get_int64,
    load_float32,
    put_float32,
    put_int64,
    splat,
    store_float32,
)
from kernels.cpu.vocabulary import (
    add64,
    count_bits,
    exact,
    exact_chunks,
    first_bit,
    lanes_above,
    lanes_at_least,
    sum64,
    widen64,
    zeros64,
)

MAX_LIKELIEST = 128
"""Candidates are put in order one by one: more of them are for a sort."""
_MINUS_INFINITY = np.float32(-np.inf)

# The arguments of a call, words of a block.
(_LOGITS, _STRIDE, _VOCAB_SIZE, _ROWS, _CHUNKS, _SCRATCH, _SCRATCH_BYTES, _CHOSEN, _LIKELIEST) = range(9)
(_EXTRA, _NUM_EXTRA, _TOKENS, _VALUES, _RANKS) = range(9, 14)


@exact
def _argument(args, place):  # type: ignore[no-untyped-def]
    return get_int64(args + 8 * place)


@exact
def _copy(logits, vocab_size, copy):  # type: ignore[no-untyped-def]
    """Fills up with -inf to a multiple of 16, which is returned."""
    vector_end = vocab_size // 16 * 16
    for i in range(0, vector_end, 16):
        store_float32(copy + 4 * i, load_float32(logits + 4 * i))
    end = (vocab_size + 15) // 16 * 16
    for i in range(vector_end, end):
        put_float32(copy + 4 * i, get_float32(logits + 4 * i) if i < vocab_size else _MINUS_INFINITY)
    return end


@exact
def _log_of_sum(logits, count, largest):  # type: ignore[no-untyped-def]
    """The logarithm of the sum of e ** (logit - largest)."""
    total, shift = zeros64(), splat(largest)
    for i in range(0, count, 16):
        total = add64(total, widen64(exp(load_float32(logits + 4 * i) - shift)))
    return math.log(sum64(total))


@exact
def _rank(logits, count, logit):  # type: ignore[no-untyped-def]
    found, bound = 1, splat(logit)
    for i in range(0, count, 16):
        found += count_bits(lanes_above(load_float32(logits + 4 * i), bound))
    return found


@exact
def _likeliest(logits, count, k, bound, tokens):  # type: ignore[no-untyped-def]
    """Writes the k likeliest tokens in order; bound is the k-th largest logit."""
    bounds, found = splat(bound), 0
    for i in range(0, count, 16):
        lanes = lanes_above(load_float32(logits + 4 * i), bounds)
        while lanes != 0:
            token = i + first_bit(lanes)
            lanes &= lanes - 1
            place = found
            while place > 0:
                before = get_int64(tokens + 8 * (place - 1))
                if get_float32(logits + 4 * before) >= get_float32(logits + 4 * token):
                    break
                put_int64(tokens + 8 * place, before)
                place -= 1
            put_int64(tokens + 8 * place, token)
            found += 1
    i = 0
    while found < k:
        x = load_float32(logits + 4 * i)
        lanes = lanes_at_least(x, bounds) & ~lanes_above(x, bounds)
        while lanes != 0 and found < k:
            put_int64(tokens + 8 * found, i + first_bit(lanes))
            lanes &= lanes - 1
            found += 1
        i += 16


@exact
def _logprobs_row(args, row, scratch):  # type: ignore[no-untyped-def]
    vocab_size = _argument(args, _VOCAB_SIZE)
    k, num_extra = _argument(args, _LIKELIEST), _argument(args, _NUM_EXTRA)
    width = 1 + k + num_extra
    tokens = _argument(args, _TOKENS) + 8 * width * row
    values = _argument(args, _VALUES) + 4 * width * row
    source = _argument(args, _LOGITS) + row * _argument(args, _STRIDE)
    largest, _ = row_maximum(source, vocab_size)
    count = _copy(source, vocab_size, scratch)
    normalizer = _log_of_sum(scratch, count, largest)
    chosen = get_int64(_argument(args, _CHOSEN) + 8 * row)
    put_int64(tokens, chosen)
    if k > 0:
        bound = kth_largest(scratch, count, k, largest, scratch + 4 * count)
        _likeliest(scratch, count, k, bound, tokens + 8)
    for i in range(num_extra):
        put_int64(tokens + 8 * (1 + k + i), get_int64(_argument(args, _EXTRA) + 8 * i))
    for i in range(width):
        logit = get_float32(scratch + 4 * get_int64(tokens + 8 * i))
        put_float32(values + 4 * i, np.float32(np.float64(logit) - np.float64(largest) - normalizer))
    put_int64(_argument(args, _RANKS) + 8 * row, _rank(scratch, count, get_float32(scratch + 4 * chosen)))


def _logprobs_rows(args, chunk):  # type: ignore[no-untyped-def]
    scratch = _argument(args, _SCRATCH) + chunk * _argument(args, _SCRATCH_BYTES)
    for row in range(chunk, _argument(args, _ROWS), _argument(args, _CHUNKS)):
        _logprobs_row(args, row, scratch)


_LOGPROBS_ROWS = exact_chunks(_logprobs_rows)


def gather_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, num_likeliest: int, extra_token_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.logprobs.reference`; float32 logits whose rows are contiguous, 0 to MAX_LIKELIEST likeliest."""
    rows, vocab_size = logits.shape
    extra = torch.empty(0, dtype=torch.int64) if extra_token_ids is None else extra_token_ids.contiguous()
    chosen = chosen.contiguous()
    width = 1 + num_likeliest + len(extra)
    token_ids = torch.empty((rows, width), dtype=torch.int64)
    values = torch.empty((rows, width), dtype=torch.float32)
    ranks = torch.empty(rows, dtype=torch.int64)
    state = team_state(rows * vocab_size)
    num_chunks = min(rows, team().size) if state else 1
    scratch, scratch_bytes = row_scratch(num_chunks, vocab_size)
    head = [logits.data_ptr(), 4 * logits.stride(0), vocab_size, rows, num_chunks, scratch, scratch_bytes]
    tail = [chosen.data_ptr(), num_likeliest, extra.data_ptr(), len(extra)]
    args = np.array([*head, *tail, token_ids.data_ptr(), values.data_ptr(), ranks.data_ptr()], np.int64)
    share(state, _LOGPROBS_ROWS.address, args.ctypes.data, num_chunks)
    return token_ids, values, ranks
