"""The one thread that computes.

Not asyncio's pool nor a pool of several: OpenMP and numba keep a team of threads per calling thread, so a second
caller would double them. A daemon, so that a computation that hangs cannot keep the process from ending.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
SWITCH_INTERVAL_S = 0.00002
"""How long the event loop may keep Python to itself while the compute thread, back from a kernel, waits for it."""


def take_short_turns() -> None:
    """Lets threads of this process ask for Python sooner than after the interpreter's default of 5 ms."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


class ComputeThread:
    """Runs what is submitted, one after another, in order."""

    def __init__(self, name: str = "compute") -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Queues a call; its result or exception is the future's. A future cancelled in time is not run."""
        future: Future[T] = Future()
        self._work.put((function, future))
        return future

    def close(self, timeout_s: float) -> bool:
        """Ends the thread after what is queued; whether it ended in time."""
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            function, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            # The loop variables must not keep a model alive while the thread waits.
            del item, function, future
