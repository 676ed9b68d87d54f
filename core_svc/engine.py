"""The engine: receive, schedule, execute, update, publish, once per step, on one plain thread."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from core_svc.config import EngineConfig
from core_svc.engine_calls import EngineCalls
from core_svc.executor import CacheInfo, Executor
from core_svc.executor_link import InFlight
from core_svc.inbox import (
    Abort,
    Add,
    DropFrontend,
    ExecutorLost,
    Message,
    ResumeWith,
    Shutdown,
    Utility,
    refuse,
    resolve,
)
from core_svc.intake import Intake
from core_svc.kv_cache_manager import KVCacheManager
from core_svc.kv_events import AllBlocksCleared, KvEvent
from core_svc.observer import EngineObserver, StepRecord
from core_svc.plan_builder import ScheduledStep
from core_svc.scheduler import Scheduler
from core_svc.step_log import log_step
from core_svc.utilities import Utilities
from core_svc.validation import limits_of
from pagewire.engine import AbortReason, GetStats, ModelInfo, StepOutputs
from pagewire.errors import (
    FailedPreconditionError,
    PagewireError,
    ResourceExhaustedError,
    UnavailableError,
)
from pagewire.runtime.log_fields import fields

logger = logging.getLogger(__name__)

T = TypeVar("T")
Publish = Callable[[str, StepOutputs], None]
"""Takes (frontend incarnation, outputs); called on the engine thread, must not block."""


class EngineCore(EngineCalls):
    """One model's scheduler loop. Its own methods belong to the engine thread; EngineCalls are for any thread."""

    def __init__(
        self,
        executor: Executor,
        model: ModelInfo,
        cache: CacheInfo,
        config: EngineConfig,
        publish: Publish,
        on_kv_events: Callable[[list[KvEvent]], None] | None = None,
        epoch: int = 1,
        observers: Sequence[EngineObserver] = (),
    ) -> None:
        self._publish_to = publish
        self._on_kv_events = on_kv_events
        super().__init__(executor, model, cache, config, Scheduler(config, self._new_kv(cache, config), epoch=epoch))
        self._received: deque[Message] = deque()
        """Messages out of the inbox that are not dealt with."""
        self._utilities = Utilities(self)
        self._intake = Intake(self.scheduler)
        self._is_lost = False
        self._executed_ns = 0
        self._observers = observers
        self._records: list[StepRecord] = []
        self._publish_ns = 0
        self.scheduler.journal.is_on = any(getattr(observer, "needs_events", True) for observer in observers)

    # --- the loop ---

    def run(self) -> None:
        """Steps while there is something to do, blocks while there is not; returns after shutdown, raises faults."""
        in_flight: InFlight | None = None
        try:
            while not self._is_stopped:
                if in_flight is None and not self._inbox and not self._can_step:
                    self._inbox.wait(self._idle_timeout_s())
                in_flight = self.advance(in_flight)
        except BaseException as error:
            self._stop(UnavailableError(f"the core died: {error!r}"))
            raise

    def advance(self, in_flight: InFlight | None) -> InFlight | None:
        """One turn of the loop: `step_ahead`, or `step` without async_scheduling. Returns what is in flight then."""
        if self.config.async_scheduling:
            return self.step_ahead(in_flight)
        self.step()
        return None

    def step(self) -> bool:
        """One transaction: receive, schedule, execute, update, publish. Returns whether anything was done."""
        self.step_started_ns = time.monotonic_ns()
        has_received = bool(self._inbox)
        self._receive(None)
        submitted = self._submit(self._schedule())
        self._update(submitted, None)
        self._utilities.answer_pauses()
        has_published = self._publish()
        self._observe()
        self._stop_if_done()
        self.step_started_ns = 0
        return has_received or submitted is not None or has_published

    def step_ahead(self, in_flight: InFlight | None) -> InFlight | None:
        """The same with overlap: the next step is planned and submitted before the one in flight is waited for.

        Returns the step that is in flight then.
        """
        self.step_started_ns = time.monotonic_ns()
        in_flight = self._receive(in_flight)
        ahead = self._submit(self._schedule())
        ahead = self._update(in_flight, ahead)
        if ahead is None:
            self._utilities.answer_pauses()
        self._publish()
        self._observe()
        if ahead is None:
            self._stop_if_done()
        self.step_started_ns = 0
        return ahead

    def has_work(self) -> bool:
        """Whether there are unfinished requests, ended ones to flush to the worker, or messages to receive."""
        return bool(self._inbox or self.scheduler.requests or self._can_step)

    @property
    def _can_step(self) -> bool:
        return self.scheduler.has_work and not self.sleep_level and not self._is_lost

    def _idle_timeout_s(self) -> float | None:
        """Until the next thing that comes by time alone; None if there is none."""
        times = [t for t in (self._intake.next_deadline_ns, self._shutdown_ns) if t is not None]
        return max(0.0, (min(times) - time.monotonic_ns()) / 1e9) if times else None

    # --- receive ---

    def _receive(self, in_flight: InFlight | None) -> InFlight | None:
        """Deals with messages and deadlines; returns what is in flight then.

        Commands run between steps, and what is said of the worker is about the step that it has: before both, the step
        in flight is committed. A look at the numbers changes nothing and waits for nothing.
        """
        self._received.extend(self._inbox.take())
        while self._received:
            if _needs_commit(self._received[0]):
                in_flight = self._update(in_flight, None)
                self._publish()
            self._handle(self._received[0])
            self._received.popleft()
        self._intake.expire_deadlines()
        if self._shutdown_ns is not None and time.monotonic_ns() >= self._shutdown_ns:
            self._intake.abort_all(AbortReason.SHUTDOWN)
        return in_flight

    def _handle(self, message: Message) -> None:
        match message:
            case Add():
                refusal = self._refusal if self._is_lost else None
                self._intake.add(message, self._limits, refusal)
                with self._lock:
                    self._num_pending_adds -= len(message.requests)
            case Abort():
                self._intake.abort(message, is_in_order=True)
            case DropFrontend():
                self._intake.drop_frontend(message.frontend_incarnation, message.reason)
            case Utility():
                self._utilities.run(message)
            case Shutdown():
                self._shutdown_ns = message.deadline_ns
            case ExecutorLost():
                self._lose_executor(message.error)
            case ResumeWith():
                self._link.use_newest()
                self._is_lost = False
                self.sleep_level = 0
                self.start_epoch(message.cache, message.epoch)
                resolve(message.future, None)

    def _receive_aborts(self) -> None:
        for message in self._inbox.take_aborts():
            self._intake.abort(message, is_in_order=False)

    # --- schedule, execute, update, publish ---

    def _schedule(self) -> ScheduledStep | None:
        if not self._can_step:
            return None
        started_ns = time.monotonic_ns()
        is_throttled = (self.scheduler.num_steps + 1) % self.config.prefill_schedule_interval != 0
        step = self.scheduler.schedule(is_prefill_throttled=is_throttled)
        ended_ns = time.monotonic_ns()
        self.scheduler.stats.schedule_s += (ended_ns - started_ns) / 1e9
        if step is not None:
            step.planned_ns, step.scheduled_ns = started_ns, ended_ns
        return step

    def _submit(self, step: ScheduledStep | None) -> InFlight | None:
        if step is None:
            return None
        for observer in self._observers:
            step.plan.trace_context = observer.begin_step(step) or step.plan.trace_context
        try:
            return self._link.submit(step)
        except Exception as error:
            self._fail_step(step, error)
            return None

    def _update(self, in_flight: InFlight | None, ahead: InFlight | None) -> InFlight | None:
        """Waits for a step's result, drains the aborts that came meanwhile, and commits.

        Returns the step submitted behind it, or None where that one went down with it.
        """
        if in_flight is None:
            return ahead
        step = in_flight.step
        try:
            result = self._link.result(in_flight)
        except Exception as error:
            self._fail_step(step, error, ahead.step if ahead is not None else None)
            return None
        started_ns, executed_ns = max(in_flight.submitted_ns, self._executed_ns), time.monotonic_ns()
        self._executed_ns = executed_ns
        self._receive_aborts()
        self.scheduler.update(step, result)
        self.scheduler.stats.execute_s += (executed_ns - started_ns) / 1e9
        self.scheduler.stats.update_s += (time.monotonic_ns() - executed_ns) / 1e9
        self._keep(StepRecord(step, result, None, started_ns, executed_ns, time.monotonic_ns()))
        if self.config.log_requests:
            log_step(step)
        return ahead

    def _publish(self) -> bool:
        started_ns = time.monotonic_ns()
        outputs = self.scheduler.outputs.take(self.scheduler.num_steps)
        for frontend_incarnation, step_outputs in outputs:
            self._publish_to(frontend_incarnation, step_outputs)
        if self._on_kv_events is not None and (events := self.scheduler.kv.take_events()):
            self._on_kv_events(events)
        if outputs:
            publish_ns = time.monotonic_ns() - started_ns
            self._publish_ns += publish_ns
            self.scheduler.stats.publish_s += publish_ns / 1e9
        return bool(outputs)

    def _keep(self, record: StepRecord) -> None:
        if self._observers:
            self._records.append(record)

    def _observe(self) -> None:
        """Tells the observers what happened since they were told last."""
        if not self._observers:
            return
        steps, events, publish_ns = self._records, self.scheduler.journal.take(), self._publish_ns
        self._records, self._publish_ns = [], 0
        if steps or events:
            for observer in self._observers:
                observer.observe(steps, events, publish_ns)

    # --- failures ---

    def _fail_step(self, step: ScheduledStep, error: Exception, ahead: ScheduledStep | None = None) -> None:
        """A step failed, and with it the one behind it: its requests end if the worker lives, else all do."""
        now_ns = time.monotonic_ns()
        for failed in (step, ahead):
            if failed is not None:
                self._keep(StepRecord(failed, None, error, failed.scheduled_ns, now_ns, now_ns))
        if isinstance(error, PagewireError) and not isinstance(error, UnavailableError | FailedPreconditionError):
            logger.error("step %d failed: %s", step.number, error, extra=fields(step=step.number))
            self.scheduler.fail_step(step, error.code, error.message, ahead)
            return
        logger.error("the executor is lost in step %d", step.number, exc_info=error, extra=fields(step=step.number))
        lost = error if isinstance(error, UnavailableError) else UnavailableError(f"the worker is lost: {error}")
        self._lose_executor(lost)
        if self._link.is_newest:
            self.fail(lost)

    def _lose_executor(self, error: PagewireError) -> None:
        """Ends everything: the KV is gone. The engine stays alive for resume_with."""
        self._is_lost = True
        self._intake.end_with_error(list(self.scheduler.requests.values()), error)

    def _stop_if_done(self) -> None:
        """Ends the loop once a shutdown has nothing left to wait for."""
        if self._shutdown_ns is None or self.scheduler.requests or self._can_step:
            return
        self._stop(UnavailableError("the core has shut down", reason="SHUTTING_DOWN"))

    def _stop(self, error: UnavailableError) -> None:
        """Ends the loop. What is not dealt with, and what comes from now on, is refused with the error."""
        with self._lock:
            self._is_stopped = True
            self._refusal = self._refusal or error
            self._received.extend(self._inbox.take())
        self._utilities.cancel_pauses(error)
        for message in self._received:
            refuse(message, error)

    # --- for utilities ---

    def abort_all(self, reason: AbortReason) -> int:
        """Ends everything alive; returns how many requests that were."""
        return self._intake.abort_all(reason)

    def call_executor(self, call: Callable[[Executor], T]) -> T:
        """Calls the executor between steps. Raises PagewireError; a worker that is gone ends everything."""
        try:
            return self._link.call(call)
        except UnavailableError as error:
            self.fail(error)
            raise

    def start_epoch(self, cache: CacheInfo, epoch: int) -> None:
        """Goes on with a new, empty pool; nothing may run. Requests that it can't hold any more end with an error."""
        self.cache = cache
        self._limits = limits_of(self._model, cache.num_blocks, self.config)
        self.scheduler.restart_cache(self._new_kv(cache, self.config), epoch)
        too_large = [r for r in self.scheduler.requests.values() if r.max_num_tokens > self._limits.max_num_tokens]
        self._intake.end_with_error(too_large, ResourceExhaustedError("the new KV pool is too small for the request"))
        if self._on_kv_events is not None:
            self._on_kv_events([AllBlocksCleared()])

    def _new_kv(self, cache: CacheInfo, config: EngineConfig) -> KVCacheManager:
        return KVCacheManager(
            cache.num_blocks,
            config.block_size,
            enable_caching=config.enable_prefix_caching,
            is_recording_events=self._on_kv_events is not None,
        )


def _needs_commit(message: Message) -> bool:
    if isinstance(message, Utility):
        return not isinstance(message.command, GetStats)
    return isinstance(message, ExecutorLost | ResumeWith)
