"""What may watch an engine (metrics, traces), and what it is told: after a turn of the loop, outside of its decisions.

The scheduler notes in its journal what happens to requests, the engine keeps what each step took; observers get both
once the step's outputs are published. Without observers nothing is kept.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from core_svc.plan_builder import ScheduledStep
from core_svc.request import Request
from pagewire.engine import TraceContext
from pagewire.plan import StepResult


class EventKind(enum.Enum):
    """What happened to a request."""

    ADDED = "added"
    ADMITTED = "admitted"
    """It took a slot, the first time or again; num_tokens: tokens whose KV was in the prefix cache."""
    PREEMPTED = "preempted"
    """It lost its slot; num_tokens: computed tokens that have to be computed again."""
    ENDED = "ended"
    """Once for each request; request.finished says how."""


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """One line of the journal."""

    kind: EventKind
    request: Request
    time_ns: int
    """Monotonic, as all times here."""
    num_tokens: int = 0


class Journal:
    """Keeps events until they are taken; nothing while it is off. Belongs to the engine thread."""

    def __init__(self) -> None:
        self.is_on = False
        self._events: list[RequestEvent] = []

    def note(self, kind: EventKind, request: Request, num_tokens: int = 0) -> None:
        """Keeps what happens now."""
        if self.is_on:
            self._events.append(RequestEvent(kind, request, time.monotonic_ns(), num_tokens))

    def take(self) -> list[RequestEvent]:
        """Hands over what happened since the last call, in order."""
        events, self._events = self._events, []
        return events


@dataclass(slots=True)
class StepRecord:
    """One step from its plan to its commit, and what the worker said of it."""

    step: ScheduledStep
    result: StepResult | None
    """None where it failed as a whole."""
    error: Exception | None
    submitted_ns: int
    """When the worker got it, or ended the step before it where that was later."""
    executed_ns: int
    """When its result was there."""
    updated_ns: int
    """When it was committed."""


class EngineObserver(Protocol):
    """Watches an engine from the engine's thread; must neither block nor raise.

    The journal of events is kept where any observer needs it: one that does not sets its attribute `needs_events` to
    False.
    """

    def begin_step(self, step: ScheduledStep) -> TraceContext | None:
        """Called before a step is handed to the worker. Returns the trace that the worker's part belongs to, if any."""
        ...

    def observe(self, steps: Sequence[StepRecord], events: Sequence[RequestEvent], publish_ns: int) -> None:
        """Called after a turn of the loop in which anything happened. publish_ns: what publishing took."""
        ...
