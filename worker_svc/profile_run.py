"""How much memory a GPU has for KV: the largest step's is measured, the rest of the share is the pool's."""

from __future__ import annotations

import logging

import torch

import kernels
from kernels.kv_layout import cache_shapes
from pagewire.errors import InvalidArgumentError, violation
from worker_svc.device_warm_up import draws
from worker_svc.models.interface import ForwardBatch, KvCaches, Model
from worker_svc.sampler import most_logits_rows

logger = logging.getLogger(__name__)
GRAPH_BYTES = 256 << 20
"""Kept free for what CUDA graphs and libraries take once the pool is there, besides a graph's activations."""


NUM_LIKELIEST = 20
"""Log-probabilities that a row of the largest step asks for; how many changes little."""


def run_largest_step(
    model: Model,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    kv_dtype: torch.dtype,
) -> torch.Tensor:
    """A forward pass of as many tokens as a step may have, then sampling that takes most memory; returns the ids.

    Every row's blocks are the null block of a pool of one, and no KV is written. Compiles the kernels too.
    """
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    batch = _largest_batch(num_rows, max_num_batched_tokens, max_model_len, block_size, model.device)
    caches: KvCaches = []
    for spec in model.kv_cache_specs():
        shapes = cache_shapes(1, block_size, spec.num_kv_heads, spec.head_size, dtype=kv_dtype, device=model.device)
        keys, values = (torch.zeros(shape, dtype=kv_dtype, device=model.device) for shape in shapes)
        caches.append((keys, values))
    hidden = model.forward(batch, caches)
    # Rows with drafts sample at several positions; the last ones here, whichever they are.
    return _sample_most(model, hidden[-most_logits_rows(max_num_seqs) :].clone())


def _sample_most(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    """The way through sampling with most copies of logits that exist at the same time.

    All rows have processors, all but one are random, and all but one want log-probabilities: what is left of a batch
    when one row is not like the others is a copy.
    """
    logits = model.compute_logits(hidden)
    kernels.argmax(logits)
    processed = logits.clone()
    kernels.argmax(processed)
    some = max(1, len(logits) - 1)
    ids = kernels.sample(processed[:some].clone(), draws(some, model.device))
    del processed
    kernels.gather_logprobs(logits[:some].clone(), ids, min(NUM_LIKELIEST, logits.shape[1]), None)
    return ids


def _largest_batch(
    num_rows: int, num_tokens: int, max_model_len: int, block_size: int, device: torch.device
) -> ForwardBatch:
    whole, rest = divmod(num_tokens, num_rows)
    counts = torch.tensor([min(whole + (row < rest), max_model_len) for row in range(num_rows)])
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    longest = int(counts.max())
    positions = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(counts)
    tensors = {
        "input_ids": torch.zeros_like(positions),
        "positions": positions,
        "query_start_loc": starts.int(),
        "seq_lens": counts.int(),
        "block_tables": torch.zeros(num_rows, -(-longest // block_size), dtype=torch.int32),
        "slot_mapping": torch.full_like(positions, -1),
    }
    on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
    return ForwardBatch(**on_device, max_query_len=longest, max_seq_len=longest)


def cuda_kv_budget_bytes(
    model: Model,
    *,
    utilization: float,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    kv_dtype: torch.dtype,
) -> int:
    """Bytes for the KV pool on the model's GPU.

    The share `utilization` of all its memory, less what is used now (weights, this process's context, other
    processes), less what the largest step took at its peak.
    """
    device = model.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode():
        run_largest_step(
            model,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            kv_dtype=kv_dtype,
        )
    torch.cuda.synchronize(device)
    step_bytes = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    budget = kv_budget_bytes(total=total, free=free, step_bytes=step_bytes, utilization=utilization)
    gib = 2**30
    logger.info(
        "memory of %s: %.1f GiB, used %.1f, largest step %.2f, KV pool %.1f",
        device,
        total / gib,
        (total - free) / gib,
        step_bytes / gib,
        budget / gib,
    )
    return budget


def kv_budget_bytes(*, total: int, free: int, step_bytes: int, utilization: float) -> int:
    """What is left of the share; InvalidArgumentError where it is nothing."""
    used, step = total - free, step_bytes + GRAPH_BYTES
    budget = int(total * utilization) - used - step
    if budget <= 0:
        limit = (
            f"leaves nothing for the KV pool: of {total} bytes {used} are used and a step takes {step}; raise it, free "
            "memory, or lower max_num_batched_tokens or max_num_seqs"
        )
        raise InvalidArgumentError([violation("gpu_memory_utilization", utilization, limit)])
    return budget
