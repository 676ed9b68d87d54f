"""Memory and processor time of a process and its descendants, from /proc."""

from __future__ import annotations

import os
import re
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """The process and its descendants that live."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found


def resident_bytes(pids: list[int]) -> int:
    """Proportional set size of all: private pages once, a shared page divided among those who share it."""
    total = 0
    for pid in pids:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        if found := re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE):
            total += int(found.group(1)) * 1024
    return total


def cpu_seconds(pids: list[int]) -> float:
    """Processor time, user and system, that the processes have taken since they started."""
    stats = [stat for pid in pids if (stat := _stat(pid))]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / _TICKS_PER_S


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command's name: state, parent, ... ; None where it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
