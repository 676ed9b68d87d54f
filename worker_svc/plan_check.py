"""Checks a plan against the batch before anything changes: a plan that is wrong must not corrupt a request.

Messages name the plan's column, the row, the value and what would be right. A plan is checked when its turn comes, so
one that was sent while the step before it ran is held against what that step left: a decode row of the next plan counts
on the token that this one sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pagewire.errors import FieldViolation, InvalidArgumentError, violation
from pagewire.plan import StepPlan
from worker_svc.ragged import has_repeats

if TYPE_CHECKING:
    from worker_svc.batch import Batch

Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int32]


def check_plan(plan: StepPlan, batch: Batch) -> None:
    """Raises InvalidArgumentError with everything found in the first part of the plan that is wrong."""
    preview = _Preview(plan, batch)
    for part in (_columns, _released, _blocks, _new_requests, _rows):
        found = part(plan, batch, preview)
        if found:
            raise InvalidArgumentError(found, reason="BAD_PLAN")


class _Preview:
    """What the batch's small columns would be when the rows start: its own ones where no request comes or goes."""

    def __init__(self, plan: StepPlan, batch: Batch) -> None:
        self.is_used, self.is_failed = batch.is_used, batch.is_failed
        self.num_tokens, self.num_computed_tokens = batch.num_tokens, batch.num_computed_tokens
        self.num_blocks = batch.num_blocks
        self.is_new: Mask | None = None
        if len(plan.released_slots) or plan.new_requests:
            self.is_used, self.is_failed = batch.is_used.copy(), batch.is_failed.copy()
            self.num_tokens, self.num_blocks = batch.num_tokens.copy(), batch.num_blocks.copy()
            self.is_new = np.zeros_like(batch.is_used)


def _first(path: str, column: Ints, is_bad: Mask, limit: str | Ints, prefix: str = "") -> list[FieldViolation]:
    """A violation for the first bad entry of a column; `limit` may be one value per row after `prefix`."""
    if not np.count_nonzero(is_bad):
        return []
    i = int(is_bad.argmax())
    text = limit if isinstance(limit, str) else f"{prefix}{int(limit[i])}"
    return [violation(f"plan.{path}[{i}]", int(column[i]), text)]


def _outside(column: Ints, end: int, start: int = 0) -> Mask:
    """True where an entry is not in [start, end). A negative number is a large one without its sign."""
    return (column - start if start else column).view(np.uint32) >= end - start


def _first_repeated(path: str, column: Ints, scratch: Ints, text: str) -> list[FieldViolation]:
    """A violation for the first entry that came before; all entries are indices into the scratch."""
    if not has_repeats(column, scratch):
        return []
    is_repeated = np.ones(len(column), np.bool_)
    is_repeated[np.unique(column, return_index=True)[1]] = False
    return _first(path, column, is_repeated, text)


def _columns(plan: StepPlan, batch: Batch, preview: _Preview) -> list[FieldViolation]:
    columns = [
        ("num_scheduled_tokens", plan.num_scheduled_tokens, 1),
        ("num_computed_tokens", plan.num_computed_tokens, 0),
        ("num_sampled_tokens", plan.num_sampled_tokens, 0),
        ("num_new_blocks", plan.num_new_blocks, 0),
    ]
    if len(plan.num_draft_tokens):
        columns.append(("num_draft_tokens", plan.num_draft_tokens, 0))
    rows = len(plan.slots)
    found = [
        violation(f"plan.{name}", f"{len(column)} entries", f"must have one per row: {rows}")
        for name, column, _ in columns
        if len(column) != rows
    ]
    for name, column, low in columns:
        found += _first(name, column, column < low, f"must be at least {low}")
    if found:
        return found
    for expected, ids, name in (
        (_total(plan.num_new_blocks), plan.new_block_ids, "new_block_ids"),
        (_total(plan.num_draft_tokens), plan.draft_token_ids, "draft_token_ids"),
        (len(plan.copy_sources), plan.copy_destinations, "copy_destinations"),
    ):
        if len(ids) != expected:
            found.append(violation(f"plan.{name}", f"{len(ids)} entries", f"must have {expected}"))
    total = _total(plan.num_scheduled_tokens)
    if total > batch.max_num_batched_tokens:
        limit = f"must be at most max_num_batched_tokens, {batch.max_num_batched_tokens}"
        found.append(violation("plan.num_scheduled_tokens", f"{total} in total", limit))
    return found


def _total(column: Ints) -> int:
    return int(np.add.reduce(column, dtype=np.int64)) if len(column) else 0


def _slots_in_range(path: str, slots: Ints, batch: Batch) -> list[FieldViolation]:
    return _first(path, slots, _outside(slots, batch.max_num_seqs), f"must be in [0, {batch.max_num_seqs})")


def _released(plan: StepPlan, batch: Batch, preview: _Preview) -> list[FieldViolation]:
    slots = plan.released_slots
    if not len(slots):
        return []
    if found := _slots_in_range("released_slots", slots, batch):
        return found
    found = _first("released_slots", slots, ~preview.is_used[slots], "must be a slot in use")
    found += _first_repeated("released_slots", slots, batch.scratch, "must not come twice")
    preview.is_used[slots] = False
    preview.is_failed[slots] = False
    return found


def _blocks(plan: StepPlan, batch: Batch, preview: _Preview) -> list[FieldViolation]:
    found = []
    limit = f"must be in [1, {batch.num_kv_blocks}): block 0 is the null block"
    for name in ("new_block_ids", "copy_sources", "copy_destinations", "zero_block_ids"):
        ids: Ints = getattr(plan, name)
        if len(ids):
            found += _first(name, ids, _outside(ids, batch.num_kv_blocks, 1), limit)
    if len(plan.copy_destinations) and not found:
        # Rare enough to allocate: no worker state is as long as the pool has blocks.
        scratch = np.empty(batch.num_kv_blocks, np.int32)
        found += _first_repeated("copy_destinations", plan.copy_destinations, scratch, "twice a target")
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
        assert preview.is_new is not None
        preview.is_used[new.slot] = preview.is_new[new.slot] = True
        preview.num_tokens[new.slot] = num_tokens
        preview.num_blocks[new.slot] = 0
    return []


def _rows(plan: StepPlan, batch: Batch, preview: _Preview) -> list[FieldViolation]:
    slots = plan.slots
    if not len(slots):
        return []
    if found := _slots_in_range("slots", slots, batch):
        return found
    found = _first("slots", slots, ~preview.is_used[slots], "must be a slot in use")
    found += _first_repeated("slots", slots, batch.scratch, "must not come twice")
    if found:
        return found
    found = _progress(plan, batch, preview)
    ids = plan.draft_token_ids
    if len(ids):
        limit = f"must be below {batch.vocab_size}"
        found += _first("draft_token_ids", ids, _outside(ids, batch.vocab_size), limit)
    return found


def _progress(plan: StepPlan, batch: Batch, preview: _Preview) -> list[FieldViolation]:
    """Whether each row starts where its request is, ends within what is known, and has blocks for it."""
    slots, computed, sampled = plan.slots, plan.num_computed_tokens, plan.num_sampled_tokens
    # A failed row is skipped: in overlap mode the core plans it once more before it learns of the failure.
    is_failed = preview.is_failed[slots]
    is_live = ~is_failed if np.count_nonzero(is_failed) else None

    def check(name: str, column: Ints, is_bad: Mask, limit: str | Ints, prefix: str = "") -> None:
        found.extend(_first(name, column, is_bad if is_live is None else is_bad & is_live, limit, prefix))

    found: list[FieldViolation] = []
    known, expected = preview.num_tokens[slots], preview.num_computed_tokens[slots]
    is_displaced = computed != expected
    if preview.is_new is not None:
        is_new = preview.is_new[slots]
        check("num_computed_tokens", computed, is_new & (computed >= known), known, "must be below ")
        is_displaced &= ~is_new
    check("num_computed_tokens", computed, is_displaced, expected, "the worker has ")
    end = np.add(computed, plan.num_scheduled_tokens, dtype=np.int64)
    drafts = plan.num_draft_tokens if len(plan.draft_token_ids) else 0
    known_end = np.add(known, drafts, dtype=np.int64)
    limit = f"must not pass max_model_len, {batch.max_model_len}, nor what is known"
    check("num_scheduled_tokens", plan.num_scheduled_tokens, end > np.minimum(known_end, batch.max_model_len), limit)
    is_sampling = sampled > 0
    is_short = is_sampling & (end != known_end)
    check("num_sampled_tokens", sampled, is_short, "must be 0 unless the row reaches its end")
    if isinstance(drafts, int):
        check("num_sampled_tokens", sampled, sampled > 1, "with the row's drafts must be 1")
    else:
        is_uneven = np.where(is_sampling, sampled != drafts + 1, drafts > 0)
        check("num_sampled_tokens", sampled, is_uneven, drafts + 1, "with the row's drafts must be ")
    num_blocks = np.add(preview.num_blocks[slots], plan.num_new_blocks, dtype=np.int64)
    found += _first("num_new_blocks", plan.num_new_blocks, num_blocks > batch.max_blocks, "more than a sequence takes")
    check("num_new_blocks", plan.num_new_blocks, num_blocks * batch.block_size < end, "not enough for the row's tokens")
    return found
