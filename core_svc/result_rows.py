"""Turns the columns of a StepResult into one result per slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.engine import LogprobColumns
from pagewire.plan import StepResult

PromptLogprobs = tuple[int, LogprobColumns]
"""First prompt position and the columns from there."""


@dataclass(slots=True)
class RowResult:
    """A worker's result for one slot."""

    token_ids: Sequence[int] = ()
    draft_token_ids: Sequence[int] = ()
    logprobs: LogprobColumns | None = None
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None


def split_rows(result: StepResult) -> dict[int, RowResult]:
    """A step's result by slot; the worker's order of rows means nothing."""
    rows: dict[int, RowResult] = {}
    token_ids, drafts = result.token_ids.tolist(), result.draft_token_ids.tolist()
    num_drafts = result.num_draft_tokens.tolist() or [0] * len(result.slots)
    start = draft_start = 0
    for slot, num, num_draft in zip(result.slots.tolist(), result.num_tokens.tolist(), num_drafts, strict=True):
        rows[slot] = RowResult(
            token_ids[start : start + num], drafts[draft_start : draft_start + num_draft] if num_draft else ()
        )
        start += num
        draft_start += num_draft
    for slot, columns in result.logprobs.items():
        rows.setdefault(slot, RowResult()).logprobs = columns
    for slot, prompt_logprobs in result.prompt_logprobs.items():
        rows.setdefault(slot, RowResult()).prompt_logprobs = prompt_logprobs
    for slot, message in result.errors.items():
        rows.setdefault(slot, RowResult()).error = message
    return rows
