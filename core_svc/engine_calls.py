"""What other threads ask of an engine: they check, count, and put messages into its inbox."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from core_svc.config import EngineConfig
from core_svc.executor import CacheInfo, Executor
from core_svc.executor_link import ExecutorLink
from core_svc.inbox import Abort, Add, DropFrontend, ExecutorLost, Inbox, Message, ResumeWith, Shutdown, Utility, reject
from core_svc.scheduler import Scheduler
from core_svc.validation import limits_of, request_violations
from pagewire.engine import (
    AbortOutcome,
    AbortReason,
    Command,
    CommandResult,
    CoreStats,
    EngineRequest,
    ModelInfo,
)
from pagewire.errors import InvalidArgumentError, PagewireError, ResourceExhaustedError, UnavailableError

T = TypeVar("T")


class EngineCalls:
    """The part of an engine that may be used from any thread; what the threads share is under one lock."""

    def __init__(
        self, executor: Executor, model: ModelInfo, cache: CacheInfo, config: EngineConfig, scheduler: Scheduler
    ) -> None:
        self.config = config
        self.cache = cache
        self.scheduler = scheduler
        self.sleep_level = 0
        self.step_started_ns = 0
        """Monotonic start of the step that runs now; 0 between steps. Read by the edge's watchdog."""
        self._link = ExecutorLink(executor)
        self._model = model
        self._limits = limits_of(model, cache.num_blocks, config)
        self._inbox = Inbox()
        self._shutdown_ns: int | None = None
        self._lock = threading.Lock()
        self._num_pending_adds = 0
        self._refusal: UnavailableError | None = None
        self._is_stopped = False

    @property
    def epoch(self) -> int:
        return self.scheduler.epoch

    @property
    def model(self) -> ModelInfo:
        """The model as it is served: max_model_len is cut to what the KV pool can hold."""
        return replace(self._model, max_model_len=self._limits.max_num_tokens)

    @property
    def num_steps(self) -> int:
        return self.scheduler.num_steps

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
