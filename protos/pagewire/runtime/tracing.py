"""Whether this process traces, by the standard OTEL_* variables; opentelemetry is imported only where it does.

Traces are on where OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set, unless OTEL_SDK_DISABLED
is true or OTEL_TRACES_EXPORTER is none. What goes wrong while they are set up is logged; the process serves without.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagewire.runtime.spans import Tracer

logger = logging.getLogger(__name__)

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[int] | None
"""None: left out."""
Attributes = Mapping[str, AttributeValue]
CLOSE_S = 2.0
"""How long a process that ends waits for its last spans, and its last numbers, to be taken. Part of its margin."""
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened at a moment of a span."""

    name: str
    time_ns: int
    """Monotonic, as all times that a Tracer is given."""
    attributes: Attributes = field(default_factory=dict)


def wants_traces(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the variables ask for traces that this build can send."""
    if not any(environ.get(name, "").strip() for name in ENDPOINTS):
        return False
    if is_disabled(environ):
        return False
    exporters = {name.strip().lower() for name in environ.get("OTEL_TRACES_EXPORTER", "otlp").split(",")}
    if not exporters & {"", "otlp", "otlp_proto_grpc"}:
        if "none" not in exporters:
            logger.warning("no traces: OTEL_TRACES_EXPORTER is %s, and only otlp is served", ",".join(exporters))
        return False
    return speaks_grpc("traces", PROTOCOLS, environ)


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Whether OTEL_SDK_DISABLED turns everything off that has to do with OpenTelemetry."""
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def speaks_grpc(signal: str, variables: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether the first of these variables that is set asks for the protocol that this build has; if not, says so."""
    protocol = next((environ[name].strip().lower() for name in variables if environ.get(name, "").strip()), "grpc")
    if protocol != "grpc":
        logger.warning("no %s: the protocol of OTLP is set to %s, and only grpc is served", signal, protocol)
    return protocol == "grpc"


def start_tracing(service: str, incarnation: str) -> Tracer | None:
    """The tracer of this process, `pagewire-<service>` unless OTEL_SERVICE_NAME says otherwise; None: no traces."""
    if not wants_traces():
        return None
    try:
        from pagewire.runtime.spans import make_tracer

        tracer = make_tracer(f"pagewire-{service}", incarnation)
    except ImportError as error:
        logger.warning("no traces: %s; install pagewire[telemetry]", error)
        return None
    except Exception as error:
        logger.warning("no traces: %s", error)
        return None
    logger.info("traces go to %s", next(os.environ[name] for name in ENDPOINTS if os.environ.get(name, "").strip()))
    return tracer


async def stop_tracing(tracer: Tracer | None) -> None:
    """Sends what is left, within CLOSE_S."""
    if tracer is not None:
        await asyncio.to_thread(tracer.close, CLOSE_S)


async def stop_telemetry(tracer: Tracer | None, close_metrics: Callable[[], None]) -> None:
    """The same, and the last numbers beside them: one after the other they would take twice as long."""
    await asyncio.gather(stop_tracing(tracer), asyncio.to_thread(close_metrics))
