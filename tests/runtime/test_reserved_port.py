"""`pagewire serve` tells the frontend where the core will listen before there is a core."""

from __future__ import annotations

import asyncio
import socket

import pytest

from pagewire.runtime.server import GrpcServer
from pagewire.serve import reserved_port


def test_a_reserved_port_is_free_for_a_server_of_ours_and_for_nobody_else() -> None:
    """A socket that takes ports as anybody does is refused it; a gRPC server listens on it and answers."""

    async def scenario(port: int) -> None:
        server = GrpcServer(["pagewire.v1.EngineCoreService"], port=port)
        assert await server.start() == port
        _, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 5)
        writer.close()
        await writer.wait_closed()
        await server.drain(0)

    with reserved_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        asyncio.run(scenario(port))
