"""How a client's trace goes with a call: as gRPC metadata."""

from __future__ import annotations

import sys

from pagewire.engine import TraceContext

Metadata = tuple[tuple[str, str], ...]


def trace_metadata(trace_context: TraceContext | None) -> Metadata | None:
    """Metadata of a call that belongs to this span (W3C), or else to the one that is active in the calling program.

    A program that has not loaded opentelemetry has no active span, so it is not loaded for that. One that has may have
    chosen other propagators than W3C; they are asked.
    """
    if trace_context is not None:
        found = {"traceparent": trace_context.traceparent, "tracestate": trace_context.tracestate}
    elif "opentelemetry.trace" in sys.modules:
        from opentelemetry.propagate import inject

        found = {}
        inject(found)
    else:
        return None
    return tuple((key.lower(), value) for key, value in found.items() if value) or None
