"""A process's metrics: what all services have, and how they leave: at an HTTP endpoint for Prometheus, and by OTLP.

    metrics = ProcessMetrics.for_settings("core", incarnation, settings)   # None: nobody asked for them
    counter = metrics.instruments.counter("pagewire_core_..._total", "What it counts.")
    metrics.start(); ...; metrics.close()

prometheus_client writes the formats: text, or OpenMetrics with exemplars where the Accept header asks for it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import platform
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

from pagewire.runtime.instruments import Counter, Histogram, Instruments, Labels, Reading
from pagewire.runtime.metrics_http import PATH, MetricsHttpServer
from pagewire.runtime.metrics_otlp import EXPORTER_VARIABLE, make_otlp, wants_otlp
from pagewire.runtime.settings import CommonSettings
from pagewire.runtime.transport import format_address

if TYPE_CHECKING:
    from prometheus_client import Metric

    from pagewire.runtime.metrics_otlp import OtlpMetrics

logger = logging.getLogger(__name__)


class ProcessMetrics:
    """The instruments of a process, and where they can be read."""

    def __init__(self, service: str, incarnation: str) -> None:
        self.service = service
        self.incarnation = incarnation
        self.instruments = Instruments()
        self.is_ready: Callable[[], bool] = lambda: False
        """Whether the process can serve; to be set."""
        self._http: MetricsHttpServer | None = None
        self._otlp: OtlpMetrics | None = None
        self._lock = threading.Lock()
        self._registry: Any = None
        self._add_common()

    @classmethod
    def for_settings(cls, service: str, incarnation: str, settings: CommonSettings) -> Self | None:
        """Metrics as the settings and OTEL_METRICS_EXPORTER ask for; None where neither does.

        Raises OSError where the port is taken or prometheus-client is not installed.
        """
        is_exported = wants_otlp()
        if settings.metrics_port is None and not is_exported:
            return None
        if importlib.util.find_spec("prometheus_client") is None:
            raise OSError("metrics need prometheus-client: pip install 'pagewire[telemetry]'")
        metrics = cls(service, incarnation)
        if settings.metrics_port is not None:
            metrics.listen(settings.metrics_host, settings.metrics_port)
        if is_exported:
            metrics._otlp = make_otlp(service, incarnation, metrics.instruments)
        return metrics

    def listen(self, host: str, port: int) -> None:
        """Takes the endpoint's port; port 0 takes a free one. Answers come after `start`."""
        self._http = MetricsHttpServer(host, port, self.render)

    @property
    def port(self) -> int:
        """The endpoint's port; 0 without one."""
        return 0 if self._http is None else self._http.port

    def start(self) -> None:
        """Serves and exports from now on."""
        if self._http is not None:
            self._http.start()
            host = str(self._http.server_address[0])
            logger.info("metrics on http://%s%s", format_address(host, self._http.port), PATH)
        if self._otlp is not None:
            self._otlp.start()

    def close(self) -> None:
        """Stops both; what was measured last is exported."""
        if self._http is not None:
            self._http.close()
        if self._otlp is not None:
            self._otlp.close()

    def render(self, accept: str) -> tuple[bytes, str]:
        """All metrics in the format that an Accept header asks for, and its content type."""
        from prometheus_client.exposition import choose_encoder

        encode, content_type = choose_encoder(accept)
        # One at a time: all wait for the same interpreter.
        with self._lock:
            if self._registry is None:
                self._registry = _registry(self.instruments)
            return encode(self._registry), content_type

    def _add_common(self) -> None:
        build = (_version("pagewire"), platform.python_version(), _version("grpcio"))
        instruments = self.instruments
        instruments.info(
            "pagewire_build_info",
            "Version of Pagewire, Python and grpcio.",
            ("service", "version", "python", "grpcio"),
            lambda: [(self.service, *build)],
        )
        instruments.info(
            "pagewire_incarnation_info",
            "The process's life: another value is another process.",
            ("service", "incarnation"),
            lambda: [(self.service, self.incarnation)],
        )
        instruments.number("gauge", "pagewire_ready", "1 while the process can serve.", lambda: int(self.is_ready()))


class ServiceMetrics:
    """What a service's own wiring of metrics derives from: it begins and ends, and does nothing where nobody asked."""

    def __init__(
        self, service: str, incarnation: str, settings: CommonSettings, *, is_ready: Callable[[], bool]
    ) -> None:
        self._process = ProcessMetrics.for_settings(service, incarnation, settings)
        if self._process is not None:
            self._process.is_ready = is_ready

    @property
    def instruments(self) -> Instruments | None:
        """Where to add; None where nobody asked for metrics."""
        return None if self._process is None else self._process.instruments

    def start(self) -> None:
        """Serves and exports from now on."""
        if self._process is not None:
            self._process.start()

    def close(self) -> None:
        """Stops; takes moments where a last export has to be made."""
        if self._process is not None:
            self._process.close()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


class _Collector:
    """Instruments as prometheus_client's families."""

    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments

    def collect(self) -> Iterator[Metric]:
        for instrument in self._instruments:
            try:
                yield _family(instrument)
            except Exception:
                # One number that can't be had must not cost the others.
                logger.warning("%s cannot be read", instrument.name, exc_info=True)

    def describe(self) -> list[Any]:
        return []


def _registry(instruments: Instruments) -> Any:
    from prometheus_client import CollectorRegistry, ProcessCollector

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(instruments))
    ProcessCollector(registry=registry)
    return registry


def _family(instrument: Counter | Reading | Histogram) -> Metric:
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
    )

    name, doc, labels, unit = instrument.name, instrument.doc, instrument.label_names, instrument.unit
    if isinstance(instrument, Histogram):
        histogram = HistogramMetricFamily(name, doc, labels=labels, unit=unit)
        _fill(histogram, instrument)
        return histogram
    values = instrument.read()
    if instrument.kind == "info":
        info = InfoMetricFamily(name.removesuffix("_info"), doc)
        for found in values:
            info.add_metric([], dict(zip(labels, found, strict=True)))
        return info
    if instrument.kind == "counter":
        family: Any = CounterMetricFamily(name, doc, labels=labels, unit=unit)
    else:
        family = GaugeMetricFamily(name, doc, labels=labels, unit=unit)
    for found, value in values.items():
        family.add_metric(found, value)
    return family  # type: ignore[no-any-return]


def _fill(family: Any, histogram: Histogram) -> None:
    from prometheus_client.samples import Exemplar

    bounds = [*(repr(bound) for bound in histogram.bounds), "+Inf"]
    for labels, distribution in histogram.read().items():
        buckets: list[Any] = []
        total = 0
        for place, (bound, count) in enumerate(zip(bounds, distribution.counts, strict=True)):
            total += count
            seen = distribution.exemplars.get(place)
            exemplar = None
            if seen is not None:
                exemplar = Exemplar({"trace_id": seen.trace_id, "span_id": seen.span_id}, seen.value, seen.time_s)
            buckets.append((bound, total, exemplar))
        family.add_metric(labels, buckets, distribution.sum)


__all__ = ["EXPORTER_VARIABLE", "Labels", "ProcessMetrics"]
