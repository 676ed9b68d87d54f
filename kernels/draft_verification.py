"""verify_drafts: samples the target at every position, and accepts the drafts that it would have sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import torch

from kernels import sampling
from kernels.compiled import compiled_for_cuda
from kernels.sampling import Draws


def reference(
    logits: torch.Tensor,
    cu_num_sampled_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draws: Draws,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that each row emits, and their number: its accepted drafts and one more.

    logits: float32 [positions, vocab_size], the positions of a row one after another; at a row's position i they are
    the target's after the row's first i drafts. cu_num_sampled_tokens: int32 [rows + 1], where each row's positions
    begin and end; a row has one more than drafts, or none and no drafts. draft_token_ids: int64 [drafts], row by row.
    cu_num_draft_tokens: int32 [rows + 1]. draws: per position; a temperature of 0 takes the likeliest token.
    Returns int64 [positions], the sampled tokens, -1 behind a row's first that is not its draft; and int64 [rows].
    What is emitted is what would have been sampled without drafts.
    """
    token_ids, num_emitted = [], []
    starts, draft_starts = cu_num_sampled_tokens.tolist(), cu_num_draft_tokens.tolist()
    for row in range(len(starts) - 1):
        drafts = draft_token_ids[draft_starts[row] : draft_starts[row + 1]].tolist()
        emitted: list[int] = []
        for place in range(starts[row + 1] - starts[row]):
            if emitted == drafts[:place]:
                emitted.append(_reference_token(logits, draws, starts[row] + place))
        num_emitted.append(len(emitted))
        token_ids += emitted + [-1] * (starts[row + 1] - starts[row] - len(emitted))
    return torch.tensor(token_ids, dtype=torch.int64), torch.tensor(num_emitted, dtype=torch.int64)


def _reference_token(logits: torch.Tensor, draws: Draws, position: int) -> int:
    here = slice(position, position + 1)
    if draws.temperature[position] == 0.0:
        return int(sampling.reference_argmax(logits[here])[0])
    return int(sampling.reference(logits[here], Draws(*(getattr(draws, f.name)[here] for f in fields(draws)))))


def accept_drafts(
    token_ids: torch.Tensor,
    cu_num_sampled_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What rows emit of the tokens sampled at all positions, int64 [positions]; see `reference`."""
    starts, num_drafts = cu_num_sampled_tokens[:-1], cu_num_draft_tokens.diff()
    num_sampled = cu_num_sampled_tokens.diff()
    rows = torch.arange(len(starts), device=token_ids.device)
    row = torch.repeat_interleave(rows, num_sampled, output_size=len(token_ids))
    place = torch.arange(len(token_ids), device=token_ids.device) - starts[row]
    # One more draft at the end, which no row has: positions without a draft compare with it in vain.
    drafts = torch.cat([draft_token_ids, draft_token_ids.new_full((1,), -1)])
    index = torch.where(place < num_drafts[row], cu_num_draft_tokens[row] + place, len(drafts) - 1)
    is_other = drafts[index] != token_ids
    first = torch.where(is_other, place, len(token_ids))
    num_emitted = torch.full_like(rows, -1).scatter_reduce(0, row, first, "amin", include_self=False) + 1
    return token_ids.masked_fill(place >= num_emitted[row], -1), num_emitted


def _verify(logits: torch.Tensor, draws: Draws, sample: Callable[[torch.Tensor, Draws], torch.Tensor]) -> torch.Tensor:
    """A token for every position."""
    is_greedy = draws.temperature == 0.0
    sampled = sample(logits, replace(draws, temperature=torch.where(is_greedy, 1.0, draws.temperature)))
    return torch.where(is_greedy, sampling.torch_argmax(logits)[0], sampled)


def torch_verify_drafts(
    logits: torch.Tensor,
    cu_num_sampled_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draws: Draws,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference`."""
    token_ids = _verify(logits, draws, sampling.torch_sample)
    return accept_drafts(token_ids, cu_num_sampled_tokens, draft_token_ids, cu_num_draft_tokens)


def cpu_verify_drafts(
    logits: torch.Tensor,
    cu_num_sampled_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draws: Draws,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference`."""
    token_ids = _verify(logits, draws, sampling.cpu_sample)
    return accept_drafts(token_ids, cu_num_sampled_tokens, draft_token_ids, cu_num_draft_tokens)


def cuda_verify_drafts(
    logits: torch.Tensor,
    cu_num_sampled_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draws: Draws,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference`."""
    module = compiled_for_cuda("verify") if sampling.is_plain(logits) else None
    verify = torch_verify_drafts if module is None else module.verify_drafts
    return verify(logits, cu_num_sampled_tokens, draft_token_ids, cu_num_draft_tokens, draws)
