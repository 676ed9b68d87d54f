"""Checks a plan against the batch before anything changes: a plan that is wrong must not corrupt a request.

Messages name the plan's column, the row, the value and what would be right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pagewire.errors import FieldViolation, InvalidArgumentError, violation
from pagewire.plan import StepPlan

if TYPE_CHECKING:
    from worker_svc.batch import Batch

Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int32]


def check_plan(plan: StepPlan, batch: Batch) -> None:
    """Raises InvalidArgumentError with everything found in the first part of the plan that is wrong."""
    preview = _Preview(batch)
    for part in (_columns, _released, _blocks, _new_requests, _rows):
        found = part(plan, batch, preview)
        if found:
            raise InvalidArgumentError(found, reason="BAD_PLAN")


class _Preview:
    """What the batch's small columns would be when the rows start."""

    def __init__(self, batch: Batch) -> None:
        self.is_used = batch.is_used.copy()
        self.is_failed = batch.is_failed.copy()
        self.is_new = np.zeros_like(batch.is_used)
        self.num_tokens = batch.num_tokens.copy()
        self.num_computed_tokens = batch.num_computed_tokens.copy()
        self.num_blocks = batch.num_blocks.copy()


def _first(path: str, column: Ints, is_bad: Mask, limit: str | Ints, prefix: str = "") -> list[FieldViolation]:
    """A violation for the first bad entry of a column; `limit` may be one value per row after `prefix`."""
    where = np.flatnonzero(is_bad)
    if not len(where):
        return []
    i = int(where[0])
    text = limit if isinstance(limit, str) else f"{prefix}{int(limit[i])}"
    return [violation(f"plan.{path}[{i}]", int(column[i]), text)]


def _repeated(column: Ints) -> Mask:
    """True at every entry that came before in the column."""
    is_repeated = np.ones(len(column), np.bool_)
    is_repeated[np.unique(column, return_index=True)[1]] = False
    return is_repeated


def _columns(plan: StepPlan, batch: Batch, preview: _Preview) -> list[FieldViolation]:
    rows = len(plan.slots)
    columns = {
        "num_scheduled_tokens": plan.num_scheduled_tokens,
        "num_computed_tokens": plan.num_computed_tokens,
        "num_sampled_tokens": plan.num_sampled_tokens,
        "num_new_blocks": plan.num_new_blocks,
    }
    if len(plan.num_draft_tokens):
        columns["num_draft_tokens"] = plan.num_draft_tokens
    found = [
        violation(f"plan.{name}", f"{len(column)} entries", f"must have one per row: {rows}")
        for name, column in columns.items()
        if len(column) != rows
    ]
    for name, column in columns.items():
        low = 1 if name == "num_scheduled_tokens" else 0
        found += _first(name, column, column < low, f"must be at least {low}")
    if found:
        return found
    for counts, ids, name in (
        (plan.num_new_blocks, plan.new_block_ids, "new_block_ids"),
        (plan.num_draft_tokens, plan.draft_token_ids, "draft_token_ids"),
        (None, plan.copy_destinations, "copy_destinations"),
    ):
        expected = len(plan.copy_sources) if counts is None else int(counts.sum(dtype=np.int64))
        if len(ids) != expected:
            found.append(violation(f"plan.{name}", f"{len(ids)} entries", f"must have {expected}"))
    total = int(plan.num_scheduled_tokens.sum(dtype=np.int64))
    if total > batch.max_num_batched_tokens:
        limit = f"must be at most max_num_batched_tokens, {batch.max_num_batched_tokens}"
        found.append(violation("plan.num_scheduled_tokens", f"{total} in total", limit))
    return found


def _slots_in_range(path: str, slots: Ints, batch: Batch) -> list[FieldViolation]:
    return _first(path, slots, (slots < 0) | (slots >= batch.max_num_seqs), f"must be in [0, {batch.max_num_seqs})")


def _released(plan: StepPlan, batch: Batch, preview: _Preview) -> list[FieldViolation]:
    slots = plan.released_slots
    if found := _slots_in_range("released_slots", slots, batch):
        return found
    found = _first("released_slots", slots, ~preview.is_used[slots], "must be a slot in use")
    found += _first("released_slots", slots, _repeated(slots), "must not come twice")
    preview.is_used[slots] = False
    preview.is_failed[slots] = False
    return found


def _blocks(plan: StepPlan, batch: Batch, preview: _Preview) -> list[FieldViolation]:
    found = []
    limit = f"must be in [1, {batch.num_kv_blocks}): block 0 is the null block"
    for name in ("new_block_ids", "copy_sources", "copy_destinations", "zero_block_ids"):
        ids: Ints = getattr(plan, name)
        found += _first(name, ids, (ids < 1) | (ids >= batch.num_kv_blocks), limit)
    found += _first("copy_destinations", plan.copy_destinations, _repeated(plan.copy_destinations), "twice a target")
    return found


def _new_requests(plan: StepPlan, batch: Batch, preview: _Preview) -> list[FieldViolation]:
    for i, new in enumerate(plan.new_requests):
        path, num_tokens = f"plan.new_requests[{i}]", len(new.token_ids)
        if not 0 <= new.slot < batch.max_num_seqs:
            return [violation(f"{path}.slot", new.slot, f"must be in [0, {batch.max_num_seqs})")]
        if preview.is_used[new.slot]:
            return [violation(f"{path}.slot", new.slot, "must be free: it was not released, or is given twice")]
        if not 1 <= num_tokens <= batch.max_model_len:
            return [violation(f"{path}.token_ids", f"{num_tokens} ids", f"must be 1 to {batch.max_model_len}")]
        if not 1 <= new.num_prompt_tokens <= num_tokens:
            return [violation(f"{path}.num_prompt_tokens", new.num_prompt_tokens, f"must be in [1, {num_tokens}]")]
        preview.is_used[new.slot] = preview.is_new[new.slot] = True
        preview.num_tokens[new.slot] = num_tokens
        preview.num_blocks[new.slot] = 0
    return []


def _rows(plan: StepPlan, batch: Batch, preview: _Preview) -> list[FieldViolation]:
    slots, computed = plan.slots, plan.num_computed_tokens
    if found := _slots_in_range("slots", slots, batch):
        return found
    found = _first("slots", slots, ~preview.is_used[slots], "must be a slot in use")
    found += _first("slots", slots, _repeated(slots), "must not come twice")
    if found:
        return found
    drafts = plan.num_draft_tokens if len(plan.num_draft_tokens) else np.zeros_like(slots)
    is_new, known, sampled = preview.is_new[slots], preview.num_tokens[slots], plan.num_sampled_tokens
    # A failed row is skipped: in overlap mode the core plans it once more before it learns of the failure.
    is_live = ~preview.is_failed[slots]
    end = computed.astype(np.int64) + plan.num_scheduled_tokens
    expected = preview.num_computed_tokens[slots]
    found += _first(
        "num_computed_tokens", computed, is_live & ~is_new & (computed != expected), expected, "the worker has "
    )
    found += _first("num_computed_tokens", computed, is_live & is_new & (computed >= known), known, "must be below ")
    limit = f"must not pass max_model_len, {batch.max_model_len}, nor what is known"
    is_beyond = (end > known + drafts) | (end > batch.max_model_len)
    found += _first("num_scheduled_tokens", plan.num_scheduled_tokens, is_live & is_beyond, limit)
    is_short = (sampled > 0) & (end != known + drafts)
    found += _first("num_sampled_tokens", sampled, is_live & is_short, "must be 0 unless the row reaches its end")
    is_uneven = np.where(sampled > 0, sampled != drafts + 1, drafts > 0)
    found += _first("num_sampled_tokens", sampled, is_live & is_uneven, drafts + 1, "with the row's drafts must be ")
    ids = plan.draft_token_ids
    found += _first("draft_token_ids", ids, (ids < 0) | (ids >= batch.vocab_size), f"must be below {batch.vocab_size}")
    num_blocks = preview.num_blocks[slots].astype(np.int64) + plan.num_new_blocks
    found += _first("num_new_blocks", plan.num_new_blocks, num_blocks > batch.max_blocks, "more than a sequence takes")
    is_uncovered = is_live & (num_blocks * batch.block_size < end)
    return found + _first("num_new_blocks", plan.num_new_blocks, is_uncovered, "not enough for the row's tokens")
