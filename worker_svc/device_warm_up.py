"""Runs a GPU's kernels in every form that a step may need, so that none is compiled in the middle of serving.

A kernel's form follows from the shape of a batch: attention has one for decodes, drafts, chunks and mixed batches, each
with a row's keys in one part or split into a power of two of them; sampling has one for few rows and for many. All
of these are shapes that a small batch has too, so the forward passes here are of a few tokens. No KV is written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

import torch

import kernels
from kernels.sampling import Draws
from worker_svc.models.interface import ForwardBatch, KvCaches, Model

logger = logging.getLogger(__name__)
MOST_TOKENS = 128
"""Of a row: from here on a chunk's tiles are the largest, whatever the number of heads."""
LEAST_KEYS, MOST_PARTS = 128, 64
"""Of a part of a row's keys, and of a row: bounds of kernels.cuda.tiles that may be wider here, not narrower."""


@torch.inference_mode()
def warm_up_device(
    model: Model,
    caches: KvCaches,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
) -> None:
    """Compiles what the steps of these sizes may need, and loads what other runs have left compiled."""
    started, num_passes = time.monotonic(), 0
    hidden = torch.empty(0, 0, device=model.device)
    longest = min(max_model_len, max_num_batched_tokens)
    for counts in row_lengths(longest, max_num_seqs, max_num_batched_tokens):
        for width in table_widths(max_model_len, block_size):
            if width * block_size >= max(counts):
                hidden = model.forward(_batch(counts, width, model.device), caches)
                num_passes += 1
    if len(hidden):
        _sample(model, hidden[:1], max_num_seqs)
    for key_cache, value_cache in list.__iter__(caches):
        null = torch.zeros(1, dtype=torch.int64, device=model.device)
        kernels.copy_blocks(key_cache, value_cache, null, null)
        kernels.zero_blocks(key_cache, value_cache, null)
    logger.info("kernels are compiled: %d forward passes in %.1f s", num_passes, time.monotonic() - started)


def row_lengths(longest: int, max_num_seqs: int, max_num_batched_tokens: int) -> list[list[int]]:
    """Tokens of the rows of batches with every tile: one row of each power of two, and a decode beside a chunk.

    One row leaves the most of the GPU to parts of its keys: more rows split them into as many or fewer. Where there is
    only ever one, the chunks that are too short for the largest tiles lie between the powers.
    """
    counts = [1 << i for i in range(MOST_TOKENS.bit_length())]
    if max_num_seqs == 1:
        counts = sorted([*counts, *(count + count // 2 for count in counts[1:-1])])
    found = sorted({min(count, longest) for count in counts})
    has_mix = max_num_seqs > 1 and max_num_batched_tokens > 2 and longest > 1
    return [[count] for count in found] + [[1, 2]] * has_mix


def table_widths(max_model_len: int, block_size: int) -> list[int]:
    """Block tables, in blocks, that hold one part, two parts, four ... and what max_model_len needs."""
    most = -(-max_model_len // block_size)
    keys = [1, *(LEAST_KEYS << i for i in range(MOST_PARTS.bit_length()))]
    return sorted({min(-(-count // block_size), most) for count in keys} | {most})


def _batch(counts: Sequence[int], width: int, device: torch.device) -> ForwardBatch:
    """Rows without tokens before theirs, whose blocks are all the null block."""
    starts = torch.tensor([0, *counts]).cumsum(0)
    positions = torch.cat([torch.arange(count) for count in counts])
    tensors = {
        "input_ids": torch.zeros_like(positions),
        "positions": positions,
        "query_start_loc": starts.int(),
        "seq_lens": torch.tensor(counts, dtype=torch.int32),
        "block_tables": torch.zeros(len(counts), width, dtype=torch.int32),
        "slot_mapping": torch.full_like(positions, -1),
    }
    on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
    return ForwardBatch(**on_device, max_query_len=max(counts), max_seq_len=max(counts))


def _numbers_of_rows(max_num_seqs: int) -> Iterator[int]:
    count = 1
    while count < max_num_seqs:
        yield count
        count *= 2
    yield max_num_seqs


def _sample(model: Model, hidden: torch.Tensor, max_num_seqs: int) -> None:
    """Sampling, log-probabilities and drafts for one row, two, four ..."""
    device = model.device
    for count in _numbers_of_rows(max_num_seqs):
        logits = model.compute_logits(hidden.expand(count, -1).contiguous())
        ids, _ = kernels.argmax(logits)
        kernels.sample(logits, draws(count, device))
        kernels.gather_logprobs(logits, ids, 1, None)
        kernels.gather_logprobs(logits, ids, 0, None)
    starts = torch.tensor([0, count], dtype=torch.int32, device=device)
    kernels.verify_drafts(logits, starts, ids[1:], (starts - 1).clamp(min=0), draws(count, device))


def draws(num_rows: int, device: torch.device) -> Draws:
    """With every truncation but the rarer ones: they are numbers of one kernel."""

    def full(value: float, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    return Draws(
        temperature=full(1.0, torch.float32),
        top_k=full(0),
        top_p=full(0.95, torch.float64),
        min_p=full(0.0, torch.float64),
        seeds=full(1),
        positions=full(1),
        child_indices=full(0),
    )
