"""The core's spans: a request's intervals and events, and steps that are linked to the sampled requests in them."""

from __future__ import annotations

from typing import Any

import pytest
from core_support import FRONTEND, Harness, make_request, params
from trace_support import Traces, ids, parent

from core_svc.fake_executor import FakeOptions
from core_svc.trace_observer import DEFAULT_STEP_INTERVAL, MAX_STEPS_NOTED, TraceObserver
from pagewire.engine import AbortReason, EngineRequest
from pagewire.errors import InternalError


def traced_engine(traces: Traces, **options: Any) -> tuple[Harness, TraceObserver]:
    interval = options.pop("step_interval", DEFAULT_STEP_INTERVAL)
    harness = Harness(**options)
    observer = TraceObserver(traces.tracer, interval)
    observer.watch(harness.scheduler)
    harness.engine._observers = [observer]
    harness.scheduler.journal.is_on = True
    return harness, observer


def assert_nothing_is_kept(observer: TraceObserver) -> None:
    assert not observer._sampled and not observer._unsampled and not observer._steps


def request(number: int, prompt: int = 6, max_tokens: int = 8, **changes: Any) -> EngineRequest:
    return make_request(number, prompt, params(max_tokens, ignore_eos=True), **changes)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_steps_are_linked_to_their_requests_and_requests_to_their_steps(traces: Traces, async_scheduling: bool) -> None:
    """Case: vllm#9952"""
    harness, observer = traced_engine(traces, async_scheduling=async_scheduling)
    parents = [parent(tracestate="vendor=x") for _ in range(3)]
    harness.add(*(request(i, max_tokens=4 + 2 * i, trace_context=parents[i]) for i in range(3)))
    harness.run()
    spans = traces.spans
    requests = [spans.one("engine.request", pagewire__request=str(i)) for i in range(3)]
    for i, found in enumerate(requests):
        assert (found.trace_id, found.parent_id) == ids(parents[i]) and found.kind == "server"
        assert found.attributes["pagewire.steps"] == 4 + 2 * i == found.attributes["pagewire.output_tokens"]
        assert [s.name for s in spans.children(found)] == ["queue", "prefill", "decode"]
    steps = spans.named("engine.step")
    assert len(steps) == 8 and len({step.trace_id for step in steps} | {r.trace_id for r in requests}) == 11
    by_number = {step.attributes["pagewire.step"]: step for step in steps}
    for found in requests:
        numbers = found.attributes["pagewire.step.numbers"]
        assert [by_number[number].link for number in numbers] == found.links
        assert all((found.link in step.links) == (number in numbers) for number, step in by_number.items())
    plans = {ids(plan.trace_context)[0] for plan in harness.plans if plan.trace_context is not None}
    assert plans == {step.trace_id for step in steps}, "what the worker is given"
    assert_nothing_is_kept(observer)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_preemptions_are_events_and_counted(traces: Traces, async_scheduling: bool) -> None:
    """Case: vllm#9952"""
    harness, observer = traced_engine(
        traces, num_blocks=8, block_size=4, max_num_seqs=4, async_scheduling=async_scheduling
    )
    harness.add(*(request(i, 6, 10) for i in range(3)))
    harness.run()
    num_preemptions = harness.scheduler.stats.num_preemptions
    assert num_preemptions, "the pool is small enough to preempt"
    requests, steps = traces.spans.named("engine.request"), traces.spans.named("engine.step")
    assert sum(r.attributes["pagewire.preemptions"] for r in requests) == num_preemptions
    assert sum(s.attributes["pagewire.step.preemptions"] for s in steps) == num_preemptions
    for found in requests:
        names = [name for name, _, _ in found.events if name in ("preempted", "resumed")]
        assert names == ["preempted", "resumed"] * found.attributes["pagewire.preemptions"]
        lost = sum(said["pagewire.tokens"] for name, _, said in found.events if name == "preempted")
        assert lost == found.attributes["pagewire.recomputed_tokens"]
        assert [when for _, when, _ in found.events] == sorted(when for _, when, _ in found.events)
        assert found.event("finished")[0] == found.end_ns
    assert max(s.attributes["pagewire.step.kv_use"] for s in steps) > 0.5
    assert_nothing_is_kept(observer)


def test_unsampled_parents_are_honoured_and_cost_steps_nothing(traces: Traces) -> None:
    """Case: vllm#38672"""
    harness, observer = traced_engine(traces)
    harness.add(*(request(i, trace_context=parent(is_sampled=False)) for i in range(4)))
    harness.step()
    assert not observer._sampled and len(observer._unsampled) == 4

    class Unread:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError("a step without sampled requests has its rows looked at")

    step = harness.steps[-1]
    step.plan.new_requests = []
    step.slots, step.requests = Unread(), Unread()  # type: ignore[assignment]
    assert observer.begin_step(step) is None
    harness.run()
    assert traces.names() == [] and all(plan.trace_context is None for plan in harness.plans)
    assert_nothing_is_kept(observer)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_one_sampled_request_among_many(traces: Traces, async_scheduling: bool) -> None:
    """Only its steps are traced, and they name it alone."""
    harness, observer = traced_engine(traces, async_scheduling=async_scheduling)
    harness.add(*(request(i, max_tokens=20, trace_context=parent(is_sampled=i == 5)) for i in range(8)))
    for _ in range(5):
        harness.step()
    harness.engine.abort(FRONTEND, [5], AbortReason.CLIENT)
    harness.run()
    found = traces.spans.one("engine.request")
    steps = traces.spans.named("engine.step")
    assert len(steps) == found.attributes["pagewire.steps"] < 8 < len(harness.plans)
    for step in steps:
        assert step.links == [found.link]
        assert (step.attributes["pagewire.step.batch_size"], step.attributes["pagewire.step.traced_requests"]) == (8, 1)
    assert found.attributes["pagewire.finish_reason"] == "abort" and not found.is_error
    assert_nothing_is_kept(observer)


def test_requests_that_end_in_the_queue_or_late(traces: Traces) -> None:
    """Case: vllm#32162"""
    harness, observer = traced_engine(traces, max_num_seqs=1)
    harness.add(request(1, max_tokens=30), request(2), request(3, remaining_ms=0))
    harness.step()
    harness.engine.abort(FRONTEND, [2], AbortReason.CLIENT)
    harness.run()
    spans = traces.spans
    aborted, late = (spans.one("engine.request", pagewire__request=number) for number in ("2", "3"))
    for found, reason in ((aborted, "abort"), (late, "deadline")):
        assert [s.name for s in spans.children(found)] == ["queue"]
        assert found.event("finished")[1] == {"pagewire.finish_reason": reason}
        assert (found.attributes["pagewire.prompt_tokens"], found.attributes["pagewire.output_tokens"]) == (6, 0)
        assert found.attributes["pagewire.steps"] == 0 and found.links == []
    assert late.is_error and not aborted.is_error and aborted.attributes["pagewire.abort_reason"] == "client"
    assert_nothing_is_kept(observer)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_failed_steps_and_their_requests(traces: Traces, async_scheduling: bool) -> None:
    """Case: vllm#9952"""
    options = FakeOptions(failures={2: InternalError("out of memory")})
    harness, observer = traced_engine(traces, options=options, async_scheduling=async_scheduling)
    harness.add(request(1))
    harness.run()
    found = traces.spans.one("engine.request")
    assert found.is_error and "out of memory" in found.message and found.attributes["error.type"] == "INTERNAL"
    failed = [step for step in traces.spans.named("engine.step") if step.is_error]
    assert failed and all("out of memory" in step.message for step in failed)
    assert failed[0].attributes["error.type"] == "INTERNAL"
    assert_nothing_is_kept(observer)


def test_links_and_noted_steps_are_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SPAN_LINK_COUNT_LIMIT", "4")
    traces = Traces()
    harness, _ = traced_engine(traces, step_interval=1)
    harness.add(*(request(i, max_tokens=MAX_STEPS_NOTED + 10) for i in range(6)))
    harness.run()
    for step in traces.spans.named("engine.step"):
        assert len(step.links) == 4 and step.attributes["pagewire.step.traced_requests"] == 6
    for found in traces.spans.named("engine.request"):
        said = found.attributes
        assert said["pagewire.steps"] == MAX_STEPS_NOTED + 10 == said["pagewire.step.last"]
        assert said["pagewire.step.numbers"] == list(range(1, MAX_STEPS_NOTED + 1)) and len(found.links) == 4
    traces.tracer.close(5)


def test_a_core_without_a_traced_frontend_begins_traces(traces: Traces) -> None:
    harness, _ = traced_engine(traces)
    harness.add(request(1), request(2))
    harness.run()
    found = traces.spans.named("engine.request")
    assert [f.parent_id for f in found] == ["", ""] and found[0].trace_id != found[1].trace_id


def test_late_steps_are_traced_now_and_then(traces: Traces) -> None:
    """A request's first steps and every so many later; a newcomer has its own first ones traced."""
    harness, _ = traced_engine(traces, step_interval=4)
    harness.add(request(1, max_tokens=20))
    for _ in range(10):
        harness.step()
    harness.add(request(2, max_tokens=6))
    harness.run()
    old, new = (traces.spans.one("engine.request", pagewire__request=number) for number in ("1", "2"))
    traced = {step.attributes["pagewire.step"]: step for step in traces.spans.named("engine.step")}
    assert sorted(traced) == [1, 2, 3, 4, 8, *range(11, 15), 16, 20]
    assert old.links == [traced[number].link for number in sorted(traced)]
    assert new.links == [traced[number].link for number in (11, 12, 13, 14, 16)]
    assert old.attributes["pagewire.step.numbers"] == list(range(1, 21))
    assert all(set(traced[number].links) == {old.link, new.link} for number in (11, 16))
