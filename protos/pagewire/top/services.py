"""A line for each service of a deployment: health, address, process, and what it is about."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from pagewire.engine import CoreStats
from pagewire.stats import CoreConnection, FrontendStats, WorkerStats
from pagewire.top.data import Answer, Sample
from pagewire.top.format import (
    NOTHING,
    Glyphs,
    duration,
    size,
)
from pagewire.top.table import Column, table

MAX_OTHER_CORES = 4
"""Lines for the cores of a frontend besides the one that is shown."""
HEALTH_STYLES = {"ready": "green", "not ready": "yellow", "down": "bold red"}


@dataclass(frozen=True, slots=True)
class _Service:
    name: str
    answer: Answer[Any]
    notes: str
    cpu: float | None

    @property
    def process(self) -> Any:
        """What the process tells of itself; None while it does not."""
        stats = self.answer.stats
        if isinstance(stats, CoreStats):
            return stats.detail.process if stats.detail is not None else None
        return stats.process if stats is not None else None

    def of_process(self, text: Any) -> str:
        return NOTHING if self.process is None else str(text(self.process))


_SERVICES = [
    Column[_Service]("SERVICE", 8, lambda s: s.name, is_left=True, style=lambda s: "bold"),
    Column[_Service](
        "HEALTH", 9, lambda s: s.answer.health, is_left=True, style=lambda s: HEALTH_STYLES.get(s.answer.health, "")
    ),
    Column[_Service]("ADDRESS", 15, lambda s: s.answer.target, is_left=True, keeps_end=True, max_width=30),
    Column[_Service]("UP", 5, lambda s: s.of_process(lambda p: duration(p.uptime_ms))),
    Column[_Service]("MEMORY", 6, lambda s: s.of_process(lambda p: size(p.resident_bytes))),
    Column[_Service]("CPU", 6, lambda s: NOTHING if s.cpu is None else f"{s.cpu:.0%}", rank=1),
    Column[_Service]("PID", 7, lambda s: s.of_process(lambda p: p.pid), rank=1),
    Column[_Service]("LIFE", 6, lambda s: s.of_process(lambda p: p.incarnation[:6]), is_left=True),
    Column[_Service](
        "NOTES",
        25,
        lambda s: s.notes,
        is_left=True,
        style=lambda s: "red" if s.answer.error else "",
        max_width=120,
    ),
]


def services(before: Sample | None, now: Sample, width: int, glyphs: Glyphs) -> list[Text]:
    """A line for each service, and one for each other core that the frontend has, as the frontend sees it."""
    rows = [
        _Service("frontend", now.frontend, _frontend_notes(now.frontend), None),
        _Service("core", now.core, _core_notes(now), None),
        _Service("worker", now.worker, _worker_notes(now.worker), None),
    ]
    if before is not None:
        answers: list[Answer[Any]] = [before.frontend, before.core, before.worker]
        olds = [_Service(row.name, answer, "", None) for row, answer in zip(rows, answers, strict=True)]
        seconds = now.taken_s - before.taken_s
        rows = [replace(row, cpu=_cpu(old, row, seconds)) for old, row in zip(olds, rows, strict=True)]
    return table(_SERVICES, [*rows[:2], *_others(now), *rows[2:]], width, glyphs)


def num_other_lines(now: Sample) -> int:
    """Lines that `services` has beyond those of the three services."""
    return len(_others(now))


def _others(now: Sample) -> list[_Service]:
    cores = now.frontend.stats.cores if now.frontend.stats is not None else ()
    if len(cores) < 2:
        return []
    # By its life too: behind port forwarding one core has two addresses.
    shown = now.detail.process.incarnation or "-"
    others = [core for core in cores if core.target != now.core.target and core.core_incarnation != shown]
    rows = [_other(core) for core in others[:MAX_OTHER_CORES]]
    if len(others) > MAX_OTHER_CORES:
        rows[-1] = replace(rows[-1], notes=f"and {len(others) - MAX_OTHER_CORES} more; {rows[-1].notes}")
    return rows


def _other(core: CoreConnection) -> _Service:
    if not core.is_connected:
        return _Service("core", Answer(core.target, "down", None, core.error), short_error(core.error), None)
    notes = f"{_number(core.num_requests, 'request')} of this frontend; see --core"
    return _Service("core", Answer(core.target, "ready", None), notes, None)


def _cpu(old: _Service, new: _Service, seconds: float) -> float | None:
    """Processors that it kept busy between two looks."""
    before, now = old.process, new.process
    if before is None or now is None or before.incarnation != now.incarnation or seconds <= 0:
        return None
    return float(now.cpu_ms - before.cpu_ms) / 1000 / seconds


def short_error(text: str) -> str:
    """What gRPC says of a connection, without what it says of itself."""
    if "Connection refused" in text:
        return "connection refused"
    if "Deadline Exceeded" in text:
        return "no answer"
    return text.partition("\n")[0]


def _frontend_notes(answer: Answer[FrontendStats]) -> str:
    stats = answer.stats
    if stats is None:
        return short_error(answer.error)
    num_usable, num_cores = sum(core.is_connected for core in stats.cores), len(stats.cores)
    cores = _number(num_usable, "core") if num_usable == num_cores else f"{num_usable} of {num_cores} cores"
    return f"{_number(stats.num_requests, 'request')}, {cores}" + (", draining" if stats.is_draining else "")


def _number(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _core_notes(now: Sample) -> str:
    stats, detail = now.core.stats, now.detail
    if stats is None:
        return short_error(now.core.error)
    if detail.unavailable:
        return short_error(detail.unavailable)
    notes = ["paused"] * stats.is_paused + [f"asleep at {stats.sleep_level}"] * bool(stats.sleep_level)
    notes += [f"epoch {stats.epoch}", _number(stats.num_frontends, "frontend")]
    return ", ".join(notes)


def _worker_notes(answer: Answer[WorkerStats]) -> str:
    stats = answer.stats
    if stats is None:
        return short_error(answer.error)
    asleep = [f"asleep at {stats.sleep_level}"] * bool(stats.sleep_level)
    return ", ".join([*asleep, f"epoch {stats.epoch}", stats.device, _number(int(stats.is_stream_open), "core")])
