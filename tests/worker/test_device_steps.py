"""Steps launched before the one before them is known, on a CPU that stands for a device."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from pagewire.errors import InternalError, InvalidArgumentError
from pagewire.sampling import SamplingParams
from tests.worker.device_core import PENALIZED, PROMPT, SAMPLED, ahead, alone, by_slot, device_core, finish
from tests.worker.mini_core import GREEDY, request
from tests.worker.tiny_model import POISON
from worker_svc.compute import ComputeThread, Deferred
from worker_svc.staging import Staging, packed_bytes


@pytest.fixture
def device():
    """A core on a runner that launches steps."""
    return device_core()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_two_steps_in_flight_sample_what_single_steps_sample(device, params) -> None:
    first, second, third = (request(PROMPT[i:], params, child_index=i) for i in range(3))
    steps = [
        [(first, 8), (second, 3)], [(second, 4), (first, 1)], [(first, 1), (second, 1), (third, 2)],
        [(third, 4), (second, 1), (first, 1)], [(second, 1), (third, 1)], [(first, 1), (third, 1), (second, 1)],
    ]  # fmt: skip
    got, before = {0: [], 1: [], 2: []}, None
    slots = {}

    def take(result):
        for slot, token in by_slot(result).items():
            got[slots[slot]].append(token)

    for rows in steps:
        launched = ahead(device, rows)
        slots |= {req.slot: (first, second, third).index(req) for req, _ in rows}
        if before is not None:
            take(finish(before))
        before = launched
    take(finish(before))
    for i in range(3):
        assert got[i] == alone(PROMPT[i:], params, len(got[i]), child_index=i)
    assert [len(got[i]) for i in range(3)] == [5, 5, 3]


def test_a_step_that_needs_the_tokens_waits_for_the_one_before(device) -> None:
    plain, other = request(PROMPT), request(PROMPT[2:], PENALIZED)
    launched = ahead(device, [(plain, 8)])
    mixed = ahead(device, [(plain, 1), (other, 6)])
    assert not isinstance(mixed, Deferred)
    again = ahead(device, [(plain, 1)])
    tokens = [by_slot(finish(launched))[plain.slot], by_slot(mixed)[plain.slot], by_slot(finish(again))[plain.slot]]
    assert tokens == alone(PROMPT, GREEDY, 3)
    assert by_slot(mixed)[other.slot] == alone(PROMPT[2:], PENALIZED, 1)[0]


def test_a_slot_that_changes_hands_in_flight(device) -> None:
    old, new = request(PROMPT), request(PROMPT[3:])
    first = ahead(device, [(old, 8)])
    slot = old.slot
    device.release(old)
    second = ahead(device, [(new, 5)])
    assert new.slot == slot
    third = ahead(device, [(new, 1)])
    assert by_slot(finish(first))[slot] == alone(PROMPT, GREEDY, 1)[0]
    assert [by_slot(finish(step))[slot] for step in (second, third)] == alone(PROMPT[3:], GREEDY, 2)


@pytest.mark.parametrize("next_is_simple", [True, False])
def test_a_row_that_fails_in_flight_fails_in_the_next_step_too(device, next_is_simple) -> None:
    bad, good = request([4, POISON]), request(PROMPT)
    params = GREEDY if next_is_simple else PENALIZED
    first = ahead(device, [(bad, 2), (good, 8)])
    extra = request(PROMPT[1:], params)
    second = ahead(device, [(good, 1), (bad, 1), (extra, 7)])
    results = [finish(first), finish(second) if next_is_simple else second]
    for result in results:
        assert list(result.errors) == [bad.slot] and "not numbers" in result.errors[bad.slot]
        assert bad.slot not in result.slots
    assert [by_slot(result)[good.slot] for result in results] == alone(PROMPT, GREEDY, 2)
    third = ahead(device, [(bad, 1), (good, 1)])
    result = finish(third)
    assert list(result.errors) == [bad.slot] and by_slot(result)[good.slot] == alone(PROMPT, GREEDY, 3)[2]


def test_a_step_that_fails_leaves_the_one_in_flight_alone(device) -> None:
    req = request(PROMPT)
    first = ahead(device, [(req, 8)])
    runner = device.execute.__self__
    computed, tokens, blocks, step = req.computed, list(req.tokens), list(req.blocks), device.step
    runner.model.fail_with = RuntimeError("out of memory")
    with pytest.raises(InternalError, match="out of memory"):
        ahead(device, [(req, 1)])
    runner.model.fail_with = None
    req.computed, req.tokens, req.blocks, device.step = computed, list(tokens), list(blocks), step
    wrong = device.plan([(req, 1)])
    wrong.num_computed_tokens = wrong.num_computed_tokens + 1
    with pytest.raises(InvalidArgumentError):
        runner.start(wrong)
    expected = alone(PROMPT, GREEDY, 2)
    assert by_slot(finish(first))[req.slot] == expected[0]
    assert int(runner.batch.token_ids[req.slot, len(PROMPT)]) == expected[0]
    req.computed, req.tokens, req.blocks, device.step = computed, list(tokens), list(blocks), step
    assert by_slot(finish(ahead(device, [(req, 1)])))[req.slot] == expected[1]


def test_min_tokens_wait_only_until_they_are_there(device) -> None:
    req = request(PROMPT, SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(3, 50)))
    kinds = [isinstance(ahead(device, [(req, n)]), Deferred) for n in (8, 1, 1, 1)]
    assert kinds == [False, False, True, True]


def test_a_deferred_value_is_finished_when_it_is_handed_out() -> None:
    compute, seen = ComputeThread(), []

    def second() -> None:
        seen.append("second")
        compute.deliver()

    def finish_first() -> int:
        seen.append("finished")
        return 7

    gate = compute.submit(lambda: seen.append("gate"))
    gate.result(10)
    go = threading.Event()
    blocker = compute.submit(lambda: go.wait(10))
    first = compute.submit(lambda: Deferred(finish_first))
    after = compute.submit(second, delivers=True)
    failing = compute.submit(lambda: Deferred(lambda: 1 / 0))
    go.set()
    assert blocker.result(10) and first.result(10) == 7 and after.result(10) is None
    assert isinstance(failing.exception(10), ZeroDivisionError)
    assert seen == ["gate", "second", "finished"]
    assert compute.close(5.0)


def test_a_call_that_comes_while_a_value_is_on_its_way_runs_at_once() -> None:
    compute, seen, is_there = ComputeThread(), [], threading.Event()

    def wait() -> str:
        seen.append("waited")
        return "value"

    first = compute.submit(lambda: Deferred(wait, is_there.is_set))
    # The thread has no other work: were it to wait for the value now, the next call would run behind it.
    second = compute.submit(lambda: seen.append("second") or Deferred(lambda: "next"), delivers=True)
    deadline = threading.Event()
    while not seen and not deadline.wait(0.005):
        pass
    assert seen[0] == "second" and second.result(10) == "next"
    assert first.result(10) == "value" and seen == ["second", "waited"]
    third = compute.submit(lambda: Deferred(wait, is_there.is_set))
    assert not third.done()
    is_there.set()
    assert third.result(10) == "value"
    assert compute.close(5.0)


def test_staging_carries_every_kind_of_array() -> None:
    arrays = [
        np.arange(5, dtype=np.int64), np.zeros(0, np.int32), np.arange(12, dtype=np.int32).reshape(3, 4)[:, :2],
        np.array([0.5, -1.0], np.float32), np.array([1e-300], np.float64),
    ]  # fmt: skip
    staging = Staging(packed_bytes([array.nbytes for array in arrays]), torch.device("cpu"))
    for turn in range(3):
        tensors = staging.stage([array + turn for array in arrays])
        for tensor, array in zip(tensors, arrays, strict=True):
            assert np.array_equal(tensor.numpy(), array + turn) and tensor.numpy().dtype == array.dtype
    with pytest.raises(ValueError, match="staging buffer holds"):
        staging.stage([*arrays, arrays[0]])
