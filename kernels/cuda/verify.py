"""The acceptance of drafts in Triton, a program per row; see kernels/draft_verification.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.sampling import sample
from kernels.cuda.variant import Variant
from kernels.sampling import Draws

BLOCK = 32


@triton.jit
def _accept(token_ids, cu_num_sampled, draft_token_ids, cu_num_drafts, num_emitted, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    start, end = tl.load(cu_num_sampled + row), tl.load(cu_num_sampled + row + 1)
    first_draft = tl.load(cu_num_drafts + row)
    num_drafts = tl.load(cu_num_drafts + row + 1) - first_draft
    num_accepted = num_drafts
    for first in range(0, num_drafts, BLOCK):
        places = first + tl.arange(0, BLOCK)
        is_draft = places < num_drafts
        draft = tl.load(draft_token_ids + first_draft + places, is_draft, 0)
        is_other = is_draft & (draft != tl.load(token_ids + start + places, is_draft, 0))
        num_accepted = tl.minimum(num_accepted, tl.min(tl.where(is_other, places, num_drafts), 0))
    emitted = tl.minimum(num_accepted + 1, end - start)
    for first in range(0, end - start, BLOCK):
        places = first + tl.arange(0, BLOCK)
        is_dropped = (places >= emitted) & (places < end - start)
        tl.store(token_ids + start + places, tl.full([BLOCK], -1, tl.int64), is_dropped)
    tl.store(num_emitted + row, emitted.to(tl.int64))


def verify_drafts(
    logits: torch.Tensor,
    cu_num_sampled_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draws: Draws,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.draft_verification.reference`; float32 logits whose rows are contiguous."""
    token_ids = sample(logits, draws)
    rows = len(cu_num_sampled_tokens) - 1
    num_emitted = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        ends = (cu_num_sampled_tokens.contiguous(), draft_token_ids.contiguous(), cu_num_draft_tokens.contiguous())
        _accept[(rows,)](token_ids, *ends, num_emitted, BLOCK=BLOCK, num_warps=1)
    return token_ids, num_emitted


def variants() -> list[Variant]:
    """Sampling has its own."""
    types = dict.fromkeys(("token_ids", "draft_token_ids", "num_emitted"), "*i64")
    types |= dict.fromkeys(("cu_num_sampled", "cu_num_drafts"), "*i32")
    return [Variant("accept_drafts", _accept, types, {"BLOCK": BLOCK}, num_warps=1)]
