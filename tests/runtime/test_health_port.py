"""Plaintext health on a port of its own, and the lame duck: what probes and callers see until a process has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.runtime.health_port import MAX_CONNECTIONS
from pagewire.runtime.server import GrpcServer
from pagewire.runtime.settings import CommonSettings, parse_settings
from pagewire.v1 import frontend_pb2

SERVICE = "pagewire.v1.FrontendService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
WithServer = Callable[..., None]


def channel_to(port: int | None) -> grpc.aio.Channel:
    """A connection of its own, as every probe makes one."""
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])


async def states(channel: grpc.aio.Channel) -> dict[str, int]:
    listed = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest(), timeout=5)
    return {name: response.status for name, response in listed.statuses.items()}


def test_the_same_states_on_both_ports(with_server: WithServer) -> None:
    async def body(harness: Any) -> None:
        async with channel_to(harness.server.health_port) as channel:
            assert (
                await states(channel)
                == await states(harness.channel)
                == {"liveness": SERVING, "readiness": NOT_SERVING, "": NOT_SERVING, SERVICE: NOT_SERVING}
            )
            await harness.server.set_ready(True)
            assert set((await states(channel)).values()) == {SERVING}

    with_server(body, health_port=0, health_host="127.0.0.1")


def test_nothing_but_health_is_served_there(with_server: WithServer) -> None:
    async def body(harness: Any) -> None:
        async with channel_to(harness.server.health_port) as channel:
            for method in (f"/{SERVICE}/Tokenize", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(method)(b"", timeout=5)
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                request = health_pb2.HealthCheckRequest(service="x" * 10_000)
                await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    with_server(body, health_port=0, health_host="127.0.0.1")


def test_connections_are_bounded(with_server: WithServer) -> None:
    """Who opens too many gets no further one, and those that are there go on."""

    async def body(harness: Any) -> None:
        channels = [channel_to(harness.server.health_port) for _ in range(MAX_CONNECTIONS + 1)]
        try:
            for channel in channels[:-1]:
                await states(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await states(channels[-1])
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await states(channels[0])
            await channels[0].close()
            async with asyncio.timeout(5):
                while True:
                    try:
                        async with channel_to(harness.server.health_port) as channel:
                            await states(channel)
                        break
                    except grpc.aio.AioRpcError:
                        await asyncio.sleep(0.05)
        finally:
            for channel in channels:
                await channel.close()

    with_server(body, health_port=0, health_host="127.0.0.1")


def test_alive_until_the_drain_has_ended(with_server: WithServer) -> None:
    """A probe that failed while streams end would have the process killed under them.

    Case: llm-d-router#1885
    """

    async def body(harness: Any) -> None:
        await harness.server.set_ready(True)
        stream = harness.stub.Generate(frontend_pb2.GenerateRequest())
        await stream.read()
        drain = asyncio.create_task(harness.server.drain(20))
        await asyncio.sleep(0.1)
        async with channel_to(harness.server.health_port) as channel:
            found = await states(channel)
        assert found == {"liveness": SERVING, "readiness": NOT_SERVING, "": NOT_SERVING, SERVICE: NOT_SERVING}
        harness.servicer.gate.set()
        await asyncio.wait_for(drain, 5)
        async with channel_to(harness.server.health_port) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await states(channel)

    with_server(body, health_port=0, health_host="127.0.0.1")


def test_a_lame_duck_takes_new_calls_and_is_not_ready(with_server: WithServer) -> None:
    """NOT_SERVING at once, whatever anybody sets; new calls are served until the time is over.

    Case: llm-d-router#1885
    """

    async def body(harness: Any) -> None:
        await harness.server.set_ready(True)
        watch = health_pb2_grpc.HealthStub(harness.channel).Watch(health_pb2.HealthCheckRequest(service="readiness"))
        assert (await watch.read()).status == SERVING
        started = time.monotonic()
        duck = asyncio.create_task(harness.server.lame_duck(0.5))
        assert (await watch.read()).status == NOT_SERVING
        await harness.server.set_ready(True)
        found = await states(harness.channel)
        assert (found["readiness"], found["liveness"]) == (NOT_SERVING, SERVING)
        assert (await harness.stub.Tokenize(frontend_pb2.TokenizeRequest(text="abc"))).token_ids == [3]
        assert not duck.done()
        await duck
        assert time.monotonic() - started >= 0.5
        watch.cancel()

    with_server(body)


def test_no_lame_duck_where_nobody_was_told_to_call(with_server: WithServer) -> None:
    async def body(harness: Any) -> None:
        await asyncio.wait_for(harness.server.lame_duck(60), 1)

    with_server(body)


def test_a_taken_health_port_is_named() -> None:
    async def main() -> None:
        first = GrpcServer([SERVICE], health_port=0, health_host="127.0.0.1")
        await first.start()
        second = GrpcServer([SERVICE], health_port=first.health_port, health_host="127.0.0.1")
        with pytest.raises(OSError, match="--health-port"):
            await second.start()
        await first.drain(0)

    asyncio.run(main())


def test_settings() -> None:
    settings = parse_settings(CommonSettings, "core", [], environ={})
    assert (settings.health_port, settings.lame_duck_s) == (None, 0.0)
    variables = {"PAGEWIRE_HEALTH_PORT": "50062", "PAGEWIRE_CORE_LAME_DUCK_S": "5"}
    settings = parse_settings(CommonSettings, "core", ["--health-host", "127.0.0.1"], environ=variables)
    assert (settings.health_port, settings.health_host, settings.lame_duck_s) == (50062, "127.0.0.1", 5.0)
