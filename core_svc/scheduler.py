"""Decides which tokens of which requests the next step computes.

There is no prefill phase and no decode phase. A request owes the tokens it knows, and its drafts, less those computed;
each step pays some of that debt under one token budget, for running requests first and then for waiting ones.

Order: under fcfs by arrival at the core; under priority by (priority, arrival at the frontend, arrival at the core),
smaller first. `running` is kept in this order, so that the last of it is the one to preempt when blocks run out, and
is never one that was scheduled already in the same step. The first of it can always take the blocks of all others,
so every step moves somebody. A waiting request never preempts a running one, whatever its priority: it waits for
blocks and a slot, at the head of the queue, and nobody overtakes it there.
"""

from __future__ import annotations

import enum
import time
from bisect import insort
from collections.abc import Iterable

from core_svc.commit import commit_row
from core_svc.config import EngineConfig
from core_svc.kv_cache_manager import KVCacheManager
from core_svc.logprob_room import LogprobRoom
from core_svc.outputs import OutputCollector, finished_of
from core_svc.plan_builder import PlanBuilder, ScheduledStep
from core_svc.recent_ids import RecentIds
from core_svc.request import NO_SLOT, Request, RequestKey, RequestStatus
from core_svc.request_queue import RequestQueue
from core_svc.result_rows import RowResult, split_rows
from pagewire.engine import AbortReason, CoreStats, Finished
from pagewire.plan import StepResult


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
        self.running: list[Request] = []
        self.waiting = RequestQueue()
        self.outputs = OutputCollector()
        self.stats = CoreStats(num_total_blocks=kv.pool.num_usable_blocks)
        self.num_steps = 0
        self.ended: RecentIds[None] = RecentIds(config.tombstone_ttl_s, config.max_tombstones)
        """Keys of requests that ended lately: an Add that is repeated late must not run again."""
        self._plan_step = 0
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._released_slots: list[int] = []
        self._logprob_room = LogprobRoom(0)
        """Of the step that is being planned."""

    # --- requests come and go ---

    def add(self, request: Request) -> None:
        """Queues a request that fits the pool; its key must be new."""
        self.requests[request.key] = request
        self.waiting.push(request)

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
            self._end(request, status)
            finished = finished_of(
                request, abort_reason=abort_reason, error_code=error_code, error_message=error_message, now_ns=now_ns
            )
            self.outputs.add_row(request, finished=finished)
        self._drop_finished()

    def _end(self, request: Request, status: RequestStatus) -> None:
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
        self.stats.num_finished += 1
        if status is RequestStatus.FINISHED_ABORTED:
            self.stats.num_aborted += 1

    def _drop_finished(self) -> None:
        self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]

    def _release_slot(self, request: Request) -> None:
        if request.slot != NO_SLOT:
            self._released_slots.append(request.slot)
            self._free_slots.append(request.slot)
            request.slot = NO_SLOT

    # --- schedule ---

    @property
    def is_paused(self) -> bool:
        return self.pause_state is not PauseState.UNPAUSED

    @property
    def has_work(self) -> bool:
        """Whether schedule would return a step."""
        if self._released_slots or (self.running and self.pause_state is not PauseState.FROZEN):
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
        is_throttled = is_prefill_throttled and any(not request.is_prefill for request in self.running)
        budget = 0 if self.pause_state is PauseState.FROZEN else self.config.max_num_batched_tokens
        num_preemptions = self.stats.num_preemptions
        budget = self._schedule_running(builder, budget, is_throttled)
        has_preempted = self.stats.num_preemptions > num_preemptions
        if not has_preempted and not is_throttled:
            budget = self._schedule_waiting(builder, budget)
        assert budget >= 0 and len(builder.requests) <= len(self.running) <= self.config.max_num_seqs
        if not builder.requests and not self._released_slots:
            self.num_steps -= 1
            return None
        self._plan_step += 1
        released_slots, self._released_slots = self._released_slots, []
        return builder.build(self.num_steps, self.epoch, self._plan_step, released_slots)

    def _schedule_running(self, builder: PlanBuilder, budget: int, is_throttled: bool) -> int:
        """Pays debts of running requests in order; returns what is left of the budget."""
        idx = 0
        while budget > 0 and idx < len(self.running):
            request = self.running[idx]
            num_new_tokens = self._num_new_tokens(request, request.num_computed_tokens, budget)
            idx += 1
            if num_new_tokens == 0 or (is_throttled and request.is_prefill):
                continue
            block_ids = self._allocate_or_preempt(request, request.num_computed_tokens + num_new_tokens)
            if block_ids is None:
                break
            builder.add(request, num_new_tokens, block_ids)
            request.spec_token_ids = []
            self._advance(request, num_new_tokens)
            budget -= num_new_tokens
        return budget

    def _allocate_or_preempt(self, request: Request, num_tokens: int) -> list[int] | None:
        """Blocks for a running request, taken from the last ones if need be; None if it was itself the last."""
        while (block_ids := self.kv.allocate_slots(request, num_tokens)) is None:
            victim = self.running.pop()
            assert victim.last_scheduled_step != self.num_steps, "a victim is never one already scheduled in the step"
            self._preempt(victim)
            if victim is request:
                return None
        return block_ids

    def _schedule_waiting(self, builder: PlanBuilder, budget: int) -> int:
        """Admits waiting requests in order while the next one's whole sequence fits; returns the rest of the budget.

        Blocks that running prefills still need are counted as taken: a long prompt admitted by its first chunk alone
        would be preempted again and again.
        """
        num_promised_blocks = -1
        while budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self._next_waiting()
            if request is None:
                break
            if num_promised_blocks < 0:
                num_promised_blocks = sum(self.kv.num_missing_blocks(running) for running in self.running)
            computed_blocks = self.kv.get_computed_blocks(request)
            num_computed_tokens = len(computed_blocks) * self.config.block_size
            num_new_tokens = self._num_new_tokens(request, num_computed_tokens, budget)
            if num_new_tokens == 0:
                break
            block_ids = self.kv.admit(
                request, computed_blocks, num_computed_tokens + num_new_tokens, num_promised_blocks
            )
            if block_ids is None:
                break
            num_promised_blocks += self.kv.num_missing_blocks(request)
            self.waiting.remove(request)
            self._admit(request, num_computed_tokens)
            builder.add_new(request, num_new_tokens, block_ids)
            self._advance(request, num_new_tokens)
            budget -= num_new_tokens
        return budget

    def _next_waiting(self) -> Request | None:
        """Who is admitted next; in a pause that lets what runs finish, only those that ran before."""
        if self.pause_state is PauseState.NO_ADMISSION:
            return self.waiting.peek_preempted()
        return self.waiting.peek() if self.pause_state is PauseState.UNPAUSED else None

    @property
    def has_started_requests(self) -> bool:
        """Whether any request runs, or ran and waits to run again."""
        return bool(self.running) or self.waiting.peek_preempted() is not None

    def _num_new_tokens(self, request: Request, num_computed_tokens: int, budget: int) -> int:
        """How much of its debt the request may pay in this step; 0 where its log-probabilities have no room left."""
        debt = request.num_tokens_with_spec - num_computed_tokens
        num_new_tokens = min(debt, budget, self.config.long_prefill_token_threshold or debt)
        return self._logprob_room.fit(request, num_computed_tokens, num_new_tokens)

    def _advance(self, request: Request, num_new_tokens: int) -> None:
        self._logprob_room.take(request, request.num_computed_tokens, num_new_tokens)
        request.num_computed_tokens += num_new_tokens
        request.last_scheduled_step = self.num_steps
        self.stats.num_scheduled_tokens += num_new_tokens

    def _admit(self, request: Request, num_computed_tokens: int) -> None:
        """Gives a waiting request its slot and its place in running."""
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed_tokens
        request.slot = self._free_slots.pop()
        request.admitted_step = self.num_steps
        insort(self.running, request, key=_order)
        if not request.scheduled_ns:
            request.scheduled_ns = time.monotonic_ns()
            request.num_hit_tokens = min(num_computed_tokens, request.num_prompt_tokens)
            self.stats.prefix_cache_queries += request.num_prompt_tokens
            self.stats.prefix_cache_hits += request.num_hit_tokens

    # --- preemption ---

    def _preempt(self, request: Request) -> None:
        """Takes blocks and slot of a request, already out of running, that will recompute everything it knows."""
        self.kv.free(request)
        self._release_slot(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_output_placeholders = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.push(request)

    def preempt_all(self) -> int:
        """Preempts everything that runs; returns how many requests that were."""
        running, self.running = self.running, []
        for request in running:
            self._preempt(request)
        return len(running)

    # --- update ---

    def update(self, step: ScheduledStep, result: StepResult) -> None:
        """Commits a step's result: tokens go to requests that still hold their slot, and to no others."""
        now_ns = time.monotonic_ns()
        plan = step.plan
        results = split_rows(result)
        num_committed = (plan.num_computed_tokens + plan.num_scheduled_tokens).tolist()
        has_ended = False
        for request, slot, num_sampled, num_committed_tokens in zip(
            step.requests, plan.slots.tolist(), plan.num_sampled_tokens.tolist(), num_committed, strict=True
        ):
            row = results.pop(slot, None) or RowResult()
            if step.is_current(request):
                has_ended |= self._commit(request, row, num_sampled, num_committed_tokens, now_ns)
        self.stats.num_unknown_ids += len(results)
        if has_ended:
            self._drop_finished()

    def _commit(
        self, request: Request, row: RowResult, num_sampled: int, num_committed_tokens: int, now_ns: int
    ) -> bool:
        """Commits one row; returns whether its request ended."""
        committed = commit_row(
            request, row, num_sampled=num_sampled, num_committed_tokens=num_committed_tokens, now_ns=now_ns
        )
        self.stats.num_generated_tokens += len(committed.token_ids)
        self.kv.cache_blocks(request, committed.num_committed_tokens)
        finished: Finished | None = None
        if committed.status is not None:
            self._end(request, committed.status)
            finished = finished_of(
                request,
                stop_token_id=committed.stop_token_id,
                error_code=committed.error_code,
                error_message=committed.error_message,
                now_ns=now_ns,
            )
        is_first = not request.is_started
        request.is_started = True
        if committed.token_ids or is_first or finished is not None or committed.prompt_logprobs is not None:
            self.outputs.add_row(
                request,
                committed.token_ids,
                logprobs=committed.logprobs,
                prompt_logprobs=committed.prompt_logprobs,
                num_cached_tokens=request.num_hit_tokens if is_first else None,
                finished=finished,
            )
        return finished is not None

    def fail_step(self, step: ScheduledStep, code: str, message: str) -> None:
        """Ends the requests of a step that failed as a whole.

        For the worker such a step has not happened: the next plan has its number, what it released is released once
        more, and slots that its new requests were to take were never taken.
        """
        requests = [request for request in step.requests if step.is_current(request)]
        self.finish(requests, RequestStatus.FINISHED_ERROR, error_code=code, error_message=message)
        never_taken = {new.slot for new in step.plan.new_requests}
        self._released_slots = [slot for slot in self._released_slots if slot not in never_taken]
        self._released_slots.extend(int(slot) for slot in step.plan.released_slots)
        self._plan_step -= 1

    # --- the pool ---

    def restart_cache(self, kv: KVCacheManager, epoch: int) -> None:
        """Goes on with a new, empty pool under a new epoch. Nothing may run; the worker's batch is empty."""
        assert not self.running
        self.kv = kv
        self.epoch = epoch
        self._plan_step = 0
        self._released_slots = []
        self.stats.num_total_blocks = kv.pool.num_usable_blocks

    def of_frontend(self, frontend_incarnation: str) -> list[Request]:
        """The live requests of a frontend."""
        return [request for request in self.requests.values() if request.key[0] == frontend_incarnation]


def _order(request: Request) -> tuple[int, int, int]:
    return request.order
