"""grpc.health.v1 alone, always plaintext, on a port of its own: for probes that speak no TLS, as Kubernetes' do.

Whoever reaches the port can ask for four words and nothing else; connections, calls and messages are bounded.
"""

from __future__ import annotations

import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from pagewire.runtime.health import HealthServicer
from pagewire.runtime.transport import format_address, server_options

MAX_CONNECTIONS = 64
MAX_CALLS = 128
MAX_MESSAGE_BYTES = 4096
IDLE_CONNECTION_MS = 60_000


class HealthPort:
    """A server for the states that another server has, made on the same event loop."""

    def __init__(self, health: HealthServicer, host: str, port: int) -> None:
        """Port 0 takes a free one."""
        self._host = host
        self.port = port
        """The bound port once started."""
        options = [
            *server_options(MAX_MESSAGE_BYTES),
            ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
            ("grpc.max_connection_idle_ms", IDLE_CONNECTION_MS),
        ]
        self._aio = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CALLS)
        health_pb2_grpc.add_HealthServicer_to_server(health, self._aio)

    async def start(self) -> None:
        """Listens. Raises OSError where the address can't be had."""
        address = format_address(self._host, self.port)
        try:
            self.port = self._aio.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(
                f"cannot listen on {address}: the port is taken or the host is not this machine's; "
                "choose others with --health-host and --health-port (0 takes a free port)"
            ) from error
        await self._aio.start()

    async def stop(self) -> None:
        """Ends at once."""
        await self._aio.stop(0)
