"""Every frontend's outputs between the engine thread and the event loop: who is connected, who is owed what, leases."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from core_svc.merge_outputs import empty_outputs
from core_svc.output_buffer import OutputBuffer
from pagewire.engine import AbortReason, CoreStats, StepOutputs
from pagewire.errors import AbortedError, FailedPreconditionError, PagewireError, ResourceExhaustedError

logger = logging.getLogger(__name__)


class OutputStream:
    """One open stream of a frontend. `ended` gets the error that ends it from this side."""

    def __init__(self, session: FrontendSession) -> None:
        self.session = session
        self.wake = asyncio.Event()
        self.is_heartbeat_due = False
        self.last_stats: CoreStats | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, error: BaseException) -> None:
        """Ends the stream with an error; the first one counts."""
        if not self.ended.done():
            self.ended.set_exception(error)


class FrontendSession:
    """A frontend incarnation: its buffer, and its stream while one is open."""

    def __init__(self, incarnation: str, max_bytes: int) -> None:
        self.incarnation = incarnation
        self.buffer = OutputBuffer(max_bytes)
        self.stream: OutputStream | None = None
        self.lease: asyncio.TimerHandle | None = None


class OutputHub:
    """All sessions. `publish` is for the engine thread; everything else runs on the event loop that made the hub."""

    def __init__(
        self,
        *,
        lease_s: float = 5.0,
        max_buffer_bytes: int = 64 * 2**20,
        on_dropped: Callable[[str, AbortReason], None] = lambda incarnation, reason: None,
    ) -> None:
        """`on_dropped`: told that a frontend is gone and why, so that the engine aborts what it has."""
        self._loop = asyncio.get_running_loop()
        self._lease_s = lease_s
        self._max_buffer_bytes = max_buffer_bytes
        self.on_dropped = on_dropped
        self._sessions: dict[str, FrontendSession] = {}
        self._is_wake_scheduled = False
        self._on_wake: list[Callable[[], None]] = []

    def publish(self, incarnation: str, outputs: StepOutputs) -> None:
        """Takes a step's outputs for one frontend. Any thread; one wake-up of the loop serves many calls."""
        session = self._sessions.get(incarnation)
        if session is not None:
            session.buffer.append(outputs)
            self.wake_soon()

    def wake_soon(self) -> None:
        """Wakes the loop once, however often it is called before it runs. Any thread."""
        if not self._is_wake_scheduled:
            self._is_wake_scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                # The loop is closed: the process ends, and nobody is left to read.
                logger.debug("outputs after the end of the event loop")

    def add_wake_listener(self, listener: Callable[[], None]) -> None:
        """Calls `listener` on the loop at each wake-up."""
        self._on_wake.append(listener)

    def open(self, incarnation: str, num_received: Mapping[int, int]) -> tuple[OutputStream, list[int], list[int]]:
        """Opens the one stream of a frontend; an older one ends with ABORTED.

        Returns it, the named requests that are not known here, and the live ones that the frontend did not name.
        """
        session = self._sessions.get(incarnation)
        if session is None:
            session = self._sessions[incarnation] = FrontendSession(incarnation, self._max_buffer_bytes)
        if session.stream is not None:
            session.stream.end(AbortedError("another StreamOutputs of this frontend took over", reason="REPLACED"))
        if session.lease is not None:
            session.lease.cancel()
            session.lease = None
        unknown, unwanted = session.buffer.reopen(num_received)
        stream = session.stream = OutputStream(session)
        stream.wake.set()
        return stream, unknown, unwanted

    def close(self, stream: OutputStream) -> None:
        """Notes that a stream has ended; the lease runs from now on, unless another stream took over."""
        session = stream.session
        if session.stream is not stream or self._sessions.get(session.incarnation) is not session:
            return
        session.stream = None
        session.lease = self._loop.call_later(self._lease_s, self._expire, session)

    def require_open(self, incarnation: str) -> OutputBuffer:
        """The buffer of a frontend whose stream is open. Raises FailedPreconditionError otherwise."""
        session = self._sessions.get(incarnation)
        if session is None or session.stream is None:
            raise FailedPreconditionError(
                f"StreamOutputs of frontend incarnation {incarnation!r} is not open: open it first",
                reason="STREAM_NOT_OPEN",
            )
        return session.buffer

    def knows_all(self, incarnation: str, request_ids: Iterable[int]) -> bool:
        """Whether a frontend's stream is open and each of the requests was added before."""
        session = self._sessions.get(incarnation)
        return session is not None and session.stream is not None and session.buffer.knows_all(request_ids)

    def send_stats(self, step: int, stats: CoreStats) -> None:
        """Sends numbers to every frontend, which balance by them; only where they have changed, or it is new."""
        stats = replace(stats, num_frontends=self.num_open)
        for session in self._sessions.values():
            if (stream := session.stream) is not None and stream.last_stats != stats:
                stream.last_stats = stats
                session.buffer.append(empty_outputs(step, stats))
                stream.wake.set()

    def send_heartbeats(self) -> None:
        """Asks every open stream for a heartbeat."""
        for session in self._sessions.values():
            if session.stream is not None:
                session.stream.is_heartbeat_due = True
                session.stream.wake.set()

    def end_all(self, error: PagewireError) -> None:
        """Ends every stream with `error` and every lease without a word to the engine: the process stops."""
        for session in self._sessions.values():
            if session.lease is not None:
                session.lease.cancel()
            if session.stream is not None:
                session.stream.end(error)
        self._sessions.clear()

    @property
    def num_open(self) -> int:
        """Frontends with an open stream. Any thread."""
        return sum(session.stream is not None for session in list(self._sessions.values()))

    @property
    def has_unsent(self) -> bool:
        """Whether an open stream still has outputs to send."""
        return any(s.buffer.has_pending for s in self._sessions.values() if s.stream is not None)

    def _wake(self) -> None:
        self._is_wake_scheduled = False
        for session in list(self._sessions.values()):
            if session.buffer.has_overflowed:
                self._drop_slow(session)
            elif session.stream is not None and session.buffer.has_pending:
                session.stream.wake.set()
        for listener in self._on_wake:
            listener()

    def _drop_slow(self, session: FrontendSession) -> None:
        text = f"the frontend does not read its outputs: more than {self._max_buffer_bytes} bytes wait"
        logger.warning("frontend %s is dropped: %s", session.incarnation, text)
        if session.stream is not None:
            session.stream.end(ResourceExhaustedError(text, reason="SLOW_CONSUMER"))
        self._drop(session, AbortReason.SLOW_CONSUMER)

    def _expire(self, session: FrontendSession) -> None:
        logger.warning(
            "frontend %s is dropped: its stream was broken for %g s, %d requests are aborted",
            session.incarnation,
            self._lease_s,
            session.buffer.num_live,
        )
        self._drop(session, AbortReason.LEASE_EXPIRED)

    def _drop(self, session: FrontendSession, reason: AbortReason) -> None:
        if session.lease is not None:
            session.lease.cancel()
        self._sessions.pop(session.incarnation, None)
        self.on_dropped(session.incarnation, reason)
