"""Decides which tokens of which requests the next step computes.

There is no prefill phase and no decode phase. A request owes the tokens it knows, and its drafts, less those computed;
each step pays some of that debt under one token budget, for running requests first and then for waiting ones.

What every running request is asked in every step is a column of the slot table, so that the common step, in which
each owes one token, is a handful of vector operations; only rows that need more (blocks, drafts, log-probabilities, a
hash, an end) are looked at one by one.

Order: under fcfs by arrival at the core; under priority by (priority, arrival at the frontend, arrival at the core),
smaller first. The table's `running` is in this order, so that the last of it is the one to preempt when blocks run
out; who is preempted is settled before any row is planned. The first of it can always take the blocks of all others,
so every step moves somebody. A waiting request never preempts a running one, whatever its priority: it waits for
blocks and a slot at the head of the queue, where it is overtaken only while a running request computes its prefix.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable

import numpy as np

from core_svc.commit import commit_step
from core_svc.config import EngineConfig
from core_svc.full_blocks import next_full_tokens
from core_svc.kv_cache_manager import KVCacheManager
from core_svc.logprob_room import LogprobRoom
from core_svc.observer import EventKind, Journal
from core_svc.outputs import OutputCollector, finished_of
from core_svc.plan_builder import PlanBuilder, Rows, ScheduledStep
from core_svc.recent_ids import RecentIds
from core_svc.request import Request, RequestKey, RequestStatus
from core_svc.request_queue import RequestQueue
from core_svc.slot_table import Slots, SlotTable
from pagewire.columns import Int32Column
from pagewire.engine import AbortReason, CoreStats
from pagewire.plan import StepResult

MAX_ASIDE = 256
"""Requests that step aside in one step; looking at each takes time."""


class PauseState(enum.Enum):
    """What schedule leaves out."""

    UNPAUSED = "unpaused"
    NO_ADMISSION = "no admission"
    FROZEN = "frozen"


class Scheduler:
    """Requests, budget and KV blocks of one engine. Not thread-safe: one engine thread calls it."""

    def __init__(self, config: EngineConfig, kv: KVCacheManager, *, epoch: int = 1) -> None:
        self.config = config
        self.kv = kv
        self.epoch = epoch
        self.pause_state = PauseState.UNPAUSED
        self.requests: dict[RequestKey, Request] = {}
        """Everything alive, running and waiting."""
        self.table = SlotTable(config.max_num_seqs)
        self.waiting = RequestQueue()
        self.outputs = OutputCollector()
        self.journal = Journal()
        self.stats = CoreStats(num_total_blocks=kv.pool.num_usable_blocks)
        self.num_steps = 0
        self.ended: RecentIds[None] = RecentIds(config.tombstone_ttl_s, config.max_tombstones)
        """Keys of requests that ended lately: an Add that is repeated late must not run again."""
        self._plan_step = 0
        self._released_slots: list[int] = []
        self._logprob_room = LogprobRoom(0)
        """Of the step that is being planned."""

    # --- requests come and go ---

    def add(self, request: Request) -> None:
        """Queues a request that fits the pool; its key must be new."""
        self.requests[request.key] = request
        self.waiting.push(request)
        self.journal.note(EventKind.ADDED, request)

    def finish(
        self,
        requests: Iterable[Request],
        status: RequestStatus,
        *,
        abort_reason: AbortReason = AbortReason.UNSPECIFIED,
        error_code: str = "",
        error_message: str = "",
    ) -> None:
        """Ends live requests from outside of a commit and tells their frontends."""
        now_ns = time.monotonic_ns()
        for request in requests:
            self.end(request, status)
            finished = finished_of(
                request, abort_reason=abort_reason, error_code=error_code, error_message=error_message, now_ns=now_ns
            )
            self.outputs.add_row(request, finished=finished)
        self.table.drop_released()

    def end(self, request: Request, status: RequestStatus) -> None:
        """The one place where a request becomes terminal: its blocks and its slot go back."""
        assert not request.status.is_finished and status.is_finished
        was_running = request.status is RequestStatus.RUNNING
        request.status = status
        del self.requests[request.key]
        self.ended.add(request.key, None)
        self.kv.free(request)
        self._release_slot(request)
        if not was_running:
            self.waiting.note_ended()
        self.journal.note(EventKind.ENDED, request)
        self.stats.num_finished += 1
        if status is RequestStatus.FINISHED_ABORTED:
            self.stats.num_aborted += 1

    def _release_slot(self, request: Request) -> None:
        if request.table is not None:
            self._released_slots.append(self.table.release(request))

    @property
    def running(self) -> list[Request]:
        """Who holds a slot, first served first. For tests and rare commands: no step asks."""
        return list(self.table.requests[self.table.running])

    @property
    def num_running(self) -> int:
        return len(self.table.running)

    # --- schedule ---

    @property
    def is_paused(self) -> bool:
        return self.pause_state is not PauseState.UNPAUSED

    @property
    def has_work(self) -> bool:
        """Whether schedule would return a step."""
        if self._released_slots or (self.num_running and self.pause_state is not PauseState.FROZEN):
            return True
        return bool(self.requests) and self._next_waiting() is not None

    def schedule(self, *, is_prefill_throttled: bool = False) -> ScheduledStep | None:
        """Plans the next step; None if there is nothing to compute and nothing to tell the worker.

        With is_prefill_throttled, requests that owe more than a decode's token wait, as long as any decode can run.
        Computed positions advance here, before the step runs; update takes back what was rejected.
        """
        builder = PlanBuilder()
        self._logprob_room = LogprobRoom(self.config.max_logprob_candidates)
        self.num_steps += 1
        is_throttled = is_prefill_throttled and self._has_decode
        full_budget = 0 if self.pause_state is PauseState.FROZEN else self.config.max_num_batched_tokens
        num_preemptions = self.stats.num_preemptions
        budget = self._schedule_running(builder, full_budget, is_throttled)
        has_preempted = self.stats.num_preemptions > num_preemptions
        if not has_preempted and not is_throttled:
            budget = self._schedule_waiting(builder, budget)
        assert budget >= 0 and builder.num_rows <= self.num_running <= self.config.max_num_seqs
        if not builder.num_rows and not self._released_slots:
            self.num_steps -= 1
            return None
        self._plan_step += 1
        released_slots, self._released_slots = self._released_slots, []
        self.stats.num_scheduled_tokens += full_budget - budget
        return builder.build(self.num_steps, self.epoch, self._plan_step, released_slots, self.table.requests)

    @property
    def _has_decode(self) -> bool:
        table, slots = self.table, self.table.running
        return bool((table.num_known_tokens[slots] - table.num_computed_tokens[slots] <= 1).any())

    def _schedule_running(self, builder: PlanBuilder, budget: int, is_throttled: bool) -> int:
        """Pays debts of running requests in order; returns what is left of the budget."""
        table, slots = self.table, self.table.running
        if not budget or not len(slots):
            return budget
        num_known, num_computed = table.num_known_tokens[slots], table.num_computed_tokens[slots]
        num_new = self._affordable(slots, num_known, num_computed, budget, is_throttled)
        num_blocks = self._blocks_beyond(num_computed + num_new, table.num_kv_tokens[slots])
        num_left = self._preempt_for(num_blocks)
        if num_left < len(slots) or not num_new.all():
            due = num_new[:num_left].nonzero()[0]
            slots, num_new, num_blocks = slots[due], num_new[due], num_blocks[due]
            num_known, num_computed = num_known[due], num_computed[due]
        crossing = num_blocks.nonzero()[0]
        block_ids: list[int] = []
        if len(crossing):
            gets_blocks, counts = slots[crossing], num_blocks[crossing]
            block_ids = self.kv.allocate(table.requests[gets_blocks].tolist(), counts.tolist())
            table.num_kv_tokens[gets_blocks] += counts * self.config.block_size
        rows = Rows.of(slots, num_new, num_computed, num_known, num_blocks)
        drafts: list[int] = []
        if table.num_drafting:
            for request, num_drafts in zip(table.requests[slots], rows.num_draft_tokens.tolist(), strict=True):
                drafts += request.spec_token_ids[:num_drafts]
                request.spec_token_ids = []
            table.num_drafts[slots] = 0
        builder.add(rows, block_ids, drafts)
        return budget - rows.advance(table, num_known)

    def _affordable(
        self, slots: Slots, num_known: Int32Column, num_computed: Int32Column, budget: int, is_throttled: bool
    ) -> Int32Column:
        """Tokens that each slot's request gets in this step, in order, if there are blocks for them.

        None where only a step in flight can tell what comes next: where its tokens are the last ones at most, and
        where it may bring drafts.
        """
        table = self.table
        num_new = (num_known - num_computed) * (num_known < table.max_num_tokens[slots])
        if table.num_drafting:
            is_waiting = table.is_drafting[slots] & (num_known > table.num_tokens[slots])
            num_new = np.where(is_waiting, 0, num_new + table.num_drafts[slots])
        if is_throttled:
            num_new[num_known - num_computed > 1] = 0
        if self.config.long_prefill_token_threshold:
            num_new = np.minimum(num_new, self.config.long_prefill_token_threshold)
        if num_new.sum() > budget:
            before = np.cumsum(num_new) - num_new
            num_new = np.clip(budget - before, 0, num_new)
        num_new = num_new.astype(np.int32, copy=False)
        if table.num_wanting_logprobs:
            for row in (table.wants_logprobs[slots] & (num_new > 0)).nonzero()[0].tolist():
                request: Request = table.requests[slots[row]]
                numbers = (int(column[row]) for column in (num_known, num_computed, num_new))
                num_new[row] = self._logprob_room.take(request, *numbers)
        return num_new

    def _preempt_for(self, num_blocks: Int32Column) -> int:
        """Preempts the last ones until the pool has the others' new blocks; returns how many are left."""
        while num_blocks.sum() > self.kv.pool.num_free_blocks:
            num_blocks = num_blocks[:-1]
            self._preempt(self.table.requests[self.table.running[-1]])
            self.table.drop_released()
        return len(num_blocks)

    def _blocks_beyond(self, num_tokens: Int32Column, num_kv_tokens: Int32Column) -> Int32Column:
        """Blocks that so many tokens take beyond those that hold num_kv_tokens, which end with a block."""
        missing: Int32Column = num_tokens - num_kv_tokens
        short = (missing > 0).nonzero()[0]
        num_blocks = np.zeros(len(missing), np.int32)
        num_blocks[short] = (missing[short] + (self.config.block_size - 1)) // self.config.block_size
        return num_blocks

    def _schedule_waiting(self, builder: PlanBuilder, budget: int) -> int:
        """Admits waiting requests in order while the next one's whole sequence fits; returns the rest of the budget.

        Blocks that running prefills still need are counted as taken: a long prompt admitted by its first chunk alone
        would be preempted again and again. A request whose prefix another computes steps aside until it can be shared.
        """
        kv, num_promised_blocks = self.kv, -1
        num_free_slots = self.config.max_num_seqs - self.num_running
        admitted: list[Request] = []
        aside: list[Request] = []
        numbers: list[tuple[int, int, int]] = []
        block_ids: list[int] = []
        while budget > 0 and len(admitted) < num_free_slots:
            request = self._next_waiting()
            if request is None:
                break
            if num_promised_blocks < 0:
                num_promised_blocks = self._num_promised_blocks()
            computed_blocks = kv.get_computed_blocks(request)
            if len(aside) < MAX_ASIDE and kv.is_prefix_coming(request, computed_blocks):
                self.waiting.remove(request)
                aside.append(request)
                continue
            num_computed = len(computed_blocks) * self.config.block_size
            num_new = min(request.num_tokens - num_computed, budget, self.config.long_prefill_token_threshold or budget)
            num_new = self._logprob_room.take(request, request.num_tokens, num_computed, num_new)
            if num_new == 0:
                break
            request_blocks = kv.admit(request, computed_blocks, num_computed + num_new, num_promised_blocks)
            if request_blocks is None:
                break
            num_promised_blocks += kv.num_missing_blocks(request)
            self.waiting.remove(request)
            admitted.append(request)
            numbers.append((num_new, num_computed, len(request_blocks)))
            block_ids += request_blocks
            budget -= num_new
        self.waiting.put_back(aside)
        if admitted:
            self._admit(builder, admitted, np.array(numbers, np.int32), block_ids)
        return budget

    def _num_promised_blocks(self) -> int:
        """Blocks that running requests still need for the tokens that they have."""
        table, slots = self.table, self.table.running
        return int(self._blocks_beyond(table.num_tokens[slots], table.num_kv_tokens[slots]).sum())

    def _next_waiting(self) -> Request | None:
        """Who is admitted next; in a pause that lets what runs finish, only those that ran before."""
        if self.pause_state is PauseState.NO_ADMISSION:
            return self.waiting.peek_preempted()
        return self.waiting.peek() if self.pause_state is PauseState.UNPAUSED else None

    @property
    def has_started_requests(self) -> bool:
        """Whether any request runs, or ran and waits to run again."""
        return bool(self.num_running) or self.waiting.peek_preempted() is not None

    def _admit(self, builder: PlanBuilder, requests: list[Request], numbers: Int32Column, block_ids: list[int]) -> None:
        """Gives requests that got blocks slots and rows. `numbers`: new and computed tokens and blocks, by request."""
        table, now_ns = self.table, time.monotonic_ns()
        num_new, num_computed, num_blocks = numbers.T
        for request, num_computed_tokens in zip(requests, num_computed.tolist(), strict=True):
            request.status = RequestStatus.RUNNING
            self.journal.note(EventKind.ADMITTED, request, num_computed_tokens)
            table.take(
                request,
                num_computed_tokens=num_computed_tokens,
                next_full_tokens=next_full_tokens(self.kv, request),
                step=self.num_steps,
            )
            if not request.scheduled_ns:
                request.scheduled_ns = now_ns
                request.num_hit_tokens = min(num_computed_tokens, request.num_prompt_tokens)
                self.stats.prefix_cache_queries += request.num_prompt_tokens
                self.stats.prefix_cache_hits += request.num_hit_tokens
        table.line_up(requests)
        slots = np.array([request.slot for request in requests], np.intp)
        num_known = table.num_tokens[slots]
        rows = Rows.of(slots, num_new, num_computed, num_known, num_blocks)
        table.num_kv_tokens[slots] = num_blocks * self.config.block_size
        builder.add_new(rows, block_ids, requests)
        rows.advance(table, num_known)

    # --- preemption ---

    def _preempt(self, request: Request) -> None:
        """Takes blocks and slot of a request that will recompute everything it knows."""
        self.journal.note(EventKind.PREEMPTED, request, request.num_computed_tokens)
        self.kv.free(request)
        self._release_slot(request)
        request.status = RequestStatus.PREEMPTED
        request.held_num_computed_tokens = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.push(request)

    def preempt_all(self) -> int:
        """Preempts everything that runs; returns how many requests that were."""
        running = self.running
        for request in running:
            self._preempt(request)
        self.table.drop_released()
        return len(running)

    # --- update ---

    def update(self, step: ScheduledStep, result: StepResult) -> None:
        """Commits a step's result: tokens go to requests that still hold their slot, and to no others."""
        commit_step(self, step, result)
        self.table.drop_released()

    def fail_step(self, step: ScheduledStep, code: str, message: str, ahead: ScheduledStep | None = None) -> None:
        """Ends the requests of a step that failed as a whole; others of the step submitted behind it run again.

        For the worker neither has happened, see _unplan.
        """
        self.finish(
            step.requests[step.is_current(self.table)],
            RequestStatus.FINISHED_ERROR,
            error_code=code,
            error_message=message,
        )
        if ahead is not None:
            for request in ahead.requests[ahead.is_current(self.table)]:
                self._preempt(request)
            self.table.drop_released()
            self._unplan(ahead)
        self._unplan(step)

    def _unplan(self, step: ScheduledStep) -> None:
        """Takes back the newest step, which has not happened for the worker.

        The next plan has its number, what it released is released once more, and slots that its new requests were to
        take were never taken.
        """
        never_taken = {new.slot for new in step.plan.new_requests}
        self._released_slots = [slot for slot in self._released_slots if slot not in never_taken]
        self._released_slots += step.plan.released_slots.tolist()
        self._plan_step -= 1

    # --- the pool ---

    def restart_cache(self, kv: KVCacheManager, epoch: int) -> None:
        """Goes on with a new, empty pool under a new epoch. Nothing may run; the worker's batch is empty."""
        assert not self.num_running
        self.kv = kv
        self.epoch = epoch
        self._plan_step = 0
        self._released_slots = []
        self.stats.num_total_blocks = kv.pool.num_usable_blocks
