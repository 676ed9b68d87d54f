"""Spans of the command line's own calls, where OTEL_* variables ask for traces: the client is a part of the trace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pagewire.engine import TraceContext
from pagewire.errors import InvalidArgumentError, PagewireError
from pagewire.runtime.lifetime import new_incarnation
from pagewire.runtime.tracing import CLOSE_S, AttributeValue, start_tracing

if TYPE_CHECKING:
    from pagewire.runtime.spans import Tracer

SERVICE = "pagewire.v1.FrontendService"


@contextmanager
def client_tracing() -> Iterator[Tracer | None]:
    """The tracer of a command that is a client; sends its spans before the command ends."""
    tracer = start_tracing("client", new_incarnation())
    try:
        yield tracer
    finally:
        if tracer is not None:
            tracer.close(CLOSE_S)


@contextmanager
def call_span(tracer: Tracer | None, target: str, method: str) -> Iterator[TraceContext | None]:
    """A call's client span, from here to the end of the block; gives what the call takes as its trace_context."""
    if tracer is None:
        yield None
        return
    host, _, port = target.rpartition(":")
    attributes: dict[str, AttributeValue] = {
        "rpc.system.name": "grpc",
        "rpc.method": f"{SERVICE}/{method}",
        "server.address": host.strip("[]"),
        "server.port": int(port) if port.isdecimal() else None,
    }
    span = tracer.begin(f"{SERVICE}/{method}", "client", time.monotonic_ns(), attributes=attributes)
    status, description = "OK", None
    try:
        yield span.trace_context
    except PagewireError as error:
        # What is wrong with a request may quote it.
        status, description = error.code, "" if isinstance(error, InvalidArgumentError) else error.message
        raise
    except BaseException:
        status, description = "CANCELLED", ""
        raise
    finally:
        if span.is_sampled:
            attributes |= {"rpc.response.status_code": status, "error.type": status if status != "OK" else None}
            tracer.end(span, time.monotonic_ns(), attributes, error=description)
