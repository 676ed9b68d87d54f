"""What happens to requests that come, are aborted, run out of time or lose their frontend."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence

from core_svc.inbox import Abort, Add, resolve
from core_svc.recent_ids import RecentIds
from core_svc.request import Request, RequestStatus
from core_svc.scheduler import Scheduler
from core_svc.validation import Limits
from pagewire.engine import AbortOutcome, AbortReason
from pagewire.errors import PagewireError

MIN_SWEEP = 64
"""Deadlines that are kept before any is looked at again."""


class Intake:
    """Applies adds, aborts and deadlines to the scheduler, on the engine thread.

    An id is known while its request lives and for a while after it ended; adding a known id changes nothing. An abort
    of an unknown id leaves a tombstone: the add that comes after it ends at once.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        config = scheduler.config
        self._scheduler = scheduler
        self._is_priority_policy = config.policy == "priority"
        self._tombstones: RecentIds[AbortReason] = RecentIds(config.tombstone_ttl_s, config.max_tombstones)
        self._deadlines: list[tuple[int, int, Request]] = []
        self._sweep_at = MIN_SWEEP
        self._num_arrivals = 0

    def add(self, message: Add, limits: Limits, refusal: PagewireError | None = None) -> None:
        """Queues requests; with a refusal they end with it instead."""
        for engine_request in message.requests:
            key = (message.frontend_incarnation, engine_request.request_id)
            if key in self._scheduler.requests or key in self._scheduler.ended:
                continue
            self._num_arrivals += 1
            request = Request.from_engine_request(
                engine_request,
                message.frontend_incarnation,
                max_model_len=limits.max_num_tokens,
                vocab_size=limits.vocab_size,
                sequence=self._num_arrivals,
                now_ns=message.received_ns,
                is_priority_policy=self._is_priority_policy,
            )
            self._scheduler.add(request)
            abort_reason = self._tombstones.pop(key)
            if abort_reason is not None:
                self._scheduler.finish([request], RequestStatus.FINISHED_ABORTED, abort_reason=abort_reason)
            elif refusal is not None:
                self.end_with_error([request], refusal)
            elif request.deadline_ns is not None:
                self._watch_deadline(request.deadline_ns, request)

    def abort(self, message: Abort, *, is_in_order: bool) -> None:
        """Ends the requests that are alive. Ids that are not wait for the ordered inbox: their add may be before them.

        The future is resolved as soon as every id has its outcome.
        """
        found: dict[int, Request] = {}
        for idx, request_id in enumerate(message.request_ids):
            request = self._scheduler.requests.get((message.frontend_incarnation, request_id))
            if idx not in message.outcomes and request is not None and request_id not in found:
                found[request_id] = request
                message.outcomes[idx] = AbortOutcome.ABORTED
        self._scheduler.finish(found.values(), RequestStatus.FINISHED_ABORTED, abort_reason=message.reason)
        for idx, request_id in enumerate(message.request_ids):
            if idx in message.outcomes:
                continue
            key = (message.frontend_incarnation, request_id)
            if is_in_order and key in self._scheduler.ended:
                message.outcomes[idx] = AbortOutcome.ALREADY_FINISHED
            elif is_in_order:
                self._tombstones.add(key, message.reason)
                self._scheduler.stats.num_unknown_ids += 1
                message.outcomes[idx] = AbortOutcome.NOT_FOUND
        if message.is_done:
            resolve(message.future, [message.outcomes[idx] for idx in range(len(message.request_ids))])

    def abort_all(self, reason: AbortReason) -> int:
        """Ends everything alive; returns how many requests that were."""
        requests = list(self._scheduler.requests.values())
        self._scheduler.finish(requests, RequestStatus.FINISHED_ABORTED, abort_reason=reason)
        return len(requests)

    def drop_frontend(self, frontend_incarnation: str, reason: AbortReason) -> None:
        """Ends everything of a frontend and forgets what was to be published to it."""
        requests = [r for r in self._scheduler.requests.values() if r.key[0] == frontend_incarnation]
        self._scheduler.finish(requests, RequestStatus.FINISHED_ABORTED, abort_reason=reason)
        self._scheduler.outputs.drop(frontend_incarnation)
        self._scheduler.ended.forget_frontend(frontend_incarnation)
        self._scheduler.table.forget_frontend(frontend_incarnation)
        self._tombstones.forget_frontend(frontend_incarnation)

    def end_with_error(self, requests: Sequence[Request], error: PagewireError) -> None:
        """Ends requests with FinishReason.ERROR and the error's status code."""
        self._scheduler.finish(
            requests, RequestStatus.FINISHED_ERROR, error_code=error.code, error_message=error.message
        )

    def _watch_deadline(self, deadline_ns: int, request: Request) -> None:
        """Ended requests go once they outnumber the living: a deadline may be far away."""
        heapq.heappush(self._deadlines, (deadline_ns, self._num_arrivals, request))
        if len(self._deadlines) > self._sweep_at:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].status.is_finished]
            heapq.heapify(self._deadlines)
            self._sweep_at = 2 * len(self._deadlines) + MIN_SWEEP

    def expire_deadlines(self) -> None:
        """Ends the requests whose deadline has passed, wherever they are."""
        now_ns = time.monotonic_ns()
        late = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            request = heapq.heappop(self._deadlines)[2]
            if not request.status.is_finished:
                late.append(request)
        self._scheduler.finish(late, RequestStatus.FINISHED_DEADLINE)

    @property
    def next_deadline_ns(self) -> int | None:
        """Monotonic time of the next deadline of a live request."""
        while self._deadlines and self._deadlines[0][2].status.is_finished:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None
