"""StepWatchdog: a hung step is found, a long one with progress is not.

Case: vllm#17972
"""

from __future__ import annotations

from core_svc.watchdog import StepWatchdog, step_age_ms

S = 10**9


def test_stalled_only_without_progress() -> None:
    watchdog = StepWatchdog(limit_s=60)
    now = 1000 * S
    assert not watchdog.is_stalled(now, 0, 0), "nothing runs"
    assert not watchdog.is_stalled(now, now - 59 * S, 0), "young"
    assert watchdog.is_stalled(now, now - 61 * S, 0), "old, no progress ever"
    assert watchdog.is_stalled(now, now - 300 * S, now - 61 * S), "progress stopped"
    assert not watchdog.is_stalled(now, now - 300 * S, now - 1 * S), "a long prefill that gets on"


def test_step_age() -> None:
    assert step_age_ms(5 * S, 0) == 0
    assert step_age_ms(5 * S, 2 * S) == 3000
