"""The engine: receive, schedule, execute, update, publish, once per step, on one plain thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from core_svc.config import EngineConfig
from core_svc.executor import CacheInfo, Executor
from core_svc.executor_link import ExecutorLink, InFlight
from core_svc.inbox import (
    Abort,
    Add,
    DropFrontend,
    ExecutorLost,
    Inbox,
    Message,
    ResumeWith,
    Shutdown,
    Utility,
    refuse,
    reject,
    resolve,
)
from core_svc.intake import Intake
from core_svc.kv_cache_manager import KVCacheManager
from core_svc.kv_events import AllBlocksCleared, KvEvent
from core_svc.plan_builder import ScheduledStep
from core_svc.scheduler import Scheduler
from core_svc.step_log import log_step
from core_svc.utilities import Utilities
from core_svc.validation import limits_of, request_violations
from pagewire.engine import (
    AbortOutcome,
    AbortReason,
    Command,
    CommandResult,
    CoreStats,
    EngineRequest,
    ModelInfo,
    StepOutputs,
)
from pagewire.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    PagewireError,
    ResourceExhaustedError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
Publish = Callable[[str, StepOutputs], None]
"""Takes (frontend incarnation, outputs); called on the engine thread, must not block."""


class EngineCore:
    """One model's scheduler loop.

    add, abort, utility, drop_frontend, shutdown, fail, resume_with, validate and stats may be called from any thread;
    run, step and has_work belong to the engine thread.
    """

    def __init__(
        self,
        executor: Executor,
        model: ModelInfo,
        cache: CacheInfo,
        config: EngineConfig,
        publish: Publish,
        on_kv_events: Callable[[list[KvEvent]], None] | None = None,
        epoch: int = 1,
    ) -> None:
        self.config = config
        self.epoch = epoch
        self.sleep_level = 0
        self.step_started_ns = 0
        """Monotonic start of the step that runs now; 0 between steps. Read by the edge's watchdog."""
        self._link = ExecutorLink(executor)
        self._model = model
        self.cache = cache
        self._publish_to = publish
        self._on_kv_events = on_kv_events
        self._limits = limits_of(model, cache.num_blocks, config)
        self.scheduler = Scheduler(config, self._new_kv(cache), epoch=epoch)
        self._inbox = Inbox()
        self._received: deque[Message] = deque()
        """Messages out of the inbox that are not dealt with."""
        self._utilities = Utilities(self)
        self._intake = Intake(self.scheduler)
        self._is_lost = False
        self._shutdown_ns: int | None = None
        # Shared with the callers' threads, under the lock.
        self._lock = threading.Lock()
        self._num_pending_adds = 0
        self._refusal: UnavailableError | None = None
        self._is_stopped = False

    @property
    def model(self) -> ModelInfo:
        """The model as it is served: max_model_len is cut to what the KV pool can hold."""
        return replace(self._model, max_model_len=self._limits.max_num_tokens)

    @property
    def num_steps(self) -> int:
        return self.scheduler.num_steps

    # --- from any thread ---

    def validate(self, request: EngineRequest, path: str = "requests[0]") -> None:
        """Raises InvalidArgumentError for a request that could never run here."""
        if found := request_violations(request, self._limits, path):
            raise InvalidArgumentError(found)

    def add(self, frontend_incarnation: str, requests: Sequence[EngineRequest]) -> None:
        """Hands over requests, all or none; a known id changes nothing.

        Raises InvalidArgumentError, ResourceExhaustedError above max_num_requests, UnavailableError while the engine
        drains or has no worker.
        """
        found = [v for i, r in enumerate(requests) for v in request_violations(r, self._limits, f"requests[{i}]")]
        if found:
            raise InvalidArgumentError(found)
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            num_held = len(self.scheduler.requests) + self._num_pending_adds
            if num_held + len(requests) > self.config.max_num_requests:
                raise ResourceExhaustedError(
                    f"the core holds {num_held} requests, max_num_requests is {self.config.max_num_requests}",
                    retry_after_s=1.0,
                )
            self._num_pending_adds += len(requests)
            self._inbox.put(Add(frontend_incarnation, list(requests)))

    def abort(
        self, frontend_incarnation: str, request_ids: Sequence[int], reason: AbortReason
    ) -> Future[list[AbortOutcome]]:
        """Ends requests; idempotent. The future has one outcome per id, in order."""
        message = Abort(frontend_incarnation, list(request_ids), reason)
        self._put(message, message.future)
        return message.future

    def utility(self, command: Command) -> Future[CommandResult]:
        """Runs an administrative command; its errors are PagewireErrors in the future."""
        message = Utility(command)
        self._put(message, message.future)
        return message.future

    def drop_frontend(self, frontend_incarnation: str, reason: AbortReason) -> None:
        """Ends everything of a frontend that is gone and publishes nothing to it."""
        self._inbox.put(DropFrontend(frontend_incarnation, reason))

    def shutdown(self, drain_s: float = 0.0) -> None:
        """Refuses adds, lets requests finish for drain_s, aborts the rest; then run returns."""
        with self._lock:
            self._refusal = UnavailableError("the core shuts down", reason="SHUTTING_DOWN")
            self._inbox.put(Shutdown(time.monotonic_ns() + int(drain_s * 1e9)))

    def fail(self, error: PagewireError) -> None:
        """Ends every request with the error, a step that runs included; adds are refused until resume_with."""
        with self._lock:
            if self._link.mark_lost(error):
                self._refusal = self._refusal or UnavailableError(f"the core has no worker: {error.message}")
                self._inbox.put(ExecutorLost(error))

    def resume_with(self, cache: CacheInfo, epoch: int) -> Future[None]:
        """Goes on after fail with a worker whose pool is new and empty; adds are taken from now on."""
        message = ResumeWith(cache, epoch)
        with self._lock:
            if self._shutdown_ns is None:
                self._refusal = None
            self._link.renew()
            self._limits = limits_of(self._model, cache.num_blocks, self.config)
            self._inbox.put(message)
        return message.future

    def stats(self) -> CoreStats:
        """Numbers as of now."""
        scheduler = self.scheduler
        num_running = scheduler.num_running
        return replace(
            scheduler.stats,
            num_running=num_running,
            num_waiting=max(0, len(scheduler.requests) - num_running) + self._num_pending_adds,
            num_used_blocks=scheduler.kv.pool.num_used_blocks,
            num_steps=scheduler.num_steps,
            is_paused=scheduler.is_paused,
            sleep_level=self.sleep_level,
            epoch=self.epoch,
        )

    def _put(self, message: Message, future: Future[T]) -> None:
        with self._lock:
            if self._is_stopped:
                reject(future, UnavailableError("the core has shut down"))
            else:
                self._inbox.put(message)

    # --- the loop ---

    def run(self) -> None:
        """Steps while there is something to do, blocks while there is not; returns after shutdown, raises faults."""
        try:
            while not self._is_stopped:
                if not self._inbox and not self._can_step:
                    self._inbox.wait(self._idle_timeout_s())
                self.step()
        except BaseException as error:
            self._stop(UnavailableError(f"the core died: {error!r}"))
            raise

    def step(self) -> bool:
        """One transaction: receive, schedule, execute, update, publish. Returns whether anything was done."""
        self.step_started_ns = time.monotonic_ns()
        has_received = self._receive()
        in_flight = self._execute(self._schedule())
        self._update(in_flight)
        self._utilities.answer_pauses()
        has_published = self._publish()
        self._stop_if_done()
        self.step_started_ns = 0
        return has_received or in_flight is not None or has_published

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

    def _receive(self) -> bool:
        self._received.extend(self._inbox.take())
        has_received = bool(self._received)
        while self._received:
            self._handle(self._received[0])
            self._received.popleft()
        self._intake.expire_deadlines()
        if self._shutdown_ns is not None and time.monotonic_ns() >= self._shutdown_ns:
            self._intake.abort_all(AbortReason.SHUTDOWN)
        return has_received

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
        self.scheduler.stats.schedule_s += (time.monotonic_ns() - started_ns) / 1e9
        return step

    def _execute(self, step: ScheduledStep | None) -> InFlight | None:
        if step is None:
            return None
        try:
            return self._link.submit(step)
        except Exception as error:
            self._fail_step(step, error)
            return None

    def _update(self, in_flight: InFlight | None) -> None:
        """Waits for the step's result, drains the aborts that came meanwhile, and commits."""
        if in_flight is None:
            return
        step = in_flight.step
        try:
            result = self._link.result(in_flight)
        except Exception as error:
            self._fail_step(step, error)
            return
        executed_ns = time.monotonic_ns()
        self._receive_aborts()
        self.scheduler.update(step, result)
        self.scheduler.stats.execute_s += (executed_ns - in_flight.submitted_ns) / 1e9
        self.scheduler.stats.update_s += (time.monotonic_ns() - executed_ns) / 1e9
        if self.config.log_requests:
            log_step(step)

    def _publish(self) -> bool:
        started_ns = time.monotonic_ns()
        outputs = self.scheduler.outputs.take(self.scheduler.num_steps)
        for frontend_incarnation, step_outputs in outputs:
            self._publish_to(frontend_incarnation, step_outputs)
        if self._on_kv_events is not None and (events := self.scheduler.kv.take_events()):
            self._on_kv_events(events)
        if outputs:
            self.scheduler.stats.publish_s += (time.monotonic_ns() - started_ns) / 1e9
        return bool(outputs)

    # --- failures ---

    def _fail_step(self, step: ScheduledStep, error: Exception) -> None:
        """A step failed: its requests end if the worker lives, everything ends if it does not."""
        if isinstance(error, PagewireError) and not isinstance(error, UnavailableError | FailedPreconditionError):
            logger.error("step %d failed: %s", step.number, error)
            self.scheduler.fail_step(step, error.code, error.message)
            return
        logger.error("the executor is lost in step %d", step.number, exc_info=error)
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
        self.cache, self.epoch = cache, epoch
        self._limits = limits_of(self._model, cache.num_blocks, self.config)
        self.scheduler.restart_cache(self._new_kv(cache), epoch)
        too_large = [r for r in self.scheduler.requests.values() if r.max_num_tokens > self._limits.max_num_tokens]
        self._intake.end_with_error(too_large, ResourceExhaustedError("the new KV pool is too small for the request"))
        if self._on_kv_events is not None:
            self._on_kv_events([AllBlocksCleared()])

    def _new_kv(self, cache: CacheInfo) -> KVCacheManager:
        return KVCacheManager(
            cache.num_blocks,
            self.config.block_size,
            enable_caching=self.config.enable_prefix_caching,
            is_recording_events=self._on_kv_events is not None,
        )
