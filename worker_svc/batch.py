"""The persistent batch: per slot the tokens, blocks and progress of its request, changed by plans.

check_plan (nothing changes) -> apply -> forward and sampling -> commit
                                  \\-> undo, where the step fails in between
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagewire.plan import StepPlan
from worker_svc.plan_check import check_plan
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
    num_draft_tokens: Ints

    def __len__(self) -> int:
        return len(self.slots)


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
        self.block_tables = np.zeros((max_num_seqs, self.max_blocks), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int32)
        self.is_used = np.zeros(max_num_seqs, np.bool_)
        self.is_failed = np.zeros(max_num_seqs, np.bool_)
        self.requests: list[SlotRequest | None] = [None] * max_num_seqs
        self.sampling = SamplingState(max_num_seqs)

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

        Raises InvalidArgumentError, and changes nothing, where the plan is wrong.
        """
        check_plan(plan, self)
        undo = self._snapshot(plan)
        for slot in plan.released_slots.tolist():
            self._clear(slot)
        for new in plan.new_requests:
            slot, request = new.slot, slot_request(new, self.vocab_size)
            self.requests[slot] = request
            self.token_ids[slot, : len(new.token_ids)] = new.token_ids
            self.num_tokens[slot] = len(new.token_ids)
            self.is_used[slot] = True
            self.is_failed[slot] = bool(request.error)
            if not request.error:
                self.sampling.set(slot, request)
        self._append_blocks(plan.slots, plan.num_new_blocks, plan.new_block_ids)
        return self._take_rows(plan), undo

    def commit(self, rows: Rows, num_emitted: Ints, token_ids: Ints) -> None:
        """Moves the rows on: appends what each one sampled, and forgets the KV of rejected drafts.

        num_emitted: int32 [rows], 0 where nothing was sampled. token_ids: the tokens of all rows.
        """
        slots = rows.slots
        row = np.repeat(np.arange(len(rows)), num_emitted)
        place = np.arange(len(token_ids)) - (np.cumsum(num_emitted) - num_emitted)[row]
        self.token_ids[slots[row], self.num_tokens[slots[row]] + place] = token_ids
        num_accepted = np.maximum(num_emitted - 1, 0)
        self.num_computed_tokens[slots] = (
            rows.num_computed_tokens + rows.num_scheduled_tokens - rows.num_draft_tokens + num_accepted
        )
        self.num_tokens[slots] += num_emitted

    def fail(self, slot: int, error: str) -> None:
        """Marks a slot's request as failed by itself."""
        self.request(slot).error = error
        self.is_failed[slot] = True

    def _clear(self, slot: int) -> None:
        self.requests[slot] = None
        self.is_used[slot] = self.is_failed[slot] = False
        self.num_tokens[slot] = self.num_computed_tokens[slot] = self.num_blocks[slot] = 0

    def _append_blocks(self, slots: Ints, num_new_blocks: Ints, block_ids: Ints) -> None:
        row = np.repeat(np.arange(len(slots)), num_new_blocks)
        place = np.arange(len(block_ids)) - (np.cumsum(num_new_blocks) - num_new_blocks)[row]
        self.block_tables[slots[row], self.num_blocks[slots[row]] + place] = block_ids
        self.num_blocks[slots] += num_new_blocks

    def _take_rows(self, plan: StepPlan) -> Rows:
        num_drafts = plan.num_draft_tokens if len(plan.num_draft_tokens) else np.zeros(len(plan.slots), np.int32)
        if len(plan.draft_token_ids):
            row = np.repeat(np.arange(len(plan.slots)), num_drafts)
            place = np.arange(len(row)) - (np.cumsum(num_drafts) - num_drafts)[row]
            live = ~self.is_failed[plan.slots[row]]
            slot = plan.slots[row][live]
            self.token_ids[slot, self.num_tokens[slot] + place[live]] = plan.draft_token_ids[live]
        live = ~self.is_failed[plan.slots]
        return Rows(
            plan.slots[live],
            plan.num_scheduled_tokens[live],
            plan.num_computed_tokens[live],
            plan.num_sampled_tokens[live],
            num_drafts[live],
        )

    def _snapshot(self, plan: StepPlan) -> Callable[[], None]:
        """Remembers what applying the plan overwrites: the small columns, and the lines of slots that are reused."""
        columns = (self.num_tokens, self.num_computed_tokens, self.num_blocks, self.is_used, self.is_failed)
        before = [column.copy() for column in columns]
        requests = list(self.requests)
        reused = [new.slot for new in plan.new_requests if requests[new.slot] is not None]
        tokens = [self.token_ids[slot, : self.num_tokens[slot]].copy() for slot in reused]
        tables = [self.block_tables[slot, : self.num_blocks[slot]].copy() for slot in reused]

        def undo() -> None:
            for column, old in zip(columns, before, strict=True):
                column[:] = old
            self.requests[:] = requests
            for slot, old_tokens, old_table in zip(reused, tokens, tables, strict=True):
                self.token_ids[slot, : len(old_tokens)] = old_tokens
                self.block_tables[slot, : len(old_table)] = old_table
                if not self.is_failed[slot]:
                    self.sampling.set(slot, self.request(slot))

        return undo
