"""What each service declares, made without a process, and what docs/metrics.md says of it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from core_svc.metrics import EngineMetrics
from core_svc.state_metrics import StateMetrics, WorkerState
from frontend_svc.metrics import CoreLinks, RequestMetrics
from pagewire.runtime.metrics import ProcessMetrics
from pagewire.runtime.rpc_metrics import RpcClientMetrics, RpcServerMetrics
from worker_svc.metrics import StepMetrics, add_worker_state

DOCUMENT = Path(__file__).parents[2] / "docs/metrics.md"
PROCESS_COLLECTOR = {
    "process_virtual_memory_bytes": ("gauge", "bytes"),
    "process_resident_memory_bytes": ("gauge", "bytes"),
    "process_start_time_seconds": ("gauge", "seconds"),
    "process_cpu_seconds_total": ("counter", "seconds"),
    "process_open_fds": ("gauge", ""),
    "process_max_fds": ("gauge", ""),
}
"""What prometheus_client's ProcessCollector adds; it declares no units."""


class Row(NamedTuple):
    """A metric of a service, or of several."""

    name: str
    kind: str
    unit: str
    labels: tuple[str, ...]
    services: tuple[str, ...]


def _instruments(service: str) -> Any:
    found = ProcessMetrics(service, "0").instruments
    RpcServerMetrics(found, counts_messages=service != "frontend")
    if service == "frontend":
        RequestMetrics(found)
        CoreLinks(found)
        RpcClientMetrics(found, "core")
    elif service == "core":
        EngineMetrics(found)
        StateMetrics(found, WorkerState(), "", lambda: 0)
        RpcClientMetrics(found, "worker")
    else:
        StepMetrics(found)
        worker: Any = SimpleNamespace()
        add_worker_state(found, worker, lambda: False, lambda: (0, 0))
    return found


def declared() -> dict[str, Row]:
    """All metrics by name; one that several services have must be the same in all of them."""
    rows: dict[str, Row] = {}
    services = ("frontend", "core", "worker")
    for service in services:
        for one in _instruments(service):
            before = rows.get(one.name)
            named = (*(before.services if before else ()), service)
            row = Row(one.name, one.kind, one.unit, one.label_names, named)
            assert before is None or before == row._replace(services=before.services), (before, row)
            rows[one.name] = row
    for name, (kind, unit) in PROCESS_COLLECTOR.items():
        rows[name] = Row(name, kind, unit, (), services)
    return rows


def documented() -> dict[str, Row]:
    """The rows of the page's tables of metrics: name, type, unit, labels, services, meaning."""
    rows = {}
    for line in DOCUMENT.read_text().splitlines():
        match = re.fullmatch(r"\| `(\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \| ([^|]*) \| [^|]+ \|", line)
        if match is not None:
            name, kind, unit, labels, services = (part.strip() for part in match.groups())
            assert name not in rows, f"{name} is documented twice"
            rows[name] = Row(
                name, kind, unit, tuple(re.findall(r"`(\w+)`", labels)), tuple(re.findall(r"\w+", services))
            )
    return rows
