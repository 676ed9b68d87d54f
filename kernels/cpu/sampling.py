"""Choosing tokens without sorting the vocabulary: see kernels/sampling.py for what is chosen.

Thresholds are found by bisection over the float32 numbers in their order: how many logits, or which mass, reach the
middle? Each question is one pass over few megabits in a core's own cache, and after a few of them only the candidates
that are left are asked. Noise is drawn as words, and becomes a logarithm only where it may win.
"""

from __future__ import annotations

import math
import threading

import numpy as np
import torch

from kernels.cpu.team import share, team
from kernels.cpu.vectors import (
    divide,
    get_float32,
    get_int64,
    load_float32,
    max_lanes,
    put_float32,
    put_int64,
    splat,
    store_float32,
)
from kernels.cpu.vocabulary import (
    add_where_at_least,
    contenders,
    count_bits,
    exact,
    exact_chunks,
    first_bit,
    float_of_key,
    get_float64,
    get_word,
    keep_at_least,
    key_of_float,
    lanes_at_least,
    larger,
    load64,
    nan_lanes,
    noise_words,
    store64,
    sum64,
    weigh,
    zeros64,
)
from kernels.philox import MAX_GUMBEL
from kernels.sampling import Draws
from kernels.weights import UNIT_BITS

_BLOCK = 2048
"""Logits that are looked through once more for the largest's place."""
_MIN_SHARED = 1 << 16
"""Logits from which on a second thread pays."""
_MINUS_INFINITY = np.float32(-np.inf)
_NO_WEIGHT = np.float32(-24.3)
"""Below it a weight is 0."""
_MAX_GUMBEL = np.float32(MAX_GUMBEL + 1e-3)
_UNIT = 2.0**UNIT_BITS
_WORDS_BYTES = 64

# The arguments of a call, words of a block.
(_LOGITS, _STRIDE, _VOCAB_SIZE, _ROWS, _CHUNKS, _SCRATCH, _SCRATCH_BYTES, _TOKENS, _LARGEST) = range(9)
(_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _SEEDS, _POSITIONS, _CHILDREN) = range(9, 16)


@exact
def row_maximum(logits, vocab_size):  # type: ignore[no-untyped-def]
    """The largest of a row of float32 at an address and its first place; NaN and its place where there is one."""
    best, place = _MINUS_INFINITY, 0
    for start in range(0, vocab_size, _BLOCK):
        end = min(start + _BLOCK, vocab_size)
        most, bad = splat(_MINUS_INFINITY), 0
        vector_end = start + (end - start) // 16 * 16
        for i in range(start, vector_end, 16):
            x = load_float32(logits + 4 * i)
            most = larger(x, most)
            bad |= nan_lanes(x)
        most_here = max_lanes(most)
        for i in range(vector_end, end):
            most_here = max(most_here, get_float32(logits + 4 * i))
            bad |= np.isnan(get_float32(logits + 4 * i))
        if bad != 0:
            for i in range(start, end):
                if np.isnan(get_float32(logits + 4 * i)):
                    return get_float32(logits + 4 * i), i
        if most_here > best:
            best, place = most_here, start
    while get_float32(logits + 4 * place) != best:
        place += 1
    return best, place


@exact
def _argument(args, place):  # type: ignore[no-untyped-def]
    return get_int64(args + 8 * place)


def _argmax_row(args, row):  # type: ignore[no-untyped-def]
    logits = _argument(args, _LOGITS) + row * _argument(args, _STRIDE)
    largest, place = row_maximum(logits, _argument(args, _VOCAB_SIZE))
    put_int64(_argument(args, _TOKENS) + 8 * row, place)
    put_float32(_argument(args, _LARGEST) + 4 * row, largest)


@exact
def count_at_least(values, count, bound):  # type: ignore[no-untyped-def]
    """How many of `count` float32 (a multiple of 16) reach the bound."""
    found, bounds = 0, splat(bound)
    for i in range(0, count, 16):
        found += count_bits(lanes_at_least(load_float32(values + 4 * i), bounds))
    return found


@exact
def keep_candidates(values, count, bound, kept):  # type: ignore[no-untyped-def]
    """Copies the float32 that reach the bound, filled up with -inf; returns how many there are then.

    count and what is returned are multiples of 16. `kept` may be `values` itself.
    """
    found, bounds = 0, splat(bound)
    for i in range(0, count, 16):
        found += keep_at_least(kept + 4 * found, load_float32(values + 4 * i), bounds)
    end = (found + 15) // 16 * 16
    for i in range(found, end):
        put_float32(kept + 4 * i, _MINUS_INFINITY)
    return end


@exact
def kth_largest(values, count, k, largest, kept):  # type: ignore[no-untyped-def]
    """The k-th largest of `count` float32 (a multiple of 16), equal ones counted each; -inf where there are fewer.

    largest: the largest of them, finite. kept: memory for candidates, as large as the values; may not be the values.
    """
    low, high = key_of_float(_MINUS_INFINITY), key_of_float(largest) + 1
    step = np.float32(2.0)
    while step < 100.0:  # logits rarely need more, and a bisection of all float32 starts far away
        bound = np.float32(largest - step)
        if count_at_least(values, count, bound) >= k:
            low = key_of_float(bound)
            break
        high = min(high, key_of_float(bound))
        step *= np.float32(2.0)
    is_whole = True
    while high - low > 1:
        if low > key_of_float(_MINUS_INFINITY) and is_whole:
            count = keep_candidates(values, count, float_of_key(low), kept)
            values, is_whole = kept, False
        middle = low + (high - low) // 2
        if count_at_least(values, count, float_of_key(middle)) >= k:
            low = middle
        else:
            high = middle
    return float_of_key(low)


@exact
def _total_weight(values, count, bound):  # type: ignore[no-untyped-def]
    total, bounds = zeros64(), splat(max(bound, _NO_WEIGHT))
    for i in range(0, count, 16):
        x = load_float32(values + 4 * i)
        if lanes_at_least(x, bounds) != 0:
            total = add_where_at_least(total, weigh(x), x, bounds)
    return sum64(total)


@exact
def _top_p_bound(values, count, bound, top_p, kept, weights):  # type: ignore[no-untyped-def]
    """The value of the last token of the smallest likeliest set whose weight reaches top_p of the total.

    Only values that reach `bound` count. kept: memory for candidates, weights: for their weights.
    """
    total = _total_weight(values, count, bound)
    target = top_p * total
    # Tokens that each weigh no more than this weigh together no more than what may be left out.
    least = max(math.floor((total - target) / count), 0.0)
    lowest = np.float32(math.log(least / _UNIT) - 1e-3) if least >= 1.0 else _NO_WEIGHT
    bound = max(bound, lowest)
    count = keep_candidates(values, count, bound, kept)
    for i in range(0, count, 16):
        store64(weights + 8 * i, weigh(load_float32(kept + 4 * i)))
    low, high = key_of_float(bound), key_of_float(np.float32(0.0)) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        mass, bounds = zeros64(), splat(float_of_key(middle))
        for i in range(0, count, 16):
            mass = add_where_at_least(mass, load64(weights + 8 * i), load_float32(kept + 4 * i), bounds)
        if sum64(mass) >= target:
            low = middle
        else:
            high = middle
    return float_of_key(low)


@exact
def _gumbel(word):  # type: ignore[no-untyped-def]
    return np.float32(-math.log(-math.log1p(-(word + 0.5) * 2.0**-32)))


@exact
def _draw(scaled, count, bound, likeliest, position, child_index, seed, words):  # type: ignore[no-untyped-def]
    """The token with the largest logit plus noise among those that reach the bound; of equal ones the lowest id."""
    noise_words(words, likeliest, position, child_index, seed)
    best, token = _gumbel(get_word(words)), likeliest
    for i in range(0, count, 16):
        x = load_float32(scaled + 4 * i)
        kept = lanes_at_least(x, splat(max(bound, np.float32(best - _MAX_GUMBEL))))
        if kept == 0:
            continue
        noise_words(words, i, position, child_index, seed)
        kept &= contenders(words, x, splat(best))
        while kept != 0:
            lane = first_bit(kept)
            kept &= kept - 1
            total = np.float32(get_float32(scaled + 4 * (i + lane)) + _gumbel(get_word(words + 4 * lane)))
            if total > best or (total == best and i + lane < token):
                best, token = total, i + lane
    return token


@exact
def _scale(logits, vocab_size, largest, temperature, scaled):  # type: ignore[no-untyped-def]
    """(logits - largest) / temperature, filled up with -inf to a multiple of 16, which is returned."""
    shift, scale = splat(largest), splat(temperature)
    vector_end = vocab_size // 16 * 16
    for i in range(0, vector_end, 16):
        store_float32(scaled + 4 * i, divide(load_float32(logits + 4 * i) - shift, scale))
    end = (vocab_size + 15) // 16 * 16
    for i in range(vector_end, end):
        x = _MINUS_INFINITY
        if i < vocab_size:
            x = np.float32(np.float32(get_float32(logits + 4 * i) - largest) / temperature)
        put_float32(scaled + 4 * i, x)
    return end


@exact
def _sample_row(args, row, scratch):  # type: ignore[no-untyped-def]
    vocab_size = _argument(args, _VOCAB_SIZE)
    logits = _argument(args, _LOGITS) + row * _argument(args, _STRIDE)
    top_k = get_int64(_argument(args, _TOP_K) + 8 * row)
    top_p = get_float64(_argument(args, _TOP_P) + 8 * row)
    min_p = get_float64(_argument(args, _MIN_P) + 8 * row)
    words, scaled = scratch, scratch + _WORDS_BYTES
    largest, likeliest = row_maximum(logits, vocab_size)
    temperature = get_float32(_argument(args, _TEMPERATURE) + 4 * row)
    count = _scale(logits, vocab_size, largest, temperature, scaled)
    kept, weights = scaled + 4 * count, scaled + 8 * count
    bound = _MINUS_INFINITY
    if 0 < top_k < vocab_size:
        bound = kth_largest(scaled, count, top_k, np.float32(0.0), kept)
    if top_p < 1.0:
        bound = max(bound, _top_p_bound(scaled, count, bound, top_p, kept, weights))
    if min_p > 0.0:
        bound = max(bound, np.float32(math.log(min_p)))
    position = get_int64(_argument(args, _POSITIONS) + 8 * row)
    child_index = get_int64(_argument(args, _CHILDREN) + 8 * row)
    seed = get_int64(_argument(args, _SEEDS) + 8 * row)
    token = _draw(scaled, count, bound, likeliest, position, child_index, seed, words)
    put_int64(_argument(args, _TOKENS) + 8 * row, token)


def _sample_rows(args, chunk):  # type: ignore[no-untyped-def]
    scratch = _argument(args, _SCRATCH) + chunk * _argument(args, _SCRATCH_BYTES)
    for row in range(chunk, _argument(args, _ROWS), _argument(args, _CHUNKS)):
        _sample_row(args, row, scratch)


_ARGMAX_ROW, _SAMPLE_ROWS = exact_chunks(_argmax_row), exact_chunks(_sample_rows)


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.sampling.reference_argmax`; float32 logits whose rows are contiguous."""
    rows, vocab_size = logits.shape
    token_ids, largest = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    args = np.array(
        [
            logits.data_ptr(),
            4 * logits.stride(0),
            vocab_size,
            rows,
            rows,
            0,
            0,
            token_ids.data_ptr(),
            largest.data_ptr(),
        ],
        np.int64,
    )
    share(team_state(rows * vocab_size), _ARGMAX_ROW.address, args.ctypes.data, rows)
    return token_ids, largest


def sample(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """See `kernels.sampling.reference`; float32 logits whose rows are contiguous."""
    rows, vocab_size = logits.shape
    state = team_state(rows * vocab_size)
    num_chunks = min(rows, team().size) if state else 1
    scratch, scratch_bytes = row_scratch(num_chunks, vocab_size)
    token_ids = torch.empty(rows, dtype=torch.int64)
    fields = (
        draws.temperature,
        draws.top_k,
        draws.top_p,
        draws.min_p,
        draws.seeds,
        draws.positions,
        draws.child_indices,
    )
    columns = [field.contiguous() for field in fields]
    head = [logits.data_ptr(), 4 * logits.stride(0), vocab_size, rows, num_chunks, scratch, scratch_bytes]
    args = np.array([*head, token_ids.data_ptr(), 0, *(column.data_ptr() for column in columns)], np.int64)
    share(state, _SAMPLE_ROWS.address, args.ctypes.data, num_chunks)
    return token_ids


def team_state(num_logits: int) -> int:
    """The team for so many logits: 0, this thread alone, where waking others costs more than they do."""
    return team().state if num_logits >= _MIN_SHARED else 0


_memory = threading.local()


def row_scratch(num_chunks: int, vocab_size: int) -> tuple[int, int]:
    """Memory for each chunk, kept for the calling thread's next call: its address, and the bytes of one chunk.

    A chunk has the words of one vector, then the scaled logits, candidates and their weights of one row.
    """
    num_bytes = _WORDS_BYTES + 16 * ((vocab_size + 15) // 16 * 16) + 64
    wanted = num_chunks * num_bytes
    kept: torch.Tensor | None = getattr(_memory, "tensor", None)
    if kept is None or len(kept) < wanted:
        kept = _memory.tensor = torch.empty(wanted, dtype=torch.uint8)
    return kept.data_ptr(), num_bytes
