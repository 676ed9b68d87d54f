"""Two plans in flight: what the second one counts on, what it gets when the first one fails, and who is in between."""

import threading
import time

import pytest

from kernels.cpu.recorder import is_recording
from pagewire.errors import AbortedError, InternalError
from pagewire.sampling import SamplingParams
from pagewire.v1 import worker_pb2
from tests.worker.mini_core import request
from tests.worker.worker_support import PROMPT, core_on
from worker_svc.compute import ComputeThread

SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=2**63 + 5)


@pytest.fixture(params=["cpu", "device"], autouse=True)
def device_steps(request, monkeypatch):
    """All of it holds too where steps are launched and waited for later, as on a GPU."""
    monkeypatch.setattr("worker_svc.runner.is_interpreting", lambda: request.param == "device")
    return request.param


def plan_ahead(core, rows):
    """A plan whose rows' requests are then as they will be, with a placeholder for the token that is not known."""
    plan = core.plan(rows)
    for req, count in rows:
        req.computed += count
        if req.computed == len(req.tokens):
            req.tokens.append(0)
    return plan


def take(req, results):
    """The request's tokens out of several results."""
    tokens = []
    for result in results:
        rows = dict(zip(result.slots.tolist(), result.token_ids.tolist(), strict=True))
        tokens += [rows[req.slot]] if req.slot in rows else []
    return tokens


def drive(stream, core, steps):
    """Runs steps (lists of rows, made one by one) with two plans in flight; returns the results."""
    results, in_flight = [], 0
    for rows in steps:
        stream.submit(plan_ahead(core, rows))
        in_flight += 1
        if in_flight == 2:
            results.append(stream.result())
            in_flight = 1
    return [*results, stream.result()]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SAMPLED])
def test_output_is_that_of_single_steps(loaded, params):
    """Prefill in chunks, decodes and a request that comes late, all behind plans whose results are not known."""
    core = core_on(loaded.stream())
    alone = [core.generate([request(p, params, child_index=i)], 8)[0] for i, p in enumerate((PROMPT, PROMPT[1:]))]
    stream = loaded.stream()
    stream.opened()
    first, late = request(PROMPT, params), request(PROMPT[1:], params, child_index=1)
    steps = [[(first, 3)], [(first, 3)], [(first, 1)], [(first, 1), (late, 5)], *[[(late, 1), (first, 1)]] * 4]
    results = drive(stream, core, [*steps, [(late, 1)], [(late, 1)], [(late, 1)]])
    assert [result.step for result in results] == list(range(core.step - 10, core.step + 1))
    assert take(first, results) == alone[0][:7] and take(late, results) == alone[1]


def test_a_request_that_stopped_is_computed_once_more_and_released_later(loaded):
    stream = loaded.stream()
    core = core_on(stream)
    stopped, other = request(PROMPT), request(PROMPT[2:])
    expected = core.generate([request(PROMPT[2:]), request(PROMPT[1:])], 4)
    drive(stream, core, [[(stopped, 6), (other, 4)], [(stopped, 1), (other, 1)]])
    slot = stopped.slot
    core.release(stopped)  # found at the first result, while the second step ran
    fresh = request(PROMPT[1:])
    results = drive(stream, core, [[(fresh, 5), (other, 1)], [(other, 1), (fresh, 1)], [(fresh, 1)], [(fresh, 1)]])
    assert fresh.slot == slot and take(fresh, results) == expected[1]
    assert take(other, results) == expected[0][2:]


def test_a_row_that_failed_is_skipped_with_its_error(loaded):
    stream = loaded.stream()
    core = core_on(stream)
    good, bad = request(PROMPT), request(PROMPT, SamplingParams(temperature=0.0, logit_bias={10**6: 1.0}))
    expected = core.generate([request(PROMPT)], 3)[0]
    results = drive(stream, core, [[(good, 6), (bad, 6)], [(good, 1), (bad, 1)], [(good, 1)]])
    assert [list(result.errors) for result in results] == [[bad.slot], [bad.slot], []]
    assert "logit_bias" in results[1].errors[bad.slot]
    assert take(good, results) == expected and take(bad, results) == []


def fail_once(worker):
    """Lets the next forward pass fail, after it was entered and told to go on."""
    model = worker._runner.model
    real, entered, go_on = model.forward, threading.Event(), threading.Event()

    def forward(batch, caches):
        entered.set()
        assert go_on.wait(20)
        model.forward = real
        raise RuntimeError("out of memory")

    model.forward = forward
    return entered, go_on


@pytest.mark.parametrize("kind", ["forward", "unreadable", "wrong"])
def test_steps_behind_one_that_failed_have_not_happened_either(loaded, server, kind):
    stream = loaded.stream()
    core = core_on(stream)
    expected = core.generate([request(PROMPT), request(PROMPT[1:])], 4)
    req, late = request(PROMPT), request(PROMPT[1:])
    core.run([(req, 6)])
    before, blocks = server.worker.step, list(req.blocks)
    plan = core.plan([(req, 1)])
    if kind == "forward":
        entered, go_on = fail_once(server.worker)
        stream.submit(plan)
        assert entered.wait(20)
    elif kind == "unreadable":
        message = worker_pb2.StepPlan(epoch=plan.epoch, step=plan.step, slots=b"123")
        stream.send(worker_pb2.ExecuteRequest(plan=message))
    else:
        plan.slots = plan.slots + 1000
        stream.submit(plan)
    failed = (req.computed, len(req.tokens), len(late.tokens))
    req.computed, req.tokens = req.computed + 1, [*req.tokens, 0]
    for rows in ([(req, 1), (late, 5)], [(req, 1), (late, 1)]):
        stream.submit(plan_ahead(core, rows))
    if kind == "forward":
        go_on.set()
    said = {"forward": "out of memory", "unreadable": "plan.slots is", "wrong": r"plan.slots\[0\]"}[kind]
    with pytest.raises(InternalError, match=said):
        stream.result()
    for step in (before + 2, before + 3):
        with pytest.raises(AbortedError, match=f"step {step} was planned behind step {before + 1}"):
            stream.result()
    assert server.worker.step == before and loaded.utility(stats={}).stats.num_slots_used == 3
    # The core plans the failed step again, and all is as if nothing had been.
    core.step, core.released = before, []
    req.computed, req.blocks = failed[0], blocks
    late.computed, late.is_known, late.blocks = 0, False, []
    del req.tokens[failed[1] :], late.tokens[failed[2] :]
    core.free_slots.append(late.slot)
    late.slot = -1
    assert core.generate([req, late], 4) == expected


def test_a_gap_behind_a_failure_is_forgotten_by_a_new_stream(loaded, server):
    stream = loaded.stream()
    core = core_on(stream)
    req = request(PROMPT)
    plan = core.plan([(req, 6)])
    slots, plan.slots = plan.slots, plan.slots + 10**6
    with pytest.raises(InternalError, match=r"plan.slots\[0\]"):
        stream.execute(plan)
    stream.close()
    again = loaded.stream()
    assert again.opened().next_step == plan.step
    plan.slots = slots
    assert again.execute(plan).step == plan.step


def test_the_next_step_does_not_wait_for_the_event_loop(loaded, server, device_steps):
    """The loop is stopped while the first of two steps runs: the second one is computed all the same."""
    stream = loaded.stream()
    core = core_on(stream)
    req = request(PROMPT)
    model, real = server.worker._runner.model, server.worker._runner.model.forward
    entered, go_on, loop_is_stopped, let_loop_go = (threading.Event() for _ in range(4))
    starts = []

    def forward(batch, caches):
        if not is_recording():  # a decode of this model is tried as a program, refused, and then run by Python
            starts.append(time.monotonic())
        entered.set()
        assert go_on.wait(20)
        return real(batch, caches)

    def stop_loop():
        loop_is_stopped.set()
        let_loop_go.wait(20)

    model.forward = forward
    stream.submit(plan_ahead(core, [(req, 6)]))
    stream.submit(plan_ahead(core, [(req, 1)]))
    assert entered.wait(20)
    deadline = time.monotonic() + 20
    while server.servicer._session.num_pending < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    server._loop.call_soon_threadsafe(stop_loop)
    assert loop_is_stopped.wait(20)
    go_on.set()
    while server.worker.step < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert server.worker.step == 2 and len(starts) == 2
    let_loop_go.set()
    results = [stream.result(), stream.result()]
    assert [result.step for result in results] == [1, 2]
    timings = results[1].timings
    assert timings.wait_ns > 0
    if device_steps == "cpu":
        assert 0 < timings.idle_ns < (starts[1] - starts[0]) * 1e9
    else:
        assert timings.idle_ns == 0, "the second step was launched before the first one had ended"


class TestComputeThread:
    """A result waits for the next call's word, if that call has promised one."""

    @pytest.fixture
    def compute(self):
        compute = ComputeThread()
        yield compute
        assert compute.close(5.0)

    def test_is_held_until_the_next_call_delivers(self, compute):
        gate, seen, first_is_done = threading.Event(), [], threading.Event()

        def second():
            seen.append(first.done())
            compute.deliver()
            seen.append(first.done())
            compute.deliver()

        first = compute.submit(lambda: gate.wait(10))
        first.add_done_callback(lambda done: first_is_done.set())
        after = compute.submit(second, delivers=True)
        gate.set()
        assert after.result(10) is None and first.result(0) is True and first_is_done.is_set()
        assert seen == [False, True]

    def test_order_holds_where_the_next_call_breaks_its_promise_or_fails(self, compute):
        gate, order = threading.Event(), []
        calls = [
            compute.submit(lambda: gate.wait(10), delivers=True),
            compute.submit(lambda: 1 / 0, delivers=True),
            compute.submit(lambda: "last", delivers=True),
        ]
        for i, call in enumerate(calls):
            call.add_done_callback(lambda done, i=i: order.append(i))
        gate.set()
        assert calls[2].result(10) == "last" and isinstance(calls[1].exception(0), ZeroDivisionError)
        assert order == [0, 1, 2]

    def test_is_not_held_for_a_call_that_promises_nothing_nor_for_none(self, compute):
        gate, hang = threading.Event(), threading.Event()
        first = compute.submit(lambda: gate.wait(10))
        long = compute.submit(lambda: hang.wait(10))
        gate.set()
        assert first.result(10) is True and not long.done()
        hang.set()
        assert long.result(10) is True
