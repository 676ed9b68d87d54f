"""A tracer whose spans stay in this process, for tests of what is traced and of nothing else."""

from __future__ import annotations

import random

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from otlp_receiver import Received, Spans, read

from pagewire.engine import TraceContext
from pagewire.runtime.spans import Tracer, make_resource


class Traces:
    """Spans made so far, as a backend would have them: they went through the encoder."""

    def __init__(self, service: str = "pagewire-test") -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer = Tracer(self.exporter, make_resource(service, "incarnation-1"))

    @property
    def spans(self) -> Spans:
        """To be asked for once everything has ended."""
        self.tracer._processor.force_flush()
        found = Spans()
        found.add(list(read(encode_spans(self.exporter.get_finished_spans()))))
        return found

    def names(self) -> list[str]:
        return [span.name for span in self.spans.all()]

    def only(self) -> Received:
        (span,) = self.spans.all()
        return span


def parent(*, is_sampled: bool = True, tracestate: str = "") -> TraceContext:
    """A span of a client."""
    trace_id, span_id = random.getrandbits(128) | 1, random.getrandbits(64) | 1
    return TraceContext(f"00-{trace_id:032x}-{span_id:016x}-{'01' if is_sampled else '00'}", tracestate)


def ids(context: TraceContext) -> tuple[str, str]:
    """Trace id and span id."""
    _, trace_id, span_id, _ = context.traceparent.split("-")
    return trace_id, span_id
