"""The persistent batch: per slot the tokens, blocks and progress of its request, changed by plans.

check_plan (nothing changes) -> apply -> forward and sampling -> commit
                                  \\-> undo, where the step fails in between

A step's rows are columns too: no loop runs over them. Only what is rare is a loop over slots: requests that come, go or
fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagewire.plan import StepPlan
from worker_svc.plan_check import check_plan
from worker_svc.ragged import rows_and_places
from worker_svc.sampling_state import SamplingState
from worker_svc.slot_request import SlotRequest, slot_request

Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class Rows:
    """The rows of a step that are computed, in the worker's order; all columns int32 [rows]."""

    slots: Ints
    num_scheduled_tokens: Ints
    num_computed_tokens: Ints
    num_sampled_tokens: Ints
    num_draft_tokens: Ints | None
    """None: no row has any."""

    def __len__(self) -> int:
        return len(self.slots)

    def only(self, is_kept: npt.NDArray[np.bool_]) -> Rows:
        """Some of the rows."""
        drafts = None if self.num_draft_tokens is None else self.num_draft_tokens[is_kept]
        columns = (self.slots, self.num_scheduled_tokens, self.num_computed_tokens, self.num_sampled_tokens)
        slots, scheduled, computed, sampled = (column[is_kept] for column in columns)
        return Rows(slots, scheduled, computed, sampled, drafts)


class Batch:
    """Slots 0 to max_num_seqs - 1. Columns are int32 [max_num_seqs]; tables have one line per slot."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        num_kv_blocks: int,
        vocab_size: int,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_kv_blocks = num_kv_blocks
        self.vocab_size = vocab_size
        self.max_blocks = -(-max_model_len // block_size)
        # One more than the longest sequence: its last sampled token is kept though it is never computed. Drafts are
        # written behind the known tokens and become known, or are overwritten, when the step is committed.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        # Behind a request's own blocks a line is zero (the null block), so that a step takes lines as they are.
        self.block_tables = np.zeros((max_num_seqs, self.max_blocks), np.int32)
        self._columns = np.zeros((3, max_num_seqs), np.int32)
        self.num_tokens, self.num_computed_tokens, self.num_blocks = self._columns
        self.is_used = np.zeros(max_num_seqs, np.bool_)
        self.is_failed = np.zeros(max_num_seqs, np.bool_)
        self.generations = np.zeros(max_num_seqs, np.int64)
        """How many requests a slot has had."""
        self.requests: list[SlotRequest | None] = [None] * max_num_seqs
        self.sampling = SamplingState(max_num_seqs)
        self.scratch = np.zeros(max_num_seqs, np.int32)
        """For checks over slots; holds nothing between two."""

    @property
    def num_slots_used(self) -> int:
        return int(self.is_used.sum())

    def request(self, slot: int) -> SlotRequest:
        """The request of a slot in use."""
        request = self.requests[slot]
        if request is None:
            raise LookupError(f"slot {slot} is free")
        return request

    def apply(self, plan: StepPlan) -> tuple[Rows, Callable[[], None]]:
        """Checks the plan and takes it over; returns the rows to compute and what undoes it.

        The rows' columns may be the plan's own. Raises InvalidArgumentError, and changes nothing, where the plan is
        wrong.
        """
        check_plan(plan, self)
        undo = self._remember(plan)
        if len(plan.released_slots):
            self._release(plan.released_slots)
        for new in plan.new_requests:
            slot, request = new.slot, slot_request(new, self.vocab_size)
            self.requests[slot] = request
            self.generations[slot] += 1
            self.token_ids[slot, : len(new.token_ids)] = new.token_ids
            self.block_tables[slot] = 0
            self.num_tokens[slot] = len(new.token_ids)
            self.is_used[slot] = True
            self.is_failed[slot] = bool(request.error)
            if not request.error:
                self.sampling.set(slot, request)
        if len(plan.new_block_ids):
            self._append_blocks(plan.slots, plan.num_new_blocks, plan.new_block_ids)
        return self._take_rows(plan), undo

    def commit(self, rows: Rows, num_emitted: Ints, token_ids: Ints) -> None:
        """Moves the rows on: appends what each one sampled, and forgets the KV of rejected drafts.

        num_emitted: int32 [rows], 0 where nothing was sampled. token_ids: the tokens of all rows.
        """
        slots = rows.slots
        num_tokens = self.num_tokens[slots]
        num_computed_tokens = rows.num_computed_tokens + rows.num_scheduled_tokens
        if rows.num_draft_tokens is not None:
            num_computed_tokens += np.maximum(num_emitted - 1, 0) - rows.num_draft_tokens
            row, place = rows_and_places(num_emitted)
            self.token_ids[slots[row], num_tokens[row] + place] = token_ids
        elif len(token_ids) == len(rows):
            self.token_ids[slots, num_tokens] = token_ids
        else:
            row = np.flatnonzero(num_emitted)
            self.token_ids[slots[row], num_tokens[row]] = token_ids
        self.num_computed_tokens[slots] = num_computed_tokens
        self.num_tokens[slots] = num_tokens + num_emitted

    def fail(self, slot: int, error: str) -> None:
        """Marks a slot's request as failed by itself."""
        self.request(slot).error = error
        self.is_failed[slot] = True

    def _release(self, slots: Ints) -> None:
        for slot in slots.tolist():
            self.requests[slot] = None
        self.is_used[slots] = self.is_failed[slots] = False
        self._columns[:, slots] = 0

    def _append_blocks(self, slots: Ints, num_new_blocks: Ints, block_ids: Ints) -> None:
        row, place = rows_and_places(num_new_blocks)
        num_blocks = self.num_blocks[slots]
        self.block_tables[slots[row], num_blocks[row] + place] = block_ids
        self.num_blocks[slots] = num_blocks + num_new_blocks

    def _take_rows(self, plan: StepPlan) -> Rows:
        slots, num_drafts = plan.slots, plan.num_draft_tokens if len(plan.draft_token_ids) else None
        is_failed = self.is_failed[slots]
        if num_drafts is not None:
            row, place = rows_and_places(num_drafts)
            live = ~is_failed[row]
            slot = slots[row][live]
            self.token_ids[slot, self.num_tokens[slot] + place[live]] = plan.draft_token_ids[live]
        rows = Rows(slots, plan.num_scheduled_tokens, plan.num_computed_tokens, plan.num_sampled_tokens, num_drafts)
        return rows.only(~is_failed) if np.count_nonzero(is_failed) else rows

    def _remember(self, plan: StepPlan) -> Callable[[], None]:
        """Keeps what applying the plan overwrites, of the slots it touches; returns what puts it back.

        A slot that the plan only has a row of keeps is_failed: the step before may be settled, and fail it, meanwhile.
        """
        new_slots = [new.slot for new in plan.new_requests]
        changed = np.array([*plan.released_slots.tolist(), *new_slots], np.int32)
        slots = np.concatenate([plan.slots, changed]) if len(changed) else plan.slots
        columns, is_used, is_failed = self._columns[:, slots], self.is_used[changed], self.is_failed[changed]
        generations = self.generations[changed]
        requests = [(slot, self.requests[slot]) for slot in changed.tolist()]
        reused = [slot for slot in new_slots if self.requests[slot] is not None]
        tokens = [self.token_ids[slot, : self.num_tokens[slot]].copy() for slot in reused]
        tables = [self.block_tables[slot, : self.num_blocks[slot]].copy() for slot in reused]

        def undo() -> None:
            num_blocks_after = self.num_blocks[slots]
            self._columns[:, slots] = columns
            self.is_used[changed], self.is_failed[changed] = is_used, is_failed
            self.generations[changed] = generations
            for slot, start, end in zip(slots.tolist(), columns[2].tolist(), num_blocks_after.tolist(), strict=True):
                self.block_tables[slot, start:end] = 0
            for slot, request in requests:
                self.requests[slot] = request
            for slot, old_tokens, old_table in zip(reused, tokens, tables, strict=True):
                self.token_ids[slot, : len(old_tokens)] = old_tokens
                self.block_tables[slot, : len(old_table)] = old_table
                if not self.is_failed[slot]:
                    self.sampling.set(slot, self.request(slot))

        return undo
