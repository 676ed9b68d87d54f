"""A step that fails, a worker that is lost, and going on afterwards."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest
from core_support import FRONTEND, Harness, assert_engine_empty, expected_tokens, make_request, params, running_engine

from core_svc.executor import CacheInfo, CacheSpec
from core_svc.fake_executor import FakeOptions
from pagewire.engine import AbortReason, FinishReason, Pause, PauseMode, ResetPrefixCache, Resume, Sleep
from pagewire.errors import FailedPreconditionError, InternalError, UnavailableError
from pagewire.plan import StepPlan, StepResult


@pytest.mark.parametrize("failing", [1, 3, 4, 6])
def test_a_failed_step_ends_its_requests_and_no_others(failing: int) -> None:
    harness = Harness(options=FakeOptions(failures={failing: InternalError("out of memory")}), max_num_seqs=2)
    asked = [make_request(i, 20, params(3 + i)) for i in range(5)]
    harness.add(*asked)
    harness.run()
    failed = [r for r in asked if harness.of(r.request_id).reason is FinishReason.ERROR]
    assert 1 <= len(failed) <= 2
    for request in asked:
        got = harness.of(request.request_id)
        assert got.finished is not None
        if request in failed:
            assert (got.finished.error_code, got.finished.error_message) == ("INTERNAL", "out of memory")
        else:
            assert got.tokens == expected_tokens(harness, request)
    assert_engine_empty(harness)


@pytest.mark.parametrize(
    "error", [UnavailableError("gone"), FailedPreconditionError("wrong step"), RuntimeError("a fault")]
)
def test_a_lost_worker_ends_everything_and_the_engine_goes_on_with_a_new_one(error: Exception) -> None:
    harness = Harness(options=FakeOptions(failures={2: error}), max_num_seqs=2)
    harness.add(*(make_request(i, 20, params(5)) for i in range(4)))
    harness.step()
    harness.step()
    for i in range(4):
        finished = harness.of(i).finished
        assert finished is not None and finished.reason is FinishReason.ERROR
        assert finished.error_code == "UNAVAILABLE"
    harness.step()
    assert not harness.engine.has_work() and harness.scheduler.kv.pool.num_used_blocks == 0
    with pytest.raises(UnavailableError, match="no worker"):
        harness.add(make_request(9, 10))
    with pytest.raises(UnavailableError):
        sleeping = harness.engine.utility(Sleep(1))
        harness.step()
        sleeping.result(0)

    harness.executor.initialize_cache(CacheSpec(num_blocks=50, max_num_seqs=2), 7)
    resumed = harness.engine.resume_with(CacheInfo(50), 7)
    asked = make_request(10, 30, params(6))
    harness.add(asked)
    harness.run()
    assert resumed.done() and harness.of(10).tokens == expected_tokens(harness, asked)
    assert harness.engine.stats().epoch == 7 and harness.engine.stats().num_total_blocks == 49
    assert_engine_empty(harness)


def test_fail_from_another_thread_ends_a_step_that_never_returns() -> None:
    harness = Harness()
    started = threading.Event()

    def hang(plan: StepPlan) -> Future[StepResult]:
        started.set()
        return Future()

    submit, harness.executor.submit = harness.executor.submit, hang  # type: ignore[method-assign]
    with running_engine(harness):
        harness.add(make_request(1, 10, params(3)))
        assert started.wait(5)
        deadline = time.monotonic() + 5
        assert harness.engine.step_started_ns > 0, "the watchdog sees that a step runs"
        harness.engine.fail(UnavailableError("the worker does not answer"))
        harness.engine.fail(UnavailableError("said twice"))
        while harness.of(1).finished is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        harness.executor.submit = submit  # type: ignore[method-assign]
        harness.executor.initialize_cache(CacheSpec(num_blocks=50), 2)
        harness.engine.resume_with(CacheInfo(50), 2).result(5)
        asked = make_request(2, 10, params(3))
        harness.add(asked)
        while harness.of(2).finished is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finished = harness.of(1).finished
    assert finished is not None and finished.error_message == "the worker does not answer"
    assert harness.of(2).tokens == expected_tokens(harness, asked)
    assert harness.engine.step_started_ns == 0
    assert_engine_empty(harness)


def test_requests_that_the_new_pool_cannot_hold_end_with_an_error() -> None:
    harness = Harness(num_blocks=20, block_size=4)
    harness.add(make_request(1, 30, params(20)), make_request(2, 10, params(4)))
    harness.step()
    harness.engine.utility(Sleep(1))
    harness.step()
    harness.executor.initialize_cache(CacheSpec(4, 8), 2)
    harness.engine.resume_with(CacheInfo(8), 2)
    harness.run()
    finished = harness.of(1).finished
    assert finished is not None and finished.error_code == "RESOURCE_EXHAUSTED"
    assert len(harness.of(2).tokens) == 4
    assert_engine_empty(harness)


def test_adds_that_were_on_their_way_when_the_worker_was_lost_end_with_its_error() -> None:
    options = FakeOptions(failures={1: UnavailableError("gone")})
    harness = Harness(options=options)
    options.while_executing = lambda plan: harness.add(make_request(2, 10))
    harness.add(make_request(1, 10))
    harness.step()
    harness.step()
    for i in (1, 2):
        finished = harness.of(i).finished
        assert finished is not None and finished.error_code == "UNAVAILABLE"


def test_a_loop_that_dies_answers_whoever_waits_and_refuses_the_rest() -> None:
    """An answer that never comes would be a silent hang of a caller in the same process."""
    harness = Harness()

    def broken(**arguments: bool) -> None:
        raise ZeroDivisionError("a fault of ours")

    harness.scheduler.schedule = broken  # type: ignore[method-assign, assignment]
    paused = harness.engine.utility(Pause(PauseMode.WAIT))
    harness.add(make_request(1, 10))
    reset = harness.engine.utility(ResetPrefixCache())
    resumed = harness.engine.utility(Resume())
    with pytest.raises(ZeroDivisionError):
        harness.engine.run()
    assert paused.done() and reset.done() and resumed.done()
    late = [harness.engine.utility(Resume()), harness.engine.abort(FRONTEND, [1], AbortReason.CLIENT)]
    for future in late:
        with pytest.raises(UnavailableError, match="shut down"):
            future.result(0)
    with pytest.raises(UnavailableError, match="the core died"):
        harness.add(make_request(2, 10))


def test_a_message_that_kills_the_loop_takes_no_answer_with_it() -> None:
    harness = Harness()
    futures = [harness.engine.abort(FRONTEND, [9], AbortReason.CLIENT), harness.engine.utility(Resume())]
    harness.engine._intake.abort = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        harness.engine.run()
    for future in futures:
        with pytest.raises(UnavailableError, match="the core died"):
            future.result(0)
