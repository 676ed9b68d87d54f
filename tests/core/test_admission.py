"""Who is admitted, when, and with how much from the cache: order, room, prefixes, throttling."""

from __future__ import annotations

import pytest
from core_support import Harness, assert_engine_empty, expected_tokens, make_request, params, run_one

from core_svc.request import RequestStatus
from pagewire.engine import AbortReason, FinishReason
from pagewire.errors import InvalidArgumentError


def scheduled(harness: Harness) -> list[list[int]]:
    return [plan.num_scheduled_tokens.tolist() for plan in harness.plans]


def test_case_5_no_admission_in_a_step_that_preempted() -> None:
    """The preempted request leaves room for one that waits and goes before it; even so it waits for the next step."""
    harness = Harness(num_blocks=6, block_size=4, policy="priority")
    harness.add(make_request(1, 4, params(12), priority=0), make_request(2, 16, params(5), priority=5))
    harness.step()
    harness.add(make_request(3, 3, params(2), priority=1))
    harness.step()
    assert harness.live(2).status is RequestStatus.PREEMPTED and not harness.plans[-1].new_requests
    assert harness.scheduler.kv.pool.num_free_blocks == 3
    harness.step()
    assert [new.request_id for new in harness.plans[-1].new_requests] == [3]
    harness.run()
    assert_engine_empty(harness)


def test_case_7_a_hit_on_the_whole_prompt_recomputes_the_last_token() -> None:
    harness = Harness(block_size=4)
    prompt = list(range(100, 112))
    first = run_one(harness, make_request(1, prompt, params(3)))
    again = run_one(harness, make_request(2, prompt, params(3)))
    assert (first.started, again.started) == (0, 8) and first.tokens == again.tokens
    assert harness.plans[-4].num_scheduled_tokens.tolist() == [4]
    longer = run_one(harness, make_request(3, [*prompt, 5], params(3)))
    assert longer.started == 12
    stats = harness.engine.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (37, 20)
    assert_engine_empty(harness)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_next_turn_of_a_conversation_finds_what_was_generated(async_scheduling: bool) -> None:
    """Blocks that decodes fill, several in one step and each at its own place, are found under their own tokens."""
    harness = Harness(block_size=4, async_scheduling=async_scheduling)
    asked = [make_request(i, 6 + 4 * i + i % 2, params(20)) for i in range(4)]
    harness.add(*asked)
    harness.run()
    for i, request in enumerate(asked):
        known = [*request.prompt_token_ids.tolist(), *harness.of(i).tokens]
        again = run_one(harness, make_request(10 + i, [*known, 5], params(2)))
        assert again.started == (len(known) - 1) // 4 * 4, "the last token was sampled and never computed"
    assert_engine_empty(harness)


def test_case_8_prompt_logprobs_skip_reading_the_cache_and_still_write_it() -> None:
    harness = Harness(block_size=4)
    prompt = list(range(100, 113))
    assert run_one(harness, make_request(1, prompt, params(2, prompt_logprobs=0))).started == 0
    assert run_one(harness, make_request(2, prompt, params(2, prompt_logprobs=0))).started == 0
    assert run_one(harness, make_request(3, prompt, params(2, skip_reading_prefix_cache=True))).started == 0
    assert run_one(harness, make_request(4, prompt, params(2))).started == 12


def test_case_10_the_same_prompt_again_right_after_an_abort() -> None:
    harness = Harness()
    harness.add(make_request(1, 20, params(30)))
    harness.step()
    harness.engine.abort("frontend-a", [1], AbortReason.CLIENT)
    again = make_request(2, make_request(1, 20).prompt_token_ids.tolist(), params(5))
    harness.add(again)
    harness.step()
    plan = harness.plans[-1]
    assert plan.released_slots.tolist() == [0] and [new.slot for new in plan.new_requests] == [0]
    harness.run()
    assert harness.of(2).tokens == expected_tokens(harness, again)
    assert_engine_empty(harness)


def test_case_11_too_large_for_the_pool_is_refused_at_add() -> None:
    """What could never fit is refused with the limit; what just fits runs alone to its end.

    Case: vllm#39734
    """
    harness = Harness(num_blocks=6, block_size=4)
    with pytest.raises(
        InvalidArgumentError, match=r"requests\[0\].prompt_token_ids is '21 tokens'.*room for 20 tokens"
    ):
        harness.add(make_request(1, 21))
    with pytest.raises(InvalidArgumentError, match=r"max_tokens is 12: must be at most 11 after 10 prompt tokens"):
        harness.add(make_request(1, 10, params(12)))
    assert harness.engine.model.max_model_len == 21
    fitting = [make_request(2, 10, params(11)), make_request(3, 20, params(1)), make_request(4, 5, params(None))]
    harness.add(*fitting)
    harness.run()
    for request in fitting:
        assert harness.of(request.request_id).tokens == expected_tokens(harness, request)
    assert_engine_empty(harness)


def test_case_14_throttled_prefills_do_not_starve_decodes_nor_are_starved() -> None:
    harness = Harness(prefill_schedule_interval=4, max_num_batched_tokens=32, enable_prefix_caching=False)
    decoding = make_request(1, 8, params(40))
    harness.add(decoding)
    harness.step()
    harness.add(make_request(2, 100, params(2)), make_request(3, 8, params(2)))
    rows = []
    for _ in range(12):
        harness.step()
        plan = harness.plans[-1]
        assert 1 in [r.key[1] for r in harness.steps[-1].requests], "the decode goes on in every step"
        rows.append(plan.total_num_scheduled_tokens > 3)
    assert sum(rows) == 3, "prefill chunks come every fourth step only"
    harness.run()
    assert_engine_empty(harness)


def test_case_14_throttling_is_released_when_nothing_else_could_run() -> None:
    harness = Harness(prefill_schedule_interval=1000, max_num_batched_tokens=16)
    harness.add(make_request(1, 60, params(3)))
    assert harness.run() < 12
    assert_engine_empty(harness)


def test_running_requests_come_before_waiting_ones() -> None:
    harness = Harness(max_num_batched_tokens=16, enable_prefix_caching=False)
    harness.add(make_request(1, 40, params(3)), make_request(2, 40, params(3)))
    harness.run()
    assert scheduled(harness)[:6] == [[16], [16], [8, 8], [1, 15], [1, 15], [2]]


def test_requests_beyond_max_num_seqs_wait_for_a_slot() -> None:
    harness = Harness(max_num_seqs=3)
    harness.add(*(make_request(i, 6, params(4)) for i in range(10)))
    harness.step()
    stats = harness.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (3, 7)
    harness.run()
    assert {slot for plan in harness.plans for slot in plan.slots.tolist()} == {0, 1, 2}
    assert_engine_empty(harness)


def test_a_long_prompt_is_admitted_only_if_all_of_it_fits() -> None:
    """Not by its first chunk, and not into blocks that another prefill still needs.

    Case: vllm#18115
    """
    harness = Harness(num_blocks=11, block_size=4, max_num_batched_tokens=8, enable_prefix_caching=False)
    harness.add(*(make_request(i, 24, params(4)) for i in range(3)))
    while harness.engine.has_work():
        harness.step()
        assert len(harness.scheduler.running) <= 1
    assert harness.engine.stats().num_preemptions == 0
    assert_engine_empty(harness)


def test_fcfs_serves_in_order_of_arrival_and_never_overtakes() -> None:
    harness = Harness(max_num_seqs=1, num_blocks=8, block_size=4)
    harness.add(make_request(5, 20, params(4), priority=9), make_request(1, 3, params(2), priority=-9))
    harness.add(make_request(7, 3, params(2)))
    harness.run()
    order = [new.request_id for plan in harness.plans for new in plan.new_requests]
    assert order == [5, 1, 7]


def test_priority_orders_by_priority_then_arrival_and_does_not_preempt_at_admission() -> None:
    harness = Harness(max_num_seqs=1, policy="priority")
    harness.add(make_request(1, 5, params(6), priority=5, arrival_time_ns=1))
    harness.step()
    harness.add(
        make_request(2, 5, params(2), priority=3, arrival_time_ns=9),
        make_request(3, 5, params(2), priority=3, arrival_time_ns=4),
        make_request(4, 5, params(2), priority=-1, arrival_time_ns=99),
        make_request(5, 5, params(2), priority=3, arrival_time_ns=4),
    )
    harness.run()
    assert [new.request_id for plan in harness.plans for new in plan.new_requests] == [1, 4, 3, 5, 2]
    assert harness.engine.stats().num_preemptions == 0


def test_a_longer_sequence_takes_nothing_from_those_that_run() -> None:
    """The table of tokens grows while short requests are in it."""
    harness = Harness(max_model_len=4000, num_blocks=400, max_num_batched_tokens=64)
    short = make_request(1, 700, params(200))
    harness.add(short)
    harness.step()
    harness.add(make_request(2, 1200, params(900)))
    for _ in range(20):
        harness.step()
    running = harness.live(1)
    assert running.token_ids.tolist() == [*short.prompt_token_ids.tolist(), *harness.of(1).tokens]
    harness.run()
    for asked in (short, make_request(2, 1200, params(900))):
        assert harness.of(asked.request_id).tokens == expected_tokens(harness, asked)
    assert_engine_empty(harness)


def test_a_prompt_whose_prefix_another_request_computes_waits_for_it_and_shares_it() -> None:
    """Both arrive before anything is cached; the second steps aside, is served from the cache, and holds up nobody."""
    harness = Harness(max_num_batched_tokens=200)
    shared = list(range(10, 138))
    first, second = make_request(0, [*shared, 7], params(3)), make_request(1, [*shared, 8], params(3))
    harness.add(first, second, make_request(2, 20, params(3)))
    harness.step()
    assert scheduled(harness) == [[129, 20]], "there was room for 51 tokens of the second"
    harness.run()
    assert harness.engine.stats().num_preemptions == 0
    computed = sum(plan.total_num_scheduled_tokens for plan in harness.plans)
    assert computed == 129 + 1 + 20 + 3 * 2, "the shared blocks are computed once"
    for request in (first, second):
        assert harness.of(request.request_id).tokens == expected_tokens(harness, request)
    assert_engine_empty(harness)


def test_a_prompt_that_waits_for_a_prefix_goes_on_when_its_computation_is_aborted() -> None:
    harness = Harness(max_num_batched_tokens=100, long_prefill_token_threshold=64)
    shared = list(range(10, 138))
    harness.add(make_request(0, [*shared, 7], params(3)), make_request(1, [*shared, 8], params(3)))
    harness.step()
    assert scheduled(harness) == [[64]], "there was room for 36 tokens of the second"
    harness.engine.abort("frontend-a", [0], AbortReason.CLIENT)
    harness.run()
    assert harness.of(1).reason is FinishReason.LENGTH
    assert_engine_empty(harness)
