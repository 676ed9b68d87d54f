"""Log-probabilities of chosen and likeliest tokens, with ranks."""

from __future__ import annotations

import math

import torch

from kernels.compiled import compiled_for_cuda
from kernels.sampling import compiled_kernels, is_plain


def reference(
    logits: torch.Tensor, chosen: torch.Tensor, num_likeliest: int, extra_token_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, log-probabilities and ranks of some candidates per row of the model's own distribution.

    logits: float32 [rows, vocab_size]. chosen: int64 [rows]. num_likeliest: -1 means all. extra_token_ids: int64
    [extra], the same for all rows. Candidates: the chosen token, the likeliest in order (of equal ones the lowest id
    first), the extra ones in the order given.
    Returns int64 and float32 [rows, 1 + likeliest + extra], and the chosen token's rank, int64 [rows]: 1 plus the
    number of strictly likelier tokens.
    """
    extra = [] if extra_token_ids is None else extra_token_ids.tolist()
    rows = [
        reference_logprobs(row, token, num_likeliest, extra)
        for row, token in zip(logits.tolist(), chosen.tolist(), strict=True)
    ]
    token_ids, values, ranks = zip(*rows, strict=True)
    return torch.tensor(token_ids), torch.tensor(values, dtype=torch.float32), torch.tensor(ranks)


def torch_gather_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, num_likeliest: int, extra_token_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `reference`."""
    columns = [chosen[:, None], ordered_topk(logits, num_likeliest)]
    if extra_token_ids is not None:
        columns.append(extra_token_ids.expand(len(logits), -1))
    token_ids = torch.cat(columns, dim=1)
    values = torch.log_softmax(logits, dim=-1).gather(1, token_ids)
    ranks = (logits > logits.gather(1, chosen[:, None])).sum(dim=-1) + 1
    return token_ids, values, ranks


def cpu_gather_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, num_likeliest: int, extra_token_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `reference`."""
    if is_plain(logits) and num_likeliest <= logits.shape[1] and compiled_kernels() is not None:
        from kernels.cpu import logprobs as compiled

        if 0 <= num_likeliest <= compiled.MAX_LIKELIEST:
            return compiled.gather_logprobs(logits, chosen, num_likeliest, extra_token_ids)
    return torch_gather_logprobs(logits, chosen, num_likeliest, extra_token_ids)


def cuda_gather_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, num_likeliest: int, extra_token_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `reference`."""
    module = compiled_for_cuda("logprobs") if is_plain(logits) else None
    gather = torch_gather_logprobs if module is None else module.gather_logprobs
    return gather(logits, chosen, num_likeliest, extra_token_ids)


def ordered_topk(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest per row in order, int64 [rows, k]; of equal ones the lowest index first. -1 means all.

    torch.topk leaves open which of several equal values it takes, so the rows where that matters are sorted in full.
    """
    width = values.shape[1]
    if k < 0 or k >= width:
        return torch.sort(values, dim=-1, descending=True, stable=True).indices
    if k == 0:
        return torch.empty((len(values), 0), dtype=torch.int64, device=values.device)
    largest, indices = torch.topk(values, min(k + 1, width), dim=-1)
    has_ties = (largest[:, :-1] == largest[:, 1:]).any(dim=-1)
    indices = indices[:, :k]
    for row in has_ties.nonzero().flatten().tolist():
        indices[row] = torch.sort(values[row], descending=True, stable=True).indices[:k]
    return indices


def reference_logprobs(
    logits: list[float], chosen: int, num_likeliest: int, extra: list[int] | None = None
) -> tuple[list[int], list[float], int]:
    """The same for one row in plain Python, for reading."""
    largest = max(logits)
    total = math.fsum(math.exp(x - largest) for x in logits)
    logprobs = [x - largest - math.log(total) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    likeliest = order if num_likeliest < 0 else order[:num_likeliest]
    token_ids = [chosen, *likeliest, *(extra or [])]
    rank = 1 + sum(1 for x in logits if x > logits[chosen])
    return token_ids, [logprobs[i] for i in token_ids], rank
