"""What this process tells of itself: how long it lives, what it takes."""

from __future__ import annotations

import functools
import os
import time
from importlib.metadata import PackageNotFoundError, version

from pagewire.stats import ProcessStats

_IMPORTED_S = time.monotonic()


def process_stats(incarnation: str) -> ProcessStats:
    """As of now."""
    return ProcessStats(
        incarnation=incarnation,
        pid=os.getpid(),
        uptime_ms=int(uptime_s() * 1000),
        resident_bytes=resident_bytes(),
        cpu_ms=int(time.process_time() * 1000),
        version=own_version(),
    )


def uptime_s() -> float:
    """Since this process started; where the system has no /proc, since this module was imported."""
    try:
        with open("/proc/self/stat", "rb") as file:
            # Field 22, counted behind the name, which may hold anything.
            started_ticks = int(file.read().rpartition(b")")[2].split()[19])
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, AttributeError):
        return time.monotonic() - _IMPORTED_S


def resident_bytes() -> int:
    """Resident memory; 0 where the system has no /proc."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@functools.cache
def own_version() -> str:
    """The installed version of Pagewire; empty where it runs from its sources alone."""
    try:
        return version("pagewire")
    except PackageNotFoundError:
        return ""
