"""A core's spans: `engine.request` of each request with its intervals, and `engine.step` of the steps they are in.

Steps are traces of their own, linked to the requests in them, for a step belongs to all of them. Only steps with a
sampled request are traced, and of those only a request's first ones and every so many later: a span takes a tenth of a
millisecond or two to make, encode and send. While no request is sampled, a step costs a look at a counter and at the
requests that it admits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from core_svc.observer import EventKind, RequestEvent, StepRecord
from core_svc.plan_builder import ScheduledStep
from core_svc.request import Request
from core_svc.trace_attributes import request_attributes, step_attributes
from pagewire.engine import FinishReason, TraceContext
from pagewire.runtime.tracing import SpanEvent

if TYPE_CHECKING:
    from core_svc.scheduler import Scheduler
    from pagewire.runtime.spans import OpenSpan, Tracer

DEFAULT_STEP_INTERVAL = 32
MAX_STEPS_NOTED = 128
"""Steps that a request's span names; later ones it counts."""
MAX_EVENTS = 64
"""Preemptions and resumptions that a request's span tells of; its attributes count all."""
MAX_OPEN_STEPS = 64
FAULTS = (FinishReason.ERROR, FinishReason.DEADLINE)


@dataclass(slots=True)
class TracedRequest:
    """A living request that is sampled."""

    span: OpenSpan
    link: Any
    """Names it in the spans of steps; made once."""
    events: list[SpanEvent] = field(default_factory=list)
    num_admissions: int = 0
    num_recomputed_tokens: int = 0
    num_steps: int = 0
    last_step: int = 0
    step_numbers: list[int] = field(default_factory=list)
    step_links: list[Any] = field(default_factory=list)
    """To those of its steps that are traced."""

    def note_step(self, number: int) -> None:
        """It is in this step."""
        self.num_steps += 1
        self.last_step = number
        if self.num_steps <= MAX_STEPS_NOTED:
            self.step_numbers.append(number)

    def note_traced_step(self, link: Any) -> None:
        """And that one is traced."""
        if len(self.step_links) < MAX_STEPS_NOTED:
            self.step_links.append(link)

    def note(self, event: SpanEvent) -> None:
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)


@dataclass(slots=True)
class OpenStep:
    """A step that is traced, until it is committed."""

    span: OpenSpan
    links: list[Any]
    num_traced: int
    num_preemptions: int
    kv_use: float


class TraceObserver:
    """Traces one engine. Belongs to its thread; `watch` comes before its loop.

    Args:
        tracer: makes the spans.
        step_interval: a sampled request has its first so many steps traced, and then every one of so many; 1: all.
    """

    def __init__(self, tracer: Tracer, step_interval: int = DEFAULT_STEP_INTERVAL) -> None:
        self._tracer = tracer
        self._step_interval = step_interval
        self._scheduler: Scheduler | None = None
        self._sampled: dict[Request, TracedRequest] = {}
        self._unsampled: set[Request] = set()
        """Settled once for each request."""
        self._steps: dict[int, OpenStep] = {}
        self._num_preemptions = 0

    def watch(self, scheduler: Scheduler) -> None:
        """Where the numbers come from that a step's span tells."""
        self._scheduler = scheduler

    def begin_step(self, step: ScheduledStep) -> TraceContext | None:
        """Begins the step's span if a sampled request is in it that is due."""
        num_preemptions = self._take_preemptions()
        if num_new := len(step.plan.new_requests):
            # A new request is scheduled before its events are told.
            self._begin_requests(step.requests[len(step.requests) - num_new :])
        if not self._sampled:
            return None
        scheduled = set(step.slots.tolist())
        present = [traced for request, traced in self._sampled.items() if request.slot in scheduled]
        is_due = False
        for traced in present:
            traced.note_step(step.number)
            is_due |= traced.num_steps <= self._step_interval or not traced.num_steps % self._step_interval
        if not is_due:
            return None
        span = self._tracer.begin_root("engine.step", "client", step.planned_ns)
        link = span.link
        for traced in present:
            traced.note_traced_step(link)
        if len(self._steps) >= MAX_OPEN_STEPS:
            self._steps.clear()
        links = [traced.link for traced in present[: self._tracer.max_links]]
        self._steps[step.number] = OpenStep(span, links, len(present), num_preemptions, self._kv_use())
        return span.trace_context

    def observe(self, steps: Sequence[StepRecord], events: Sequence[RequestEvent], publish_ns: int) -> None:
        """Ends the spans of what has ended."""
        if self._steps:
            for record in steps:
                if (found := self._steps.pop(record.step.number, None)) is not None:
                    self._end_step(record, found)
        for event in events:
            self._on_event(event)

    def _begin_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request in self._sampled or request in self._unsampled:
                continue
            if self._tracer.is_unsampled(request.trace_context):
                self._unsampled.add(request)
                continue
            span = self._tracer.begin("engine.request", "server", request.queued_ns, parent=request.trace_context)
            if span.is_sampled:
                self._sampled[request] = TracedRequest(span, span.link)
            else:
                self._unsampled.add(request)

    def _on_event(self, event: RequestEvent) -> None:
        request = event.request
        if event.kind is EventKind.ADDED:
            self._begin_requests((request,))
            return
        if event.kind is EventKind.ENDED:
            self._unsampled.discard(request)
            if (ended := self._sampled.pop(request, None)) is not None:
                self._end_request(request, ended, event.time_ns)
            return
        traced = self._sampled.get(request)
        if traced is None:
            return
        if event.kind is EventKind.PREEMPTED:
            traced.num_recomputed_tokens += event.num_tokens
            traced.note(SpanEvent("preempted", event.time_ns, {"pagewire.tokens": event.num_tokens}))
        elif event.kind is EventKind.ADMITTED:
            traced.num_admissions += 1
            if traced.num_admissions > 1:
                traced.note(SpanEvent("resumed", event.time_ns, {"pagewire.cached_tokens": event.num_tokens}))

    def _end_request(self, request: Request, traced: TracedRequest, ended_ns: int) -> None:
        tracer, span, finished = self._tracer, traced.span, request.finished
        reason = request.status.finish_reason
        first_ns = request.first_token_ns
        bounds = [("queue", request.queued_ns), ("prefill", request.scheduled_ns), ("decode", first_ns)]
        ends = [request.scheduled_ns or ended_ns, first_ns or ended_ns, ended_ns]
        for (name, start_ns), end_ns in zip(bounds, ends, strict=True):
            if start_ns:
                tracer.end(tracer.begin_child(span, name, "internal", start_ns), end_ns)
        events = list(traced.events)
        if first_ns:
            events.append(SpanEvent("first_token", first_ns))
        events.append(SpanEvent("finished", ended_ns, {"pagewire.finish_reason": reason.name.lower()}))
        events.sort(key=lambda event: event.time_ns)
        error = None
        if reason in FAULTS:
            error = finished.error_message if finished is not None and finished.error_message else reason.name.lower()
        attributes = request_attributes(request, traced)
        tracer.end(span, ended_ns, attributes, events=events, links=traced.step_links, error=error)

    def _end_step(self, record: StepRecord, found: OpenStep) -> None:
        attributes = step_attributes(record, found, self._scheduler)
        error = None if record.error is None else str(record.error)
        self._tracer.end(found.span, record.updated_ns, attributes, links=found.links, error=error)

    def _take_preemptions(self) -> int:
        """How many there were since the last step."""
        if self._scheduler is None:
            return 0
        before, self._num_preemptions = self._num_preemptions, self._scheduler.stats.num_preemptions
        return self._num_preemptions - before

    def _kv_use(self) -> float:
        if self._scheduler is None:
            return 0.0
        pool = self._scheduler.kv.pool
        return 1.0 - pool.num_free_blocks / max(pool.num_usable_blocks, 1)
