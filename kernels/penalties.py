"""Logits processors: penalties on tokens seen, bias, and masks. All change logits in place.

Tokens of several rows come as one flat list of (row, token id) pairs. Each function touches only the logits named.
Each is here four times: in torch, as a reference over all rows and over one row, for reading, and for CUDA.
"""

from __future__ import annotations

import math

import torch

from kernels.compiled import compiled_for_cuda
from kernels.sampling import is_plain


def apply_repetition_penalty(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, penalties: torch.Tensor
) -> None:
    """Divides positive and multiplies negative logits of tokens seen in prompt or output by their row's penalty.

    logits: [rows, vocab_size]. rows, token_ids: int64 [pairs], no pair twice. penalties: float32 [pairs].
    Source: CTRL (Keskar et al., 2019), as vLLM applies it.
    """
    seen = logits[rows, token_ids]
    logits[rows, token_ids] = torch.where(seen > 0, seen / penalties, seen * penalties)


def reference_repetition_penalty(logits: list[float], seen: list[int], penalty: float) -> list[float]:
    """The same for one row, for reading."""
    return [(x / penalty if x > 0 else x * penalty) if i in set(seen) else x for i, x in enumerate(logits)]


def reference_apply_repetition_penalty(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, penalties: torch.Tensor
) -> None:
    """See `apply_repetition_penalty`."""
    for row, token, penalty in zip(rows.tolist(), token_ids.tolist(), penalties, strict=True):
        x = logits[row, token]
        logits[row, token] = x / penalty if x > 0 else x * penalty


def cuda_apply_repetition_penalty(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, penalties: torch.Tensor
) -> None:
    """See `apply_repetition_penalty`."""
    module = compiled_for_cuda("penalties") if is_plain(logits) else None
    apply = apply_repetition_penalty if module is None else module.apply_repetition_penalty
    apply(logits, rows, token_ids, penalties)


def apply_output_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Subtracts frequency times count, and presence once, from the logits of tokens in the output.

    rows, token_ids: int64 [pairs], no pair twice. counts, frequency, presence: float32 [pairs].
    Source: OpenAI's API reference, as vLLM applies it (the prompt does not count).
    """
    logits[rows, token_ids] = logits[rows, token_ids] - frequency * counts - presence


def reference_output_penalties(
    logits: list[float], output: list[int], frequency: float, presence: float
) -> list[float]:
    """The same for one row, for reading."""
    return [x - frequency * output.count(i) - presence * (i in output) for i, x in enumerate(logits)]


def reference_apply_output_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """See `apply_output_penalties`."""
    for i, (row, token) in enumerate(zip(rows.tolist(), token_ids.tolist(), strict=True)):
        logits[row, token] = logits[row, token] - frequency[i] * counts[i] - presence[i]


def cuda_apply_output_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """See `apply_output_penalties`."""
    module = compiled_for_cuda("penalties") if is_plain(logits) else None
    apply = apply_output_penalties if module is None else module.apply_output_penalties
    apply(logits, rows, token_ids, counts, frequency, presence)


def add_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor) -> None:
    """Adds a bias, float32 [pairs], to the logits of (row, token id) pairs, no pair twice."""
    logits[rows, token_ids] += bias


def reference_add_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor) -> None:
    """See `add_bias`."""
    for row, token, x in zip(rows.tolist(), token_ids.tolist(), bias, strict=True):
        logits[row, token] += x


def cuda_add_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor) -> None:
    """See `add_bias`."""
    module = compiled_for_cuda("penalties") if is_plain(logits) else None
    (add_bias if module is None else module.add_bias)(logits, rows, token_ids, bias)


def mask_tokens(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Forbids the (row, token id) pairs."""
    logits[rows, token_ids] = -math.inf


def reference_mask_tokens(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """See `mask_tokens`."""
    for row, token in zip(rows.tolist(), token_ids.tolist(), strict=True):
        logits[row, token] = -math.inf


def cuda_mask_tokens(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """See `mask_tokens`."""
    module = compiled_for_cuda("penalties") if is_plain(logits) else None
    (mask_tokens if module is None else module.mask_tokens)(logits, rows, token_ids)


def keep_only_tokens(logits: torch.Tensor, row: int, token_ids: torch.Tensor) -> None:
    """Forbids all tokens of one row but these, int64 [tokens]."""
    kept = logits[row, token_ids]
    logits[row] = -math.inf
    logits[row, token_ids] = kept


def apply_bitmask(logits: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> None:
    """Forbids what a grammar's bit masks do not allow.

    rows: int64 [masked rows]. mask: int32 [masked rows, ceil(vocab_size / 32)], bit 0 of word 0 is token 0.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
    is_allowed = ((mask[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]].to(torch.bool)
    logits[rows] = logits[rows].masked_fill_(~is_allowed, -math.inf)


def reference_bitmask(logits: list[float], mask: list[int]) -> list[float]:
    """The same for one row, for reading."""
    return [x if mask[i // 32] >> (i % 32) & 1 else -math.inf for i, x in enumerate(logits)]


def reference_apply_bitmask(logits: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> None:
    """See `apply_bitmask`."""
    for row, words in zip(rows.tolist(), mask.tolist(), strict=True):
        logits[row] = torch.tensor(reference_bitmask(logits[row].tolist(), words))


def cuda_apply_bitmask(logits: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> None:
    """See `apply_bitmask`."""
    module = compiled_for_cuda("penalties") if is_plain(logits) else None
    (apply_bitmask if module is None else module.apply_bitmask)(logits, rows, mask)
