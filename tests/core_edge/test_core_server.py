"""EngineCoreService over real gRPC: requests, aborts, streams, leases, resends, utilities, health, limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pagewire.columns import pack_int32, pack_uint64
from pagewire.runtime.status import from_rpc_error
from pagewire.types_wire import TokenizerAssembler
from pagewire.v1 import core_pb2, core_pb2_grpc, types_pb2
from tests.core_edge.harness import TIMEOUT_S, Core, Frontend, engine_request, eventually, running_core
from tests.core_edge.worker_server import TOKENIZER_FILES, Script, ScriptedWorker, expected_tokens

SERVICE = "pagewire.v1.EngineCoreService"


def with_core(body: Callable[[Core], Awaitable[None]], script: Script | None = None, **settings: Any) -> None:
    """Runs the body against a core; the core must end cleanly too."""

    async def run() -> None:
        async with running_core(ScriptedWorker(script), **settings) as core:
            await body(core)

    asyncio.run(run())


async def refused(call: Awaitable[Any], code: grpc.StatusCode) -> str:
    """The message of a call that must fail with `code`."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is code, caught.value
    return str(caught.value.details())


def narrow_channel(core: Core) -> grpc.aio.Channel:
    """A channel whose receive window is small, so that an unread stream blocks its writer soon."""
    options = [("grpc.http2.lookahead_bytes", 65536), ("grpc.http2.bdp_probe", 0)]
    return grpc.aio.insecure_channel(core.address, options=options)


def handshake(incarnation: str = "f", low: int = 1, high: int = 1) -> core_pb2.HandshakeRequest:
    return core_pb2.HandshakeRequest(
        frontend_incarnation=incarnation, protocol_versions=types_pb2.ProtocolVersions(min=low, max=high)
    )


def test_handshake_tells_what_the_core_serves() -> None:
    async def body(core: Core) -> None:
        response = await core.stub.Handshake(handshake())
        assert response.core_incarnation == core.process.incarnation
        assert response.model.fingerprint.model == "scripted"
        assert (response.block_size, response.num_kv_blocks, response.max_num_seqs) == (16, 4095, 7)
        assert (response.lease_ms, response.heartbeat_interval_ms) == (2000, 50)
        assert list(response.features) == ["prefix_caching"]
        assert response.protocol_versions.min <= 1 <= response.protocol_versions.max
        message = await refused(core.stub.Handshake(handshake(low=2, high=9)), grpc.StatusCode.FAILED_PRECONDITION)
        assert "[2, 9]" in message
        await refused(core.stub.Handshake(handshake("")), grpc.StatusCode.INVALID_ARGUMENT)

    with_core(body, max_num_seqs=7)


def test_add_stream_finish() -> None:
    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        requests = [engine_request(1, range(1, 40), 9), engine_request(2, [5], 3)]
        response = await frontend.add(*requests)
        assert response.core_incarnation == core.process.incarnation
        await frontend.ended(1, 2)
        assert frontend.tokens == {r.request_id: expected_tokens(r) for r in requests}
        assert frontend.finished[1].reason == types_pb2.FINISH_REASON_LENGTH
        await core.assert_empty()

    with_core(body)


def test_add_needs_an_open_stream() -> None:
    async def body(core: Core) -> None:
        frontend = Frontend(core)
        message = await refused(frontend.add(engine_request(1)), grpc.StatusCode.FAILED_PRECONDITION)
        assert "StreamOutputs" in message
        await frontend.open()
        await frontend.add(engine_request(1))
        await frontend.ended(1)
        await frontend.break_stream()
        await eventually(lambda: core.process._hub.num_open == 0)
        await refused(frontend.add(engine_request(2)), grpc.StatusCode.FAILED_PRECONDITION)

    with_core(body)


def test_a_repeated_add_changes_nothing() -> None:
    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        for _ in range(3):
            await frontend.add(engine_request(1, max_tokens=20))
        await frontend.ended(1)
        await frontend.add(engine_request(1, max_tokens=20))
        await frontend.add(engine_request(2))
        await frontend.ended(2)
        assert frontend.tokens[1] == expected_tokens(engine_request(1, max_tokens=20))
        assert (await core.stats()).num_finished == 2
        await core.assert_empty()

    with_core(body)


def test_children_are_added_all_or_none() -> None:
    """Case: vllm#51629"""

    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        bad = engine_request(12, [49_999, 50_000])
        message = await refused(
            frontend.add(engine_request(10), engine_request(11), bad), grpc.StatusCode.INVALID_ARGUMENT
        )
        assert "requests[2].prompt_token_ids[1]" in message and "50000" in message
        assert (await core.stats()).num_running == 0
        await frontend.add(*(engine_request(i, max_tokens=60_000) for i in (20, 21, 22)))
        await eventually(lambda: all(len(frontend.tokens[i]) > 2 for i in (20, 21, 22)))
        assert await frontend.abort(20, 21, 22) == [types_pb2.ABORT_OUTCOME_ABORTED] * 3
        await frontend.ended(20, 21, 22)
        await core.assert_empty()
        assert not {10, 11, 12} & frontend.finished.keys()

    with_core(body)


def test_abort_outcomes_and_tombstone() -> None:
    """An abort that overtakes its Add, an unknown id, a second abort.

    Case: smg#1351
    Case: vllm#43226
    """

    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        await frontend.add(engine_request(1), engine_request(2, max_tokens=60_000))
        await frontend.ended(1)
        outcomes = await frontend.abort(1, 2, 3, reason=types_pb2.ABORT_REASON_STOP_STRING)
        assert outcomes == [
            types_pb2.ABORT_OUTCOME_ALREADY_FINISHED,
            types_pb2.ABORT_OUTCOME_ABORTED,
            types_pb2.ABORT_OUTCOME_NOT_FOUND,
        ]
        await frontend.ended(2)
        assert frontend.finished[2].reason == types_pb2.FINISH_REASON_ABORT
        assert frontend.finished[2].abort_reason == types_pb2.ABORT_REASON_STOP_STRING
        # The abort of 3 overtook its Add, which must not run.
        await frontend.add(engine_request(3, max_tokens=60_000), engine_request(4))
        await frontend.ended(3, 4)
        assert frontend.tokens[3] == []
        assert frontend.finished[3].reason == types_pb2.FINISH_REASON_ABORT
        assert await frontend.abort(2) == [types_pb2.ABORT_OUTCOME_ALREADY_FINISHED]
        await core.assert_empty()

    with_core(body)


def test_a_broken_lease_frees_everything() -> None:
    """Case: vllm#54947"""

    async def body(core: Core) -> None:
        frontend, other = Frontend(core), Frontend(core)
        await frontend.open()
        await other.open()
        await frontend.add(*(engine_request(i, max_tokens=60_000) for i in range(3)))
        await other.add(engine_request(1, max_tokens=60_000))
        await eventually(lambda: len(frontend.tokens[2]) > 0)
        assert (await core.stats()).num_running == 4
        await frontend.break_stream()
        async with asyncio.timeout(5):
            while (await core.stats()).num_running != 1:
                await asyncio.sleep(0.02)
        assert (await core.stats()).num_aborted == 3
        await other.abort(1)
        await core.assert_empty()
        # The same incarnation may come back, but finds nothing.
        await frontend.open()
        assert frontend.unknown == [0, 1, 2]

    with_core(body, lease_ms=300)


def test_reconnect_gives_every_token_exactly_once() -> None:
    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        await frontend.add(engine_request(1, max_tokens=400), engine_request(2, max_tokens=300))
        for _ in range(4):
            before = len(frontend.tokens[1])
            await frontend.reads(lambda before=before: len(frontend.tokens[1]) > before + 5)
            await frontend.break_stream()
            await asyncio.sleep(0.05)
            await frontend.open()
            assert frontend.unknown == []
            await frontend.acknowledge()
        await frontend.ended(1, 2)
        assert frontend.tokens == {
            1: expected_tokens(engine_request(1, max_tokens=400)),
            2: expected_tokens(engine_request(2, max_tokens=300)),
        }
        await core.assert_empty()

    with_core(body, Script(step_s=0.001))


def test_what_ended_during_a_break_is_delivered_after_it() -> None:
    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        core.script.hold.clear()
        await frontend.add(
            engine_request(
                1,
            )
        )
        await frontend.break_stream()
        core.script.hold.set()
        await asyncio.sleep(0.1)
        await frontend.open()
        await frontend.ended(1)
        assert frontend.tokens[1] == expected_tokens(
            engine_request(
                1,
            )
        )
        await frontend.acknowledge()
        await eventually(lambda: core.process._hub.require_open(frontend.incarnation).num_bytes == 0)

    with_core(body)


def test_a_second_stream_replaces_the_first() -> None:
    async def body(core: Core) -> None:
        first = Frontend(core)
        await first.open(is_reading=False)
        await first.add(engine_request(1, max_tokens=300))
        while len(first.tokens[1]) < 3:
            await first.read_one()
        second = Frontend(core, first.incarnation)
        second.tokens, second.finished = first.tokens, first.finished
        await second.open()
        # What is in flight on the first stream is not for the second one's books.
        first.tokens, first.finished, first.take = {}, {}, lambda message: None  # type: ignore[method-assign]
        first.start_reading()
        assert (await first.stream_error()).code() is grpc.StatusCode.ABORTED
        await second.ended(1)
        assert second.tokens[1] == expected_tokens(engine_request(1, max_tokens=300))
        await asyncio.sleep(0.5)
        assert core.process._hub.num_open == 1, "the end of the first must not start a lease"

    with_core(body, Script(step_s=0.001), lease_ms=300)


def test_requests_that_the_frontend_no_longer_wants_are_aborted() -> None:
    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        await frontend.add(engine_request(1, max_tokens=60_000), engine_request(2, max_tokens=60_000))
        await eventually(lambda: len(frontend.tokens[2]) > 0)
        await frontend.break_stream()
        del frontend.tokens[1]
        frontend.tokens[77] = [5]
        await frontend.open(is_reading=False)
        assert frontend.unknown == [77]
        async with asyncio.timeout(5):
            while (await core.stats()).num_running != 1:
                await asyncio.sleep(0.02)

    with_core(body)


def test_frontends_do_not_see_each_other() -> None:
    """Case: vllm#10583"""

    async def body(core: Core) -> None:
        # The same ids on purpose.
        def requests_of(i: int) -> list[core_pb2.EngineRequest]:
            return [engine_request(1, range(1, 5 + i), 30), engine_request(2, [9 + i], 10 + i)]

        frontends = [Frontend(core) for _ in range(3)]
        for frontend in frontends:
            await frontend.open()
        for i, frontend in enumerate(frontends):
            await frontend.add(*requests_of(i))
        assert await frontends[0].abort(3) == [types_pb2.ABORT_OUTCOME_NOT_FOUND]
        for i, frontend in enumerate(frontends):
            await frontend.ended(1, 2)
            assert frontend.tokens == {r.request_id: expected_tokens(r) for r in requests_of(i)}
        await core.assert_empty()

    with_core(body)


def test_a_slow_reader_gets_merged_outputs() -> None:
    async def body(core: Core) -> None:
        async with narrow_channel(core) as channel:
            slow, fast = Frontend(core, channel=channel), Frontend(core)
            await slow.open(is_reading=False)
            await fast.open()
            count, length = 64, 300
            await slow.add(*(engine_request(i, max_tokens=length) for i in range(count)))
            buffer = core.process._hub.require_open(slow.incarnation)
            await eventually(lambda: buffer.num_live == 0, 60)
            await fast.add(engine_request(1))
            await fast.ended(1)
            assert buffer.num_bytes < 4 * 2**20
            slow.start_reading()
            await slow.ended(*range(count))
            assert slow.num_messages < length / 2, "several steps came in one message"
            for i in range(count):
                assert slow.tokens[i] == expected_tokens(engine_request(i, max_tokens=length))
            await core.assert_empty()

    with_core(body, heartbeat_interval_ms=1000)


def test_a_reader_that_never_reads_is_dropped() -> None:
    async def body(core: Core) -> None:
        async with narrow_channel(core) as channel:
            slow, fast = Frontend(core, channel=channel), Frontend(core)
            await slow.open(is_reading=False)
            await fast.open()
            await slow.add(*(engine_request(i, max_tokens=900) for i in range(64)))
            await fast.add(engine_request(1, max_tokens=100))
            async with asyncio.timeout(60):
                while (await core.stats()).num_aborted < 64:
                    await asyncio.sleep(0.05)
            slow.start_reading()
            assert (await slow.stream_error()).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await fast.ended(1)
            await core.assert_empty()

    with_core(body, output_buffer_bytes=100_000, heartbeat_interval_ms=1000)


def test_heartbeats_tell_the_age_of_a_long_step() -> None:
    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        await eventually(lambda: len(frontend.heartbeats) > 2)
        assert frontend.heartbeats[-1].step_age_ms == 0
        core.script.hold.clear()
        await frontend.add(engine_request(1))
        await eventually(lambda: frontend.heartbeats[-1].step_age_ms > 300)
        progress = frontend.heartbeats[-1].worker_progress
        await eventually(lambda: frontend.heartbeats[-1].worker_progress > progress)
        core.script.hold.set()
        await frontend.ended(1)
        await eventually(lambda: frontend.heartbeats[-1].step_age_ms == 0 and frontend.heartbeats[-1].step >= 5)

    with_core(body, Script(heartbeat_s=0.02))


def test_stats_go_to_one_frontend_and_only_when_they_change() -> None:
    async def body(core: Core) -> None:
        frontends = [Frontend(core), Frontend(core)]
        for frontend in frontends:
            await frontend.open()
        await frontends[1].add(engine_request(1))
        await frontends[1].ended(1)
        await eventually(lambda: len(frontends[0].stats) > 0 and frontends[0].stats[-1].num_finished == 1)
        assert frontends[0].stats[-1].num_frontends == 2
        await asyncio.sleep(1.2)
        count = len(frontends[0].stats)
        await asyncio.sleep(2.2)
        assert (len(frontends[0].stats), len(frontends[1].stats)) == (count, 0)

    with_core(body)


def utility(**command: Any) -> core_pb2.UtilityRequest:
    return core_pb2.UtilityRequest(**command)


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


async def read_events(core: Core, start_sequence: int, until: int) -> list[core_pb2.StreamKvEventsResponse]:
    call = core.stub.StreamKvEvents(core_pb2.StreamKvEventsRequest(start_sequence=start_sequence))
    batches: list[core_pb2.StreamKvEventsResponse] = []
    while not batches or batches[-1].sequence < until:
        batches.append(await asyncio.wait_for(call.read(), TIMEOUT_S))
    call.cancel()
    return batches


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


def test_large_messages() -> None:
    """Case: triton#1776"""

    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        prompt = np.ones(5 * 2**20 // 4 + 1, np.int32)
        # The message passes; that the pool is too small for it is another matter, and is said.
        message = await refused(frontend.add(engine_request(1, prompt)), grpc.StatusCode.INVALID_ARGUMENT)
        assert "prompt_token_ids" in message and str(len(prompt)) in message
        huge = np.ones(65 * 2**20 // 4, np.int32)
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(core.address, options=options) as channel:
            stub = core_pb2_grpc.EngineCoreServiceStub(channel)
            request = core_pb2.AddRequest(frontend_incarnation=frontend.incarnation, requests=[engine_request(2, huge)])
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Add(request, timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--max-message-bytes" in from_rpc_error(caught.value).message
        await frontend.add(engine_request(3))
        await frontend.ended(3)

    with_core(body)


def test_a_prompt_message_of_five_mebibytes_runs() -> None:
    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        request = engine_request(1, np.ones(5 * 2**20 // 4 + 1, np.int32), 2)
        await frontend.add(request)
        await eventually(lambda: 1 in frontend.finished, 60)
        assert frontend.tokens[1] == expected_tokens(request)
        await core.assert_empty()

    with_core(body, Script(num_kv_blocks=100_000), max_num_batched_tokens=2**18, enable_prefix_caching=False)


def test_log_probabilities_that_fit_no_message_are_refused() -> None:
    """One request must not break the stream that carries everybody's results."""

    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        request = engine_request(1, range(1, 101))
        request.sampling_params.prompt_logprobs = -1
        message = await refused(frontend.add(engine_request(2), request), grpc.StatusCode.INVALID_ARGUMENT)
        assert "requests[1].sampling_params.prompt_logprobs" in message and "100 tokens" in message
        request.prompt_token_ids = pack_int32(range(1, 4))
        await frontend.add(request)
        await frontend.ended(1)

    with_core(body)


def test_too_many_ids_in_one_message_are_refused() -> None:
    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        message = await refused(frontend.abort(*range(70_000)), grpc.StatusCode.INVALID_ARGUMENT)
        assert "65536" in message
        await frontend.add(engine_request(1))
        await frontend.ended(1)

    with_core(body)


def test_a_full_core_says_when_to_come_back() -> None:
    """Case: TGI#439"""

    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        core.script.hold.clear()
        await frontend.add(*(engine_request(i) for i in range(4)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await frontend.add(engine_request(9))
        error = from_rpc_error(caught.value)
        assert error.code == "RESOURCE_EXHAUSTED" and getattr(error, "retry_after_s", None)
        core.script.hold.set()
        await frontend.ended(0, 1, 2, 3)
        assert core.process._hub.require_open(frontend.incarnation).num_live == 0

    with_core(body, max_num_requests=4, worker_silence_s=30.0)


def test_malformed_stream_messages() -> None:
    async def body(core: Core) -> None:
        async def first(message: core_pb2.StreamOutputsRequest | None) -> str:
            call = core.stub.StreamOutputs(iter([message] if message is not None else []))
            return await refused(anext(aiter(call)), grpc.StatusCode.INVALID_ARGUMENT)

        await first(None)
        await first(core_pb2.StreamOutputsRequest())
        bad = core_pb2.StreamOutputsRequest()
        bad.open.frontend_incarnation = "f"
        bad.open.request_ids = b"123"
        assert "open.request_ids" in await first(bad)
        bad.open.request_ids, bad.open.num_received = pack_uint64([1]), pack_int32([])
        assert "open.num_received" in await first(bad)
        # A bad message later ends the stream with a status too.
        frontend = Frontend(core)
        await frontend.open()
        message = core_pb2.StreamOutputsRequest()
        message.acknowledge.finished_request_ids = b"1"
        await frontend._call.write(message)
        error = await frontend.stream_error()
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "finished_request_ids" in str(error.details())

    with_core(body)
