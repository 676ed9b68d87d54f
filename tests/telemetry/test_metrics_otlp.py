"""Metrics over OTLP: a real collector's service gets the same numbers under the conventions' names."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc

from pagewire.runtime.metrics import EXPORTER_VARIABLE, ProcessMetrics
from pagewire.runtime.metrics_otlp import INTERVAL_VARIABLE, wants_otlp
from pagewire.runtime.settings import CommonSettings
from pagewire.runtime.tracing import CLOSE_S, start_tracing, stop_telemetry
from tests.telemetry.metrics_support import eventually


class Receiver(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()

    def metrics(self, place: int = -1) -> dict[str, Any]:
        (resource,) = self.requests[place].resource_metrics
        return {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}


def test_the_same_numbers_go_to_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(2))
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv(EXPORTER_VARIABLE, "otlp")
    monkeypatch.setenv(INTERVAL_VARIABLE, "100")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    try:
        process = ProcessMetrics.for_settings("core", "abc", CommonSettings())
        assert process is not None and process.port == 0
        counter = process.instruments.counter("pagewire_core_things_total", "Things.", ("cause",))
        labels = ("gen_ai_operation_name", "error_type")
        histogram = process.instruments.histogram("gen_ai_server_request_duration_seconds", "R.", (1, 2), labels)
        process.start()
        eventually(lambda: len(receiver.requests) > 1, what="two exports")
        counter.add(3, ("client",))
        histogram.observe(1.5, ("chat", ""))
        process.close()
    finally:
        server.stop(0)
    # The last export, at the end, has what came after the one before it.
    (resource,) = receiver.requests[-1].resource_metrics
    attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert attributes["service.name"] == "pagewire-core" and attributes["service.instance.id"] == "abc"
    found = receiver.metrics()
    (point,) = found["pagewire_core_things"].sum.data_points
    assert point.as_double == 3 or point.as_int == 3
    assert found["pagewire_core_things"].sum.is_monotonic
    assert [(a.key, a.value.string_value) for a in point.attributes] == [("cause", "client")]
    request = found["gen_ai.server.request.duration"]
    (point,) = request.histogram.data_points
    assert (list(point.bucket_counts), list(point.explicit_bounds), point.sum) == ([0, 1, 0], [1, 2], 1.5)
    # An empty label is no attribute.
    assert [(a.key, a.value.string_value) for a in point.attributes] == [("gen_ai.operation.name", "chat")]
    assert request.unit == "s"


@pytest.mark.parametrize(
    ("variables", "is_told"),
    [
        ({EXPORTER_VARIABLE: "otlp", INTERVAL_VARIABLE: "often"}, "OTEL_METRIC_EXPORT_INTERVAL is 'often': must be"),
        ({EXPORTER_VARIABLE: "otlp", INTERVAL_VARIABLE: "0"}, "OTEL_METRIC_EXPORT_INTERVAL is '0': must be"),
        ({EXPORTER_VARIABLE: "otlp", INTERVAL_VARIABLE: "inf"}, "OTEL_METRIC_EXPORT_INTERVAL is 'inf': must be"),
        ({EXPORTER_VARIABLE: "otlp", "OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "could not convert"),
        ({EXPORTER_VARIABLE: "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http/protobuf, and only grpc"),
        ({EXPORTER_VARIABLE: "otlp", "OTEL_SDK_DISABLED": "true"}, ""),
        ({EXPORTER_VARIABLE: "prometheus,console"}, ""),
    ],
)
def test_variables_that_cannot_be_followed_end_no_process(
    variables: dict[str, str], is_told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    process = ProcessMetrics.for_settings("core", "abc", CommonSettings(metrics_port=0, metrics_host="127.0.0.1"))
    assert process is not None and process.port > 0
    process.start()
    process.close()
    assert "metrics-otlp" not in {thread.name for thread in threading.enumerate()}
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [is_told in line and "no metrics over OTLP" in line for line in said] == [True] * bool(is_told)


def test_a_name_among_others_with_blanks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wants_otlp({EXPORTER_VARIABLE: "console, OTLP"})
    assert not wants_otlp({EXPORTER_VARIABLE: "none"}) and not wants_otlp({})


def test_a_silent_collector_holds_the_end_up_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv(EXPORTER_VARIABLE, "otlp")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        process = ProcessMetrics.for_settings("core", "abc", CommonSettings())
        tracer = start_tracing("core", "abc")
        assert process is not None and tracer is not None
        process.start()
        span = tracer.begin_root("a span", "internal", 1)
        tracer.end(span, 2)
        started = time.monotonic()
        asyncio.run(stop_telemetry(tracer, process.close))
        assert CLOSE_S - 0.5 < time.monotonic() - started < CLOSE_S + 1.0
        tracer.close(10)
        assert time.monotonic() - started < CLOSE_S + 1.0
