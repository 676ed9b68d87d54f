"""Pause, resume, cache reset, sleep and wake, stats, profile: one command at a time, between steps."""

from __future__ import annotations

import pytest
from core_support import FRONTEND, Harness, assert_engine_empty, expected_tokens, make_request, params, run_one

from core_svc.fake_executor import FakeOptions
from core_svc.kv_events import AllBlocksCleared, BlockStored
from pagewire.engine import (
    AbortReason,
    Command,
    CommandResult,
    CoreStats,
    FinishReason,
    GetStats,
    Pause,
    PauseMode,
    Profile,
    ResetPrefixCache,
    Resume,
    Sleep,
    WakeUp,
)
from pagewire.errors import AbortedError, FailedPreconditionError, InternalError, InvalidArgumentError


def call(harness: Harness, command: Command) -> CommandResult:
    future = harness.engine.utility(command)
    harness.step()
    return future.result(0)


def two_running_one_waiting(**changes: object) -> Harness:
    harness = Harness(max_num_seqs=2, **changes)  # type: ignore[arg-type]
    harness.add(*(make_request(i, 20, params(6)) for i in range(3)))
    harness.step()
    return harness


def finish_all(harness: Harness) -> None:
    harness.run()
    for i in range(3):
        assert harness.of(i).tokens == expected_tokens(harness, make_request(i, 20, params(6)))
    assert_engine_empty(harness)


def test_case_12_pause_keep_freezes_everything_and_adds_queue() -> None:
    harness = two_running_one_waiting()
    assert call(harness, Pause(PauseMode.KEEP)) == 0
    num_plans = harness.executor.num_plans
    harness.add(make_request(7, 20, params(2)))
    for _ in range(3):
        assert not any(harness.step() for _ in range(2)) or harness.executor.num_plans == num_plans
    assert harness.executor.num_plans == num_plans and harness.engine.stats().is_paused
    assert len(harness.scheduler.running) == 2 and harness.engine.has_work()
    aborted = harness.engine.abort(FRONTEND, [7], AbortReason.CLIENT)
    harness.step()
    assert aborted.result(0) and harness.of(7).reason is FinishReason.ABORT
    call(harness, Resume())
    finish_all(harness)


def test_case_12_pause_wait_lets_what_runs_finish_and_answers_then() -> None:
    harness = two_running_one_waiting()
    paused = harness.engine.utility(Pause(PauseMode.WAIT, reset_prefix_cache=True))
    for _ in range(4):
        harness.step()
        assert not paused.done()
    harness.step()
    assert paused.result(0) == 0 and harness.of(0).reason is harness.of(1).reason is FinishReason.LENGTH
    assert harness.of(2).num_messages == 0 and not harness.scheduler.kv.pool.cached_blocks
    num_plans = harness.executor.num_plans
    harness.step()
    harness.step()
    assert harness.executor.num_plans == num_plans + 1, "only the flush of the released slots"
    call(harness, Resume())
    finish_all(harness)


def test_case_12_pause_abort_ends_everything() -> None:
    harness = two_running_one_waiting()
    assert call(harness, Pause(PauseMode.ABORT, reset_prefix_cache=True)) == 3
    for i in range(3):
        finished = harness.of(i).finished
        assert finished is not None and finished.reason is FinishReason.ABORT
        assert finished.abort_reason is AbortReason.PAUSE
    harness.step()
    assert_engine_empty(harness)
    harness.add(make_request(9, 10, params(2)))
    harness.step()
    assert harness.of(9).num_messages == 0
    call(harness, Resume())
    harness.run()
    assert harness.of(9).reason is FinishReason.LENGTH


def test_pause_wait_is_answered_at_once_when_nothing_runs_and_cancelled_by_resume() -> None:
    harness = Harness()
    assert call(harness, Pause(PauseMode.WAIT)) == 0
    call(harness, Resume())
    harness.add(make_request(1, 10, params(9)))
    harness.step()
    first = harness.engine.utility(Pause(PauseMode.WAIT))
    harness.step()
    call(harness, Resume())
    with pytest.raises(AbortedError, match="resumed"):
        first.result(0)
    second = harness.engine.utility(Pause(PauseMode.WAIT))
    harness.step()
    assert call(harness, Pause(PauseMode.KEEP)) == 0
    with pytest.raises(AbortedError, match="another pause"):
        second.result(0)
    with pytest.raises(InvalidArgumentError, match=r"pause\.mode"):
        call(harness, Pause(0))  # type: ignore[arg-type]
    call(harness, Resume())
    harness.run()
    assert_engine_empty(harness)


def test_pause_keep_with_reset_preempts_and_recomputes() -> None:
    harness = two_running_one_waiting()
    call(harness, Pause(PauseMode.KEEP, reset_prefix_cache=True))
    assert harness.scheduler.kv.pool.num_used_blocks == 0 and not harness.scheduler.kv.pool.cached_blocks
    call(harness, Resume())
    finish_all(harness)
    assert harness.engine.stats().num_preemptions == 2


def test_reset_prefix_cache_needs_free_blocks_or_preemption() -> None:
    harness = two_running_one_waiting(record_events=True)
    with pytest.raises(FailedPreconditionError, match="blocks are in use"):
        call(harness, ResetPrefixCache())
    assert AllBlocksCleared() not in harness.events and any(isinstance(e, BlockStored) for e in harness.events)
    assert call(harness, ResetPrefixCache(preempt_running=True)) == 2
    assert AllBlocksCleared() in harness.events
    finish_all(harness)
    assert call(harness, ResetPrefixCache()) == 0
    prompt = make_request(0, 20).prompt_token_ids.tolist()
    assert run_one(harness, make_request(8, prompt, params(2))).started == 0


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_preempts_resets_and_wakes_under_a_new_epoch(level: int) -> None:
    harness = two_running_one_waiting(record_events=True)
    freed = call(harness, Sleep(level))
    assert isinstance(freed, int) and freed > 0
    stats = harness.engine.stats()
    assert (stats.sleep_level, stats.num_running, stats.num_waiting, stats.num_used_blocks) == (level, 0, 3, 0)
    num_plans = harness.executor.num_plans
    harness.add(make_request(7, 20, params(2)))
    harness.step()
    harness.step()
    assert harness.executor.num_plans == num_plans, "nothing runs while asleep"
    assert call(harness, Sleep(1)) == 0 and harness.events[-1] == AllBlocksCleared()
    harness.events.clear()
    assert call(harness, WakeUp()) == 2 == call(harness, WakeUp())
    assert harness.executor.calls == [f"sleep({level})", "wake_up", "initialize_cache(2)"]
    assert harness.events[0] == AllBlocksCleared()
    assert (harness.plans[-2].epoch, harness.plans[-2].step) == (2, 1)
    finish_all(harness)
    assert len(harness.of(7).tokens) == 2 and harness.engine.stats().epoch == 2


def test_sleep_refuses_levels_that_do_not_exist() -> None:
    harness = Harness()
    with pytest.raises(InvalidArgumentError, match=r"sleep\.level is 3"):
        call(harness, Sleep(3))


def test_a_command_that_fails_is_answered_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    harness = two_running_one_waiting()

    def broken() -> CoreStats:
        raise ZeroDivisionError

    harness.engine.stats = broken  # type: ignore[method-assign]
    with pytest.raises(InternalError, match="GetStats failed"):
        call(harness, GetStats())
    assert "GetStats failed" in caplog.text
    finish_all(harness)


def test_stats_and_profile() -> None:
    harness = two_running_one_waiting()
    stats = call(harness, GetStats())
    assert isinstance(stats, CoreStats)
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.num_total_blocks) == (2, 1, 4, 199)
    assert stats.num_steps == 1 and stats.num_scheduled_tokens == 40 and stats.num_generated_tokens == 2
    assert stats.schedule_s > 0 and stats.execute_s > 0 and stats.update_s > 0 and stats.publish_s > 0
    assert call(harness, Profile(True)) == "fake-profile"
    finish_all(harness)
    assert harness.engine.stats().num_finished == 3


def test_kv_events_follow_the_cache() -> None:
    """A reader that replays the events knows exactly what can be found."""
    harness = Harness(record_events=True, num_blocks=9, block_size=4, options=FakeOptions(seed=1))
    found: set[bytes] = set()
    for i in range(8):
        run_one(harness, make_request(i % 3, [i % 3 + 5] * 13, params(6)) if i < 3 else make_request(i, 13, params(6)))
    for event in harness.events:
        match event:
            case BlockStored():
                assert not found.intersection(event.block_hashes)
                found.update(event.block_hashes)
            case AllBlocksCleared():
                found.clear()
            case _:
                assert found.issuperset(event.block_hashes)
                found.difference_update(event.block_hashes)
    assert found == set(harness.scheduler.kv.pool.cached_blocks)


def test_a_pause_that_waits_is_answered_by_sleep() -> None:
    harness = two_running_one_waiting()
    paused = harness.engine.utility(Pause(PauseMode.WAIT))
    harness.step()
    assert not paused.done()
    call(harness, Sleep(1))
    assert paused.result(0) == 0
    call(harness, WakeUp())
    call(harness, Resume())
    finish_all(harness)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_case_12_pause_wait_lets_preempted_requests_finish_too(policy: str) -> None:
    """What ran is not new: it comes back although nothing new is admitted, whatever stands before it in the queue."""
    harness = Harness(num_blocks=8, block_size=4, max_num_seqs=4, policy=policy)
    asked = [make_request(i, 4, params(16), priority=1, arrival_time_ns=i) for i in range(2)]
    harness.add(*asked)
    harness.step()
    harness.add(make_request(7, 4, params(4), priority=0, arrival_time_ns=9))
    paused = harness.engine.utility(Pause(PauseMode.WAIT))
    for _ in range(80):
        if paused.done():
            break
        assert any(harness.of(request.request_id).reason is None for request in asked)
        harness.step()
    assert paused.result(0) == 0 and harness.engine.stats().num_preemptions > 0
    for request in asked:
        assert harness.of(request.request_id).tokens == expected_tokens(harness, request)
    assert harness.of(7).num_messages == 0
    call(harness, Resume())
    harness.run()
    assert harness.of(7).reason is FinishReason.LENGTH
    assert_engine_empty(harness)


def test_a_pause_that_waits_outlasts_a_reset_of_the_cache() -> None:
    harness = two_running_one_waiting()
    paused = harness.engine.utility(Pause(PauseMode.WAIT))
    harness.step()
    call(harness, ResetPrefixCache(preempt_running=True))
    assert not paused.done() and harness.of(0).reason is None
    for _ in range(20):
        harness.step()
    assert paused.result(0) == 0
    assert harness.of(0).reason is harness.of(1).reason is FinishReason.LENGTH and harness.of(2).num_messages == 0
    call(harness, Resume())
    finish_all(harness)
