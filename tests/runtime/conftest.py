"""A small server of the real contract: the frontend's Tokenize and Generate, answering what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from pagewire.runtime.server import GrpcServer
from pagewire.runtime.transport import MAX_MESSAGE_BYTES, secure_or_insecure_channel
from pagewire.v1 import frontend_pb2, frontend_pb2_grpc

SERVICE = "pagewire.v1.FrontendService"


class Servicer(frontend_pb2_grpc.FrontendServiceServicer):
    """Raises `error` where one is set; else Tokenize counts bytes and Generate streams until `gate` opens."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.gate = asyncio.Event()
        self.was_cancelled = False

    async def Tokenize(self, request: Any, context: Any) -> Any:
        if self.error is not None:
            raise self.error
        return frontend_pb2.TokenizeResponse(token_ids=[len(request.text)])

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield frontend_pb2.GenerateResponse(request_id="first")
        if self.error is not None:
            raise self.error
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        yield frontend_pb2.GenerateResponse(request_id="last", is_finished=True)


class Harness:
    """A started server with its servicer and a client channel."""

    def __init__(self, server: GrpcServer, servicer: Servicer, channel: grpc.aio.Channel, port: int) -> None:
        self.server, self.servicer, self.channel, self.port = server, servicer, channel, port
        self.stub = frontend_pb2_grpc.FrontendServiceStub(channel)


@asynccontextmanager
async def running(max_message_bytes: int = MAX_MESSAGE_BYTES, **kwargs: Any) -> AsyncIterator[Harness]:
    server = GrpcServer([SERVICE], max_message_bytes=max_message_bytes, **kwargs)
    servicer = Servicer()
    frontend_pb2_grpc.add_FrontendServiceServicer_to_server(servicer, server.aio)
    port = await server.start()
    try:
        async with secure_or_insecure_channel(f"127.0.0.1:{port}", max_message_bytes=max_message_bytes) as channel:
            yield Harness(server, servicer, channel, port)
    finally:
        servicer.gate.set()
        await server.drain(0.5)


@pytest.fixture
def with_server() -> Callable[..., None]:
    """Runs an async test body against a fresh server."""

    def run(body: Callable[[Harness], Awaitable[None]], **kwargs: Any) -> None:
        async def main() -> None:
            async with running(**kwargs) as harness:
                await asyncio.wait_for(body(harness), timeout=30)

        asyncio.run(main())

    return run
