"""The last steps of an engine, kept for whoever asks: an observer that remembers, and computes only when asked."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from core_svc.observer import RequestEvent, StepRecord
from core_svc.plan_builder import ScheduledStep
from pagewire.columns import Int32Column, int32
from pagewire.engine import TraceContext
from pagewire.plan import Timings
from pagewire.stats import MAX_STEPS, StepColumns

_NO_TIMINGS = Timings()


class _Kept(NamedTuple):
    """Of a step. Not its plan, which holds whole prompts."""

    number: int
    num_scheduled_tokens: Int32Column
    num_sampled_tokens: Int32Column
    schedule_ns: int
    execute_ns: int
    update_ns: int
    updated_ns: int
    publish_ns: int
    timings: Timings
    is_failed: bool


class RecentSteps:
    """An EngineObserver of steps alone. `columns` may be called from any thread."""

    needs_events = False

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque(maxlen=MAX_STEPS)

    def begin_step(self, step: ScheduledStep) -> TraceContext | None:
        """Nothing to do yet."""
        return None

    def observe(self, steps: Sequence[StepRecord], events: Sequence[RequestEvent], publish_ns: int) -> None:
        """Keeps the numbers of the steps; what publishing took counts for the last of them."""
        for record in steps:
            step, plan, result = record.step, record.step.plan, record.result
            self._kept.append(
                _Kept(
                    step.number,
                    plan.num_scheduled_tokens,
                    plan.num_sampled_tokens,
                    step.scheduled_ns - step.planned_ns,
                    record.executed_ns - record.submitted_ns,
                    record.updated_ns - record.executed_ns,
                    record.updated_ns,
                    publish_ns if record is steps[-1] else 0,
                    _NO_TIMINGS if result is None else result.timings,
                    result is None,
                )
            )

    def columns(self, max_steps: int) -> StepColumns:
        """The newest steps, at most so many, oldest first."""
        # Copied at once: the engine's thread goes on appending.
        kept = list(self._kept.copy())[-max_steps:] if max_steps > 0 else []
        now_ns = time.monotonic_ns()

        def us(times_ns: Sequence[int]) -> Int32Column:
            return int32(min(max(ns, 0) // 1000, 2**31 - 1) for ns in times_ns)

        return StepColumns(
            numbers=np.array([k.number for k in kept], np.uint64),
            ages_us=np.array([max(now_ns - k.updated_ns, 0) // 1000 for k in kept], np.uint64),
            num_requests=int32(len(k.num_scheduled_tokens) for k in kept),
            num_scheduled_tokens=int32(int(k.num_scheduled_tokens.sum()) for k in kept),
            num_prefill_tokens=int32(_num_prefill_tokens(k) for k in kept),
            num_sampled_tokens=int32(int(k.num_sampled_tokens.sum()) for k in kept),
            schedule_us=us([k.schedule_ns for k in kept]),
            execute_us=us([k.execute_ns for k in kept]),
            update_us=us([k.update_ns for k in kept]),
            publish_us=us([k.publish_ns for k in kept]),
            prepare_us=us([k.timings.prepare_ns for k in kept]),
            forward_us=us([k.timings.forward_ns for k in kept]),
            sample_us=us([k.timings.sample_ns for k in kept]),
            is_failed=int32(int(k.is_failed) for k in kept),
        )


def _num_prefill_tokens(kept: _Kept) -> int:
    num_scheduled = kept.num_scheduled_tokens
    return int(num_scheduled[num_scheduled > kept.num_sampled_tokens].sum())
