"""How other threads reach the engine thread: one ordered inbox, and a short cut for aborts.

An abort lies in both. The short cut is drained between execution and commit, so that a request aborted while its step
ran gets nothing from that step; the ordered inbox makes sure that an abort never overtakes the add before it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from core_svc.executor import CacheInfo
from pagewire.engine import AbortOutcome, AbortReason, Command, CommandResult, EngineRequest
from pagewire.errors import PagewireError

T = TypeVar("T")
MAX_WAIT_S = 86_400.0


@dataclass(slots=True, eq=False)
class Add:
    """Requests to queue; validated already."""

    frontend_incarnation: str
    requests: Sequence[EngineRequest]
    received_ns: int = field(default_factory=time.monotonic_ns)
    """Deadlines and queue times count from here."""


@dataclass(slots=True, eq=False)
class Abort:
    """Requests to end; outcomes fill up, and the future is resolved when all are known."""

    frontend_incarnation: str
    request_ids: Sequence[int]
    reason: AbortReason
    future: Future[list[AbortOutcome]] = field(default_factory=Future)
    outcomes: dict[int, AbortOutcome] = field(default_factory=dict)
    """By index in request_ids."""

    @property
    def is_done(self) -> bool:
        return len(self.outcomes) == len(self.request_ids)


@dataclass(slots=True, eq=False)
class DropFrontend:
    """End everything of a frontend that is gone, and tell it nothing."""

    frontend_incarnation: str
    reason: AbortReason


@dataclass(slots=True, eq=False)
class Utility:
    """An administrative command."""

    command: Command
    future: Future[CommandResult] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class Shutdown:
    """Stop when nothing is alive any more, at deadline_ns (monotonic) at the latest."""

    deadline_ns: int


@dataclass(slots=True, eq=False)
class ExecutorLost:
    """The worker is gone and all KV with it."""

    error: PagewireError


@dataclass(slots=True, eq=False)
class ResumeWith:
    """A worker is there again, with an empty pool."""

    cache: CacheInfo
    epoch: int
    future: Future[None] = field(default_factory=Future)


Message = Add | Abort | DropFrontend | Utility | Shutdown | ExecutorLost | ResumeWith


class Inbox:
    """Messages to the engine thread, in order. put and put_abort may be called from any thread."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._messages: deque[Message] = deque()
        self._aborts: deque[Abort] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Message) -> None:
        """Adds a message and wakes the engine thread."""
        with self._condition:
            self._messages.append(message)
            if isinstance(message, Abort):
                self._aborts.append(message)
            self._condition.notify()

    def take(self) -> list[Message]:
        """All messages, in order."""
        with self._condition:
            messages, self._messages = list(self._messages), deque()
            self._aborts.clear()
        return messages

    def take_aborts(self) -> list[Abort]:
        """Aborts that came since the last call of take or take_aborts; they stay in the ordered inbox as well."""
        if not self._aborts:
            return []
        with self._condition:
            aborts, self._aborts = list(self._aborts), deque()
        return aborts

    def wait(self, timeout_s: float | None) -> None:
        """Blocks until a message is there or the timeout (a day at most) has passed; None waits for ever."""
        with self._condition:
            if not self._messages:
                # A deadline may lie farther off than a condition can wait; who wakes early looks again.
                self._condition.wait(None if timeout_s is None else min(timeout_s, MAX_WAIT_S))


def resolve(future: Future[T], result: T) -> None:
    """Sets a future's result unless its owner gave it up."""
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_result(result)


def reject(future: Future[Any], error: BaseException) -> None:
    """Sets a future's exception unless its owner gave it up."""
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_exception(error)


def refuse(message: Message, error: BaseException) -> None:
    """Answers a message that will not be dealt with, where somebody waits for an answer."""
    match message:
        case Abort(future=future) | Utility(future=future) | ResumeWith(future=future):
            reject(future, error)
