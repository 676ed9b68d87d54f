"""grpc.health.v1 with Check, Watch and List, for asyncio servers.

grpcio's own servicer has no List, and its Watch streams never end, so a server that drains would wait for each of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

LIVENESS = "liveness"
"""Health service that says whether the process should be restarted."""
READINESS = "readiness"
"""Health service that says whether a request can be served now."""


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Serving states by service name. All methods run on the server's event loop."""

    def __init__(self) -> None:
        self._is_serving: dict[str, bool] = {}
        self._changed = asyncio.Event()
        self._is_closed = False

    def set(self, service: str, is_serving: bool) -> None:
        """Sets a state and wakes everyone who watches."""
        if self._is_serving.get(service) != is_serving:
            self._is_serving[service] = is_serving
            self._wake_watchers()

    def close(self) -> None:
        """Ends all Watch streams, now and later, after they have seen the last state."""
        self._is_closed = True
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, service: str) -> Any:
        is_serving = self._is_serving.get(service)
        if is_serving is None:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        return health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """The state of one service; NOT_FOUND where it is unknown."""
        if request.service not in self._is_serving:
            names = ", ".join(repr(name) for name in sorted(self._is_serving))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no health service {request.service!r}; known: {names}")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def List(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """The states of all services."""
        return health_pb2.HealthListResponse(
            statuses={name: health_pb2.HealthCheckResponse(status=self._status(name)) for name in self._is_serving}
        )

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        """The state of one service now and whenever it changes."""
        last = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
                continue
            if self._is_closed:
                return
            await changed.wait()
