"""How requests get in and out: idempotent adds, tombstones, deadlines, frontends that go, limits, the idle loop."""

from __future__ import annotations

import logging
import os
import threading
import time

import numpy as np
import pytest
from core_support import (
    FRONTEND,
    Harness,
    assert_engine_empty,
    expected_tokens,
    make_request,
    params,
    run_one,
    running_engine,
)

from core_svc.fake_executor import FakeOptions
from pagewire.engine import AbortReason, FinishReason, Pause, PauseMode
from pagewire.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from pagewire.plan import StepResult
from pagewire.sampling import SamplingParams


def names(outcomes: list[object]) -> list[str]:
    return [outcome.name for outcome in outcomes]  # type: ignore[attr-defined]


def test_a_repeated_add_changes_nothing() -> None:
    harness = Harness()
    asked = make_request(1, 10, params(5))
    harness.add(asked)
    harness.add(asked)
    harness.step()
    harness.add(asked)
    harness.run()
    harness.add(asked)
    harness.run()
    assert harness.of(1).tokens == expected_tokens(harness, asked)
    assert harness.engine.stats().num_finished == 1
    assert_engine_empty(harness)


def test_an_id_that_ended_in_this_very_receive_does_not_run_again() -> None:
    harness = Harness()
    asked = make_request(1, 10, params(5))
    harness.add(asked)
    harness.engine.abort(FRONTEND, [1], AbortReason.CLIENT)
    harness.add(asked)
    harness.run()
    assert harness.of(1).reason is FinishReason.ABORT and harness.of(1).tokens == []
    assert_engine_empty(harness)


def test_an_abort_before_its_add_leaves_a_tombstone() -> None:
    """The late request ends at once with the abort's reason, and its stream ends; others are not touched.

    Case: smg#1351
    """
    harness = Harness()
    outcomes = harness.engine.abort(FRONTEND, [1], AbortReason.CLIENT)
    harness.step()
    assert names(outcomes.result(0)) == ["NOT_FOUND"]
    harness.add(make_request(1, 10), make_request(2, 10, params(3)))
    harness.run()
    finished = harness.of(1).finished
    assert finished is not None and finished.reason is FinishReason.ABORT
    assert finished.abort_reason is AbortReason.CLIENT
    assert harness.of(1).tokens == [] and len(harness.of(2).tokens) == 3
    assert harness.executor.num_plans == 4, "the aborted one never got to the worker"
    assert_engine_empty(harness)


def test_tombstones_expire_and_are_bounded() -> None:
    harness = Harness(tombstone_ttl_s=0.02, max_tombstones=3)
    harness.engine.abort(FRONTEND, [1, 2, 3, 4], AbortReason.CLIENT)
    harness.step()
    harness.add(make_request(1, 5, params(1)), make_request(4, 5, params(1)))
    harness.run()
    assert harness.of(1).reason is FinishReason.LENGTH, "the oldest had to go"
    assert harness.of(4).reason is FinishReason.ABORT
    time.sleep(0.03)
    harness.add(make_request(3, 5, params(1)))
    harness.run()
    assert harness.of(3).reason is FinishReason.LENGTH
    assert_engine_empty(harness)


def test_an_abort_never_overtakes_its_own_add() -> None:
    options = FakeOptions()
    harness = Harness(options=options)
    futures = []

    def add_and_abort(plan: object) -> None:
        options.while_executing = None
        harness.add(make_request(2, 10))
        futures.append(harness.engine.abort(FRONTEND, [2], AbortReason.CLIENT))

    options.while_executing = add_and_abort
    harness.add(make_request(1, 10, params(3)))
    harness.run()
    assert names(futures[0].result(0)) == ["ABORTED"]
    assert harness.of(2).reason is FinishReason.ABORT and harness.of(2).tokens == []
    assert_engine_empty(harness)


def test_aborts_are_exact_and_idempotent() -> None:
    """Only the very id is hit, in the very frontend; repeating it is told apart and harms nobody.

    Case: sglang#30912
    """
    harness = Harness()
    harness.add(make_request(1, 10, params(4)), make_request(11, 10, params(4)))
    harness.add(make_request(1, 10, params(4)), frontend="frontend-b")
    harness.step()
    first = harness.engine.abort(FRONTEND, [1, 1], AbortReason.CLIENT)
    second = harness.engine.abort(FRONTEND, [1], AbortReason.CLIENT)
    harness.run()
    assert names(first.result(0)) == ["ABORTED", "ALREADY_FINISHED"] and names(second.result(0)) == ["ALREADY_FINISHED"]
    assert harness.of(11).reason is FinishReason.LENGTH
    assert harness.of(1, "frontend-b").reason is FinishReason.LENGTH and len(harness.of(1, "frontend-b").tokens) == 4
    assert_engine_empty(harness)


def test_unknown_ids_are_counted_and_ignored() -> None:
    """Late notices and results for requests that are gone do not disturb the engine.

    Case: vllm#43226
    """
    harness = Harness()
    harness.add(make_request(1, 10, params(6)))
    harness.step()
    step = harness.steps[-1]
    harness.engine.abort("nobody", [5], AbortReason.CLIENT)
    harness.engine.drop_frontend("nobody", AbortReason.CLIENT)
    harness.step()
    with_unknown_slot = StepResult(1, 1, np.array([0, 77], np.int32), np.array([1, 1]), np.array([5, 6]))
    harness.scheduler.update(step, with_unknown_slot)
    assert harness.engine.stats().num_unknown_ids == 2


def test_results_of_a_step_before_a_preemption_are_not_for_the_request_that_came_back() -> None:
    harness = Harness()
    asked = make_request(1, 10, params(4))
    harness.add(asked)
    harness.engine._receive(None)
    old = harness.scheduler.schedule()
    assert old is not None
    result = harness.executor.submit(old.plan).result(0)
    harness.scheduler.preempt_all()
    harness.step()
    tokens = list(harness.of(1).tokens)
    harness.scheduler.update(old, result)
    assert harness.live(1).num_output_tokens == len(tokens) == 1
    harness.run()
    assert harness.of(1).tokens == expected_tokens(harness, asked)
    assert_engine_empty(harness)


def test_two_frontends_with_equal_ids_do_not_mix() -> None:
    """An id belongs to its frontend's incarnation.

    Case: vllm#10583
    """
    harness = Harness()
    one, other = make_request(1, [5, 6, 7], params(6)), make_request(1, [8, 9], params(4))
    harness.add(one, frontend="a")
    harness.add(other, frontend="b")
    harness.run()
    assert harness.of(1, "a").tokens == expected_tokens(harness, one)
    assert harness.of(1, "b").tokens == expected_tokens(harness, other)
    assert {frontend for frontend, _ in harness.messages} == {"a", "b"}


def test_a_frontend_that_is_gone_frees_everything_within_two_steps() -> None:
    """Nothing is published to it any more, and the worker's slots are free as well.

    Case: vllm#54947
    """
    harness = Harness()
    harness.add(*(make_request(i, 30, params(50)) for i in range(5)))
    harness.add(make_request(9, 30, params(5)), frontend="frontend-b")
    harness.step()
    num_messages = len([1 for frontend, _ in harness.messages if frontend == FRONTEND])
    harness.engine.drop_frontend(FRONTEND, AbortReason.LEASE_EXPIRED)
    harness.step()
    stats = harness.engine.stats()
    assert (stats.num_running, stats.num_aborted) == (1, 5) and stats.num_used_blocks == 2
    assert len(harness.executor.used_slots) == 1
    assert len([1 for frontend, _ in harness.messages if frontend == FRONTEND]) == num_messages
    harness.run()
    assert harness.of(9, "frontend-b").reason is FinishReason.LENGTH
    for i in range(5):
        del harness.collected[FRONTEND, i]
    assert_engine_empty(harness)


def test_deadlines_end_requests_wherever_they_are() -> None:
    harness = Harness(max_num_seqs=1, options=FakeOptions(latency_s=0.005))
    harness.add(
        make_request(1, 10, params(2000), remaining_ms=300),
        make_request(2, 10, params(5), remaining_ms=20),
        make_request(3, 10, params(2)),
        make_request(4, 10, params(2), remaining_ms=0),
    )
    harness.run()
    assert [harness.of(i).reason for i in (1, 2, 3, 4)] == [
        FinishReason.DEADLINE,
        FinishReason.DEADLINE,
        FinishReason.LENGTH,
        FinishReason.DEADLINE,
    ]
    assert len(harness.of(1).tokens) > 1 and harness.of(2).tokens == harness.of(4).tokens == []
    assert_engine_empty(harness)
    harness.executor.shutdown()


def test_more_than_max_num_requests_is_refused_as_a_whole() -> None:
    harness = Harness(max_num_requests=3)
    harness.add(make_request(1, 5, params(2)), make_request(2, 5, params(2)))
    with pytest.raises(ResourceExhaustedError, match="max_num_requests is 3") as caught:
        harness.add(make_request(3, 5), make_request(4, 5))
    assert caught.value.retry_after_s
    harness.add(make_request(5, 5, params(2)))
    harness.run()
    assert (FRONTEND, 3) not in harness.collected
    harness.add(make_request(3, 5, params(2)), make_request(4, 5, params(2)))
    harness.run()
    assert_engine_empty(harness)


def test_add_takes_all_or_none_and_names_the_field() -> None:
    harness = Harness()
    bad = [
        (make_request(1, []), r"requests\[1\].prompt_token_ids"),
        (
            make_request(1, [5, 50_000]),
            r"prompt_token_ids\[1\] is 50000: token ids must be in \[0, 50000\)",
        ),
        (make_request(1, [5, -1]), r"requests\[1\].prompt_token_ids\[1\]"),
        (make_request(1, [5], SamplingParams(temperature=1.0, max_tokens=3)), r"requests\[1\].sampling_params.seed"),
        (make_request(1, [5], SamplingParams(n=2, seed=1)), r"requests\[1\].sampling_params.n"),
        (make_request(1, [5], params(3, logit_bias={99_999: 1.0})), r"requests\[1\].sampling_params.logit_bias"),
        (make_request(1, [5], remaining_ms=-1), r"requests\[1\].remaining_ms"),
        (make_request(2**64, [5]), r"requests\[1\].request_id"),
    ]
    for request, pattern in bad:
        with pytest.raises(InvalidArgumentError, match=pattern):
            harness.add(make_request(0, 5), request)
        with pytest.raises(InvalidArgumentError):
            harness.engine.validate(request)
    assert not harness.engine.has_work()


def test_an_idle_engine_blocks_and_a_request_is_served_at_once() -> None:
    """No polling: an idle loop takes no CPU time, and its first token is not delayed by it.

    Case: vllm#16968
    """
    harness = Harness()
    wakes = 0
    step = harness.engine.step

    def counting() -> bool:
        nonlocal wakes
        wakes += 1
        return step()

    harness.engine.step = counting  # type: ignore[method-assign]
    with running_engine(harness):
        time.sleep(0.05)
        wakes_before, cpu_before = wakes, time.process_time()
        time.sleep(0.5)
        assert wakes == wakes_before and time.process_time() - cpu_before < 0.1
        started = time.monotonic()
        harness.add(make_request(1, 10, params(3)))
        while harness.of(1).finished is None:
            assert time.monotonic() - started < 5
            time.sleep(0.001)
        harness.add(make_request(2, 10, params(3), remaining_ms=10**7))
        while harness.of(2).finished is None:
            assert time.monotonic() - started < 5
            time.sleep(0.001)
    assert_engine_empty(harness)


def test_a_deadline_wakes_a_paused_engine() -> None:
    harness = Harness()
    with running_engine(harness):
        harness.engine.utility(Pause(PauseMode.KEEP)).result(5)
        harness.add(make_request(1, 10, params(3), remaining_ms=30))
        started = time.monotonic()
        while harness.of(1).finished is None:
            assert time.monotonic() - started < 5
            time.sleep(0.001)
    assert harness.of(1).reason is FinishReason.DEADLINE


def test_shutdown_refuses_adds_drains_and_aborts_the_rest() -> None:
    harness = Harness(options=FakeOptions(latency_s=0.002))
    with running_engine(harness) as thread:
        harness.add(make_request(1, 10, params(20)), make_request(2, 10, params(3000)))
        harness.engine.shutdown(drain_s=1.0)
        with pytest.raises(UnavailableError, match="shuts down"):
            harness.add(make_request(3, 10))
        thread.join(5)
        assert not thread.is_alive()
    assert harness.of(1).reason is FinishReason.LENGTH and len(harness.of(1).tokens) == 20
    finished = harness.of(2).finished
    assert finished is not None and finished.reason is FinishReason.ABORT
    assert finished.abort_reason is AbortReason.SHUTDOWN and len(harness.of(2).tokens) > 20
    assert_engine_empty(harness)
    with pytest.raises(UnavailableError):
        harness.engine.abort(FRONTEND, [1], AbortReason.CLIENT).result(1)
    harness.executor.shutdown()


def test_adds_from_many_threads_are_all_served() -> None:
    harness = Harness(max_num_seqs=16, num_blocks=400)

    def client(number: int) -> None:
        for i in range(20):
            harness.add(make_request(i, 5 + i, params(4)), frontend=f"frontend-{number}")
            if i % 5 == 0:
                harness.engine.abort(f"frontend-{number}", [i], AbortReason.CLIENT).result(10)

    with running_engine(harness):
        threads = [threading.Thread(target=client, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        deadline = time.monotonic() + 20
        while harness.engine.stats().num_finished < 80:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    assert_engine_empty(harness)
    assert len(harness.collected) == 80


def test_the_debug_line_of_a_request_and_step(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(log_requests=True)
    with caplog.at_level(logging.INFO, logger="core_svc.steps"):
        tokens = run_one(harness, make_request(0, 10, params(2))).tokens
    pid = f" pid={os.getpid()}"
    assert [record.getMessage() for record in caplog.records] == [
        f"step=1 req=0 status=RUNNING computed=10 total=11 scheduled=10 new_tokens=[{tokens[0]}] finished=False{pid}",
        f"step=2 req=0 status=FINISHED_LENGTH_CAPPED computed=11 total=12 scheduled=1 new_tokens=[{tokens[1]}]"
        f" finished=True{pid}",
    ]
    caplog.clear()
    quiet = Harness()
    with caplog.at_level(logging.INFO, logger="core_svc.steps"):
        run_one(quiet, make_request(0, 10, params(2)))
    assert not caplog.records
