"""Who watches an engine is told of every request and every step, once, in order, after the outputs are out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from core_support import FRONTEND, Harness, make_request, params

from core_svc.fake_executor import FakeOptions
from core_svc.observer import EventKind, RequestEvent, StepRecord
from core_svc.plan_builder import ScheduledStep
from pagewire.engine import AbortReason, FinishReason, TraceContext
from pagewire.errors import InternalError


class Watcher:
    """Keeps what it is told, and how many messages were published by then."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.begun: list[int] = []
        self.records: list[StepRecord] = []
        self.events: list[RequestEvent] = []
        self.publish_ns = 0
        harness.engine._observers = [self]
        harness.scheduler.journal.is_on = True

    def begin_step(self, step: ScheduledStep) -> TraceContext | None:
        self.begun.append(step.number)
        return TraceContext(f"trace of step {step.number}")

    def observe(self, steps: Sequence[StepRecord], events: Sequence[RequestEvent], publish_ns: int) -> None:
        self.records += steps
        self.events += events
        self.publish_ns += publish_ns
        for event in events:
            if event.kind is EventKind.ENDED:
                assert self.harness.of(event.request.key[1]).finished is event.request.finished

    def kinds(self, request_id: int) -> list[EventKind]:
        return [event.kind for event in self.events if event.request.key == (FRONTEND, request_id)]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_every_request_and_step_is_told_of_once_and_in_order(async_scheduling: bool):
    harness = Harness(num_blocks=8, block_size=4, max_num_seqs=4, async_scheduling=async_scheduling)
    watcher = Watcher(harness)
    harness.add(*(make_request(i, 6, params(10, ignore_eos=True)) for i in range(3)))
    harness.run()
    num_preemptions = harness.scheduler.stats.num_preemptions
    assert num_preemptions, "the pool is small enough to preempt"
    for i in range(3):
        kinds = watcher.kinds(i)
        assert kinds[0] is EventKind.ADDED and kinds[-1] is EventKind.ENDED and kinds.count(EventKind.ENDED) == 1
        middle = kinds[1:-1]
        assert middle[::2] == [EventKind.ADMITTED] * len(middle[::2])
        assert middle[1::2] == [EventKind.PREEMPTED] * len(middle[1::2])
    preempted = [event for event in watcher.events if event.kind is EventKind.PREEMPTED]
    assert len(preempted) == num_preemptions and all(event.num_tokens > 0 for event in preempted)
    assert [event.time_ns for event in watcher.events] == sorted(event.time_ns for event in watcher.events)
    numbers = [record.step.number for record in watcher.records]
    assert numbers == watcher.begun == list(range(1, harness.engine.num_steps + 1))
    assert [p.trace_context for p in harness.plans] == [TraceContext(f"trace of step {n}") for n in numbers]
    for record in watcher.records:
        step = record.step
        assert step.planned_ns <= step.scheduled_ns <= record.submitted_ns <= record.executed_ns <= record.updated_ns
        assert record.result is not None and record.error is None
    assert watcher.publish_ns > 0


def test_aborted_and_failed_requests_and_failed_steps_are_told_of():
    harness = Harness(options=FakeOptions(failures={2: InternalError("out of memory")}))
    watcher = Watcher(harness)
    harness.add(make_request(1, 5), make_request(2, 5))
    harness.step()
    harness.engine.abort(FRONTEND, [1], AbortReason.CLIENT)
    harness.run()
    ends = {e.request.key[1]: e.request.finished for e in watcher.events if e.kind is EventKind.ENDED}
    assert ends[1] is not None and (ends[1].reason, ends[1].abort_reason) == (FinishReason.ABORT, AbortReason.CLIENT)
    assert ends[2] is not None and (ends[2].reason, ends[2].error_code) == (FinishReason.ERROR, "INTERNAL")
    failed = [record for record in watcher.records if record.error is not None]
    assert [record.step.number for record in failed] == [2] and failed[0].result is None


def test_without_observers_nothing_is_kept():
    harness = Harness()
    harness.add(make_request(1, 5))
    harness.run()
    assert not harness.scheduler.journal.take() and not harness.engine._records
