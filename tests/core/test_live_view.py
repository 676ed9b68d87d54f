"""What a live view is told of an engine: requests with their debts, the KV pool block by block, the last steps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter

import pytest
from core_support import Harness, make_request, params

from core_svc.detailed_stats import DetailedStats
from core_svc.live_view import block_columns, detail_of, request_columns
from core_svc.recent_steps import RecentSteps
from pagewire.engine import CoreStats, EngineInfo, GetStats
from pagewire.errors import InternalError, UnavailableError
from pagewire.stats import MAX_STEPS, BlockState, DetailWanted, RequestState


def watched(**values: object) -> tuple[Harness, RecentSteps]:
    """An engine whose steps are kept."""
    harness, recent = Harness(**values), RecentSteps()  # type: ignore[arg-type]
    harness.engine._observers = (recent,)
    return harness, recent


def test_requests_are_told_in_the_order_in_which_they_are_served_with_what_they_owe():
    harness, _ = watched(num_blocks=16, block_size=4, max_num_seqs=2)
    for i, num_prompt in enumerate((6, 10, 30, 7)):
        request = make_request(i, num_prompt, params(20, ignore_eos=True))
        request.external_request_id, request.priority = f"req-{i}", i
        harness.add(request)
    for _ in range(3):
        harness.step()
    scheduler = harness.scheduler
    columns = request_columns(scheduler, 10)
    assert columns.num_total == 4
    assert columns.external_request_ids == ["req-0", "req-1", "req-2", "req-3"]
    assert columns.states.tolist() == [RequestState.RUNNING] * 2 + [RequestState.WAITING] * 2
    assert columns.num_prompt_tokens.tolist() == [6, 10, 30, 7]
    assert columns.priorities.tolist() == [0, 1, 2, 3]
    for i, request in enumerate([*scheduler.running, *(r for r in scheduler.requests.values() if r.table is None)]):
        owed = request.num_tokens + len(request.spec_token_ids) + request.num_output_placeholders
        assert columns.debts[i] == owed - request.num_computed_tokens
        assert columns.num_blocks[i] == len(request.blocks)
        assert columns.num_output_tokens[i] == request.num_tokens - request.num_prompt_tokens
    assert columns.debts.tolist()[2:] == [30, 7]
    bounded = request_columns(scheduler, 3)
    assert (bounded.num_total, bounded.external_request_ids) == (4, ["req-0", "req-1", "req-2"])
    assert detail_of(scheduler, DetailWanted()).requests.external_request_ids == []


def test_a_preempted_request_owes_everything_again():
    harness, _ = watched(num_blocks=8, block_size=4, max_num_seqs=4)
    harness.add(*(make_request(i, 6, params(10, ignore_eos=True)) for i in range(3)))
    while not harness.scheduler.stats.num_preemptions:
        harness.step()
    columns = request_columns(harness.scheduler, 10)
    (row,) = (columns.states == RequestState.PREEMPTED).nonzero()[0].tolist()
    assert columns.num_computed_tokens[row] == columns.num_blocks[row] == 0
    assert columns.debts[row] == columns.num_prompt_tokens[row] + columns.num_output_tokens[row]
    assert columns.num_preemptions[row] == 1


def test_blocks_are_told_one_by_one_or_every_so_many_th():
    harness, _ = watched(num_blocks=40, block_size=4, max_num_seqs=4)
    harness.add(make_request(0, 16, params(1)))
    harness.run()
    harness.add(*(make_request(i, 16, params(8, ignore_eos=True)) for i in (1, 2)))
    for _ in range(2):
        harness.step()
    pool = harness.scheduler.kv.pool
    columns = block_columns(pool, 100)
    states = Counter(columns.states)
    assert (columns.num_blocks, columns.stride, len(columns.states)) == (39, 1, 39)
    assert states[BlockState.USED] + states[BlockState.SHARED] == pool.num_used_blocks
    assert states[BlockState.FREE] + states[BlockState.CACHED] == pool.num_free_blocks
    assert states[BlockState.SHARED] == sum(block.ref_cnt > 1 for block in pool.blocks)
    sampled = block_columns(pool, 10)
    assert (sampled.stride, len(sampled.states)) == (4, 10)
    assert sampled.states == columns.states[::4]
    assert block_columns(pool, 0).states == b""


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_recent_steps_add_up_and_are_bounded(async_scheduling: bool):
    harness, recent = watched(
        num_blocks=200, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, async_scheduling=async_scheduling
    )
    harness.add(make_request(0, 40, params(8, ignore_eos=True)), make_request(1, 3, params(8, ignore_eos=True)))
    harness.run()
    steps, stats = recent.columns(MAX_STEPS), harness.engine.stats()
    assert steps.num_scheduled_tokens.sum() == stats.num_scheduled_tokens
    assert steps.num_sampled_tokens.sum() >= stats.num_generated_tokens == 16
    # The last prompt tokens of a request that are computed beside its first sample count as prefill.
    assert steps.num_prefill_tokens.sum() == 43
    assert steps.numbers.tolist() == sorted(steps.numbers.tolist())
    assert (steps.execute_us >= 0).all() and not steps.is_failed.any()
    harness.add(make_request(2, 3, params(MAX_STEPS + 20, ignore_eos=True)))
    harness.run()
    assert len(recent.columns(1000).numbers) == MAX_STEPS
    assert recent.columns(5).numbers.tolist() == recent.columns(MAX_STEPS).numbers.tolist()[-5:]
    assert len(recent.columns(0).numbers) == 0


def test_a_failed_step_is_kept_as_one():
    harness, recent = watched(num_blocks=20)
    harness.executor.options.failures[1] = InternalError("broken")
    harness.add(make_request(0, 3))
    harness.run()
    assert recent.columns(9).is_failed.tolist()[0] == 1


def test_a_look_at_the_numbers_does_not_wait_for_the_step_in_flight():
    harness, _ = watched(num_blocks=40, async_scheduling=True)
    harness.add(make_request(0, 3, params(20, ignore_eos=True)))
    engine = harness.engine
    in_flight = engine.advance(engine.advance(None))
    assert in_flight is not None
    num_committed = engine.scheduler.stats.num_generated_tokens
    asked = engine.utility(GetStats(DetailWanted(max_requests=1)))
    seen = engine._receive(in_flight)
    assert seen is in_flight
    stats = asked.result(0)
    assert isinstance(stats, CoreStats) and stats.detail is not None
    assert stats.num_generated_tokens == num_committed
    assert stats.detail.requests.num_placeholder_tokens.tolist() == [1]
    while in_flight is not None:
        in_flight = engine.advance(in_flight)


def test_who_asks_during_a_long_step_gets_what_was_known_before_it():
    """The engine's thread is this test's: it answers when it is told to."""
    harness, recent = watched(num_blocks=40)
    engine, wanted = harness.engine, DetailWanted(max_requests=8, max_steps=8, max_blocks=64)
    info = EngineInfo("core", engine.model, 4, 39, 8, 64, 100)
    detailed = DetailedStats(engine, info, recent, "worker:1")
    harness.add(make_request(0, 3, params(20, ignore_eos=True)))

    def ask(*, is_answered: bool) -> CoreStats:
        timer = threading.Timer(0.05, engine.step) if is_answered else None
        if timer is not None:
            timer.start()
        stats = asyncio.run(detailed.answer(wanted, ""))
        if timer is not None:
            timer.join()
        return stats

    nothing = ask(is_answered=False).detail
    assert nothing is not None and nothing.is_partial
    assert (nothing.requests.request_ids.tolist(), nothing.blocks.num_blocks) == ([], 39)
    # It answers late, to nobody.
    engine.step()
    known = ask(is_answered=True).detail
    assert known is not None and not known.is_partial
    assert known.requests.request_ids.tolist() == [0] and known.snapshot_age_ms == 0
    assert (known.worker_target, known.process.incarnation, known.model) == ("worker:1", "core", info.model.model)
    time.sleep(0.002)
    old = ask(is_answered=False).detail
    assert old is not None and old.is_partial and old.snapshot_age_ms > 0
    assert old.requests.request_ids.tolist() == [0] and old.blocks.states == known.blocks.states
    assert old.steps.numbers.tolist() == recent.columns(8).numbers.tolist()
    engine._stop(UnavailableError("over"))
    with pytest.raises(UnavailableError):
        ask(is_answered=False)
