"""The worker's span of a step: under the core's, with where the time went; none without a sampled step."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from trace_support import Traces, ids, parent

from pagewire.engine import TraceContext
from pagewire.errors import InternalError
from pagewire.plan import StepPlan, StepResult, Timings
from worker_svc.compute import ComputeThread
from worker_svc.execute_session import ExecuteSession
from worker_svc.trace_observer import TraceObserver


def plan(step: int, context: TraceContext | None) -> StepPlan:
    column = np.array([3, 1], np.int32)
    return StepPlan(7, step, column, column, column, column, column, column, trace_context=context)


def run(traces: Traces, plans: list[StepPlan], device: str = "cpu") -> list[Any]:
    """Sends plans through a session whose steps 3 fail; what the core would get."""

    def start(found: StepPlan, await_mask: Any, deliver: Any) -> StepResult:
        if found.step == 3:
            raise InternalError("the device is on fire")
        time.sleep(0.005)
        timings = Timings(prepare_ns=1_000_000, forward_ns=3_000_000, sample_ns=500_000)
        return StepResult(found.epoch, found.step, found.slots, found.slots, found.slots, timings=timings)

    async def scenario() -> list[Any]:
        compute = ComputeThread()
        worker: Any = SimpleNamespace(start=start)
        session = ExecuteSession("core-1", 7, worker, compute, [TraceObserver(traces.tracer, device)])
        for found in plans:
            session.submit(found)
        await session.wait_idle()
        await asyncio.sleep(0.02)
        assert await asyncio.to_thread(compute.close, 5.0)
        return [session.outgoing.get_nowait() for _ in plans]

    return asyncio.run(scenario())


def test_execute_is_under_the_cores_step(traces: Traces) -> None:
    """Case: vllm#9952"""
    steps = [parent() for _ in range(3)]
    outgoing = run(traces, [plan(i + 1, context) for i, context in enumerate(steps)])
    assert len(outgoing) == 3
    found = sorted(traces.spans.named("execute"), key=lambda span: span.attributes["pagewire.execute.step"])
    assert [(span.trace_id, span.parent_id) for span in found] == [ids(context) for context in steps]
    said = found[0].attributes
    assert (said["pagewire.step.batch_size"], said["pagewire.step.tokens"], said["pagewire.step.epoch"]) == (2, 4, 7)
    assert [said[f"pagewire.execute.{part}_s"] for part in ("prepare", "forward", "sample")] == [0.001, 0.003, 0.0005]
    assert found[1].attributes["pagewire.execute.wait_s"] > 0.004, "it waited for the step before"
    assert found[0].end_ns - found[0].start_ns >= 5_000_000 and found[0].end_ns <= found[1].end_ns
    assert found[2].is_error and "on fire" in found[2].message and found[2].attributes["error.type"] == "INTERNAL"


def test_a_step_that_is_not_sampled_has_none(traces: Traces) -> None:
    outgoing = run(traces, [plan(1, None), plan(2, TraceContext()), plan(4, parent(is_sampled=False))])
    assert len(outgoing) == 3 and traces.names() == []


def test_what_timed_it_is_said(traces: Traces) -> None:
    run(traces, [plan(1, parent())], device="cuda")
    assert traces.only().attributes["pagewire.execute.clock"] == "cuda_event"
