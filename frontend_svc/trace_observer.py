"""A frontend's spans: the server span of a request, with `tokenize` and `generate` under it.

All three are made when the request ends, however it ends. `generate` is drawn when it comes, for it is the parent of
what the core says of the request.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from frontend_svc.observer import RequestTimeline
from frontend_svc.trace_attributes import (
    SERVER_FAULTS,
    description_of,
    finish_reasons,
    first_attributes,
    method_of,
    server_attributes,
)
from pagewire.runtime.tracing import SpanEvent

if TYPE_CHECKING:
    from pagewire.runtime.spans import OpenSpan, Tracer

ANY_HOST = ("", "0.0.0.0", "::")
CAPTURE_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


def captures_content(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the text of prompts and answers may go into spans; never by default."""
    return environ.get(CAPTURE_VARIABLE, "").strip().lower() in ("true", "1", "span_only", "span_and_event")


class TraceObserver:
    """Traces requests. Belongs to the event loop.

    Args:
        tracer: makes the spans.
        host: what the server listens on.
        port: tells its port, once it listens.
    """

    def __init__(self, tracer: Tracer, host: str, port: Callable[[], int]) -> None:
        self._tracer = tracer
        self._host = socket.gethostname() if host in ANY_HOST else host
        self._port = port
        self._captures_content = captures_content()
        self._open: dict[int, tuple[OpenSpan, OpenSpan]] = {}
        """Server span and `generate` of the living requests that are sampled, by the id of their timeline."""

    def began(self, timeline: RequestTimeline) -> None:
        """Settles whether the request is sampled; what the core gets names `generate` as its parent."""
        request, tracer = timeline.request, self._tracer
        span = tracer.begin(
            method_of(request),
            "server",
            timeline.received_ns,
            parent=request.trace_context,
            attributes=first_attributes(timeline),
        )
        if not span.is_sampled:
            request.trace_context = span.trace_context
            return
        generate = tracer.begin_child(span, "generate", "client", timeline.received_ns)
        request.trace_context = generate.trace_context
        self._open[id(timeline)] = span, generate
        if self._captures_content:
            timeline.texts = {}

    def ended(self, timeline: RequestTimeline) -> None:
        """Makes the spans of a request that is sampled."""
        found = self._open.pop(id(timeline), None)
        if found is None:
            return
        span, generate = found
        status, why = timeline.status_code, description_of(timeline.error)
        if timeline.tokenize_ns:
            self._end_tokenize(span, timeline, status, why)
        if timeline.tokenized_ns:
            self._end_generate(generate, timeline, status, why)
        attributes = {
            **server_attributes(timeline, self._captures_content),
            "server.address": self._host,
            "server.port": self._port(),
        }
        error = why if status in SERVER_FAULTS else None
        self._tracer.end(span, timeline.ended_ns, attributes, error=error)

    def _end_tokenize(self, above: OpenSpan, timeline: RequestTimeline, status: str, why: str) -> None:
        span = self._tracer.begin_child(above, "tokenize", "internal", timeline.tokenize_ns)
        if not timeline.tokenized_ns:
            self._tracer.end(span, timeline.ended_ns, {"error.type": status}, error=why)
            return
        num_tokens = timeline.parent.usage.num_prompt_tokens if timeline.parent is not None else None
        self._tracer.end(span, timeline.tokenized_ns, {"gen_ai.usage.input_tokens": num_tokens})

    def _end_generate(self, span: OpenSpan, timeline: RequestTimeline, status: str, why: str) -> None:
        span.start_ns = timeline.tokenized_ns
        parent, reasons = timeline.parent, finish_reasons(timeline)
        events = []
        if timeline.added_ns:
            events.append(SpanEvent("added", timeline.added_ns))
        if parent is not None and parent.first_token_ns:
            events.append(SpanEvent("first_token", parent.first_token_ns))
        events.append(SpanEvent("finished", timeline.ended_ns, {"gen_ai.response.finish_reasons": reasons}))
        attributes = {
            "pagewire.core": timeline.core or None,
            "pagewire.completions": len(reasons),
            "error.type": status if status != "OK" else None,
        }
        error = why if status != "OK" else None
        self._tracer.end(span, timeline.ended_ns, attributes, events=events, error=error)
