"""Spans that are made when they end: what they hold is known by then, and nothing is kept open by the library.

A span's place in its trace (its ids, and whether it is sampled) is settled when it begins, because others have to name
it as their parent meanwhile. Parents are always given: nothing here reads or sets an ambient context, so a span
can't slip into a trace that is not its own. Only this module and its tests import opentelemetry.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pagewire.engine import TraceContext
from pagewire.runtime.tracing import Attributes, SpanEvent

KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
RANDOM_TRACE_ID = 0x02
"""The flag of W3C trace context, level 2, that says that a trace id is random; handed on as it came."""
CLOCK_REFRESH_NS = 60 * 10**9
SAY_AGAIN_S = 60.0
"""How often the same complaint of the exporter is logged."""
_W3C = TraceContextTextMapPropagator()
_NOWHERE = Context()
"""No span. (None would mean the ambient context.)"""
_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.sdk.trace.export",
    "opentelemetry.sdk._shared_internal",
)


@dataclass(slots=True)
class OpenSpan:
    """A span that has begun."""

    name: str
    kind: SpanKind
    start_ns: int
    context: SpanContext
    parent: SpanContext | None

    @property
    def is_sampled(self) -> bool:
        """Whether it will be sent."""
        return self.context.trace_flags.sampled

    @property
    def trace_context(self) -> TraceContext:
        """How it is named on the wire, as a parent: W3C, version 00."""
        context = self.context
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        return TraceContext(parent, context.trace_state.to_header())

    @property
    def link(self) -> Link:
        """It, named by a span of another trace."""
        return Link(self.context)


class Tracer:
    """Begins and ends the spans of one process; for any thread. Times are monotonic nanoseconds.

    A span that `begin` finds not sampled has a context like any other, for those who come after; it must not be ended.
    """

    def __init__(self, exporter: SpanExporter, resource: Resource) -> None:
        self._exporter = _MakingExporter(exporter, resource)
        self._processor = BatchSpanProcessor(self._exporter)
        # The library reads OTEL_TRACES_SAMPLER where a provider is made.
        self._sampler = TracerProvider(resource=resource, shutdown_on_exit=False).sampler
        self._random = random.Random(os.urandom(32))
        self._clock = _WallClock()
        self._honours_unsampled = self._is_honouring_unsampled()
        limit = SpanLimits().max_links
        self.max_links = 128 if limit is None else limit
        """Links of a span; OTEL_SPAN_LINK_COUNT_LIMIT."""

    def is_unsampled(self, parent: TraceContext | None) -> bool:
        """Whether a span with this parent is not sampled, where that can be seen at a glance."""
        return self._honours_unsampled and parent is not None and parent.traceparent.endswith("-00")

    def begin(
        self,
        name: str,
        kind: str,
        start_ns: int,
        *,
        parent: TraceContext | None = None,
        attributes: Attributes | None = None,
    ) -> OpenSpan:
        """A span whose parent, if it has one, is in another process. The sampler decides, and is given `attributes`.

        A parent that is not valid W3C is as good as none: the span begins a trace.
        """
        above = _read(parent)
        trace_id = above.trace_id if above is not None else self._new_id(128)
        found = self._sampler.should_sample(_inside(above), trace_id, name, KINDS[kind], _set_ones(attributes), ())
        is_sampled: bool = found.decision.is_sampled()  # type: ignore[no-untyped-call]
        flags = (TraceFlags.SAMPLED if is_sampled else 0) | (above.trace_flags & RANDOM_TRACE_ID if above else 0)
        context = SpanContext(trace_id, self._new_id(64), False, TraceFlags(flags), found.trace_state)
        return OpenSpan(name, KINDS[kind], start_ns, context, above)

    def begin_child(self, parent: OpenSpan, name: str, kind: str, start_ns: int) -> OpenSpan:
        """A span under one of this process."""
        above = parent.context
        context = SpanContext(above.trace_id, self._new_id(64), False, above.trace_flags, above.trace_state)
        return OpenSpan(name, KINDS[kind], start_ns, context, above)

    def begin_root(self, name: str, kind: str, start_ns: int) -> OpenSpan:
        """A span that begins a trace and is sampled: who asks has decided."""
        context = SpanContext(self._new_id(128), self._new_id(64), False, TraceFlags(TraceFlags.SAMPLED))
        return OpenSpan(name, KINDS[kind], start_ns, context, None)

    def end(
        self,
        span: OpenSpan,
        end_ns: int,
        attributes: Attributes | None = None,
        *,
        events: Sequence[SpanEvent] = (),
        links: Sequence[Link] = (),
        error: str | None = None,
    ) -> None:
        """Hands a sampled span over to be sent, as failed where `error` (a description, may be empty) is given."""
        to_wall = self._clock.offset_ns()
        ended = _EndedSpan(
            span, max(end_ns, span.start_ns), to_wall, attributes, events, links[: self.max_links], error
        )
        # It asks for the context alone, and whether that is sampled.
        self._processor.on_end(cast(ReadableSpan, ended))

    def close(self, timeout_s: float) -> None:
        """Sends what has ended, for `timeout_s` at most; what ends later is lost. Again: nothing."""
        flush = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        flush.start()
        flush.join(timeout_s)
        if flush.is_alive():
            # Ends the exporter's retries; its thread is a daemon, and keeps no process alive.
            self._exporter.shutdown()

    def _new_id(self, num_bits: int) -> int:
        # Not of Python's own generator: a program that seeds that would make the same ids again.
        return self._random.getrandbits(num_bits) or 1

    def _is_honouring_unsampled(self) -> bool:
        """Whether the sampler follows a parent that is not sampled, asked with the trace id that any ratio samples."""
        parent = SpanContext(1, 1, True, TraceFlags(0))
        found = self._sampler.should_sample(_inside(parent), 1, "", SpanKind.SERVER, {}, ())
        return not found.decision.is_sampled()  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class _EndedSpan:
    """A span on its way to the exporter's thread, which has the time to make one of the library's of it."""

    span: OpenSpan
    end_ns: int
    to_wall_ns: int
    attributes: Attributes | None
    events: Sequence[SpanEvent]
    links: Sequence[Link]
    error: str | None

    @property
    def context(self) -> SpanContext:
        return self.span.context

    def make(self, resource: Resource, scope: InstrumentationScope, limits: SpanLimits) -> ReadableSpan:
        """The library's form. It is what exporters take; its own way there is to hold a span open from its begin."""
        span, to_wall_ns, longest = self.span, self.to_wall_ns, limits.max_span_attribute_length
        events = [Event(e.name, _set_ones(e.attributes), e.time_ns + to_wall_ns) for e in self.events]
        status = Status()
        if self.error is not None:
            status = Status(StatusCode.ERROR, self.error.encode(errors="replace").decode() or None)
        return ReadableSpan(
            span.name,
            span.context,
            span.parent,
            resource,
            {key: _cut(value, longest) for key, value in _set_ones(self.attributes).items()},
            events[: limits.max_events],
            self.links,
            span.kind,
            status=status,
            start_time=span.start_ns + to_wall_ns,
            end_time=self.end_ns + to_wall_ns,
            instrumentation_scope=scope,
        )


class _MakingExporter(SpanExporter):
    """Makes spans, and gives them to the exporter that sends them."""

    def __init__(self, exporter: SpanExporter, resource: Resource) -> None:
        self._exporter, self._resource = exporter, resource
        self._scope = InstrumentationScope("pagewire", _version())
        self._limits = SpanLimits()
        self._is_shut = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        ended = cast(Sequence[_EndedSpan], spans)
        return self._exporter.export([each.make(self._resource, self._scope, self._limits) for each in ended])

    def shutdown(self) -> None:
        """Once: the library calls it after us where time ran out, and complains of the second call."""
        if not self._is_shut:
            self._is_shut = True
            self._exporter.shutdown()


class _WallClock:
    """The one place where monotonic times become wall clock times. Looks again once a minute, as clocks are set."""

    def __init__(self) -> None:
        self._offset_ns = self._read_ns = 0

    def offset_ns(self) -> int:
        now_ns = time.monotonic_ns()
        if not self._read_ns or now_ns - self._read_ns > CLOCK_REFRESH_NS:
            self._offset_ns, self._read_ns = time.time_ns() - now_ns, now_ns
        return self._offset_ns


class _Repeats(logging.Filter):
    """Lets each complaint through once a minute: a collector that is away for a day must not fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[object, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        since, left_out = self._said.get(record.msg, (now - SAY_AGAIN_S, 0))
        if now - since < SAY_AGAIN_S:
            self._said[record.msg] = (since, left_out + 1)
            return False
        self._said[record.msg] = (now, 0)
        if left_out:
            record.msg, record.args = f"{record.getMessage()} (and {left_out} times more before)", ()
        if record.levelno > logging.WARNING:
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


def quieten_exporters() -> None:
    """Has the library's exporters say each of their complaints once a minute. Again: nothing."""
    quiet = _Repeats()
    for name in _LOGGERS:
        found = logging.getLogger(name)
        if not any(isinstance(known, _Repeats) for known in found.filters):
            found.addFilter(quiet)


def make_tracer(service_name: str, incarnation: str) -> Tracer:
    """A tracer that sends by OTLP over gRPC, set up by the OTEL_* variables. Raises what the library raises."""
    quieten_exporters()
    return Tracer(OTLPSpanExporter(), make_resource(service_name, incarnation))


def make_resource(service_name: str, incarnation: str) -> Resource:
    """What every span says of its process; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come before what we know."""
    host = socket.gethostname()
    known: dict[str, str | int] = {
        "service.name": service_name,
        "service.instance.id": incarnation,
        "service.version": _version(),
        "host.name": host,
        "process.pid": os.getpid(),
        "telemetry.sdk.language": "python",
        "telemetry.sdk.name": "opentelemetry",
        "telemetry.sdk.version": _version("opentelemetry-sdk"),
    }
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        known["k8s.pod.name"] = os.environ.get("POD_NAME") or host
    return Resource(known).merge(OTELResourceDetector().detect())


def _version(distribution: str = "pagewire") -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"


def _read(context: TraceContext | None) -> SpanContext | None:
    """A context off the wire; None where there is none, or none that is valid."""
    if context is None or not context.traceparent:
        return None
    carrier = {"traceparent": context.traceparent, "tracestate": context.tracestate}
    found = get_current_span(_W3C.extract(carrier, _NOWHERE)).get_span_context()
    return found if found.is_valid else None


def _inside(context: SpanContext | None) -> Context:
    return _NOWHERE if context is None else set_span_in_context(NonRecordingSpan(context), _NOWHERE)


def _set_ones(attributes: Attributes | None) -> dict[str, str | bool | int | float | Sequence[str] | Sequence[int]]:
    return {key: value for key, value in (attributes or {}).items() if value is not None}


def _cut(value: Any, longest: int | None) -> Any:
    return value[:longest] if isinstance(value, str) else value
