"""Tells a hung step from a long one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepWatchdog:
    """A step that is older than `limit_s`, on a worker that made no progress for as long, is hung."""

    limit_s: float

    def is_stalled(self, now_ns: int, step_started_ns: int, progress_ns: int) -> bool:
        """All on the monotonic clock; `step_started_ns` is 0 between steps."""
        if step_started_ns == 0:
            return False
        return now_ns - max(step_started_ns, progress_ns) > self.limit_s * 1e9


def step_age_ms(now_ns: int, step_started_ns: int) -> int:
    """Age of the step that runs; 0 between steps."""
    return max(now_ns - step_started_ns, 0) // 1_000_000 if step_started_ns else 0
