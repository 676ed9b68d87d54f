"""The engine's hold on its executor: it hands steps over, waits for them, and knows when the worker is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from core_svc.executor import Executor
from core_svc.plan_builder import ScheduledStep
from pagewire.errors import InternalError, PagewireError, UnavailableError
from pagewire.plan import StepResult

T = TypeVar("T")


@dataclass(slots=True)
class InFlight:
    """A step that was handed to the executor and whose result is not committed."""

    step: ScheduledStep
    future: Future[StepResult]
    lost: Future[PagewireError]
    """Resolved when the worker that has the step is lost."""
    submitted_ns: int


class ExecutorLink:
    """mark_lost and renew may be called from any thread, under the engine's lock; the rest is for the engine thread.

    Losing a worker and getting a new one are noticed at once by callers of other threads, and by the engine thread
    when it comes to the message: generations tell whether a failure belongs to a worker that was replaced already.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lost: Future[PagewireError] = Future()
        """Resolved while there is no worker."""
        self._newest_generation = 0
        self._generation = 0

    def mark_lost(self, error: PagewireError) -> bool:
        """Ends a wait for a step that will never come; returns False where the worker was lost already."""
        if self._lost.done():
            return False
        self._lost.set_result(error)
        return True

    def renew(self) -> None:
        """There is a new worker."""
        self._lost = Future()
        self._newest_generation += 1

    def use_newest(self) -> None:
        """From now on the engine's steps are for the new worker."""
        self._generation = self._newest_generation

    @property
    def is_newest(self) -> bool:
        """Whether the engine's steps are for the worker that is there now."""
        return self._generation == self._newest_generation

    def submit(self, step: ScheduledStep) -> InFlight:
        """Hands a step over."""
        submitted_ns = time.monotonic_ns()
        return InFlight(step, self._executor.submit(step.plan), self._lost, submitted_ns)

    def result(self, in_flight: InFlight) -> StepResult:
        """The step's result; raises what it failed with, or what mark_lost was told while it ran."""
        lost, future = in_flight.lost, in_flight.future
        if not future.done():
            futures: tuple[Future[Any], ...] = (future, lost)
            wait(futures, return_when=FIRST_COMPLETED)
        if not future.done():
            raise lost.result()
        return future.result()

    def call(self, call: Callable[[Executor], T]) -> T:
        """Calls the executor between steps. Raises PagewireError: UnavailableError where the worker is gone."""
        if self._lost.done():
            raise UnavailableError("the core has no worker")
        try:
            return call(self._executor)
        except PagewireError:
            raise
        except Exception as error:
            raise InternalError(f"the worker failed: {error}") from error
