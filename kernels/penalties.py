"""Logits processors: penalties on tokens seen, bias, and masks. All change logits in place.

Tokens of several rows come as one flat list of (row, token id) pairs. Each function touches only the logits named.
"""

from __future__ import annotations

import math

import torch


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


def add_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor) -> None:
    """Adds a bias, float32 [pairs], to the logits of (row, token id) pairs, no pair twice."""
    logits[rows, token_ids] += bias


def mask_tokens(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Forbids the (row, token id) pairs."""
    logits[rows, token_ids] = -math.inf


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
