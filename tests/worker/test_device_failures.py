"""Steps that fail while the one before them is on its way, and devices that are lost."""

from __future__ import annotations

import pytest
import torch

from pagewire.errors import InternalError
from tests.worker.device_core import (
    PENALIZED,
    PROMPT,
    SAMPLED,
    ahead,
    alone,
    by_slot,
    device_core,
    finish,
    remembered,
    runner_of,
)
from tests.worker.mini_core import GREEDY, MiniCore, request
from tests.worker.tiny_model import POISON
from worker_svc.device_failure import is_lost
from worker_svc.device_steps import Clock, DeviceSteps
from worker_svc.worker import Worker

ILLEGAL = "an illegal memory access was encountered"


@pytest.fixture
def worker(tiny, monkeypatch):
    monkeypatch.setattr("worker_svc.runner.is_interpreting", lambda: True)
    worker = Worker(num_threads=1)
    worker.load_model(tiny, load_format="dummy")
    worker.initialize_cache(epoch=1, block_size=4, num_blocks=50, max_num_seqs=8, max_num_batched_tokens=64)
    return worker


@pytest.fixture
def core(worker):
    core = MiniCore(worker.start, num_blocks=50, block_size=4)
    core.free_slots = list(range(8))
    return core


def raises_illegal(*_):
    raise RuntimeError(ILLEGAL)


def assert_lost(worker, core, req) -> None:
    with pytest.raises(InternalError, match=f"must be started again: the device failed: RuntimeError: {ILLEGAL}"):
        ahead(core, [(req, 1)])
    with pytest.raises(InternalError, match="must be started again"):
        worker.initialize_cache(epoch=2, block_size=4, num_blocks=50, max_num_seqs=8, max_num_batched_tokens=64)
    with pytest.raises(InternalError, match="must be started again"):
        worker.load_model("another")
    assert worker.step_started_ns == 0


def test_a_device_that_fails_fails_every_later_step(worker, core, monkeypatch) -> None:
    req = request(PROMPT)
    first = ahead(core, [(req, 8)])
    monkeypatch.setattr(Clock, "wait", raises_illegal)
    with pytest.raises(InternalError, match="the device failed: RuntimeError: an illegal memory access"):
        finish(first)
    assert_lost(worker, core, req)


@pytest.mark.parametrize("params", [GREEDY, PENALIZED], ids=["launched", "waited for"])
def test_a_wait_within_the_next_step_finds_that_too(worker, core, monkeypatch, params) -> None:
    req = request(PROMPT, params)
    first = ahead(core, [(request(PROMPT[1:]), 7)])
    monkeypatch.setattr(Clock, "wait", raises_illegal)
    with pytest.raises(InternalError, match="the device failed: RuntimeError: an illegal memory access"):
        ahead(core, [(req, 8)])
    assert_lost(worker, core, req)
    with pytest.raises(InternalError, match="the device failed"):
        finish(first)
    assert worker.step_started_ns == 0


@pytest.mark.parametrize("params", [GREEDY, PENALIZED], ids=["launched", "waited for"])
@pytest.mark.parametrize("lost", [True, False])
def test_a_launch_that_raises_fails_its_step_or_the_device(worker, core, monkeypatch, params, lost) -> None:
    req = request(PROMPT, params)
    back = remembered(core, [req])
    model = worker._loaded.model
    forward = type(model).forward
    monkeypatch.setattr("worker_svc.runner.is_lost", lambda device: lost)
    monkeypatch.setattr(type(model), "forward", raises_illegal)
    with pytest.raises(InternalError, match=("the device failed: " if lost else "^") + f"RuntimeError: {ILLEGAL}"):
        ahead(core, [(req, 8)])
    monkeypatch.setattr(type(model), "forward", forward)
    back()
    if lost:
        assert_lost(worker, core, req)
    else:
        worker.execute(core.plan([(req, 8)]))


def test_a_device_is_lost_where_it_does_not_get_to_the_end(monkeypatch) -> None:
    assert not is_lost(torch.device("cpu"))
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert not is_lost(cuda)
    monkeypatch.setattr(torch.cuda, "synchronize", raises_illegal)
    assert is_lost(cuda)


@pytest.mark.parametrize("params", [GREEDY, PENALIZED], ids=["launched", "waited for"])
def test_a_slot_that_changed_hands_in_a_step_that_failed(params) -> None:
    core = device_core()
    runner = runner_of(core)
    old, new = request(PROMPT, SAMPLED), request(PROMPT[3:], params)
    first = ahead(core, [(old, 8)])
    slot, back = old.slot, remembered(core, [old, new])
    core.release(old, keep_blocks=True)  # what the failed step computes may not overwrite what comes back
    runner.model.fail_with = RuntimeError("out of memory")
    with pytest.raises(InternalError, match="out of memory"):
        ahead(core, [(new, 5)])
    assert new.slot == slot
    runner.model.fail_with = None
    back()
    expected = alone(PROMPT, SAMPLED, 3)
    second = ahead(core, [(old, 1)])
    third = ahead(core, [(old, 1)])
    assert [by_slot(finish(step))[slot] for step in (first, second, third)] == expected


@pytest.mark.parametrize("is_released", [False, True])
def test_a_row_that_failed_stays_failed_when_the_next_step_is_undone(is_released) -> None:
    core = device_core()
    runner = runner_of(core)
    bad, good, extra = request([4, POISON]), request(PROMPT), request(PROMPT[1:], PENALIZED)
    first = ahead(core, [(bad, 2), (good, 8)])
    slot, back = bad.slot, remembered(core, [bad, good, extra])
    runner.model.fail_with = RuntimeError("out of memory")
    if is_released:
        core.release(bad)
    with pytest.raises(InternalError, match="out of memory"):
        ahead(core, [(good, 1), (extra, 7)] + [(bad, 1)] * (not is_released))
    runner.model.fail_with = None
    back()
    assert runner.batch.is_failed[slot]
    second = ahead(core, [(bad, 1), (good, 1)])
    for result in (finish(first), finish(second)):
        assert list(result.errors) == [slot] and "not numbers" in result.errors[slot]
    assert by_slot(second.finish()) == {good.slot: alone(PROMPT, GREEDY, 2)[1]}


@pytest.mark.parametrize("when", [1, 2, 3], ids=["before the forward pass", "before sampling", "after sampling"])
def test_a_launch_that_fails_on_its_way_leaves_no_trace(monkeypatch, when) -> None:
    """Neither in the ids that the next step takes on the device, nor in those of the step before on the host."""
    core = device_core()
    req, marks = request(PROMPT, SAMPLED), []
    first = ahead(core, [(req, 8)])
    back = remembered(core, [req])

    def mark(clock) -> None:
        marks.append(clock)
        if len(marks) == when:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(Clock, "mark", mark)
    with pytest.raises(InternalError, match="out of memory"):
        ahead(core, [(req, 1)])
    monkeypatch.undo()
    back()
    second = ahead(core, [(req, 1)])
    third = ahead(core, [(req, 1)])
    tokens = [by_slot(finish(step))[req.slot] for step in (first, second, third)]
    assert tokens == alone(PROMPT, SAMPLED, 3)


def test_a_result_that_cannot_be_handed_out_leaves_no_trace() -> None:
    core = device_core()
    runner, req = runner_of(core), request(PROMPT)
    first = ahead(core, [(req, 8)])
    back = remembered(core, [req])
    with pytest.raises(InternalError, match=ILLEGAL):
        runner.start(core.plan([(req, 1)]), on_prepared=raises_illegal)
    back()
    second = ahead(core, [(req, 1)])
    assert [by_slot(finish(step))[req.slot] for step in (first, second)] == alone(PROMPT, GREEDY, 2)


def test_a_launch_that_fails_keeps_its_hands_off_the_ids_of_the_step_before(monkeypatch) -> None:
    """Even before that step is waited for: a failed launch's buffers on the host are taken again, not the others."""
    core, req, marks = device_core(), request(PROMPT), []
    first = ahead(core, [(req, 8)])
    back = remembered(core, [req])
    monkeypatch.setattr(DeviceSteps, "rewind", lambda steps: None)
    monkeypatch.setattr(Clock, "mark", lambda clock: marks.append(clock) or (len(marks) == 3 and raises_illegal()))
    with pytest.raises(InternalError, match=ILLEGAL):
        ahead(core, [(req, 1)])
    back()
    ahead(core, [(req, 1)])
    assert by_slot(finish(first))[req.slot] == alone(PROMPT, GREEDY, 1)[0]


@pytest.mark.parametrize("is_released", [False, True])
def test_undoing_a_plan_undoes_what_the_plan_did_alone(is_released) -> None:
    core = device_core()
    batch, req, other = runner_of(core).batch, request(PROMPT), request(PROMPT[1:])
    finish(ahead(core, [(req, 8), (other, 7)]))
    slot, generation = req.slot, int(batch.generations[req.slot])
    if is_released:
        core.release(req)
        plan = core.plan([(other, 1), (request(PROMPT[2:]), 6)])
    else:
        plan = core.plan([(other, 1), (req, 1)])
    _, undo = batch.apply(plan)
    assert batch.generations[slot] == generation + is_released
    batch.fail(other.slot, "the step before has failed it")
    undo()
    assert batch.is_failed[other.slot] and batch.request(other.slot).error and not batch.is_failed[slot]
    assert batch.generations[slot] == generation and batch.num_tokens[slot] == 9
