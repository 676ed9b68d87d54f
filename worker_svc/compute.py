"""The one thread that computes.

Not asyncio's pool nor a pool of several: torch's OpenMP keeps a team of threads per calling thread, so a second caller
would double them, and the kernels' own team serves one caller at a time. A daemon, so that a computation that hangs
cannot keep the process from ending.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")
SWITCH_INTERVAL_S = 0.0005
"""How long the event loop may keep Python to itself while the compute thread, back from a kernel, waits for it. Between
0.1 and 5 ms neither steps nor the idle time between them changed measurably; the bound is for a result of megabytes.
"""

POLL_S = 0.0001
"""How often a device is asked whether a step has ended while no next one is there; a step takes milliseconds."""


def take_short_turns() -> None:
    """Lets threads of this process ask for Python sooner than after the interpreter's default of 5 ms."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


class Deferred(Generic[T]):
    """A call's value that is still on its way, such as on a GPU.

    `finish` waits for it; `is_ready` tells, without waiting, whether finish would not have to.
    """

    def __init__(self, finish: Callable[[], T], is_ready: Callable[[], bool] = lambda: True) -> None:
        self.finish = finish
        self.is_ready = is_ready


@dataclass(slots=True)
class _Call:
    """A call that waits for its turn, and what came of it."""

    function: Callable[[], Any]
    delivers: bool
    future: Future[Any] = field(default_factory=Future)
    value: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self.function()
        except BaseException as error:
            self.error = error

    def is_ready(self) -> bool:
        return not isinstance(self.value, Deferred) or self.value.is_ready()

    def deliver(self) -> None:
        if isinstance(self.value, Deferred):
            try:
                self.value = self.value.finish()
            except BaseException as error:
                self.error = error
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.value)


class ComputeThread:
    """Runs what is submitted, one after another, in order.

    Who gets a result wakes up and takes Python for its own work, just when the next call wants to begin. So where the
    next call is there already and promises to call `deliver` (submit's `delivers`), the result waits until it does,
    which it should as soon as its own Python is done and the processor is busy without it. A result that is Deferred
    waits for the next call as long as the device works on it, so that the device has its next work before it ends.
    """

    def __init__(self, name: str = "compute") -> None:
        self._work: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._held: _Call | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T | Deferred[T]], *, delivers: bool = False) -> Future[T]:
        """Queues a call; its result or exception is the future's. A future cancelled in time is not run.

        A value that is Deferred is finished when its result is handed out.
        """
        call = _Call(function, delivers)
        self._work.put(call)
        return call.future

    def deliver(self) -> None:
        """Hands out the result that is held back, if there is one. For the compute thread."""
        if (held := self._held) is not None:
            self._held = None
            held.deliver()

    def close(self, timeout_s: float) -> bool:
        """Ends the thread after what is queued; whether it ended in time."""
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        call = self._work.get()
        while call is not None:
            if call.future.set_running_or_notify_cancel():
                call.run()
                self.deliver()  # the result before, if this call did not: results come in order
                self._held = call
            # The loop's variable must not keep a model alive while the thread waits.
            del call
            call = self._next()
        self.deliver()

    def _next(self) -> _Call | None:
        """The next call; delivers what is held unless the call will."""
        try:
            call = self._poll()
        except queue.Empty:
            self.deliver()
            return self._work.get()
        if call is None or not call.delivers:
            self.deliver()
        return call

    def _poll(self) -> _Call | None:
        """The next call, if it comes before the held value is ready: it can begin then. queue.Empty otherwise."""
        while self._held is not None and not self._held.is_ready():
            with contextlib.suppress(queue.Empty):
                return self._work.get(timeout=POLL_S)
        return self._work.get_nowait()
