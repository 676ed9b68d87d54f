"""What a step computes: budget, chunks, preemption, limits, ends. Named after the cases of the design."""

from __future__ import annotations

import pytest
from core_support import EOS, Harness, assert_engine_empty, at_plan, expected_tokens, make_request, params, run_one

from core_svc.fake_executor import FakeOptions
from core_svc.request import RequestStatus
from pagewire.engine import AbortReason, FinishReason
from pagewire.errors import InvalidArgumentError


def scheduled(harness: Harness) -> list[list[int]]:
    return [plan.num_scheduled_tokens.tolist() for plan in harness.plans]


def test_example_six_prompt_tokens_and_two_more() -> None:
    harness = Harness()
    asked = make_request(0, 6, params(2))
    harness.add(asked)
    harness.step()
    request = harness.live(0)
    assert (request.num_tokens, request.num_computed_tokens) == (7, 6)
    harness.step()
    assert (request.num_tokens, request.num_computed_tokens) == (8, 7), "the second token's KV is never computed"
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert harness.executor.used_slots == {0}
    harness.step()
    assert scheduled(harness) == [[6], [1], []]
    assert harness.plans[2].released_slots.tolist() == [0]
    assert harness.of(0).tokens == expected_tokens(harness, asked) and harness.of(0).reason is FinishReason.LENGTH
    assert not harness.step()
    assert_engine_empty(harness)


def test_example_three_prompts_of_800_with_threshold_400_and_budget_1024() -> None:
    harness = Harness(max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    harness.add(*(make_request(i, 800, params(4)) for i in range(3)))
    for _ in range(3):
        harness.step()
    assert scheduled(harness) == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]
    harness.run()
    assert_engine_empty(harness)


def test_case_1_abort_while_executing() -> None:
    """The token of the step is dropped, the blocks are free once the step is over, and the end is an abort.

    Case: vllm#29987
    """
    outcomes = []
    options = FakeOptions()
    harness = Harness(options=options)
    options.while_executing = at_plan(
        2, lambda: outcomes.append(harness.engine.abort("frontend-a", [1], AbortReason.CLIENT))
    )
    harness.add(make_request(1, 20, params(10)))
    harness.step()
    assert len(harness.of(1).tokens) == 1
    harness.step()
    got = harness.of(1)
    assert len(got.tokens) == 1 and got.reason is FinishReason.ABORT
    assert got.finished is not None and got.finished.abort_reason is AbortReason.CLIENT
    assert harness.scheduler.kv.pool.num_used_blocks == 0
    assert outcomes[0].result(0)[0].name == "ABORTED"
    harness.run()
    assert_engine_empty(harness)


def test_case_1_abort_in_the_last_step() -> None:
    """A request aborted while its last step runs ends as aborted, not by length.

    Case: vllm#29987
    """
    options = FakeOptions()
    harness = Harness(options=options)
    options.while_executing = at_plan(2, lambda: harness.engine.abort("frontend-a", [1], AbortReason.CLIENT))
    got = run_one(harness, make_request(1, 20, params(2)))
    assert len(got.tokens) == 1 and got.reason is FinishReason.ABORT
    assert harness.engine.stats().num_aborted == harness.engine.stats().num_finished == 1
    assert_engine_empty(harness)


def test_case_2_abort_of_a_waiting_a_preempted_and_an_ended_request() -> None:
    harness = Harness(max_num_seqs=2)
    harness.add(*(make_request(i, 20, params(5)) for i in range(3)))
    harness.step()
    assert harness.live(2).status is RequestStatus.WAITING
    harness.scheduler.preempt_all()
    assert harness.live(1).status is RequestStatus.PREEMPTED
    aborted = harness.engine.abort("frontend-a", [2, 1, 77], AbortReason.ABORT_CALL)
    harness.step()
    assert [outcome.name for outcome in aborted.result(0)] == ["ABORTED", "ABORTED", "NOT_FOUND"]
    assert harness.of(1).reason is harness.of(2).reason is FinishReason.ABORT
    harness.run()
    again = harness.engine.abort("frontend-a", [0, 2], AbortReason.ABORT_CALL)
    harness.step()
    assert [outcome.name for outcome in again.result(0)] == ["ALREADY_FINISHED", "ALREADY_FINISHED"]
    assert harness.of(0).reason is FinishReason.LENGTH and len(harness.of(0).tokens) == 5
    assert_engine_empty(harness)


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_case_3_stop_inside_the_accepted_tokens_of_a_step(acceptance: float) -> None:
    plain = Harness()
    prompt = make_request(1, 30, params(40))
    tokens = run_one(plain, prompt).tokens
    for cut in range(1, 12):
        if tokens[cut - 1] in tokens[: cut - 1]:
            continue
        harness = Harness(options=FakeOptions(num_drafts=5, draft_acceptance=acceptance))
        got = run_one(harness, make_request(1, 30, params(40, stop_token_ids=(tokens[cut - 1],), logprobs=0)))
        assert got.tokens == tokens[:cut], "nothing after the stop"
        assert sum(len(columns) for columns in got.logprobs) == cut
        assert [int(columns.token_ids[i, 0]) for columns in got.logprobs for i in range(len(columns))] == tokens[:cut]
        assert got.finished is not None and got.finished.stop_token_id == tokens[cut - 1]
        assert_engine_empty(harness)


def test_rejected_drafts_roll_computed_tokens_back() -> None:
    harness = Harness(options=FakeOptions(num_drafts=4, draft_acceptance=0.0))
    asked = make_request(1, 20, params(12))
    harness.add(asked)
    while harness.engine.has_work():
        harness.step()
        if request := harness.scheduler.requests.get(("frontend-a", 1)):
            assert request.num_computed_tokens == request.num_tokens - 1
    assert harness.of(1).tokens == expected_tokens(harness, asked)
    assert [plan.num_scheduled_tokens[0] for plan in harness.plans[1:3]] == [5, 5]


def test_drafts_beyond_the_last_token_are_not_computed() -> None:
    harness = Harness(options=FakeOptions(num_drafts=4, draft_acceptance=1.0), num_blocks=3)
    asked = make_request(1, 28, params(5))
    assert run_one(harness, asked).tokens == expected_tokens(harness, asked)
    assert harness.plans[1].num_draft_tokens.tolist() == [3]


def test_case_4_preempting_oneself_as_the_last_candidate() -> None:
    harness = Harness(num_blocks=4, block_size=4, max_num_batched_tokens=16)
    first, second = make_request(1, 4, params(8)), make_request(2, 4, params(8))
    harness.add(first, second)
    harness.step()
    preempted = []
    while harness.engine.has_work():
        harness.step()
        preempted += [r.key[1] for r in harness.scheduler.requests.values() if r.status is RequestStatus.PREEMPTED]
    assert set(preempted) == {2}, "the first one never gives way"
    for asked in (first, second):
        assert harness.of(asked.request_id).tokens == expected_tokens(harness, asked)
    assert_engine_empty(harness)


def test_case_4_a_victim_is_never_one_already_scheduled_in_the_step() -> None:
    """Running is in order, so that victims come from its end; the scheduler asserts it, too.

    Case: vllm#23347
    """
    harness = Harness(num_blocks=12, block_size=4, policy="priority", max_num_batched_tokens=64)
    asked = [make_request(i, 9, params(20), priority=-i, arrival_time_ns=i) for i in range(6)]
    for request in asked:
        harness.add(request)
        harness.step()
    harness.run()
    assert harness.engine.stats().num_preemptions > 3
    for step in harness.steps:
        assert len({id(request) for request in step.requests}) == len(step.requests)
    for request in asked:
        assert harness.of(request.request_id).tokens == expected_tokens(harness, request)
    assert_engine_empty(harness)


def test_case_4_victims_are_the_last_and_only_as_many_as_must_be() -> None:
    """Two rows cross into a new block at once, and one victim's blocks are enough for both of the others.

    Case: vllm#23347
    """
    harness = Harness(num_blocks=10, block_size=4, max_num_batched_tokens=64, enable_prefix_caching=False)
    harness.add(*(make_request(i, 10, params(20)) for i in range(3)))
    harness.step()
    before = harness.scheduler.running
    while not harness.engine.stats().num_preemptions:
        harness.step()
    assert harness.scheduler.running == before[:2] and before[2].status is RequestStatus.PREEMPTED
    assert list(harness.steps[-1].requests) == before[:2] and before[2].blocks == []
    assert harness.plans[-1].num_new_blocks.tolist() == [1, 1]
    harness.run()
    for i in range(3):
        assert harness.of(i).tokens == expected_tokens(harness, make_request(i, 10, params(20)))
    assert_engine_empty(harness)


def test_case_6_a_resumed_request_recomputes_prompt_and_output_and_emits_nothing_twice() -> None:
    harness = Harness(enable_prefix_caching=False)
    asked = make_request(1, 10, params(8))
    harness.add(asked)
    for _ in range(3):
        harness.step()
    assert len(harness.of(1).tokens) == 3
    harness.scheduler.preempt_all()
    harness.step()
    resumed = harness.plans[-1].new_requests[0]
    assert resumed.token_ids.tolist() == asked.prompt_token_ids.tolist() + harness.of(1).tokens[:3]
    assert resumed.num_prompt_tokens == 10 and harness.plans[-1].num_scheduled_tokens.tolist() == [13]
    assert harness.plans[-1].released_slots.tolist() == [0]
    harness.run()
    assert harness.of(1).tokens == expected_tokens(harness, asked)
    assert harness.of(1).finished is not None and harness.of(1).finished.num_preemptions == 1
    assert_engine_empty(harness)


def test_case_9_the_length_limits_of_model_and_request() -> None:
    harness = Harness(max_model_len=30)
    for request_id, (prompt, max_tokens, expected) in enumerate(
        [(25, 100, 5), (25, 3, 3), (29, None, 1), (10, 20, 20)]
    ):
        got = run_one(harness, make_request(request_id, prompt, params(max_tokens)))
        assert len(got.tokens) == expected and got.reason is FinishReason.LENGTH
    with pytest.raises(InvalidArgumentError, match="at most 29 tokens"):
        harness.add(make_request(9, 30))
    assert_engine_empty(harness)


def test_case_13_an_empty_schedule_still_flushes() -> None:
    harness = Harness()
    run_one(harness, make_request(1, 5, params(1)))
    assert scheduled(harness) == [[5], []] and harness.executor.used_slots == set()
    assert not harness.engine.has_work() and not harness.step()


def test_inter_token_work_is_bounded_by_the_budget() -> None:
    """A long prompt never holds up the decodes: every step has a token of each, and at most the budget.

    Case: vllm#1026
    """
    harness = Harness(max_num_batched_tokens=32)
    harness.add(*(make_request(i, 4, params(60)) for i in range(4)))
    harness.step()
    harness.add(make_request(9, 1000, params(2)))
    for _ in range(30):
        before = [len(harness.of(i).tokens) for i in range(4)]
        harness.step()
        assert [len(harness.of(i).tokens) for i in range(4)] == [count + 1 for count in before]
        assert harness.plans[-1].total_num_scheduled_tokens == 32
    harness.run()


def test_priority_victims_are_those_of_least_priority() -> None:
    harness = Harness(num_blocks=9, block_size=4, policy="priority", enable_prefix_caching=False)
    harness.add(
        make_request(1, 7, params(8), priority=2),
        make_request(2, 7, params(8), priority=0),
        make_request(3, 7, params(8), priority=1),
    )
    harness.run()
    preempted = {i: harness.of(i).finished.num_preemptions for i in (1, 2, 3)}  # type: ignore[union-attr]
    assert preempted[2] == 0 and preempted[1] > 0
    assert_engine_empty(harness)


@pytest.mark.parametrize("logprobs", [None, 0], ids=["by column", "row by row"])
def test_stop_by_end_of_sequence_stop_token_and_min_tokens(logprobs: int | None) -> None:
    """Before min_tokens neither kind of stop ends a request; the limits always do.

    Case: vllm#21987
    """
    plain = Harness()
    tokens = run_one(plain, make_request(1, 30, params(12))).tokens
    assert len(set(tokens)) == 12

    def run(eos: int | None = None, **changes: object) -> tuple[int, FinishReason | None, int | None]:
        harness = Harness()
        asked = make_request(1, 30, params(12, logprobs=logprobs, **changes))
        if eos is not None:
            asked.eos_token_ids = (eos,)
        got = run_one(harness, asked)
        assert got.finished is not None
        assert_engine_empty(harness)
        return len(got.tokens), got.reason, got.finished.stop_token_id

    assert run(eos=tokens[4]) == (5, FinishReason.STOP, None)
    assert run(eos=tokens[4], ignore_eos=True) == (12, FinishReason.LENGTH, None)
    assert run(eos=tokens[4], min_tokens=5) == (5, FinishReason.STOP, None)
    assert run(eos=tokens[4], min_tokens=6) == (12, FinishReason.LENGTH, None)
    assert run(stop_token_ids=(tokens[3],)) == (4, FinishReason.STOP, tokens[3])
    assert run(stop_token_ids=(tokens[3],), min_tokens=5) == (12, FinishReason.LENGTH, None)
    assert run(stop_token_ids=(tokens[3], tokens[7]), min_tokens=5) == (8, FinishReason.STOP, tokens[7])
    assert run(eos=tokens[4], ignore_eos=True, stop_token_ids=(tokens[4],)) == (5, FinishReason.STOP, tokens[4])
    assert EOS not in tokens


def test_stops_are_found_however_many_ids_a_request_names_and_whoever_had_the_slot_before() -> None:
    """More ids than the table has room for, the one that counts at any place; the next request has none of them."""
    harness = Harness(max_num_seqs=1)
    tokens = run_one(harness, make_request(0, 20, params(12))).tokens
    unused = [token for token in range(100, 120) if token not in tokens]
    for request_id, place in enumerate((0, 3, 7, 8, 12), start=1):
        stop_token_ids = (*unused[:place], tokens[5], *unused[place:14])
        many = make_request(request_id, 20, params(12, stop_token_ids=stop_token_ids))
        many.prompt_token_ids = make_request(0, 20).prompt_token_ids
        got = run_one(harness, many)
        assert got.tokens == tokens[:6] and got.reason is FinishReason.STOP
        few = make_request(100 + request_id, 20, params(12, stop_token_ids=(unused[0], unused[1], tokens[5])))
        few.prompt_token_ids = make_request(0, 20).prompt_token_ids
        assert run_one(harness, few).tokens == tokens[:6]
        none = make_request(200 + request_id, 20, params(12))
        none.prompt_token_ids = few.prompt_token_ids
        assert run_one(harness, none).tokens == tokens
    assert_engine_empty(harness)


def test_min_tokens_does_not_outlive_the_model_length() -> None:
    harness = Harness(max_model_len=20)
    got = run_one(harness, make_request(1, 15, params(40, min_tokens=30)))
    assert len(got.tokens) == 5 and got.reason is FinishReason.LENGTH


def test_output_handed_over_counts_and_is_not_sent_again() -> None:
    harness = Harness()
    whole = make_request(1, 20, params(12, min_tokens=6))
    tokens = run_one(harness, whole).tokens
    moved = make_request(2, whole.prompt_token_ids.tolist(), params(12, min_tokens=6), output=tokens[:5])
    got = run_one(harness, moved)
    assert got.first_offset == 5 and got.tokens == tokens[5:]
    stopped = make_request(3, whole.prompt_token_ids.tolist(), params(12, min_tokens=7), output=tokens[:5])
    stopped.eos_token_ids = (tokens[5], tokens[6])
    assert run_one(harness, stopped).tokens == tokens[5:7]
    with pytest.raises(InvalidArgumentError, match="output_token_ids"):
        harness.add(make_request(4, 20, params(12), output=range(20, 32)))


def test_partial_prefills_emit_nothing_but_the_start() -> None:
    harness = Harness(max_num_batched_tokens=16)
    got = run_one(harness, make_request(1, 100, params(1)))
    assert got.num_messages == 2 and got.started == 0 and len(got.tokens) == 1


@pytest.mark.parametrize("budget", [16, 17, 64, 2048])
def test_prompt_logprobs_come_once_and_in_order_under_chunks_and_preemption(budget: int) -> None:
    """Every position once, aligned, whatever recomputes it.

    Case: vllm#14239
    """
    harness = Harness(max_num_batched_tokens=budget, block_size=4)
    asked = make_request(1, 70, params(6, prompt_logprobs=0))
    harness.add(asked)
    count = 0
    while harness.engine.has_work():
        harness.step()
        count += 1
        if count in (2, 3, 7):
            harness.scheduler.preempt_all()
    got = harness.of(1)
    positions = [start + i for start, columns in got.prompt_logprobs for i in range(len(columns))]
    assert positions == list(range(1, 70))
    chosen = [int(token) for _, columns in got.prompt_logprobs for token in columns.token_ids[:, 0]]
    assert chosen == asked.prompt_token_ids.tolist()[1:]
    assert got.tokens == expected_tokens(harness, asked)
    assert_engine_empty(harness)


def test_a_row_error_ends_that_request_alone() -> None:
    harness = Harness(options=FakeOptions(failing_request_ids={2}))
    asked = [make_request(i, 10, params(4)) for i in (1, 2, 3)]
    harness.add(*asked)
    harness.run()
    failed = harness.of(2).finished
    assert failed is not None and failed.reason is FinishReason.ERROR
    assert (failed.error_code, failed.error_message) == ("INTERNAL", "the logits are not numbers")
    for request in (asked[0], asked[2]):
        assert harness.of(request.request_id).tokens == expected_tokens(harness, request)
    assert_engine_empty(harness)


def test_finished_tells_where_the_time_went() -> None:
    harness = Harness(options=FakeOptions(latency_s=0.01), max_num_seqs=1)
    harness.add(make_request(1, 10, params(4)), make_request(2, 10, params(4)))
    harness.run()
    first, second = harness.of(1).finished, harness.of(2).finished
    assert first is not None and second is not None
    assert 10_000 <= first.prefill_us < 1_000_000 and 30_000 <= first.decode_us < 1_000_000
    assert second.queue_us >= first.prefill_us + first.decode_us > first.queue_us
    harness.executor.shutdown()
