"""One Execute stream: plans in order to the compute thread, results in order back, masks to the plans that wait.

What a core that keeps two plans in flight can rely on:

- Results come in the order of plans. The compute thread takes step N + 1 from its queue as soon as N has ended; the
  event loop, which reads plans and writes results, has no part in between. Where N + 1 is there by then, N's result
  leaves when N + 1 is prepared and its forward pass begins, a fraction of a millisecond later (see ComputeThread).
  On a GPU N + 1 is launched while N runs, and N's result leaves when N has ended (see device_steps).
- A plan is checked when its turn comes, against what the step before it left. A row of N + 1 starts at N's
  num_computed_tokens plus what N scheduled of it, and may count on the token that N samples though the core doesn't
  know it. A request that stopped in N is computed once more; its row's result is for the core to drop.
- A row that failed by itself in N is skipped in N + 1, with the same error in its result's errors, until the core
  releases the slot. No other row notices.
- A step that fails as a whole (a StepFailure on the wire) has not happened: batch and slots are as before it. Plans
  behind it fail too (code ABORTED, see Worker.execute), and have not happened either, until step N comes again. The
  core may send its new plan for step N as soon as it sees N's failure; answers of the plans in between come first.
- A gap that no failure explains, or a plan of another epoch, ends the stream with FAILED_PRECONDITION.
- When the stream ends, plans that have not started will not run; the one that runs is finished, and the next stream's
  Opened.next_step tells whether it was committed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from pagewire.errors import (
    AbortedError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    PagewireError,
    ResourceExhaustedError,
)
from pagewire.plan import GrammarMask, StepPlan, StepResult
from pagewire.runtime.log_fields import fields
from worker_svc.compute import ComputeThread, Deferred
from worker_svc.observer import ExecuteObserver
from worker_svc.worker import Worker

logger = logging.getLogger(__name__)
MAX_PENDING_PLANS = 64
GRAMMAR_MASK_TIMEOUT_S = 30.0


class StepFailed(Exception):
    """A step failed as a whole; the stream goes on."""

    def __init__(self, epoch: int, step: int, error: PagewireError) -> None:
        super().__init__(error.message)
        self.epoch = epoch
        self.step = step
        self.error = error


class HeartbeatDue:
    """A sign of life is due."""


Outgoing = StepResult | StepFailed | HeartbeatDue | PagewireError | None
"""What to send, the error that ends the stream, or None: its orderly end."""


class ExecuteSession:
    """Lives on the event loop. `outgoing` has what is to be sent; `end` closes the session."""

    def __init__(
        self,
        core_incarnation: str,
        epoch: int,
        worker: Worker,
        compute: ComputeThread,
        observers: Sequence[ExecuteObserver] = (),
    ) -> None:
        self.core_incarnation = core_incarnation
        self.epoch = epoch
        self.outgoing: asyncio.Queue[Outgoing] = asyncio.Queue()
        self.num_pending = 0
        self.idle_since_s = time.monotonic()
        """When the last plan ended; monotonic."""
        self._worker = worker
        self._compute = compute
        self._observers = observers
        self._loop = asyncio.get_running_loop()
        self._masks: dict[tuple[int, int], Future[GrammarMask]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_ended = False

    def submit(self, plan: StepPlan) -> None:
        """Queues a plan; its result or failure comes to `outgoing`."""
        arrived_ns, started_ns = time.monotonic_ns(), 0
        key = (plan.epoch, plan.step)
        mask: Future[GrammarMask] = Future()
        if plan.awaits_grammar_mask:
            self._masks[key] = mask

        def execute() -> StepResult | Deferred[StepResult]:
            nonlocal started_ns
            if self._is_ended:
                raise AbortedError("the stream that brought the plan has ended")
            started_ns = time.monotonic_ns()
            wait_ns = started_ns - arrived_ns
            started = self._worker.start(plan, lambda: _await_mask(mask), self._compute.deliver)
            if isinstance(started, Deferred):
                return Deferred(lambda: _waited(started.finish(), wait_ns), started.is_ready)
            return _waited(started, wait_ns)

        def tell(done: Future[StepResult], ended_ns: int) -> None:
            error = done.exception()
            for observer in self._observers if started_ns else ():
                observer.executed(plan, None if error else done.result(), error, started_ns, ended_ns)

        self._queue(execute, key, tell if self._observers else None)

    def submit_failure(self, epoch: int, step: int, error: PagewireError) -> None:
        """Reports a plan that could not be read, behind the results of the plans before it."""

        self._queue(lambda: self._worker.refuse(epoch, step, error), (epoch, step))

    def put_mask(self, mask: GrammarMask) -> None:
        """Hands a mask to its plan. One that nobody waits for (its step has failed) is dropped."""
        future = self._masks.pop((mask.epoch, mask.step), None)
        if future is None:
            where = fields(epoch=mask.epoch, step=mask.step)
            logger.info("a grammar mask comes that nobody waits for", extra=where)
        elif not future.done():
            future.set_result(mask)

    @property
    def is_ended(self) -> bool:
        """The stream is over, or about to be."""
        return self._is_ended

    def end(self, error: PagewireError | None) -> None:
        """Ends the session: plans that have not started will not, and `outgoing` ends with the error. Idempotent."""
        if self._is_ended:
            return
        self._is_ended = True
        for future in self._masks.values():
            if not future.done():
                future.set_exception(AbortedError("the stream ended before the grammar mask came"))
        self._masks.clear()
        self.outgoing.put_nowait(error)

    def prompt_heartbeat(self) -> None:
        """Makes the stream send a heartbeat if a plan is pending and nothing else is about to be sent."""
        if self.num_pending and not self._is_ended and self.outgoing.empty():
            self.outgoing.put_nowait(HeartbeatDue())

    async def wait_idle(self) -> None:
        """Returns when no plan is pending."""
        await self._idle.wait()

    def _queue(
        self,
        execute: Callable[[], StepResult | Deferred[StepResult]],
        key: tuple[int, int],
        tell: Callable[[Future[StepResult], int], None] | None = None,
    ) -> None:
        # Results count until they are taken: a core that sends and does not read must not fill the memory.
        if self.num_pending + self.outgoing.qsize() >= MAX_PENDING_PLANS:
            self.end(ResourceExhaustedError(f"more than {MAX_PENDING_PLANS} plans or results wait on the stream"))
            return
        self.num_pending += 1
        self._idle.clear()
        future: Future[StepResult] = self._compute.submit(execute, delivers=True)
        future.add_done_callback(lambda done: self._loop.call_soon_threadsafe(self._on_done, done, key))
        if tell is not None:
            future.add_done_callback(lambda done: self._tell_soon(tell, done))

    def _tell_soon(self, tell: Callable[[Future[StepResult], int], None], done: Future[StepResult]) -> None:
        """Tells the observers of a step that has ended now, a turn of the loop later: its result sets off first."""
        ended_ns = time.monotonic_ns()
        self._loop.call_soon_threadsafe(lambda: self._loop.call_soon(tell, done, ended_ns))

    def _on_done(self, future: Future[StepResult], key: tuple[int, int]) -> None:
        self.num_pending -= 1
        self._masks.pop(key, None)
        if not self.num_pending:
            self.idle_since_s = time.monotonic()
            self._idle.set()
        error = future.exception()
        if self._is_ended:
            return
        if error is None:
            self.outgoing.put_nowait(future.result())
        elif isinstance(error, FailedPreconditionError):
            # A gap in the steps, or no cache: nothing that follows can be right either.
            self.end(error)
        else:
            if not isinstance(error, PagewireError):
                logger.error("step %d failed", key[1], exc_info=error, extra=fields(epoch=key[0], step=key[1]))
                error = InternalError(f"{type(error).__name__}: {error}")
            self.outgoing.put_nowait(StepFailed(*key, error))


def _waited(result: StepResult, wait_ns: int) -> StepResult:
    result.timings.wait_ns = wait_ns
    return result


def _await_mask(mask: Future[GrammarMask]) -> GrammarMask:
    try:
        return mask.result(GRAMMAR_MASK_TIMEOUT_S)
    except TimeoutError:
        raise DeadlineExceededError(f"no grammar mask came within {GRAMMAR_MASK_TIMEOUT_S:g} s") from None
