"""Whether a process traces, by the standard variables; and that a collector that is not there harms nothing."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import time

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from otlp_receiver import OtlpReceiver
from trace_support import Traces, ids, parent
from traced_processes import free_port

from pagewire.runtime.propagation import trace_metadata
from pagewire.runtime.spans import Tracer, make_resource, make_tracer
from pagewire.runtime.tracing import start_tracing, wants_traces

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}


@pytest.mark.parametrize(
    ("variables", "is_on"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://collector:4317"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "True"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "false"}, True),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, False),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "otlp"}, True),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "zipkin"}, False),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, True),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, False),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, True),
    ],
)
def test_the_standard_variables_decide(variables: dict[str, str], is_on: bool) -> None:
    assert wants_traces(variables) is is_on


def test_without_an_endpoint_nothing_is_imported() -> None:
    """Frontend, core and client start without opentelemetry, and a client's call does not load it."""
    code = """
import json, sys
import frontend_svc.__main__, core_svc.__main__, worker_svc.trace_observer, pagewire.client, pagewire.generate
from pagewire.client_trace import call_span, client_tracing
from pagewire.runtime.propagation import trace_metadata
from pagewire.runtime.tracing import start_tracing
assert start_tracing("frontend", "x") is None
with client_tracing() as tracer, call_span(tracer, "a:1", "Chat") as context:
    assert tracer is None and context is None and trace_metadata(context) is None
print(json.dumps([name for name in sys.modules if name.startswith("opentelemetry")]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_settings_that_the_library_refuses_are_logged_and_the_process_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "zip")
    assert start_tracing("frontend", "x") is None
    assert any("no traces" in record.getMessage() for record in caplog.records)


def test_spans_go_out_over_the_wire_before_the_end(monkeypatch: pytest.MonkeyPatch, receiver: OtlpReceiver) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    tracer = start_tracing("core", "incarnation-7")
    assert tracer is not None
    now_ns = time.monotonic_ns()
    tracer.end(tracer.begin("over the wire", "internal", now_ns), now_ns + 5_000_000)
    wall_ns = time.time_ns()
    tracer.close(10)
    found = receiver.spans.one("over the wire")
    assert abs(found.start_ns - wall_ns) < 1e9 and found.end_ns - found.start_ns == 5_000_000
    assert (found.service, found.resource["service.instance.id"]) == ("pagewire-core", "incarnation-7")


def test_a_collector_that_is_not_there_harms_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ending spans takes no longer, nothing is raised, the log has a few lines, and the process ends in time."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    caplog.set_level(logging.DEBUG)
    tracer = make_tracer("pagewire-core", "x")
    slowest = 0.0
    for _ in range(6000):
        started = time.perf_counter()
        now_ns = time.monotonic_ns()
        tracer.end(tracer.begin("lost", "internal", now_ns), now_ns)
        slowest = max(slowest, time.perf_counter() - started)
    time.sleep(2.5)
    started = time.monotonic()
    tracer.close(0.5)
    assert time.monotonic() - started < 5
    assert slowest < 1.0
    said = [record for record in caplog.records if record.levelno >= logging.INFO]
    assert 0 < len(said) <= 8, [record.getMessage() for record in said]
    assert all(record.levelno <= logging.WARNING for record in said)


@pytest.mark.parametrize(
    ("sampler", "argument", "root", "sampled_parent", "unsampled_parent"),
    [
        ("", "", True, True, False),
        ("parentbased_always_on", "", True, True, False),
        ("parentbased_traceidratio", "0", False, True, False),
        ("traceidratio", "0", False, False, False),
        ("always_off", "", False, False, False),
        ("parentbased_always_off", "", False, True, False),
    ],
)
def test_the_sampler_is_the_variables(
    monkeypatch: pytest.MonkeyPatch,
    sampler: str,
    argument: str,
    root: bool,
    sampled_parent: bool,
    unsampled_parent: bool,
) -> None:
    if sampler:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    traces = Traces()
    begin = traces.tracer.begin
    assert begin("x", "server", 1).is_sampled is root
    assert begin("x", "server", 1, parent=parent()).is_sampled is sampled_parent
    assert begin("x", "server", 1, parent=parent(is_sampled=False)).is_sampled is unsampled_parent
    traces.tracer.close(5)


def test_a_ratio_samples_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.1")
    traces = Traces()
    num_sampled = sum(traces.tracer.begin("x", "server", 1).is_sampled for _ in range(4000))
    assert 300 < num_sampled < 500
    traces.tracer.close(5)


def test_the_resource_is_the_variables_before_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.namespace=llm,host.name=node-7,k8s.pod.name=core-0")
    assert make_resource("pagewire-core", "i").attributes["service.name"] == "pagewire-core"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "other")
    said = make_resource("pagewire-core", "i").attributes
    wanted = {"service.name": "other", "service.namespace": "llm", "host.name": "node-7", "k8s.pod.name": "core-0"}
    assert wanted.items() <= said.items()
    assert said["service.instance.id"] == "i" and said["service.version"]
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("POD_NAME", "worker-3")
    assert make_resource("x", "i").attributes["k8s.pod.name"] == "worker-3"


def test_ids_do_not_follow_the_programs_random_numbers(traces: Traces) -> None:
    found = set()
    for _ in range(2):
        random.seed(7)
        found.add(traces.tracer.begin("x", "server", 1).context.trace_id)
    assert len(found) == 2


def test_a_span_keeps_what_it_was_given(traces: Traces) -> None:
    tracer, above = traces.tracer, parent(tracestate="a=1,b=2")
    outer = tracer.begin("outer", "server", 1000, parent=above)
    inner = tracer.begin_child(outer, "inner", "internal", 2000)
    tracer.end(inner, 3000, {"x": 1, "y": None, "z": ["a"]}, error="bad \ud800 text")
    tracer.end(outer, 4000)
    found_inner, found_outer = traces.spans.one("inner"), traces.spans.one("outer")
    assert (found_outer.trace_id, found_outer.parent_id) == ids(above)
    assert (found_inner.trace_id, found_inner.parent_id) == (found_outer.trace_id, found_outer.span_id)
    assert ids(inner.trace_context) == (found_inner.trace_id, found_inner.span_id)
    assert inner.trace_context.tracestate == "a=1,b=2"
    assert found_inner.attributes == {"x": 1, "z": ["a"]}
    assert found_inner.is_error and found_inner.message == "bad ? text"
    assert found_inner.start_ns - found_outer.start_ns == 1000 and found_outer.end_ns - found_inner.end_ns == 1000


def test_a_client_hands_on_the_active_span(traces: Traces) -> None:
    assert trace_metadata(None) is None
    context = trace.SpanContext(0xABC, 0xDEF, False, trace.TraceFlags(1), trace.TraceState([("v", "1")]))
    with trace.use_span(trace.NonRecordingSpan(context)):
        assert trace_metadata(None) == (("traceparent", f"00-{0xABC:032x}-{0xDEF:016x}-01"), ("tracestate", "v=1"))
        given = parent()
        assert trace_metadata(given) == (("traceparent", given.traceparent),)


@pytest.mark.parametrize(
    ("endpoint", "insecure", "is_plain"),
    [
        ("http://collector:4317", None, True),
        ("https://collector:4317", None, False),
        ("collector:4317", None, False),
        ("collector:4317", "true", True),
    ],
)
def test_whether_the_collector_speaks_tls(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, insecure: str | None, is_plain: bool
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    if insecure is not None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", insecure)
    exporter = OTLPSpanExporter()
    assert exporter._insecure is is_plain
    Tracer(exporter, make_resource("x", "i")).close(1)
