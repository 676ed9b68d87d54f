"""The WorkerService over real gRPC on a tiny Llama: handshake, fencing, loading, steps, heartbeats, commands."""

import threading
import time

import grpc
import numpy as np
import pytest

from pagewire.columns import int32
from pagewire.plan import GrammarMask
from pagewire.sampling import SamplingParams
from pagewire.v1 import types_pb2, worker_pb2
from tests.worker.mini_core import MiniCore, request
from tests.worker.worker_support import PROMPT, Client, core_on, fails


def test_handshake(client, tiny):
    answer = client.handshake()
    assert answer.worker_incarnation == "worker-incarnation" and answer.device == "cpu"
    assert (answer.rank, answer.world_size, answer.epoch, answer.HasField("model")) == (0, 1, 0, False)
    client.load(tiny, load_format="dummy")
    client.initialize_cache(epoch=7)
    answer = client.handshake()
    assert answer.epoch == 7 and answer.step == 0 and answer.model.vocab_size == 131


def test_handshake_refuses_other_versions_and_empty_ids(server, client):
    with fails(grpc.StatusCode.FAILED_PRECONDITION, "protocol_versions"):
        client.handshake(low=2, high=9)
    with fails(grpc.StatusCode.INVALID_ARGUMENT, "core_incarnation"):
        Client(server.address, core="").handshake()


def test_calls_before_the_handshake(client):
    for call in (lambda: client.load("x"), client.initialize_cache, client.tokenizer, lambda: client.utility(stats={})):
        with fails(grpc.StatusCode.FAILED_PRECONDITION, "Handshake"):
            call()


def test_load_reports_progress_and_is_idempotent(client, tiny):
    client.handshake()
    responses = client.load(tiny, load_format="dummy")
    assert len(responses) > 2 and responses[0].stage and responses[-1].fraction == 1.0
    assert [r.HasField("model") for r in responses] == [False] * (len(responses) - 1) + [True]
    assert len(client.load(tiny, load_format="dummy")) == 1


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"model": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"model": "./nowhere"}, grpc.StatusCode.NOT_FOUND),
        ({"dtype": types_pb2.DATA_TYPE_INT8}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"dtype": 77}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"load_format": "strange"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"load_format": ""}, grpc.StatusCode.NOT_FOUND),  # no weights there
    ],
)
def test_load_errors(client, tiny, fields, code):
    client.handshake()
    with fails(code):
        client.load(**({"model": tiny, "load_format": "dummy"} | fields))
    assert client.load(tiny, load_format="dummy")[-1].HasField("model")


def test_cache_needs_a_model_and_a_new_epoch(client, tiny):
    client.handshake()
    with fails(grpc.StatusCode.FAILED_PRECONDITION, "no model"):
        client.initialize_cache()
    client.load(tiny, load_format="dummy")
    pool = client.initialize_cache(epoch=3)
    assert pool.num_blocks == 100 and pool.kv_cache_dtype == types_pb2.DATA_TYPE_FLOAT32
    assert pool.bytes_per_block == 2 * 2 * 4 * 2 * 8 * 4  # K and V, layers, tokens, KV heads, head size, float32
    for epoch in (0, 2, 3):
        with fails(grpc.StatusCode.FAILED_PRECONDITION, "epoch"):
            client.initialize_cache(epoch=epoch)
    half = client.initialize_cache(
        epoch=4, num_blocks=0, memory_bytes=10 * 1024, kv_cache_dtype=types_pb2.DATA_TYPE_BFLOAT16
    )
    assert (half.num_blocks, half.bytes_per_block) == (20, 512)
    most = client.initialize_cache(epoch=5, num_blocks=0)
    assert most.num_blocks == 64 * 32 + 1  # no more than 64 sequences of 128 tokens can use


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"block_size": 0}, grpc.StatusCode.INVALID_ARGUMENT, "block_size"),
        ({"max_num_seqs": 0}, grpc.StatusCode.INVALID_ARGUMENT, "max_num_seqs"),
        ({"max_num_batched_tokens": 2**31}, grpc.StatusCode.INVALID_ARGUMENT, "max_num_batched_tokens"),
        ({"num_blocks": 1}, grpc.StatusCode.INVALID_ARGUMENT, "num_blocks"),
        ({"num_blocks": 0, "memory_bytes": 2000}, grpc.StatusCode.INVALID_ARGUMENT, "memory_bytes"),
        ({"num_blocks": 2**31}, grpc.StatusCode.RESOURCE_EXHAUSTED, "available"),
        ({"kv_cache_dtype": types_pb2.DATA_TYPE_INT8}, grpc.StatusCode.UNIMPLEMENTED, "int8"),
    ],
)
def test_cache_errors(client, tiny, fields, code, said):
    client.handshake()
    client.load(tiny, load_format="dummy")
    with fails(code, said):
        client.initialize_cache(**fields)
    assert client.initialize_cache().num_blocks == 100


def all_columns(req):
    return [*req.logprobs, *(columns for _, columns in req.prompt_logprobs)]


def test_steps_over_the_stream_equal_steps_in_process(loaded, server):
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5, logprobs=2, prompt_logprobs=1)
    core = core_on(loaded.stream())
    wired = [request(PROMPT, params), request(PROMPT[1:]), request(PROMPT[2:], params, child_index=1)]
    core.generate(wired, 9, budget=5)
    loaded.initialize_cache(epoch=2)
    local = MiniCore(server.worker.execute, num_blocks=100, block_size=4, epoch=2)
    direct = [request(PROMPT, params), request(PROMPT[1:]), request(PROMPT[2:], params, child_index=1)]
    server.compute.submit(lambda: local.generate(direct, 9, budget=5)).result(20)
    for a, b in zip(wired, direct, strict=True):
        assert a.output == b.output and len(a.output) == 9
        assert len(a.logprobs) == len(b.logprobs) and len(a.prompt_logprobs) == len(b.prompt_logprobs)
        for x, y in zip(all_columns(a), all_columns(b), strict=True):
            assert np.array_equal(x.token_ids, y.token_ids) and np.array_equal(x.ranks, y.ranks)
            assert np.array_equal(x.logprobs, y.logprobs)


def test_plans_sent_ahead_are_answered_in_order(loaded):
    """Decode rows carry no tokens, so a plan can go out before the result of the one before is there."""
    stream = loaded.stream()
    core = core_on(stream)
    req = request(PROMPT)
    core.run([(req, len(PROMPT))])
    first = core.plan([(req, 1)])
    req.computed, req.tokens = req.computed + 1, [*req.tokens, 0]  # a placeholder for the token in flight
    second = core.plan([(req, 1)])
    stream.submit(first)
    stream.submit(second)
    results = [stream.result(), stream.result()]
    assert [r.step for r in results] == [2, 3] and all(r.timings.forward_ns > 0 for r in results)
    assert results[1].timings.wait_ns > 0


def test_execute_opens_with_open_and_the_right_epoch(loaded):
    stream = loaded.stream(epoch=9)
    with fails(grpc.StatusCode.FAILED_PRECONDITION, "epoch"):
        stream.opened()
    plan_first = iter([worker_pb2.ExecuteRequest(plan=worker_pb2.StepPlan())])
    with fails(grpc.StatusCode.INVALID_ARGUMENT, "open"):
        next(loaded.stub.Execute(plan_first, timeout=10))
    with fails(grpc.StatusCode.INVALID_ARGUMENT, "open"):
        next(loaded.stub.Execute(iter([]), timeout=10))
    stream = loaded.stream()
    opened = stream.opened()
    assert opened.worker_incarnation == "worker-incarnation" and opened.next_step == 1
    stream.send(worker_pb2.ExecuteRequest(open=worker_pb2.ExecuteRequest.Open(core_incarnation="core-1", epoch=1)))
    with fails(grpc.StatusCode.INVALID_ARGUMENT, "after the first"):
        stream.message()


@pytest.mark.parametrize("changes", [{"step": 3}, {"step": 1}, {"epoch": 2}])
def test_a_gap_in_the_steps_is_refused(loaded, changes):
    stream = loaded.stream()
    core = core_on(stream)
    req = request(PROMPT)
    core.run([(req, len(PROMPT))])
    stream.submit(core.plan([(req, 1)], **changes))
    with fails(grpc.StatusCode.FAILED_PRECONDITION, "expects step 2 of epoch 1"):
        stream.message()


def test_a_broken_stream_can_be_opened_again_where_it_stopped(loaded):
    stream = loaded.stream()
    core = core_on(stream)
    req = request(PROMPT)
    core.generate([req], 3)
    stream.close()
    again = loaded.stream()
    assert again.opened().next_step == core.step + 1
    core.execute = again.execute
    assert len(core.generate([req], 6)[0]) == 6


def test_a_wrong_plan_fails_its_step_and_nothing_else(loaded):
    stream = loaded.stream()
    core = core_on(stream)
    req = request(PROMPT)
    rows = [(req, len(PROMPT))]
    plan = core.plan(rows)
    good = plan.new_block_ids
    plan.new_block_ids = int32([5, 10_000])
    stream.submit(plan)
    failure = stream.message().failure
    assert failure.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "plan.new_block_ids[1] is 10000" in failure.message
    broken = worker_pb2.ExecuteRequest(plan=worker_pb2.StepPlan(epoch=1, step=1, slots=b"123"))
    stream.send(broken)
    failure = stream.message().failure
    assert failure.code == grpc.StatusCode.INVALID_ARGUMENT.value[0] and "plan.slots" in failure.message
    plan.new_block_ids = good
    core.take(rows, stream.execute(plan))
    assert len(core.generate([req], 4)[0]) == 4


def test_a_newer_core_fences_the_older(loaded, server):
    stream = loaded.stream()
    core_on(stream)
    newer = Client(server.address, core="core-2")
    assert newer.handshake().epoch == 1
    with fails(grpc.StatusCode.FAILED_PRECONDITION, "newer handshake"):
        stream.message()
    for call in (
        lambda: loaded.load("x"),
        lambda: loaded.initialize_cache(9),
        lambda: loaded.utility(sleep={"level": 1}),
    ):
        with fails(grpc.StatusCode.FAILED_PRECONDITION, "newer handshake"):
            call()
    with fails(grpc.StatusCode.FAILED_PRECONDITION, "newer handshake"):
        loaded.stream().opened()
    newer.initialize_cache(epoch=2)
    core = core_on(newer.stream(epoch=2), epoch=2)
    assert len(core.generate([request(PROMPT)], 3)[0]) == 3
    newer.close()


def test_a_newer_stream_of_the_same_core_takes_over(loaded):
    old = loaded.stream()
    core = core_on(old)
    new = loaded.stream()
    core.execute = new.execute
    new.opened()
    with fails(grpc.StatusCode.ABORTED, "newer Execute stream"):
        old.message()
    assert len(core.generate([request(PROMPT)], 2)[0]) == 2


def test_a_new_epoch_ends_the_old_stream(loaded):
    stream = loaded.stream()
    core_on(stream)
    loaded.initialize_cache(epoch=2)
    with fails(grpc.StatusCode.FAILED_PRECONDITION, "epoch"):
        stream.message()


def test_half_closing_gets_the_pending_results(loaded):
    stream = loaded.stream()
    core = core_on(stream)
    req = request(PROMPT)
    stream.submit(core.plan([(req, len(PROMPT))]))
    stream.half_close()
    assert stream.result().step == 1
    with pytest.raises(StopIteration):
        next(stream.call)


class Gate:
    """Holds the forward pass of a worker: `hang` stops it, `crawl` makes it read its KV layer by layer, slowly."""

    def __init__(self, worker):
        self.runner = worker._runner
        self.real = self.runner.model.forward
        self.entered, self.open = threading.Event(), threading.Event()
        self.is_crawling = False
        self.runner.model.forward = self.forward

    def forward(self, batch, caches):
        self.entered.set()
        while not self.open.wait(0.05):
            if self.is_crawling:
                caches[0]
        return self.real(batch, caches)


def test_heartbeats_tell_a_long_step_from_a_hung_one(loaded, server):
    """Case: vllm#17972"""
    stream = loaded.stream()
    core = core_on(stream)
    req = request(PROMPT)
    gate = Gate(server.worker)
    gate.is_crawling = True
    stream.submit(core.plan([(req, len(PROMPT))]))
    threading.Timer(2.4, lambda: setattr(gate, "is_crawling", False)).start()
    threading.Timer(4.7, gate.open.set).start()
    assert stream.result().step == 1
    ages = [beat.step_age_ms for beat in stream.heartbeats]
    assert len(ages) == 4 and ages == sorted(ages) and 500 <= ages[0] <= 1900 and ages[-1] >= 3000
    progress = [beat.worker_progress for beat in stream.heartbeats]
    assert progress[0] < progress[1] and progress[2] == progress[3]
    time.sleep(1.2)
    assert core.step == 1 and len(stream.heartbeats) == 4  # none between steps


def test_stats_answer_while_a_step_runs(loaded, server):
    """Case: vllm#24910"""
    stream = loaded.stream()
    core = core_on(stream)
    gate = Gate(server.worker)
    stream.submit(core.plan([(request(PROMPT), len(PROMPT))]))
    assert gate.entered.wait(10)
    stats = loaded.utility(stats={}).stats
    assert stats.num_slots_used == 1 and stats.resident_bytes > 1 << 20 and stats.num_steps == 0
    gate.open.set()
    stream.result()
    assert loaded.utility(stats={}).stats.num_steps == 1


def test_who_only_looks_needs_no_handshake_and_fences_nobody(server, client, tiny):
    looker = Client(server.address, core="")
    before = looker.utility(stats={}).stats
    assert (before.core_incarnation, before.model, before.epoch) == ("", "", 0)
    assert before.process.incarnation == "worker-incarnation" and before.process.resident_bytes > 1 << 20
    client.handshake()
    client.load(tiny, load_format="dummy")
    client.initialize_cache()
    stream = client.stream()
    core = core_on(stream)
    stats = looker.utility(stats={}).stats
    assert (stats.core_incarnation, stats.is_stream_open) == (client.core, True)
    assert stats.epoch == 1 and stats.device == "cpu" and stats.model
    with fails(grpc.StatusCode.INVALID_ARGUMENT, "core_incarnation"):
        looker.utility(sleep={"level": 1})
    stream.submit(core.plan([(request(PROMPT), len(PROMPT))]))
    assert len(stream.result().slots) == 1


def test_grammar_mask_comes_while_the_forward_pass_runs(loaded, server):
    stream = loaded.stream()
    core = core_on(stream)
    req = request(PROMPT)
    gate = Gate(server.worker)
    rows = [(req, len(PROMPT))]
    plan = core.plan(rows, awaits_grammar_mask=True)
    stream.submit(plan)
    assert gate.entered.wait(10)
    words = np.zeros(5, np.int32)
    words[3] = 1 << 7
    stream.send_mask(GrammarMask(1, 1, int32([req.slot]), int32([1]), words))
    gate.open.set()
    core.take(rows, stream.result())
    assert req.output == [3 * 32 + 7]


def test_a_stream_that_ends_before_its_mask_frees_the_worker(loaded, server):
    stream = loaded.stream()
    core = core_on(stream)
    plan = core.plan([(request(PROMPT), len(PROMPT))], awaits_grammar_mask=True)
    stream.submit(plan)
    deadline = time.monotonic() + 10
    while server.worker.step_started_ns == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    stream.close()
    again = loaded.stream()
    assert again.opened().next_step == 1  # the step has not happened
    assert loaded.utility(stats={}).stats.num_slots_used == 0
