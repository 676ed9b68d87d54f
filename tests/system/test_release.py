"""What is given back: KV after a cancelled call, the processor when idle."""

from __future__ import annotations

import time

import psutil
import pytest

from pagewire.runtime.transport import sync_channel
from pagewire.types_wire import core_stats_from_proto
from pagewire.v1 import core_pb2, core_pb2_grpc
from tests.system.deployment import wait_until

IDLE_S = 5.0
MAX_IDLE_SHARE = 0.02


@pytest.fixture
def stats(deployment):
    with sync_channel(deployment.address("core")) as channel:
        stub = core_pb2_grpc.EngineCoreServiceStub(channel)
        request = core_pb2.UtilityRequest(stats=core_pb2.UtilityRequest.Stats())
        yield lambda: core_stats_from_proto(stub.Utility(request, timeout=10).stats)


@pytest.mark.parametrize("num_completions", [1, 4])
def test_cancelling_frees_everything(client, stats, num_completions):
    """A client that goes away leaves no running request and no block in use, within a second.

    Case: vllm#54947
    Case: vllm#51629
    """
    before = stats()
    stream = client.generate(
        "Once upon a time", n=num_completions, max_tokens=2000, ignore_eos=True, temperature=1.0, seed=1
    )
    for _ in range(3):
        next(stream)
    during = stats()
    assert during.num_running == num_completions
    assert during.num_used_blocks > 0
    stream.close()
    assert wait_until(lambda: (s := stats()).num_running == s.num_waiting == s.num_used_blocks == 0, 1.0)
    after = stats()
    assert after.num_aborted - before.num_aborted == num_completions
    assert after.num_finished - before.num_finished == num_completions
    time.sleep(0.2)
    assert stats().num_steps - after.num_steps <= 1


def test_idle_processes_use_no_processor(client, deployment):
    """After work, each process stays under 2 % of a core.

    Case: vllm#16968
    """
    client.complete("Hi", max_tokens=2)
    time.sleep(1)
    processes = {service: psutil.Process(p.pid) for service, p in deployment.processes.items()}

    def used_s():
        return {service: sum(process.cpu_times()[:2]) for service, process in processes.items()}

    before = used_s()
    time.sleep(IDLE_S)
    shares = {service: (now - before[service]) / IDLE_S for service, now in used_s().items()}
    assert all(share < MAX_IDLE_SHARE for share in shares.values()), shares


def test_first_token_after_idle_is_not_delayed(client):
    """The loop blocks when idle and wakes at once: a call after a pause takes no longer than one without.

    Case: vllm#16968
    """

    def first_token_s():
        started = time.perf_counter()
        client.complete("Hi", max_tokens=1, temperature=0)
        return time.perf_counter() - started

    first_token_s()
    warm = sorted(first_token_s() for _ in range(5))[2]
    idle = []
    for _ in range(3):
        time.sleep(1)
        idle.append(first_token_s())
    assert min(idle) < warm + 0.25
