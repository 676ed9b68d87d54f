"""Deadlines far away, and what an abort of very many requests costs."""

from __future__ import annotations

import pytest
from core_support import FRONTEND, Harness, assert_engine_empty, make_request, params, running_engine

from pagewire.engine import AbortOutcome, AbortReason, FinishReason, Pause, PauseMode, Resume


@pytest.mark.parametrize("remaining_ms", [2**42, 2**64 - 1])
def test_a_deadline_beyond_what_a_thread_can_wait_for_does_not_end_the_loop(remaining_ms: int) -> None:
    """While paused the loop waits for the next deadline, which may lie centuries ahead."""
    harness = Harness()
    with running_engine(harness) as thread:
        assert harness.engine.utility(Pause(PauseMode.KEEP)).result(5) == 0
        harness.add(make_request(1, 10, params(2), remaining_ms=remaining_ms))
        assert harness.engine.abort(FRONTEND, [9], AbortReason.CLIENT).result(5) == [AbortOutcome.NOT_FOUND]
        harness.engine.utility(Resume()).result(5)
        thread.join(0.2)
        assert thread.is_alive()
    assert harness.of(1).reason in (FinishReason.LENGTH, FinishReason.ABORT)


def test_ended_requests_are_not_kept_until_their_deadline() -> None:
    harness = Harness()
    for request_id in range(400):
        harness.add(make_request(request_id, 5, params(1), remaining_ms=3_600_000 + request_id))
        harness.run()
    assert len(harness.engine._intake._deadlines) <= 130
    assert_engine_empty(harness)


def test_many_aborts_in_one_message_end_each_request_once_whatever_is_named_twice() -> None:
    harness = Harness(max_num_seqs=4)
    harness.add(*(make_request(i, 5, params(9)) for i in range(12)))
    harness.step()
    aborted = harness.engine.abort(FRONTEND, [3, 99, 3, 11, 0], AbortReason.CLIENT)
    harness.step()
    assert [outcome.name for outcome in aborted.result(0)] == [
        "ABORTED",
        "NOT_FOUND",
        "ALREADY_FINISHED",
        "ABORTED",
        "ABORTED",
    ]
    harness.run()
    assert sum(harness.of(i).reason is FinishReason.ABORT for i in range(12)) == 3
    assert_engine_empty(harness)
