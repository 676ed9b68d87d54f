"""An OTLP receiver: takes spans over gRPC as a backend would, and finds them again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Link:
    trace_id: str
    span_id: str


@dataclass(slots=True)
class Received:
    """A span as it came over the wire."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    links: list[Link]
    is_error: bool
    message: str
    resource: dict[str, Any]

    @property
    def service(self) -> str:
        return str(self.resource["service.name"])

    @property
    def pid(self) -> int:
        return int(self.resource["process.pid"])

    @property
    def link(self) -> Link:
        return Link(self.trace_id, self.span_id)

    def event(self, name: str) -> tuple[int, dict[str, Any]]:
        """Time and attributes of its one event of this name."""
        ((time_ns, attributes),) = [(when, said) for found, when, said in self.events if found == name]
        return time_ns, attributes


class Spans:
    """Spans that were received. Every search waits for what it expects, as spans are sent in batches."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spans: list[Received] = []

    def add(self, spans: list[Received]) -> None:
        with self._changed:
            self._spans += spans
            self._changed.notify_all()

    def all(self) -> list[Received]:
        with self._changed:
            return list(self._spans)

    def wait(self, wanted: Callable[[list[Received]], Any], timeout_s: float = WAIT_S) -> Any:
        """What `wanted` finds in the spans received, once that is anything."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not (found := wanted(self._spans)):
                left = deadline - time.monotonic()
                names = sorted((span.service, span.name) for span in self._spans)
                assert left > 0 and self._changed.wait(left), f"it did not come; received: {names}"
        return found

    def named(self, name: str, **attributes: Any) -> list[Received]:
        """Spans received by now with this name and these attributes (dots written as two underscores)."""
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}
        return [s for s in self.all() if s.name == name and wanted.items() <= s.attributes.items()]

    def one(self, name: str, trace_id: str = "", **attributes: Any) -> Received:
        """The one span of this name, trace and attributes."""
        self.wait(lambda _: [s for s in self.named(name, **attributes) if trace_id in ("", s.trace_id)])
        (found,) = [s for s in self.named(name, **attributes) if trace_id in ("", s.trace_id)]
        return found

    def trace(self, trace_id: str) -> list[Received]:
        """The spans of a trace, by their starts."""
        return sorted((s for s in self.all() if s.trace_id == trace_id), key=lambda s: s.start_ns)

    def children(self, parent: Received, name: str = "") -> list[Received]:
        found = [s for s in self.trace(parent.trace_id) if s.parent_id == parent.span_id]
        return [s for s in found if name in ("", s.name)]


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on a free port of this machine."""

    def __init__(self) -> None:
        self.spans = Spans()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def Export(self, request: Any, context: Any) -> Any:
        self.spans.add(list(read(request)))
        return trace_service_pb2.ExportTraceServiceResponse()

    def close(self) -> None:
        self._server.stop(0).wait(5)


def read(request: Any) -> Iterator[Received]:
    """The spans of a message."""
    for of_resource in request.resource_spans:
        resource = _attributes(of_resource.resource.attributes)
        for scope in of_resource.scope_spans:
            for span in scope.spans:
                yield Received(
                    span.name,
                    trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _attributes(span.attributes),
                    [(e.name, e.time_unix_nano, _attributes(e.attributes)) for e in span.events],
                    [Link(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                    span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
                    span.status.message,
                    resource,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
