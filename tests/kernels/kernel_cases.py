"""Inputs for every operation of the table, made from a seed: ragged mixes, odd sizes, NaN wherever nothing may be read.

Each maker returns the positional and keyword arguments of one call. Outputs that a kernel fills come filled with NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from kernels.float_weight import FloatWeight
from kernels.kv_layout import cache_shapes, write_keys, write_values
from kernels.matrix import column_major
from kernels.sampling import Draws


@dataclass
class Call:
    """Arguments of one call, and which of them it changes in place."""

    args: list[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    changed: tuple[int, ...] = ()


@dataclass
class Paged:
    """A filled cache and the batch that reads it."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor


def randn(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def paged(
    generator: torch.Generator,
    rows: list[tuple[int, int]],
    *,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    value_size: int | None = None,
    dtype: torch.dtype,
) -> Paged:
    """A cache for rows of (query_len, seq_len) in scrambled blocks; every slot that no row owns is NaN."""
    widths = [-(-seq_len // block_size) for _, seq_len in rows]
    num_blocks = sum(widths) + 3
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    tables = torch.zeros(len(rows), max([*widths, 1]) + 1, dtype=torch.int32)
    sizes = (head_size, value_size or head_size)
    shapes = cache_shapes(
        num_blocks,
        block_size,
        num_kv_heads,
        head_size,
        value_size=value_size,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    caches = [torch.full(shape, torch.nan, dtype=dtype) for shape in shapes]
    for row, (_, seq_len) in enumerate(rows):
        for i in range(widths[row]):
            block = order.pop()
            tables[row, i] = block
            used = min(block_size, seq_len - i * block_size)
            slots = block * block_size + torch.arange(used)
            keys, values = (randn(generator, used, num_kv_heads, size, dtype=dtype) for size in sizes)
            write_keys(caches[0], slots, keys)
            write_values(caches[1], slots, values, block_size)
    starts = torch.tensor([0, *(query_len for query_len, _ in rows)]).cumsum(0).int()
    return Paged(caches[0], caches[1], starts, torch.tensor([s for _, s in rows]).int(), tables)


MIXES: list[list[tuple[int, int]]] = [
    [(1, 1)],
    [(7, 7), (1, 19), (5, 23), (1, 2), (3, 3)],
    [(1, 33), (1, 31), (1, 5), (1, 16), (1, 17)],
    [(0, 0), (4, 12), (0, 9), (1, 40)],
    [(3, 2), (1, 0), (2, 11)],  # queries before the sequence's start see nothing
]

OPTIONS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 1},
    {"sliding_window": 7},
    {"softcap": 2.0},
    {"sinks": True},
    {"alibi_slopes": True},
    {"sliding_window": 5, "softcap": 1.5, "sinks": True, "alibi_slopes": True},
]


def attention_calls(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Call]:
    shapes = [(1, 1, 8, 8, 4), (6, 2, 20, 12, 5), (9, 3, 16, 16, 16)]
    for number, options in enumerate(OPTIONS * len(MIXES)):
        rows = MIXES[number % len(MIXES)]
        num_heads, num_kv_heads, head_size, value_size, block_size = shapes[number % len(shapes)]
        kv = paged(
            generator,
            rows,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            value_size=value_size,
            dtype=dtype,
        )
        num_tokens = int(kv.query_start_loc[-1])
        query = randn(generator, num_tokens, num_heads, head_size, dtype=dtype) * 2
        kwargs = dict(options, out=torch.full((num_tokens, num_heads, value_size), torch.nan, dtype=dtype))
        for name in ("sinks", "alibi_slopes"):
            if name in kwargs:
                kwargs[name] = randn(generator, num_heads, dtype=torch.float32)
        yield Call(
            [query, kv.key_cache, kv.value_cache, kv.query_start_loc, kv.seq_lens, kv.block_tables, 0.37], kwargs
        )


def merge_calls(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Call]:
    for num_tokens, num_heads, value_size in ((1, 1, 8), (5, 3, 12), (9, 8, 80), (0, 2, 16)):
        outs = [randn(generator, num_tokens, num_heads, value_size, dtype=dtype) for _ in range(2)]
        logs = [randn(generator, num_tokens, num_heads, dtype=torch.float32) * 9 for _ in range(2)]
        yield Call([outs[0], logs[0], outs[1], logs[1]])
        outs, logs = [x.clone() for x in outs], [x.clone() for x in logs]
        for part in range(2):  # one of the two has no keys, and anything in its output
            outs[part][part::2], logs[part][part::2] = torch.nan, -torch.inf
        yield Call([outs[0], logs[0], outs[1], logs[1]])


def write_calls(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Call]:
    for num_tokens, cache_dtype in ((1, dtype), (13, dtype), (13, torch.float16), (0, dtype)):
        shapes = cache_shapes(6, 5, 3, 7, dtype=cache_dtype, device=torch.device("cpu"))
        caches = [torch.full(shape, torch.nan, dtype=cache_dtype) for shape in shapes]
        slots = torch.randperm(30, generator=generator)[:num_tokens]
        slots[num_tokens // 2 : num_tokens // 2 + (num_tokens > 2)] = -1
        new = [randn(generator, num_tokens, 3, 7, dtype=dtype) for _ in range(2)]
        yield Call([*new, *caches, slots], changed=(2, 3))
        # Heads before tokens in memory, as transformers has them.
        yield Call([*(x.transpose(0, 1).contiguous().transpose(0, 1) for x in new), *caches, slots], changed=(2, 3))


def norm_calls(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Call]:
    for shape in ((1, 64), (5, 63), (4, 3, 20), (0, 16), (2, 8192), (2, 9001)):
        x, weight = randn(generator, *shape, dtype=dtype), randn(generator, shape[-1], dtype=dtype)
        yield Call([x, weight, 1e-5])
        yield Call([x, weight, 1e-5, randn(generator, *shape, dtype=dtype)], changed=(0, 3))


def rotary_calls(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Call]:
    shapes = [(16, 8, 16, 16, dtype), (20, 6, 12, 4, dtype), (64, 32, 64, 16, dtype), (7, 3, 7, 5, torch.float16)]
    for number, (head_size, half, value_size, block_size, cache_dtype) in enumerate(shapes * 2):
        num_tokens, num_heads, num_kv_heads = (1, 9, 40, 0)[number % 4], 6, 2
        angles = torch.rand(50, half, generator=generator) * 6
        positions = torch.randint(50, (num_tokens,), generator=generator)
        cache_shape = cache_shapes(
            12,
            block_size,
            num_kv_heads,
            head_size,
            value_size=value_size,
            dtype=cache_dtype,
            device=positions.device,
        )
        caches = [torch.full(shape, torch.nan, dtype=cache_dtype) for shape in cache_shape]
        # A chunk's slots follow one another; a decode's are scattered.
        slots = torch.arange(num_tokens) + 3 if number % 2 else torch.randperm(48, generator=generator)[:num_tokens]
        slots[num_tokens // 2 : num_tokens // 2 + (num_tokens > 2)] = -1
        width = num_heads * head_size + num_kv_heads * (head_size + value_size)
        qkv = randn(generator, num_tokens, width, dtype=dtype)
        args = [qkv, positions, (angles.cos(), angles.sin()), *caches, slots, head_size]
        norms = tuple(randn(generator, head_size, dtype=dtype) for _ in range(2))
        yield Call([*args, norms, 1e-5] if number >= len(shapes) else args, changed=(0, 3, 4))


def activation_calls(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Call]:
    for num_tokens, size in ((1, 8), (7, 63), (0, 8), (2, 1030)):
        yield Call([randn(generator, num_tokens, 2 * size, dtype=dtype) * 3])


def linear_calls(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Call]:
    for num_rows, in_features, out_features in ((1, 63, 10), (2, 64, 7), (17, 33, 65)):
        x, weight = (randn(generator, n, in_features, dtype=dtype) for n in (num_rows, out_features))
        bias = randn(generator, out_features, dtype=dtype)
        yield Call([x, weight, bias])
        columns = column_major(out_features, in_features, dtype=dtype, device=weight.device)
        yield Call([x, columns.copy_(weight)])


def packed_calls(generator: torch.Generator, dtype: torch.dtype, is_gated: bool, has_bias: bool) -> Iterator[Call]:
    """Products with weights packed and plain."""
    for num_rows, in_features, sizes in ((1, 63, [10, 10]), (2, 64, [8, 8]), (17, 33, [65, 65])):
        x = randn(generator, num_rows, in_features, dtype=dtype)
        plain = randn(generator, sum(sizes), in_features, dtype=dtype)
        packed = FloatWeight(sizes, in_features, dtype, is_gated)
        packed.fill(plain)
        bias = [randn(generator, sum(sizes), dtype=dtype)] if has_bias else []
        yield Call([x, packed, *bias])
        yield Call([x, plain, *bias])


def embedding_calls(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Call]:
    for num_ids, in_features in ((1, 64), (0, 8), (19, 33)):
        plain = randn(generator, 70, in_features, dtype=dtype)
        packed = FloatWeight([70], in_features, dtype)
        packed.fill(plain)
        ids = torch.randint(70, (num_ids,), generator=generator)
        yield Call([ids, packed])
        yield Call([ids, plain])


def block_calls(generator: torch.Generator, dtype: torch.dtype, num_lists: int) -> Iterator[Call]:
    for count, (key_size, value_size) in ((0, (5, 5)), (1, (5, 5)), (4, (5, 7)), (8, (16, 8)), (3, (8, 400))):
        caches = [randn(generator, 9, 3, 2, size, dtype=dtype) for size in (key_size, value_size)]
        caches[0][4] = torch.nan
        order = torch.randperm(9, generator=generator).int()
        # Sources and destinations overlap: what is read is the state before the call.
        lists = [order[:count], order[1 : count + 1]][:num_lists]
        yield Call([*caches, *lists], changed=(0, 1))


def argmax_calls(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Call]:
    for rows, vocab_size in ((1, 1), (3, 97), (5, 2500)):
        logits = randn(generator, rows, vocab_size, dtype=dtype).float()
        yield Call([logits])
        logits = logits.round()
        logits[-1, vocab_size // 2] = torch.nan
        yield Call([logits])


def sample_calls(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Call]:
    for rows, vocab_size in ((1, 1), (4, 97), (7, 513)):

        def chosen(values: list[float], kind: torch.dtype, rows: int = rows) -> torch.Tensor:
            return torch.tensor(values, dtype=kind)[torch.randint(len(values), (rows,), generator=generator)]

        draws = Draws(
            temperature=chosen([0.1, 1.0, 3.0], torch.float32),
            top_k=chosen([0, 1, 20, 600], torch.int64),
            top_p=chosen([0.3, 0.95, 1.0], torch.float64),
            min_p=chosen([0.0, 0.1], torch.float64),
            seeds=torch.randint(-(2**62), 2**62, (rows,), generator=generator),
            positions=torch.arange(rows) * 1000,
            child_indices=torch.arange(rows) % 3,
        )
        logits = randn(generator, rows, vocab_size, dtype=dtype).float() * 3
        yield Call([logits, draws])
        yield Call([logits.round(), draws])


def verify_calls(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Call]:
    """Rows with drafts that are often right, without drafts, and without positions; greedy ones among them."""
    for num_drafts, vocab_size in (([0], 5), ([3, 0, -1, 1, 40, 7], 97), ([-1, 2], 300), ([-1], 7)):
        num_sampled = torch.tensor(num_drafts) + 1
        positions, count = int(num_sampled.sum()), sum(max(n, 0) for n in num_drafts)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), num_sampled.cumsum(0)])
        draft_starts = torch.cat([torch.zeros(1, dtype=torch.int64), (num_sampled - 1).clamp(min=0).cumsum(0)])
        logits = randn(generator, positions, vocab_size, dtype=dtype).float()
        drafts = torch.randint(vocab_size, (count,), generator=generator)
        row = torch.arange(len(num_drafts)).repeat_interleave((num_sampled - 1).clamp(min=0))
        place = torch.arange(count) - draft_starts[row]
        is_likely = torch.rand(count, generator=generator) < 0.9
        index = (starts[row] + place)[is_likely]
        logits[index, drafts[is_likely]] += 20
        draws = Draws(
            temperature=(torch.arange(positions) % 4 / 2).float(),
            top_k=torch.arange(positions) % 3 * 10,
            top_p=torch.where(torch.arange(positions) % 5 < 3, 1.0, 0.8).double(),
            min_p=torch.zeros(positions, dtype=torch.float64),
            seeds=torch.randint(-(2**62), 2**62, (positions,), generator=generator),
            positions=torch.arange(positions),
            child_indices=torch.zeros(positions, dtype=torch.int64),
        )
        yield Call([logits, starts.int(), drafts, draft_starts.int(), draws])


def pair_calls(generator: torch.Generator, dtype: torch.dtype, columns: list[float]) -> Iterator[Call]:
    """Logits, pairs of rows and tokens, and columns of numbers up to so large."""
    for rows, vocab_size, count in ((1, 5, 3), (4, 97, 300), (3, 40, 0)):
        logits = randn(generator, rows, vocab_size, dtype=dtype).float()
        pairs = torch.randperm(rows * vocab_size, generator=generator)[:count]
        numbers = [torch.rand(len(pairs), generator=generator) * most + 0.1 for most in columns]
        yield Call([logits, pairs // vocab_size, pairs % vocab_size, *numbers], changed=(0,))


def bitmask_calls(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Call]:
    for rows, vocab_size, masked in ((1, 5, [0]), (4, 97, [3, 1]), (3, 2100, [0, 1, 2]), (2, 64, [])):
        logits = randn(generator, rows, vocab_size, dtype=dtype).float()
        words = torch.randint(-(2**31), 2**31, (len(masked), -(-vocab_size // 32)), generator=generator)
        yield Call([logits, torch.tensor(masked, dtype=torch.int64), words.int()], changed=(0,))


def logprobs_calls(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Call]:
    for num_likeliest, extra in ((0, None), (5, None), (-1, [3, 1]), (97, None), (7, [96])):
        logits = randn(generator, 3, 97, dtype=dtype).float() * 3
        extra_ids = None if extra is None else torch.tensor(extra)
        yield Call([logits, torch.randint(97, (3,), generator=generator), num_likeliest, extra_ids])


CALLS: dict[str, Callable[[torch.Generator, torch.dtype], Iterator[Call]]] = {
    "paged_attention": attention_calls,
    "merge_attention": merge_calls,
    "write_kv": write_calls,
    "rms_norm": norm_calls,
    "rotate_and_write_kv": rotary_calls,
    "linear": lambda generator, dtype: chain(
        linear_calls(generator, dtype), packed_calls(generator, dtype, is_gated=False, has_bias=True)
    ),
    "gated_linear": lambda generator, dtype: packed_calls(generator, dtype, is_gated=True, has_bias=True),
    "logits": lambda generator, dtype: packed_calls(generator, dtype, is_gated=False, has_bias=False),
    "embedding": embedding_calls,
    "silu_and_mul": activation_calls,
    "gelu_and_mul": activation_calls,
    "gelu_tanh_and_mul": activation_calls,
    "argmax": argmax_calls,
    "sample": sample_calls,
    "gather_logprobs": logprobs_calls,
    "verify_drafts": verify_calls,
    "apply_repetition_penalty": lambda generator, dtype: pair_calls(generator, dtype, [2.0]),
    "apply_output_penalties": lambda generator, dtype: pair_calls(generator, dtype, [5.0, 1.0, 1.0]),
    "add_bias": lambda generator, dtype: pair_calls(generator, dtype, [5.0]),
    "mask_tokens": lambda generator, dtype: pair_calls(generator, dtype, []),
    "apply_bitmask": bitmask_calls,
    "copy_blocks": lambda generator, dtype: block_calls(generator, dtype, 2),
    "zero_blocks": lambda generator, dtype: block_calls(generator, dtype, 1),
}
