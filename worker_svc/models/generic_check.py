"""Compares a generic model with its own eager form at load, so that nothing can differ silently.

The probe counts calls; this sees what a count can't: positions that are not used, options that our attention was not
given, state that a model keeps beside the KV cache.
"""

from __future__ import annotations

import torch

from pagewire.errors import InvalidArgumentError, violation
from worker_svc.models.generic import GenericModel
from worker_svc.models.interface import ForwardBatch, KvCaches

_BLOCK_SIZE = 4
# Each step has rows of (sequence, first position, end): two prompts, then the rest of one of them beside a decode.
_LENGTHS = (7, 4)
_STEPS = (((0, 0, 4), (1, 0, 3)), ((1, 3, 4), (0, 4, 7)))
_TABLES = ((3, 1), (2, 0))
MAX_ERROR_FLOAT32 = 1e-3
MAX_MEDIAN_ERROR_16_BIT = 0.1


def check_against_eager(model: GenericModel, architecture: str) -> None:
    """Runs eleven tokens both ways. Raises InvalidArgumentError naming the architecture where hidden states differ.

    In 16 bits rounding can send a token to another expert, so there the median over tokens is judged.
    """
    sequences = [[(5 + 7 * i + 3 * j) % model.vocab_size for i in range(n)] for j, n in enumerate(_LENGTHS)]
    expected = torch.cat([model.eager_hidden_states(tokens) for tokens in sequences])
    got = torch.cat(_paged_hidden_states(model, sequences))
    errors = (got - expected).float().norm(dim=-1) / expected.float().norm(dim=-1).clamp(min=1e-6)
    is_exact = model.dtype == torch.float32
    error = float(errors.max() if is_exact else errors.median())
    limit = MAX_ERROR_FLOAT32 if is_exact else MAX_MEDIAN_ERROR_16_BIT
    if not error <= limit and bool(expected.isfinite().all()):
        problem = f"with paged attention it differs from its own eager form by {error:.2g}, allowed is {limit:g}"
        raise InvalidArgumentError([violation("model", architecture, problem)], reason="UNSUPPORTED_ARCHITECTURE")


def _paged_hidden_states(model: GenericModel, sequences: list[list[int]]) -> list[torch.Tensor]:
    num_blocks = 1 + max(max(table) for table in _TABLES)
    caches: KvCaches = [
        (
            torch.zeros(shape, dtype=model.dtype, device=model.device),
            torch.zeros(shape, dtype=model.dtype, device=model.device),
        )
        for shape in ((num_blocks, _BLOCK_SIZE, spec.num_kv_heads, spec.head_size) for spec in model.kv_cache_specs())
    ]
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    for rows in _STEPS:
        batch = _batch(rows, sequences, model.device)
        hidden = model.forward(batch, caches)
        for (sequence, _, _), part in zip(rows, hidden.split([end - start for _, start, end in rows]), strict=True):
            parts[sequence].append(part)
    return [torch.cat(part) for part in parts]


def _batch(rows: tuple[tuple[int, int, int], ...], sequences: list[list[int]], device: torch.device) -> ForwardBatch:
    def ints(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    places = [(sequence, position) for sequence, start, end in rows for position in range(start, end)]
    lengths = [end - start for _, start, end in rows]
    slots = [_TABLES[s][p // _BLOCK_SIZE] * _BLOCK_SIZE + p % _BLOCK_SIZE for s, p in places]
    return ForwardBatch(
        input_ids=ints([sequences[s][p] for s, p in places]),
        positions=ints([p for _, p in places]),
        query_start_loc=ints([0, *(sum(lengths[: i + 1]) for i in range(len(lengths)))], torch.int32),
        seq_lens=ints([end for _, _, end in rows], torch.int32),
        block_tables=torch.tensor([_TABLES[s] for s, _, _ in rows], dtype=torch.int32, device=device),
        slot_mapping=ints(slots),
        max_query_len=max(lengths),
        max_seq_len=max(end for _, _, end in rows),
    )
