"""The rest of EngineCoreService over real gRPC: utilities, tokenizer, cache events, health, reflection."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pagewire.types_wire import TokenizerAssembler
from pagewire.v1 import core_pb2
from tests.core_edge.harness import (
    TIMEOUT_S,
    Core,
    Frontend,
    engine_request,
    eventually,
    refused,
    with_core,
)
from tests.core_edge.worker_server import TOKENIZER_FILES, expected_tokens

SERVICE = "pagewire.v1.EngineCoreService"


def utility(**command: Any) -> core_pb2.UtilityRequest:
    return core_pb2.UtilityRequest(**command)


async def read_events(core: Core, start_sequence: int, until: int) -> list[core_pb2.StreamKvEventsResponse]:
    call = core.stub.StreamKvEvents(core_pb2.StreamKvEventsRequest(start_sequence=start_sequence))
    batches: list[core_pb2.StreamKvEventsResponse] = []
    while not batches or batches[-1].sequence < until:
        batches.append(await asyncio.wait_for(call.read(), TIMEOUT_S))
    call.cancel()
    return batches


def test_utilities() -> None:
    async def body(core: Core) -> None:
        request = core_pb2.UtilityRequest
        frontend = Frontend(core)
        await frontend.open()
        call = core.stub.Utility
        await call(utility(pause=request.Pause(mode=core_pb2.PAUSE_MODE_KEEP)))
        assert (await core.stats()).is_paused
        await frontend.add(engine_request(1))
        await asyncio.sleep(0.1)
        assert frontend.tokens[1] == []
        await call(utility(resume=request.Resume()))
        await frontend.ended(1)
        await call(utility(reset_prefix_cache=request.ResetPrefixCache()))
        assert (await call(utility(profile=request.Profile(start=True)))).profile.path == "profile.json"
        assert (await call(utility(sleep=request.Sleep(level=2)))).sleep.freed_bytes == 123
        await frontend.add(engine_request(2))
        await asyncio.sleep(0.1)
        assert frontend.tokens[2] == [] and (await core.stats()).sleep_level == 2
        assert (await call(utility(wake_up=request.WakeUp()))).wake_up.epoch == 2
        await frontend.ended(2)
        assert frontend.tokens[2] == expected_tokens(
            engine_request(
                2,
            )
        )
        await refused(call(utility()), grpc.StatusCode.INVALID_ARGUMENT)
        await refused(call(utility(list_adapters=request.ListAdapters())), grpc.StatusCode.UNIMPLEMENTED)
        # A caller that gives up must not harm the engine, which answers into nothing.
        await frontend.add(engine_request(3, max_tokens=60_000))
        await eventually(lambda: len(frontend.tokens[3]) > 0)
        waiting = call(utility(pause=request.Pause(mode=core_pb2.PAUSE_MODE_WAIT)), timeout=0.2)
        await refused(waiting, grpc.StatusCode.DEADLINE_EXCEEDED)
        await frontend.abort(3)
        await call(utility(resume=request.Resume()))
        await frontend.add(engine_request(4))
        await frontend.ended(4)

    with_core(body)


def test_tokenizer_comes_whole() -> None:
    async def body(core: Core) -> None:
        assembler = TokenizerAssembler()
        async for message in core.stub.GetTokenizer(core_pb2.GetTokenizerRequest()):
            assembler.add(message.chunk)
        assert assembler.files() == TOKENIZER_FILES

    with_core(body)


def test_kv_events_resume_and_gap() -> None:
    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        for i in range(4):
            await frontend.add(engine_request(i, range(100 * i + 1, 100 * i + 50), 1))
            await frontend.ended(i)
        await eventually(lambda: core.process._kv_log.last_sequence >= 4)
        last = core.process._kv_log.last_sequence
        batches = await read_events(core, 1, last)
        assert [batch.sequence for batch in batches] == list(range(1, last + 1))
        assert {batch.core_incarnation for batch in batches} == {core.process.incarnation}
        stored = [event.block_stored for batch in batches for event in batch.events]
        assert sum(len(event.block_hashes) for event in stored) == 4 * 3
        assert all(event.block_size == 16 for event in stored)
        assert [batch.sequence for batch in await read_events(core, last, last)] == [last]
        # A place that the log no longer has: everything anew.
        core.process._kv_log._batches.popleft()
        (snapshot,) = await read_events(core, 1, last)
        assert snapshot.events[0].WhichOneof("event") == "all_blocks_cleared"
        assert len(snapshot.events) == 1 + 12
        # A waiting reader is woken.
        call = core.stub.StreamKvEvents(core_pb2.StreamKvEventsRequest(start_sequence=last + 1))
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0.1)
        assert not reading.done()
        await core.stub.Utility(utility(reset_prefix_cache=core_pb2.UtilityRequest.ResetPrefixCache()))
        batch = await asyncio.wait_for(reading, TIMEOUT_S)
        assert batch.events[0].WhichOneof("event") == "all_blocks_cleared"
        call.cancel()

    with_core(body)


def test_health_and_reflection() -> None:
    """Case: smg#866"""

    async def body(core: Core) -> None:
        health = health_pb2_grpc.HealthStub(core.channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        for name in ("", "liveness", "readiness", SERVICE):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == serving
        listed = await health.List(health_pb2.HealthListRequest())
        assert {"", "liveness", "readiness", SERVICE} <= set(listed.statuses)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="readiness"))
        assert (await watch.read()).status == serving
        core.process._servicer.unavailable = "a test"
        core.process._update_readiness()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        core.process._become_available()
        assert (await watch.read()).status == serving
        watch.cancel()
        stub = reflection_pb2_grpc.ServerReflectionStub(core.channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        services = {service.name for service in (await call.read()).list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= services
        await call.done_writing()

    with_core(body)
