"""What a process measures, in plain Python: counters, gauges and histograms that a scrape or an export reads.

Built for loops that must not notice: an observation is a bisection and two additions, without a lock. Each label set of
an instrument has one writing thread; readers on other threads copy, and see every instrument as it is at some moment,
not all of them as of the same one. What is counted elsewhere already is read there, when somebody asks (`reading`).

Labels are tuples of values in the order of the instrument's label names. Their values come from bounded sets: never
put a request's id, a client's address or a text of a client into one.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pagewire.engine import TraceContext

Kind = Literal["counter", "gauge", "histogram", "info"]
Labels = tuple[str, ...]

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Bounds for parts of a request's life."""
STEP_SECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
"""Bounds for parts of a step."""
RPC_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""Bounds that OpenTelemetry's conventions name for rpc.*.call.duration."""
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One observation and the trace that it belongs to."""

    trace_id: str
    span_id: str
    value: float
    time_s: float
    """Wall clock."""


@dataclass(slots=True)
class Distribution:
    """A histogram's state for one label set."""

    counts: list[int]
    """By bucket, not cumulative; one more than there are bounds."""
    sum: float = 0.0
    exemplars: dict[int, Exemplar] = field(default_factory=dict)
    """By bucket: the last one."""


class Instrument:
    """What every instrument has."""

    def __init__(self, kind: Kind, name: str, doc: str, labels: Sequence[str] = (), unit: str = "") -> None:
        """`name` is the one that is exposed: with the unit, and `_total` for counters; `unit`: such as seconds."""
        self.kind, self.name, self.doc, self.label_names, self.unit = kind, name, doc, tuple(labels), unit


class Counter(Instrument):
    """A sum that only grows, by label set."""

    def __init__(
        self, name: str, doc: str, labels: Sequence[str] = (), unit: str = "", preset: Iterable[Labels] = ()
    ) -> None:
        """`preset`: label sets that are there, at zero, before anything is counted, so that a first one is a rise."""
        super().__init__("counter", name, doc, labels, unit)
        self._values: dict[Labels, float] = dict.fromkeys(preset, 0) if labels else {(): 0}

    def add(self, amount: float = 1, labels: Labels = ()) -> None:
        """Adds to one label set."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def read(self) -> Mapping[Labels, float]:
        """A copy."""
        return self._values.copy()


class Reading(Instrument):
    """Numbers that are kept elsewhere: a function gives them by label set when somebody asks. Any thread calls it."""

    def __init__(
        self,
        kind: Kind,
        name: str,
        doc: str,
        read: Callable[[], Mapping[Labels, float]],
        labels: Sequence[str] = (),
        unit: str = "",
    ) -> None:
        super().__init__(kind, name, doc, labels, unit)
        self.read = read


class Histogram(Instrument):
    """A distribution by label set."""

    def __init__(
        self,
        name: str,
        doc: str,
        bounds: Sequence[float],
        labels: Sequence[str] = (),
        unit: str = "seconds",
        preset: Iterable[Labels] = (),
    ) -> None:
        super().__init__("histogram", name, doc, labels, unit)
        self.bounds = tuple(float(bound) for bound in bounds)
        self._distributions: dict[Labels, Distribution] = {}
        for label_set in preset if labels else [()]:
            self._of(label_set)

    def _of(self, labels: Labels) -> Distribution:
        found = self._distributions[labels] = Distribution([0] * (len(self.bounds) + 1))
        return found

    def observe(self, value: float, labels: Labels = (), trace: TraceContext | None = None) -> None:
        """Adds a value; with a sampled trace it becomes the bucket's exemplar."""
        found = self._distributions.get(labels) or self._of(labels)
        place = bisect_left(self.bounds, value)
        found.counts[place] += 1
        found.sum += value
        if trace is not None and (ids := sampled_ids(trace)) is not None:
            found.exemplars[place] = Exemplar(*ids, value, time.time())

    def read(self) -> dict[Labels, Distribution]:
        """A copy."""
        found = self._distributions.copy()
        return {labels: Distribution(d.counts.copy(), d.sum, d.exemplars.copy()) for labels, d in found.items()}


def sampled_ids(trace: TraceContext) -> tuple[str, str] | None:
    """Trace id and span id of a trace that is recorded; None where it is not, or is no W3C trace context."""
    match = _TRACEPARENT.match(trace.traceparent)
    return (match[1], match[2]) if match is not None and int(match[3], 16) & 1 else None


class Instruments:
    """All instruments of a process, in the order in which they were made."""

    def __init__(self) -> None:
        self._instruments: dict[str, Counter | Reading | Histogram] = {}

    def __iter__(self) -> Iterator[Counter | Reading | Histogram]:
        return iter(list(self._instruments.values()))

    def _add(self, instrument: Counter | Reading | Histogram) -> None:
        if instrument.name in self._instruments:
            raise ValueError(f"there is an instrument {instrument.name} already")
        self._instruments[instrument.name] = instrument

    def counter(
        self, name: str, doc: str, labels: Sequence[str] = (), unit: str = "", preset: Iterable[Labels] = ()
    ) -> Counter:
        """See Counter."""
        counter = Counter(name, doc, labels, unit, preset)
        self._add(counter)
        return counter

    def histogram(
        self,
        name: str,
        doc: str,
        bounds: Sequence[float] = SECONDS,
        labels: Sequence[str] = (),
        unit: str = "seconds",
        preset: Iterable[Labels] = (),
    ) -> Histogram:
        """See Histogram."""
        histogram = Histogram(name, doc, bounds, labels, unit, preset)
        self._add(histogram)
        return histogram

    def reading(
        self,
        kind: Kind,
        name: str,
        doc: str,
        read: Callable[[], Mapping[Labels, float]],
        labels: Sequence[str] = (),
        unit: str = "",
    ) -> None:
        """See Reading."""
        self._add(Reading(kind, name, doc, read, labels, unit))

    def number(self, kind: Kind, name: str, doc: str, read: Callable[[], float], unit: str = "") -> None:
        """A reading without labels."""
        self.reading(kind, name, doc, lambda: {(): read()}, unit=unit)

    def info(self, name: str, doc: str, labels: Sequence[str], read: Callable[[], Iterable[Labels]]) -> None:
        """Facts as labels of the value 1; `name` ends with `_info`."""
        self.reading("info", name, doc, lambda: dict.fromkeys(read(), 1), labels)
