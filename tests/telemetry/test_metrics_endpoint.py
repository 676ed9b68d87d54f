"""The endpoint answers in bounded time whatever its clients do, and instruments count what they are told."""

from __future__ import annotations

import gzip
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from pagewire.engine import TraceContext
from pagewire.runtime import metrics_http
from pagewire.runtime.instruments import Instruments, sampled_ids
from pagewire.runtime.metrics import EXPORTER_VARIABLE, ProcessMetrics
from pagewire.runtime.settings import CommonSettings, parse_settings
from tests.telemetry.metrics_support import OPENMETRICS, SAMPLED, TRACE_ID, eventually, fetch, parse, value


@pytest.fixture
def metrics() -> Iterator[ProcessMetrics]:
    found = ProcessMetrics("core", "abc")
    found.listen("127.0.0.1", 0)
    found.start()
    yield found
    found.close()


def test_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EXPORTER_VARIABLE, raising=False)
    assert parse_settings(CommonSettings, "core", [], environ={}).metrics_port is None
    assert ProcessMetrics.for_settings("core", "abc", CommonSettings()) is None
    settings = parse_settings(CommonSettings, "core", [], environ={"PAGEWIRE_CORE_METRICS_PORT": "9102"})
    assert settings.metrics_port == 9102


def test_a_port_that_is_taken_is_named(metrics: ProcessMetrics) -> None:
    settings = CommonSettings(metrics_port=metrics.port, metrics_host="127.0.0.1")
    with pytest.raises(OSError, match=rf"127\.0\.0\.1:{metrics.port} for metrics.*--metrics-port"):
        ProcessMetrics.for_settings("core", "abc", settings)


def test_paths_compression_and_what_all_processes_have(metrics: ProcessMetrics) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/", timeout=5)
    assert caught.value.code == 404
    caught.value.close()
    request = urllib.request.Request(f"http://127.0.0.1:{metrics.port}/metrics?x=1")
    request.add_header("Accept-Encoding", "gzip")
    with urllib.request.urlopen(request, timeout=5) as response:
        assert response.headers["Content-Encoding"] == "gzip"
        assert b"pagewire_build_info" in gzip.decompress(response.read())
    metrics.is_ready = lambda: True
    scrape = parse(fetch(metrics.port)[0])
    assert value(scrape, "pagewire_ready") == 1
    assert value(scrape, "pagewire_incarnation_info", service="core", incarnation="abc") == 1


def test_counters_histograms_and_readings(metrics: ProcessMetrics) -> None:
    instruments = metrics.instruments
    counter = instruments.counter("x_total", "X.", ("cause",), preset=[("a",), ("b",)])
    counter.add(2, ("b",))
    counter.add(1, ('weird "\\\n',))
    histogram = instruments.histogram("y_seconds", "Y.", (0.1, 1, 10))
    for seconds in (0.05, 0.1, 0.5, 100):
        histogram.observe(seconds)
    histogram.observe(5, trace=TraceContext(SAMPLED))
    histogram.observe(6, trace=TraceContext(SAMPLED[:-2] + "00"))
    instruments.number("gauge", "z_ratio", "Z.", lambda: 0.25, "ratio")
    scrape = parse(fetch(metrics.port)[0])
    assert [value(scrape, "x_total", cause=c) for c in ("a", "b", 'weird "\\\n')] == [0, 2, 1]
    buckets = {s.labels["le"]: s for s in scrape["y_seconds"].samples if s.name.endswith("bucket")}
    assert {le: sample.value for le, sample in buckets.items()} == {"0.1": 2, "1.0": 3, "10.0": 5, "+Inf": 6}
    assert value(scrape, "y_seconds_sum") == pytest.approx(111.65)
    assert buckets["10.0"].exemplar.labels["trace_id"] == TRACE_ID and buckets["10.0"].exemplar.value == 5
    assert all(buckets[le].exemplar is None for le in ("0.1", "1.0", "+Inf"))
    assert scrape["y_seconds"].unit == "seconds" and value(scrape, "z_ratio") == 0.25
    with pytest.raises(ValueError, match="x_total"):
        instruments.counter("x_total", "Another.")


def test_a_number_that_cannot_be_read_costs_no_other(metrics: ProcessMetrics, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> float:
        raise RuntimeError("gone")

    metrics.instruments.number("gauge", "broken", "Broken.", broken)
    metrics.instruments.number("gauge", "whole", "Whole.", lambda: 1)
    scrape = parse(fetch(metrics.port)[0])
    assert "broken" not in scrape and value(scrape, "whole") == 1
    assert "broken cannot be read" in caplog.text


@pytest.mark.parametrize("traceparent", ["", "00-x", f"00-{TRACE_ID}-00f067aa0ba902b7-00", f"00-{TRACE_ID[:-1]}-0-01"])
def test_traces_that_are_not_recorded_give_no_exemplar(traceparent: str) -> None:
    assert sampled_ids(TraceContext(traceparent)) is None


def test_slow_and_silent_clients_hold_nobody_up(metrics: ProcessMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that send nothing, half a line at a time, or read nothing: the next scrape is answered, and they go."""
    monkeypatch.setattr(metrics_http, "MAX_CONNECTION_S", 1.0)
    # More than the sockets' buffers hold.
    metrics.instruments.info("big_info", "Big.", ("text",), lambda: [("x" * 20_000_000,)])
    clients = [socket.create_connection(("127.0.0.1", metrics.port)) for _ in range(metrics_http.MAX_CONNECTIONS - 2)]
    try:
        clients[0].sendall(b"GET /metr")
        clients[1].sendall(b"GET /metrics HTTP/1.0\r\nAccept: " + OPENMETRICS.encode() + b"\r\n\r\n")
        time.sleep(0.2)
        started = time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/nothing-big", timeout=5):
            raise AssertionError("it is not there")
    except urllib.error.HTTPError as error:
        assert error.code == 404 and time.monotonic() - started < 1.0
        error.close()
        eventually(lambda: len(_threads()) == 0, 10, "the end of all connections")
    finally:
        for client in clients:
            client.close()


def test_no_more_connections_than_the_bound(metrics: ProcessMetrics) -> None:
    clients = [socket.create_connection(("127.0.0.1", metrics.port)) for _ in range(metrics_http.MAX_CONNECTIONS)]
    try:
        eventually(lambda: len(_threads()) == metrics_http.MAX_CONNECTIONS)
        with socket.create_connection(("127.0.0.1", metrics.port), timeout=5) as one_more:
            one_more.settimeout(5)
            assert one_more.recv(1) == b"", "it is closed at once"
    finally:
        for client in clients:
            client.close()
    eventually(lambda: not _threads())
    assert "pagewire_ready" in fetch(metrics.port)[0]


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]


def test_observations_beside_scrapes_are_whole() -> None:
    """Counts only grow and sums fit while another thread reads."""
    instruments = Instruments()
    histogram = instruments.histogram("y_seconds", "Y.", (1, 2), ("kind",))
    is_over = threading.Event()

    def write() -> None:
        number = 0
        while not is_over.is_set():
            histogram.observe(1.5, (str(number % 50),))
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        last = 0
        for _ in range(300):
            total = sum(sum(found.counts) for found in histogram.read().values())
            assert total >= last
            last = total
    finally:
        is_over.set()
        writer.join()
    assert last > 0
