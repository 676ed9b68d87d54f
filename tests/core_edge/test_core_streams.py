"""StreamOutputs over real gRPC: leases, resends, replacement, slow readers, heartbeats, stats."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import numpy as np

from core_svc.kv_event_log import KvEventLog
from core_svc.output_hub import OutputHub
from core_svc.server import EngineCoreServicer
from pagewire.columns import int32, pack_int32, pack_uint64
from pagewire.engine import StepOutputs
from pagewire.v1 import core_pb2, types_pb2
from tests.core_edge.harness import (
    Core,
    Frontend,
    engine_request,
    eventually,
    refused,
    with_core,
)
from tests.core_edge.worker_server import Script, expected_tokens


def narrow_channel(core: Core) -> grpc.aio.Channel:
    """A channel whose receive window is small, so that an unread stream blocks its writer soon."""
    options = [("grpc.http2.lookahead_bytes", 65536), ("grpc.http2.bdp_probe", 0)]
    return grpc.aio.insecure_channel(core.address, options=options)


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


def test_a_stream_that_comes_back_in_time_ends_its_lease() -> None:
    async def body(core: Core) -> None:
        frontend = Frontend(core)
        await frontend.open()
        await frontend.add(engine_request(1, max_tokens=60_000))
        await frontend.reads(lambda: len(frontend.tokens[1]) > 3)
        await frontend.break_stream()
        await asyncio.sleep(0.1)
        await frontend.open()
        await asyncio.sleep(1.0)
        stats = await core.stats()
        assert (stats.num_running, stats.num_aborted, stats.num_frontends) == (1, 0, 1), "the old lease has run out"
        await frontend.abort(1)
        await frontend.ended(1)

    with_core(body, Script(step_s=0.005), lease_ms=600)


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


def test_a_replaced_stream_takes_nothing_more() -> None:
    """Not even where it was in the middle of a write: what it took would be missing on the new stream."""

    class SlowContext:
        def __init__(self) -> None:
            self.writes: list[core_pb2.StreamOutputsResponse] = []
            self.may_go_on = asyncio.Event()

        async def write(self, message: core_pb2.StreamOutputsResponse) -> None:
            self.writes.append(message)
            await self.may_go_on.wait()

    def token(offset: int) -> StepOutputs:
        return StepOutputs(offset + 1, np.array([1], np.uint64), int32([offset]), int32([1]), int32([7]))

    async def body() -> None:
        hub = OutputHub()
        servicer = EngineCoreServicer("core", hub, KvEventLog(notify=lambda: None))
        first, _, _ = hub.open("frontend", {})
        first.session.buffer.register([1])
        hub.publish("frontend", token(0))
        context = SlowContext()
        sending = asyncio.create_task(servicer._send(first, context))  # type: ignore[arg-type]
        await eventually(lambda: len(context.writes) == 1)
        second, unknown, _ = hub.open("frontend", {1: 1})
        hub.publish("frontend", token(1))
        context.may_go_on.set()
        await asyncio.sleep(0.05)
        assert not unknown and len(context.writes) == 1
        taken = second.session.buffer.take()
        assert taken is not None and taken.offsets.tolist() == [1]
        sending.cancel()
        assert first.ended.exception() is not None

    asyncio.run(asyncio.wait_for(body(), 20))


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


def test_a_blocked_stream_can_be_replaced() -> None:
    """A half-dead connection whose writer waits for room: the frontend comes back on another one and lacks nothing."""

    async def body(core: Core) -> None:
        async with narrow_channel(core) as channel:
            stuck = Frontend(core, channel=channel)
            await stuck.open(is_reading=False)
            await stuck.add(*(engine_request(i, max_tokens=300) for i in range(64)))
            buffer = core.process._hub.require_open(stuck.incarnation)
            await eventually(lambda: buffer.num_live == 0, 60)
            assert buffer.has_pending, "the writer must be blocked"
            again = Frontend(core, stuck.incarnation)
            again.tokens = {i: [] for i in range(64)}
            await again.open()
            await again.ended(*range(64))
            for i in range(64):
                assert again.tokens[i] == expected_tokens(engine_request(i, max_tokens=300))
            await eventually(lambda: core.process._hub.num_open == 1)
            stuck.take = lambda message: None  # type: ignore[method-assign]
            stuck.start_reading()
            assert (await stuck.stream_error()).code() is grpc.StatusCode.ABORTED

    with_core(body)


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


def test_stats_go_to_every_frontend_and_only_when_they_change() -> None:
    """Frontends balance by them."""

    async def body(core: Core) -> None:
        frontends = [Frontend(core), Frontend(core)]
        for frontend in frontends:
            await frontend.open()
        await frontends[1].add(engine_request(1))
        await frontends[1].ended(1)
        await eventually(lambda: all(f.stats and f.stats[-1].num_finished == 1 for f in frontends))
        assert [f.stats[-1].num_frontends for f in frontends] == [2, 2]
        await asyncio.sleep(1.2)
        counts = [len(f.stats) for f in frontends]
        await asyncio.sleep(2.2)
        assert [len(f.stats) for f in frontends] == counts

    with_core(body)


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
