"""Calls every kernel that a model needs once, so that they are compiled at load and not in the first request."""

from __future__ import annotations

import torch

import kernels
from kernels.cpu import jit
from kernels.dispatch import is_interpreting
from kernels.kv_layout import cache_shapes
from kernels.sampling import Draws
from worker_svc.decode_programs import DecodePrograms
from worker_svc.models.interface import ForwardBatch, Model

BLOCK_SIZE = 16


def warm_up(model: Model, what: str) -> None:
    """Runs a prompt and a decode through a model on a CPU and samples; `what` names the model's kernels in the log."""
    if model.device.type != "cpu" or is_interpreting() or jit.unavailable() is not None:
        return
    with jit.compiling(what):
        caches = []
        for spec in model.kv_cache_specs():
            shapes = cache_shapes(
                2, BLOCK_SIZE, spec.num_kv_heads, spec.head_size, dtype=model.dtype, device=model.device
            )
            key_cache, value_cache = (torch.zeros(shape, dtype=model.dtype) for shape in shapes)
            caches.append((key_cache, value_cache))
        programs, decode = DecodePrograms(model, caches), _batch(1)
        for batch in (_batch(3), decode, decode):
            hidden = programs(batch)
            logits = model.compute_logits(hidden[-1:])
        token_ids, _ = kernels.argmax(logits)
        kernels.sample(logits, _draws())
        kernels.gather_logprobs(logits, token_ids, 1, None)


def _batch(num_tokens: int) -> ForwardBatch:
    return ForwardBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.arange(num_tokens),
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_tables=torch.ones(1, 1, dtype=torch.int32),
        slot_mapping=torch.arange(num_tokens) + BLOCK_SIZE,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )


def _draws() -> Draws:
    return Draws(
        temperature=torch.ones(1),
        top_k=torch.tensor([2]),
        top_p=torch.tensor([0.5], dtype=torch.float64),
        min_p=torch.tensor([0.1], dtype=torch.float64),
        seeds=torch.zeros(1, dtype=torch.int64),
        positions=torch.zeros(1, dtype=torch.int64),
        child_indices=torch.zeros(1, dtype=torch.int64),
    )
