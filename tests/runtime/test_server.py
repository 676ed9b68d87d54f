"""The server that every service starts: health, reflection, limits, ports, draining."""

from __future__ import annotations

import asyncio
import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pagewire.errors import ResourceExhaustedError
from pagewire.runtime.server import GrpcServer
from pagewire.runtime.status import from_rpc_error
from pagewire.runtime.transport import secure_or_insecure_channel
from pagewire.v1 import frontend_pb2, frontend_pb2_grpc

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
SERVICE = "pagewire.v1.FrontendService"


def test_health_check_and_list(with_server):
    """Liveness from the start; readiness, the service and the empty name once ready.

    Case: smg#866
    """

    async def body(harness):
        health = health_pb2_grpc.HealthStub(harness.channel)

        async def states():
            listed = await health.List(health_pb2.HealthListRequest())
            by_list = {name: response.status for name, response in listed.statuses.items()}
            for name, status in by_list.items():
                checked = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert checked.status == status
            return by_list

        assert await states() == {
            "liveness": SERVING,
            "readiness": NOT_SERVING,
            "": NOT_SERVING,
            SERVICE: NOT_SERVING,
        }
        await harness.server.set_ready(True)
        assert set((await states()).values()) == {SERVING}
        await harness.server.set_alive(False)
        assert (await states())["liveness"] == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="nonsense"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert "readiness" in caught.value.details()

    with_server(body)


def test_health_watch_follows_changes_and_ends_at_drain(with_server):
    """A Watch answers at once, again at every change, and does not hold a drain up.

    Case: smg#866
    """

    async def body(harness):
        health = health_pb2_grpc.HealthStub(harness.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="readiness"))
        unknown = health.Watch(health_pb2.HealthCheckRequest(service="nonsense"))
        assert (await watch.read()).status == NOT_SERVING
        assert (await unknown.read()).status == UNKNOWN
        await harness.server.set_ready(True)
        assert (await watch.read()).status == SERVING
        started = asyncio.get_running_loop().time()
        await harness.server.drain(20)
        assert asyncio.get_running_loop().time() - started < 2
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
        assert await unknown.read() is grpc.aio.EOF

    with_server(body)


def test_reflection_lists_and_describes(with_server):
    """Reflection names every service and hands out the file of a symbol."""

    async def body(harness):
        stub = reflection_pb2_grpc.ServerReflectionStub(harness.channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        listed, described = [response async for response in stub.ServerReflectionInfo(iter(requests))]
        names = {service.name for service in listed.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names
        assert any(b"Generate" in file for file in described.file_descriptor_response.file_descriptor_proto)

    with_server(body)


@pytest.mark.parametrize("num_bytes", [5 * 2**20, 60 * 2**20])
def test_messages_above_four_mib_pass(with_server, num_bytes):
    """grpc's own limit of 4 MiB is not ours.

    Case: triton#1776
    """

    async def body(harness):
        response = await harness.stub.Tokenize(frontend_pb2.TokenizeRequest(text="x" * num_bytes))
        assert list(response.token_ids) == [num_bytes]

    with_server(body)


def test_too_large_message_names_the_setting(with_server):
    """What the receiver refuses is RESOURCE_EXHAUSTED, and the error says which setting limits it.

    Case: triton#1776
    """

    async def body(harness):
        request = frontend_pb2.TokenizeRequest(text="x" * 100_000)
        roomy = secure_or_insecure_channel(f"127.0.0.1:{harness.port}", max_message_bytes=2**20)
        async with roomy as channel:
            for stub in (harness.stub, frontend_pb2_grpc.FrontendServiceStub(channel)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Tokenize(request)
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                error = from_rpc_error(caught.value)
                assert isinstance(error, ResourceExhaustedError)
                assert "--max-message-bytes" in error.message
                assert "PAGEWIRE_MAX_MESSAGE_BYTES" in error.message
                assert "65536" in error.message
        # The server lives on.
        assert (await harness.stub.Tokenize(frontend_pb2.TokenizeRequest(text="abc"))).token_ids == [3]

    with_server(body, max_message_bytes=65536)


def test_taken_port_is_a_clear_error():
    """Two servers on one port: the second says so, instead of sharing it in silence."""

    async def main():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            server = GrpcServer([SERVICE], port=port)
            with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port}.*--port"):
                await server.start()

    asyncio.run(main())


def test_drain_lets_running_calls_end_and_refuses_new_ones(with_server):
    """Drain: liveness stays, readiness goes, a running stream ends well, a new call is UNAVAILABLE.

    Case: llm-d-router#1885
    """

    async def body(harness):
        await harness.server.set_ready(True)
        stream = harness.stub.Generate(frontend_pb2.GenerateRequest())
        assert (await stream.read()).request_id == "first"
        drain = asyncio.create_task(harness.server.drain(20))
        await asyncio.sleep(0.1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await harness.stub.Tokenize(frontend_pb2.TokenizeRequest(text="late"), timeout=2)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not drain.done()
        harness.servicer.gate.set()
        assert (await stream.read()).is_finished
        assert await stream.code() is grpc.StatusCode.OK
        await asyncio.wait_for(drain, 2)

    with_server(body)


def test_drain_is_bounded(with_server):
    """A stream that does not end is cut when the grace is over, and its handler is cancelled."""

    async def body(harness):
        stream = harness.stub.Generate(frontend_pb2.GenerateRequest())
        await stream.read()
        started = asyncio.get_running_loop().time()
        await harness.server.drain(0.3)
        assert asyncio.get_running_loop().time() - started < 3
        assert await stream.code() is not grpc.StatusCode.OK
        await asyncio.sleep(0.1)
        assert harness.servicer.was_cancelled

    with_server(body)


def test_client_cancellation_reaches_the_handler(with_server):
    """The error interceptor does not stand between a cancelled call and its handler.

    Case: vllm#54947
    """

    async def body(harness):
        stream = harness.stub.Generate(frontend_pb2.GenerateRequest())
        await stream.read()
        stream.cancel()
        for _ in range(100):
            if harness.servicer.was_cancelled:
                return
            await asyncio.sleep(0.02)
        pytest.fail("the handler was not cancelled within 2 s")

    with_server(body)
