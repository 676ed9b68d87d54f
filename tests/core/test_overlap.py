"""Overlap: the next step is planned and submitted while one runs, and nothing that comes out is different for it."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import Future

import pytest
from core_support import (
    FRONTEND,
    Harness,
    assert_engine_empty,
    at_plan,
    expected_tokens,
    make_request,
    params,
    run_one,
    running_engine,
)
from hypothesis import given, settings
from test_core_properties import Play, Scenario, relaxed, scenarios

from core_svc.executor import CacheInfo, CacheSpec
from core_svc.fake_executor import FakeOptions
from pagewire.engine import (
    AbortReason,
    Command,
    CommandResult,
    FinishReason,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Resume,
    Sleep,
    WakeUp,
)
from pagewire.errors import InternalError, UnavailableError
from pagewire.plan import StepPlan, StepResult


def overlapping(**arguments: object) -> Harness:
    return Harness(async_scheduling=True, **arguments)  # type: ignore[arg-type]


def rows_of(harness: Harness, request_id: int) -> list[int]:
    """Tokens that each step computed for a request, steps without it left out."""
    return [
        int(step.plan.num_scheduled_tokens[row])
        for step in harness.steps
        for row, request in enumerate(step.requests)
        if request.key[1] == request_id
    ]


@given(scenarios())
@settings(relaxed, max_examples=100)
def test_both_modes_say_the_same(scenario: Scenario) -> None:
    """The same arrivals, aborts, stops, pauses, chunks and small pools; each request has the same tokens and end."""
    ended: list[dict[tuple[str, int], tuple[list[int], FinishReason | None]]] = []
    for async_scheduling in (False, True):
        config = {**scenario.config, "async_scheduling": async_scheduling}
        play = Play(dataclasses.replace(scenario, config=config))
        play.run()
        ended.append({key: (got.tokens, got.reason) for key, got in play.harness.collected.items()})
    in_turn, overlapped = ended
    for key in in_turn.keys() & overlapped.keys():
        (tokens, reason), (other_tokens, other_reason) = in_turn[key], overlapped[key]
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and reason is other_reason:
            assert tokens == other_tokens
        else:
            # An abort comes at another moment of the request's life; what came before it is the same.
            assert tokens[: len(other_tokens)] == other_tokens[: len(tokens)]


def test_the_next_step_is_at_the_worker_before_the_result_of_this_one_is_asked_for() -> None:
    harness = overlapping()
    asked = make_request(1, 10, params(6))
    harness.add(asked)
    harness.step()
    assert harness.executor.num_plans == 1 and harness.of(1).num_messages == 0
    for count in range(1, 6):
        harness.step()
        assert harness.executor.num_plans == count + 1 and len(harness.of(1).tokens) == count
        assert harness.in_flight is not None
    harness.run()
    assert harness.of(1).tokens == expected_tokens(harness, asked)
    assert_engine_empty(harness)


def test_a_limit_that_is_known_wastes_no_row() -> None:
    """The token in flight is the last one by max_tokens: there is nothing to plan behind it."""
    harness = overlapping()
    run_one(harness, make_request(1, 10, params(4)))
    assert rows_of(harness, 1) == [10, 1, 1, 1]
    assert_engine_empty(harness)


def test_a_stop_that_is_not_known_wastes_one_row_whose_result_is_dropped() -> None:
    plain = Harness()
    tokens = run_one(plain, make_request(1, 30, params(40))).tokens
    cut = next(i for i in range(5, 40) if tokens[i] not in tokens[:i])
    harness = overlapping(block_size=4)
    got = run_one(harness, make_request(1, 30, params(40, stop_token_ids=(tokens[cut],))))
    assert got.tokens == tokens[: cut + 1] and got.reason is FinishReason.STOP
    assert rows_of(harness, 1) == [30, *[1] * (cut + 1)]
    stats = harness.engine.stats()
    assert stats.num_generated_tokens == cut + 1 and stats.num_unknown_ids == 0
    assert_engine_empty(harness)


def test_blocks_of_a_wasted_row_are_given_away_and_come_to_no_harm() -> None:
    """The row still writes KV into blocks that were freed; whoever gets them writes later, and finds its own."""
    stopped = [make_request(i, 15, params(40)) for i in range(4)]
    tokens = [run_one(Harness(), request).tokens for request in stopped]
    for request, said in zip(stopped, tokens, strict=True):
        request.sampling_params = params(40, stop_token_ids=(said[1],))
    harness = overlapping(num_blocks=11, block_size=8, max_num_seqs=4)
    others = [make_request(10 + i, 20, params(12)) for i in range(6)]
    harness.add(*stopped, *others)
    harness.run()
    for request in (*stopped, *others):
        assert harness.of(request.request_id).tokens == expected_tokens(harness, request)
    assert_engine_empty(harness)


def test_only_what_is_committed_gets_a_hash() -> None:
    harness = overlapping(block_size=4, max_num_batched_tokens=4)
    harness.add(make_request(1, 12, params(2)))
    harness.step()
    harness.step()
    request = harness.live(1)
    assert request.num_computed_tokens == 8, "two chunks are in flight or done"
    assert [block.block_hash is not None for block in request.blocks] == [True, False]
    harness.run()
    assert_engine_empty(harness)


@pytest.mark.parametrize("failing", [1, 2, 3, 4, 6])
def test_a_failed_step_takes_the_one_behind_it_back_and_ends_its_own_requests_only(failing: int) -> None:
    """Who is only in the step behind runs again: for the worker that step has not happened."""
    harness = overlapping(
        options=FakeOptions(failures={failing: InternalError("out of memory")}),
        max_num_seqs=3,
        max_num_batched_tokens=24,
    )
    asked = [make_request(i, 20, params(3 + i)) for i in range(6)]
    harness.add(*asked)
    harness.run()
    failed_step = harness.steps[failing - 1]
    for request in asked:
        got = harness.of(request.request_id)
        if request.request_id in [r.key[1] for r in failed_step.requests]:
            assert got.finished is not None and got.finished.error_message == "out of memory"
        else:
            assert got.tokens == expected_tokens(harness, request)
    assert harness.executor.violations == []
    assert_engine_empty(harness)


def test_a_row_that_fails_is_planned_once_more_and_answered_once() -> None:
    harness = overlapping(options=FakeOptions(failing_request_ids={2}))
    asked = [make_request(i, 10, params(4)) for i in (1, 2, 3)]
    harness.add(*asked)
    harness.run()
    failed = harness.of(2).finished
    assert failed is not None and (failed.error_code, failed.error_message) == (
        "INTERNAL",
        "the logits are not numbers",
    )
    assert rows_of(harness, 2) == [10, 1] and harness.engine.stats().num_unknown_ids == 0
    for request in (asked[0], asked[2]):
        assert harness.of(request.request_id).tokens == expected_tokens(harness, request)
    assert_engine_empty(harness)


def test_an_abort_while_two_steps_are_in_flight_drops_both_results() -> None:
    options = FakeOptions()
    harness = overlapping(options=options)
    options.while_executing = at_plan(3, lambda: harness.engine.abort(FRONTEND, [1], AbortReason.CLIENT))
    got = run_one(harness, make_request(1, 20, params(10)))
    assert len(got.tokens) == 1 and got.reason is FinishReason.ABORT
    assert harness.engine.stats().num_generated_tokens == 1
    assert_engine_empty(harness)


def test_a_victim_in_flight_samples_the_same_token_again() -> None:
    harness = overlapping(num_blocks=9, block_size=4, enable_prefix_caching=False)
    asked = [make_request(i, 7, params(16)) for i in range(3)]
    harness.add(*asked)
    harness.run()
    assert harness.engine.stats().num_preemptions > 0
    for request in asked:
        assert harness.of(request.request_id).tokens == expected_tokens(harness, request)
    assert_engine_empty(harness)


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_drafts_are_verified_and_their_requests_wait_for_results(acceptance: float) -> None:
    harness = overlapping(options=FakeOptions(num_drafts=3, draft_acceptance=acceptance))
    asked = make_request(1, 20, params(24))
    assert run_one(harness, asked).tokens == expected_tokens(harness, asked)
    num_drafts = sum(int(plan.num_draft_tokens.sum()) for plan in harness.plans)
    assert num_drafts > 6, "drafts are used in spite of overlap"
    if acceptance == 1.0:
        assert len(rows_of(harness, 1)) < 12
    assert_engine_empty(harness)


def call(harness: Harness, command: Command) -> CommandResult:
    future = harness.engine.utility(command)
    harness.step()
    return future.result(0)


def test_commands_run_between_steps() -> None:
    """What is in flight is committed and published first; what the command does is seen by the next plan."""
    harness = overlapping(record_events=True)
    asked = [make_request(i, 20, params(12)) for i in range(3)]
    harness.add(*asked)
    harness.step()
    harness.step()
    assert len(harness.of(0).tokens) == 1
    assert call(harness, ResetPrefixCache(preempt_running=True)) == 3
    assert len(harness.of(0).tokens) == 2
    harness.step()
    harness.step()
    assert call(harness, Pause(PauseMode.KEEP)) == 0
    assert harness.in_flight is None
    num_plans = harness.executor.num_plans
    for _ in range(3):
        harness.step()
    assert harness.executor.num_plans == num_plans
    call(harness, Resume())
    harness.step()
    freed = call(harness, Sleep(1))
    assert isinstance(freed, int) and freed > 0 and harness.in_flight is None
    assert harness.executor.used_slots == set()
    assert call(harness, WakeUp()) == 2
    harness.run()
    for request in asked:
        assert harness.of(request.request_id).tokens == expected_tokens(harness, request)
    assert_engine_empty(harness)


def test_a_pause_that_waits_is_answered_when_nothing_is_in_flight() -> None:
    plain = Harness()
    tokens = run_one(plain, make_request(1, 20, params(40))).tokens
    harness = overlapping()
    harness.add(make_request(1, 20, params(40, stop_token_ids=(tokens[3],))))
    harness.step()
    paused = harness.engine.utility(Pause(PauseMode.WAIT, reset_prefix_cache=True))
    while not paused.done():
        assert harness.in_flight is not None or harness.scheduler.running or harness.engine.has_work()
        harness.step()
    assert harness.in_flight is None and paused.result(0) == 0
    assert harness.of(1).reason is FinishReason.STOP and not harness.scheduler.kv.pool.cached_blocks


def test_a_worker_lost_with_two_steps_in_flight() -> None:
    """The loop ends both, everybody gets the error, and a new worker is gone on with."""
    harness = overlapping()
    pending: list[Future[StepResult]] = []

    def hang(plan: StepPlan) -> Future[StepResult]:
        pending.append(Future())
        return pending[-1]

    submit, harness.executor.submit = harness.executor.submit, hang  # type: ignore[method-assign]
    with running_engine(harness):
        harness.add(make_request(1, 10, params(30)))
        deadline = time.monotonic() + 5
        while len(pending) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(0.02)
        assert len(pending) == 2, "no third one before the first has a result"
        assert harness.engine.step_started_ns > 0, "the watchdog sees that a step runs"
        harness.executor.submit = submit  # type: ignore[method-assign]
        harness.engine.fail(UnavailableError("the worker does not answer"))
        harness.executor.initialize_cache(CacheSpec(num_blocks=50), 2)
        harness.engine.resume_with(CacheInfo(50), 2).result(5)
        asked = make_request(2, 10, params(5))
        harness.add(asked)
        while harness.of(2).finished is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finished = harness.of(1).finished
    assert finished is not None and finished.error_message == "the worker does not answer"
    assert harness.of(2).tokens == expected_tokens(harness, asked)
    assert_engine_empty(harness)


def test_a_step_of_a_worker_that_was_lost_and_replaced_is_not_waited_for() -> None:
    """Both messages lie in the inbox before the loop looks at the step that will never end."""
    harness = overlapping()
    harness.executor.submit = lambda plan: Future()  # type: ignore[method-assign]
    harness.add(make_request(1, 10, params(30)))
    harness.step()
    assert harness.in_flight is not None
    harness.engine.fail(UnavailableError("the worker is gone"))
    harness.executor.initialize_cache(CacheSpec(num_blocks=50), 2)
    resumed = harness.engine.resume_with(CacheInfo(50), 2)
    stepping = threading.Thread(target=harness.step, daemon=True)
    stepping.start()
    stepping.join(5)
    assert not stepping.is_alive() and resumed.done() and harness.in_flight is None
    finished = harness.of(1).finished
    assert finished is not None and finished.error_message == "the worker is gone"
    assert harness.engine.stats().epoch == 2


def test_shutdown_waits_for_what_is_in_flight() -> None:
    harness = overlapping(options=FakeOptions(latency_s=0.01))
    with running_engine(harness) as thread:
        harness.add(make_request(1, 10, params(20)), make_request(2, 10, params(3000)))
        harness.engine.shutdown(drain_s=0.5)
        thread.join(5)
        assert not thread.is_alive()
    assert harness.of(1).reason is FinishReason.LENGTH and len(harness.of(1).tokens) == 20
    finished = harness.of(2).finished
    assert finished is not None and finished.abort_reason is AbortReason.SHUTDOWN
    assert_engine_empty(harness)
    harness.executor.shutdown()


def test_the_worker_does_not_wait_for_the_core() -> None:
    """On real threads: when a step ends, the next plan lies there already."""
    # Steps of 15 ms: a processor that another process takes for a few may not look like a core that is late.
    options, idle = FakeOptions(latency_s=0.015), []
    harness = overlapping(options=options)
    submitted = threading.Semaphore(0)
    submit = harness.executor.submit

    def counting(plan: StepPlan) -> Future[StepResult]:
        future = submit(plan)
        submitted.release()
        return future

    harness.executor.submit = counting  # type: ignore[method-assign]
    # Runs at the start of each step, after its latency: one permit is its own, another one the next plan's.
    options.while_executing = lambda plan: idle.append(submitted.acquire() and submitted._value == 0)
    with running_engine(harness):
        harness.add(*(make_request(i, 10, params(60)) for i in range(8)))
        deadline = time.monotonic() + 10
        while any(harness.of(i).finished is None for i in range(8)):
            assert time.monotonic() < deadline
            time.sleep(0.001)
    # The last steps have none behind them; a busy machine may delay a few.
    assert len(idle) >= 60 and sum(idle) < len(idle) / 4
    assert_engine_empty(harness)
    harness.executor.shutdown()
