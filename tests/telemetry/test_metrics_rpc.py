"""Calls are counted once each, by the code that the caller gets, and handlers behave as they do without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from pagewire.errors import ResourceExhaustedError
from pagewire.runtime.instruments import Instruments
from pagewire.runtime.rpc_metrics import RpcClientMetrics, RpcServerMetrics
from pagewire.runtime.server import GrpcServer
from pagewire.runtime.transport import secure_or_insecure_channel, sync_channel
from pagewire.v1 import core_pb2, core_pb2_grpc

SERVICE = "pagewire.v1.EngineCoreService"


class Servicer(core_pb2_grpc.EngineCoreServiceServicer):
    """One unary call that fails on demand, and one stream without an end."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.is_closed = asyncio.Event()

    async def Abort(self, request: Any, context: Any) -> Any:
        if self.error is not None:
            raise self.error
        return core_pb2.EngineCoreServiceAbortResponse()

    async def StreamKvEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            while True:
                yield core_pb2.StreamKvEventsResponse(core_incarnation="x" * 100)
                await asyncio.sleep(0.01)
        finally:
            self.is_closed.set()


def counts(instruments: Instruments, name: str) -> dict[tuple[str, ...], float]:
    """Values of a counter, or numbers of observations, by labels."""
    (found,) = [instrument.read() for instrument in instruments if instrument.name == name]
    return {labels: v if isinstance(v, int | float) else sum(v.counts) for labels, v in found.items()}


async def talk(servicer: Servicer, server: Instruments, client: Instruments) -> None:
    grpc_server = GrpcServer([SERVICE], interceptors=[RpcServerMetrics(server, counts_messages=True)])
    core_pb2_grpc.add_EngineCoreServiceServicer_to_server(servicer, grpc_server.aio)
    port = await grpc_server.start()
    metrics = RpcClientMetrics(client, "core")
    try:
        async with secure_or_insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = core_pb2_grpc.EngineCoreServiceStub(metrics.aio(channel))
            request = core_pb2.EngineCoreServiceAbortRequest(frontend_incarnation="abc")
            await stub.Abort(request, timeout=5)
            for error in (ResourceExhaustedError("full", reason="FULL"), RuntimeError("a fault")):
                servicer.error = error
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Abort(request, timeout=5)
                expected = "RESOURCE_EXHAUSTED" if isinstance(error, ResourceExhaustedError) else "INTERNAL"
                assert caught.value.code().name == expected
            servicer.error = None
            await asyncio.to_thread(blocking, metrics, port, request)
            events = stub.StreamKvEvents(core_pb2.StreamKvEventsRequest())
            assert (await events.read()).core_incarnation
            events.cancel()
            # The handler's own clean-up runs at once, as it does without the interceptor.
            await asyncio.wait_for(servicer.is_closed.wait(), 5)
    finally:
        await grpc_server.drain(0)


def blocking(metrics: RpcClientMetrics, port: int, request: Any) -> None:
    with sync_channel(f"127.0.0.1:{port}") as channel:
        core_pb2_grpc.EngineCoreServiceStub(metrics.sync(channel)).Abort(request, timeout=5)


def test_calls_and_messages_on_both_ends() -> None:
    async def run() -> tuple[Instruments, Instruments]:
        server, client = Instruments(), Instruments()
        await asyncio.wait_for(talk(Servicer(), server, client), 30)
        return server, client

    server, client = asyncio.run(run())
    abort, events = f"{SERVICE}/Abort", f"{SERVICE}/StreamKvEvents"
    calls = {("grpc", abort, "OK"): 2, ("grpc", abort, "RESOURCE_EXHAUSTED"): 1, ("grpc", abort, "INTERNAL"): 1}
    assert counts(client, "rpc_client_call_duration_seconds") == calls
    assert counts(server, "rpc_server_call_duration_seconds") == {**calls, ("grpc", events, "CANCELLED"): 1}
    errors = {(abort, "RESOURCE_EXHAUSTED", "FULL"): 1, (abort, "INTERNAL", "INTERNAL"): 1}
    assert counts(server, "pagewire_rpc_server_errors_total") == errors
    sent = counts(client, "pagewire_rpc_client_bytes_total")
    received = counts(server, "pagewire_rpc_server_bytes_total")
    assert sent[abort, "sent"] == received[abort, "received"] == 4 * 5
    assert sent[events, "received"] >= 100 and received[events, "sent"] >= sent[events, "received"]
    assert counts(client, "pagewire_rpc_client_messages_total")[abort, "sent"] == 4
    assert counts(client, "pagewire_rpc_client_messages_total")[abort, "received"] == 2
