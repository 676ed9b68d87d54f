"""The waiting queue, the memory of ids, the settings, and what a request derives from its parameters."""

from __future__ import annotations

import random
import time

import pytest
from core_support import FRONTEND, make_request, params

from core_svc.config import EngineConfig
from core_svc.recent_ids import RecentIds
from core_svc.request import Request, RequestStatus
from core_svc.request_queue import RequestQueue
from pagewire.errors import InvalidArgumentError


def request(sequence: int, priority: int = 0, arrival: int = 0, *, is_priority_policy: bool = True) -> Request:
    return Request.from_engine_request(
        make_request(sequence, 3, priority=priority, arrival_time_ns=arrival),
        FRONTEND,
        max_model_len=100,
        sequence=sequence,
        now_ns=0,
        is_priority_policy=is_priority_policy,
    )


def take(queue: RequestQueue) -> Request:
    found = queue.peek()
    assert found is not None
    queue.remove(found)
    return found


def test_the_queue_follows_the_policy_of_its_requests() -> None:
    kinds = [(5, 1), (0, 9), (0, 3), (5, 0), (-3, 7)]
    for is_priority_policy, expected in ((True, [4, 2, 1, 3, 0]), (False, [0, 1, 2, 3, 4])):
        queue = RequestQueue()
        for sequence, (priority, arrival) in enumerate(kinds):
            queue.push(request(sequence, priority, arrival, is_priority_policy=is_priority_policy))
        assert [take(queue).key[1] for _ in kinds] == expected
        assert queue.peek() is None and queue.peek_preempted() is None


def test_preempted_requests_are_found_behind_others() -> None:
    queue = RequestQueue()
    waiting = [request(sequence, priority) for sequence, priority in enumerate((0, 3, 1, 2))]
    for each in waiting:
        queue.push(each)
    waiting[1].status = waiting[3].status = RequestStatus.PREEMPTED
    assert queue.peek_preempted() is waiting[3] and queue.peek() is waiting[0]
    queue.remove(waiting[3])
    assert queue.peek_preempted() is waiting[1]
    assert [take(queue) for _ in range(3)] == [waiting[0], waiting[2], waiting[1]]


def test_ended_requests_leave_the_queue_without_a_search() -> None:
    rng = random.Random(0)
    queue, alive = RequestQueue(), {}
    for sequence in range(500):
        alive[sequence] = request(sequence, rng.randint(0, 5))
        queue.push(alive[sequence])
        if rng.random() < 0.7:
            ended = alive.pop(rng.choice(list(alive)))
            ended.status = RequestStatus.FINISHED_ABORTED
            queue.note_ended()
        assert len(queue) == len(alive)
        assert len(queue._heap) <= 2 * len(alive) + 1, "the heap does not grow with what has ended"
    popped = [take(queue) for _ in range(len(queue))]
    assert popped == sorted(alive.values(), key=lambda r: r.order) and queue.peek() is None


def test_recent_ids_are_bounded_keep_the_first_value_and_expire() -> None:
    ids: RecentIds[int] = RecentIds(ttl_s=0.02, capacity=2)
    ids.add(("a", 1), 10)
    ids.add(("a", 1), 11)
    ids.add(("b", 1), 20)
    assert len(ids) == 2 and ids.pop(("a", 1)) == 10 and ids.pop(("a", 1)) is None
    ids.add(("a", 2), 1)
    ids.add(("a", 3), 1)
    assert ("b", 1) not in ids and ("a", 3) in ids
    ids.forget_frontend("a")
    assert len(ids) == 0
    ids.add(("a", 4), 1)
    time.sleep(0.03)
    assert ("a", 4) not in ids and len(ids) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("long_prefill_token_threshold", -1),
        ("max_num_requests", 0),
        ("prefill_schedule_interval", 0),
        ("policy", "lifo"),
    ],
)
def test_settings_that_make_no_sense_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{field} is"):
        EngineConfig(**{field: value})  # type: ignore[arg-type]


def test_what_a_request_derives_from_its_parameters() -> None:
    asked = make_request(1, 10, params(None, ignore_eos=True, stop_token_ids=(5, 6)), remaining_ms=250)
    made = Request.from_engine_request(asked, FRONTEND, max_model_len=64, sequence=1, now_ns=1_000)
    assert (made.num_tokens, made.num_prompt_tokens, made.max_num_tokens) == (10, 10, 64)
    assert made.eos_token_ids == frozenset() and made.stop_token_ids == {5, 6}
    assert made.deadline_ns == 250_001_000 and made.num_computed_tokens == 0
    new = made.to_new_request()
    assert new.token_ids.tolist() == asked.prompt_token_ids.tolist() and new.eos_token_ids == ()
    made.held_token_ids[0] = 77
    assert new.token_ids.tolist() == asked.prompt_token_ids.tolist(), "a plan's columns never change afterwards"
