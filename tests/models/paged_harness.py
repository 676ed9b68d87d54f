"""Runs a model over paged KV the way a scheduler might: ragged steps, scrambled blocks, rows that come and go."""

from __future__ import annotations

import random

import torch

from kernels.kv_layout import cache_shapes
from worker_svc.models.interface import ForwardBatch, KvCaches, Model

BLOCK_SIZE = 4


def make_caches(model: Model, num_blocks: int, block_size: int = BLOCK_SIZE) -> KvCaches:
    """Caches full of NaN: whatever is read without having been written shows."""
    caches = []
    for spec in model.kv_cache_specs():
        key_shape, value_shape = cache_shapes(
            num_blocks, block_size, spec.num_kv_heads, spec.head_size, dtype=model.dtype, device=model.device
        )
        caches.append(
            (
                torch.full(key_shape, torch.nan, dtype=model.dtype),
                torch.full(value_shape, torch.nan, dtype=model.dtype),
            )
        )
    return caches


def make_batch(
    rows: list[tuple[list[int], int, int]], tables: list[list[int]], block_size: int = BLOCK_SIZE
) -> ForwardBatch:
    """A batch of rows (token ids of the whole sequence, first position, end position)."""
    ids, positions, slots, starts = [], [], [], [0]
    for (tokens, start, end), table in zip(rows, tables, strict=True):
        ids += tokens[start:end]
        positions += range(start, end)
        slots += [table[p // block_size] * block_size + p % block_size for p in range(start, end)]
        starts.append(starts[-1] + end - start)
    width = max(len(table) for table in tables)
    return ForwardBatch(
        input_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([end for _, _, end in rows], dtype=torch.int32),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        max_query_len=max(end - start for _, start, end in rows),
        max_seq_len=max(end for _, _, end in rows),
    )


def paged_logits(
    model: Model,
    sequences: list[list[int]],
    *,
    seed: int = 0,
    block_size: int = BLOCK_SIZE,
    chunks: tuple[int, ...] = (1, 1, 2, 5, 7, 11),
) -> list[torch.Tensor]:
    """Logits [len(sequence), vocab_size] of each sequence, computed in mixed steps of chunks and single tokens.

    Sequences join at different steps; the order of rows changes from step to step.
    """
    rng = random.Random(seed)
    widths = [-(-len(tokens) // block_size) for tokens in sequences]
    order = list(range(1, sum(widths) + 3))
    rng.shuffle(order)
    tables = [[order.pop() for _ in range(width)] for width in widths]
    caches = make_caches(model, sum(widths) + 3, block_size)
    computed = [0] * len(sequences)
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    step = 0
    while any(done < len(tokens) for done, tokens in zip(computed, sequences, strict=True)):
        alive = [i for i in range(min(len(sequences), step + 2)) if computed[i] < len(sequences[i])]
        step += 1
        if not alive:
            continue
        rng.shuffle(alive)
        ends = [min(len(sequences[i]), computed[i] + rng.choice(chunks)) for i in alive]
        rows = [(sequences[i], computed[i], end) for i, end in zip(alive, ends, strict=True)]
        batch = make_batch(rows, [tables[i] for i in alive], block_size)
        hidden = model.forward(batch, caches)
        logits = model.compute_logits(hidden)
        for row, (i, end) in enumerate(zip(alive, ends, strict=True)):
            parts[i].append(logits[int(batch.query_start_loc[row]) : int(batch.query_start_loc[row + 1])])
            computed[i] = end
    return [torch.cat(part) for part in parts]


def random_sequences(vocab_size: int, lengths: tuple[int, ...] = (37, 1, 23, 30), seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def relative_error(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest difference at any position, as a part of the largest logit."""
    largest = max(float(e.abs().max()) for e in expected)
    return max(float((g - e).abs().max()) for g, e in zip(got, expected, strict=True)) / largest
