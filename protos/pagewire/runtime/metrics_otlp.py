"""A process's instruments sent to an OpenTelemetry collector, every so often, over OTLP/gRPC.

The exporter is OpenTelemetry's, with its own variables (OTEL_EXPORTER_OTLP_ENDPOINT, ..._METRICS_ENDPOINT, headers,
certificates); the numbers are those of the endpoint, read once per OTEL_METRIC_EXPORT_INTERVAL.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pagewire.runtime.instruments import Counter, Histogram, Instruments, Labels, Reading
from pagewire.runtime.tracing import CLOSE_S, is_disabled, speaks_grpc

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Metric, MetricsData

logger = logging.getLogger(__name__)

EXPORTER_VARIABLE = "OTEL_METRICS_EXPORTER"
"""OpenTelemetry's own: with `otlp` in it, metrics are sent to a collector too."""
PROTOCOLS = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
INTERVAL_VARIABLE = "OTEL_METRIC_EXPORT_INTERVAL"
DEFAULT_INTERVAL_MS = 60_000.0
MIN_INTERVAL_MS, MAX_INTERVAL_MS = 10.0, 86_400_000.0
FLUSH_MS = CLOSE_S * 1000

_NAMES = {
    "gen_ai_server_request_duration_seconds": "gen_ai.server.request.duration",
    "gen_ai_server_time_to_first_token_seconds": "gen_ai.server.time_to_first_token",
    "gen_ai_server_time_per_output_token_seconds": "gen_ai.server.time_per_output_token",
    "rpc_server_call_duration_seconds": "rpc.server.call.duration",
    "rpc_client_call_duration_seconds": "rpc.client.call.duration",
}
"""What the conventions call them; others keep their names."""
_ATTRIBUTES = {
    "gen_ai_operation_name": "gen_ai.operation.name",
    "gen_ai_provider_name": "gen_ai.provider.name",
    "gen_ai_request_model": "gen_ai.request.model",
    "error_type": "error.type",
    "rpc_system_name": "rpc.system.name",
    "rpc_method": "rpc.method",
    "rpc_response_status_code": "rpc.response.status_code",
}
_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1", "": "1", "tokens": "{token}"}


def wants_otlp(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the variables ask for metrics over OTLP that this build can send."""
    exporters = {name.strip().lower() for name in environ.get(EXPORTER_VARIABLE, "").split(",")}
    if not exporters & {"otlp", "otlp_proto_grpc"} or is_disabled(environ):
        return False
    return speaks_grpc("metrics over OTLP", PROTOCOLS, environ)


def make_otlp(service: str, incarnation: str, instruments: Instruments) -> OtlpMetrics | None:
    """An exporter of these instruments. What is wrong with its variables is logged; the process serves without."""
    try:
        return OtlpMetrics(service, incarnation, instruments)
    except ImportError as error:
        logger.warning("no metrics over OTLP: %s; install pagewire[telemetry]", error)
    except Exception as error:
        logger.warning("no metrics over OTLP: %s", error)
    return None


def _interval_s() -> float:
    text = os.environ.get(INTERVAL_VARIABLE, "").strip() or str(DEFAULT_INTERVAL_MS)
    try:
        interval_ms = float(text)
    except ValueError:
        interval_ms = 0.0
    if not MIN_INTERVAL_MS <= interval_ms <= MAX_INTERVAL_MS:
        limit = f"must be a number of milliseconds from {MIN_INTERVAL_MS:g} to {MAX_INTERVAL_MS:g}"
        raise ValueError(f"{INTERVAL_VARIABLE} is {text!r}: {limit}")
    return interval_ms / 1000


class OtlpMetrics:
    """Exports on a thread of its own from `start` to `close`."""

    def __init__(self, service: str, incarnation: str, instruments: Instruments) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.resources import Resource

        from pagewire.runtime.spans import quieten_exporters

        quieten_exporters()
        attributes = {"service.name": f"pagewire-{service}", "service.instance.id": incarnation}
        named = os.environ.get("OTEL_SERVICE_NAME")
        self._resource = Resource.create({**attributes, **({"service.name": named} if named else {})})
        self._exporter = OTLPMetricExporter()
        self._instruments = instruments
        self._started_ns = time.time_ns()
        self._interval_s = _interval_s()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-otlp", daemon=True)

    def start(self) -> None:
        """Exports from now on."""
        self._thread.start()

    def close(self) -> None:
        """Exports once more, for a bounded time."""
        self._is_closed.set()
        self._thread.join(FLUSH_MS / 1000)
        self._exporter.shutdown(timeout_millis=FLUSH_MS)

    def _run(self) -> None:
        while True:
            is_last = self._is_closed.wait(self._interval_s)
            try:
                self._exporter.export(self._data(), timeout_millis=FLUSH_MS if is_last else 10_000)
            except Exception:
                # A collector that is away must not end the thread.
                logger.warning("metrics could not be exported", exc_info=True)
            if is_last:
                return

    def _data(self) -> MetricsData:
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        metrics = []
        for instrument in self._instruments:
            try:
                metrics.append(self._metric(instrument))
            except Exception:
                logger.warning("%s cannot be read", instrument.name, exc_info=True)
        scope = ScopeMetrics(InstrumentationScope("pagewire"), metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def _metric(self, instrument: Counter | Reading | Histogram) -> Metric:
        from opentelemetry.sdk.metrics.export import AggregationTemporality, Gauge, Metric, Sum

        data: Any
        if isinstance(instrument, Histogram):
            data = self._histogram(instrument)
        else:
            points = [self._number(instrument.label_names, *found) for found in instrument.read().items()]
            is_sum = instrument.kind == "counter"
            data = Sum(points, AggregationTemporality.CUMULATIVE, True) if is_sum else Gauge(points)
        name = _NAMES.get(instrument.name, instrument.name.removesuffix("_total"))
        return Metric(name, instrument.doc, _UNITS.get(instrument.unit, instrument.unit), data)

    def _number(self, names: Labels, labels: Labels, value: float) -> Any:
        from opentelemetry.sdk.metrics.export import NumberDataPoint

        return NumberDataPoint(_attributes(names, labels), self._started_ns, time.time_ns(), value)

    def _histogram(self, histogram: Histogram) -> Any:
        from opentelemetry.sdk.metrics.export import AggregationTemporality, HistogramDataPoint
        from opentelemetry.sdk.metrics.export import Histogram as OtlpHistogram

        now_ns = time.time_ns()
        points = [
            HistogramDataPoint(
                attributes=_attributes(histogram.label_names, labels),
                start_time_unix_nano=self._started_ns,
                time_unix_nano=now_ns,
                count=sum(found.counts),
                sum=found.sum,
                bucket_counts=found.counts,
                explicit_bounds=histogram.bounds,
                # Not kept: an average says more than the extremes of a process's whole life.
                min=float("nan"),
                max=float("nan"),
            )
            for labels, found in histogram.read().items()
        ]
        return OtlpHistogram(points, AggregationTemporality.CUMULATIVE)


def _attributes(names: Labels, values: Labels) -> dict[str, str]:
    return {_ATTRIBUTES.get(name, name): value for name, value in zip(names, values, strict=True) if value}
