"""Asks the services of a deployment what they do. One that does not answer in time is down, and the rest goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.engine import CoreStats
from pagewire.runtime.status import from_rpc_error
from pagewire.runtime.transport import TlsConfig, secure_or_insecure_channel
from pagewire.stats import MAX_STEPS, FrontendStats, WorkerStats
from pagewire.stats_wire import read
from pagewire.top.data import Answer, Sample
from pagewire.types_wire import core_stats_from_proto
from pagewire.v1 import core_pb2, core_pb2_grpc, frontend_pb2, frontend_pb2_grpc, worker_pb2, worker_pb2_grpc

T = TypeVar("T")

TIMEOUT_S = 2.0
MAX_REQUESTS, MAX_BLOCKS = 256, 4096
"""What one look asks a core for: more than a terminal shows, and little work for the core."""
DEFAULT_TARGETS = {"frontend": "127.0.0.1:50051", "core": "127.0.0.1:50052", "worker": "127.0.0.1:50053"}

_HEALTH = {
    health_pb2.HealthCheckResponse.SERVING: "ready",
    health_pb2.HealthCheckResponse.NOT_SERVING: "not ready",
}
_Detail = core_pb2.UtilityRequest.Stats.Detail


class Deployment:
    """The services of one deployment. Each is where its flag says, else where the one in front of it has it."""

    def __init__(
        self,
        targets: Mapping[str, str | None],
        tls: TlsConfig | None = None,
        *,
        api_key: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`targets`: by service, where the user named one. The API key goes to the frontend alone."""
        self._given = {name: target for name, target in targets.items() if target}
        self._found: dict[str, str] = {}
        self._tls, self._timeout_s = tls, timeout_s
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else None
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def close(self) -> None:
        """Closes the connections."""
        for channel in self._channels.values():
            await channel.close()

    async def look(self) -> Sample:
        """Asks all three at once, and once more for those whose address another one's answer tells."""
        frontend, core, worker = await asyncio.gather(self._frontend(), self._core(), self._worker())
        if self._learn("core", _target_of_core(frontend.stats)):
            core = await self._core()
        if self._learn("worker", core.stats.detail.worker_target if core.stats and core.stats.detail else ""):
            worker = await self._worker()
        return Sample(time.monotonic(), time.time(), frontend, core, worker)

    def _target(self, service: str) -> str:
        return self._given.get(service) or self._found.get(service) or DEFAULT_TARGETS[service]

    def _learn(self, service: str, target: str) -> bool:
        """Takes an address in; whether the service has to be asked there now."""
        before = self._target(service)
        if target:
            self._found[service] = target
        return self._target(service) != before

    def _channel(self, target: str) -> grpc.aio.Channel:
        if target not in self._channels:
            self._channels[target] = secure_or_insecure_channel(target, self._tls)
        return self._channels[target]

    async def _frontend(self) -> Answer[FrontendStats]:
        async def ask(channel: grpc.aio.Channel) -> FrontendStats:
            stub: Any = frontend_pb2_grpc.FrontendServiceStub(channel)
            request = frontend_pb2.GetStatsRequest()
            response = await stub.GetStats(request, timeout=self._timeout_s, metadata=self._metadata)
            return read(FrontendStats, response)

        return await self._ask("frontend", ask)

    async def _core(self) -> Answer[CoreStats]:
        async def ask(channel: grpc.aio.Channel) -> CoreStats:
            detail = _Detail(max_requests=MAX_REQUESTS, max_steps=MAX_STEPS, max_blocks=MAX_BLOCKS)
            request = core_pb2.UtilityRequest(stats=core_pb2.UtilityRequest.Stats(detail=detail))
            stub: Any = core_pb2_grpc.EngineCoreServiceStub(channel)
            return core_stats_from_proto((await stub.Utility(request, timeout=self._timeout_s)).stats)

        return await self._ask("core", ask)

    async def _worker(self) -> Answer[WorkerStats]:
        async def ask(channel: grpc.aio.Channel) -> WorkerStats:
            request = worker_pb2.WorkerServiceUtilityRequest(stats=worker_pb2.WorkerServiceUtilityRequest.Stats())
            stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            return read(WorkerStats, (await stub.Utility(request, timeout=self._timeout_s)).stats)

        return await self._ask("worker", ask)

    async def _ask(self, service: str, ask: Callable[[grpc.aio.Channel], Awaitable[T]]) -> Answer[T]:
        target = self._target(service)
        channel = self._channel(target)
        stats, health = await asyncio.gather(ask(channel), self._health(channel), return_exceptions=True)
        for found in (stats, health):
            if isinstance(found, BaseException) and not isinstance(found, grpc.RpcError):
                raise found
        state = health if isinstance(health, str) else "down"
        if not isinstance(stats, BaseException):
            return Answer(target, state, stats)
        assert isinstance(stats, grpc.RpcError)
        error = from_rpc_error(stats).message
        if service not in self._given and service not in self._found and "refused" in error:
            error = f"nobody at the usual port; see --{service}"
        return Answer(target, state, None, error)

    async def _health(self, channel: grpc.aio.Channel) -> str:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=self._timeout_s)
        return _HEALTH.get(response.status, "unknown")


def _target_of_core(stats: FrontendStats | None) -> str:
    """The core that is shown: the first that the frontend can use, else the first that it looks for."""
    cores = stats.cores if stats is not None else ()
    usable = [core.target for core in cores if core.is_connected] or [core.target for core in cores]
    return usable[0] if usable else ""
