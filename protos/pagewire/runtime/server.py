"""A grpc.aio server as every service starts it: limits, keepalive, TLS, health, reflection, errors, draining."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from typing import Self

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pagewire.runtime.health import LIVENESS, READINESS, HealthServicer
from pagewire.runtime.health_port import HealthPort
from pagewire.runtime.settings import CommonSettings
from pagewire.runtime.status import ErrorInterceptor
from pagewire.runtime.transport import MAX_MESSAGE_BYTES, TlsConfig, format_address, server_options

log = logging.getLogger(__name__)
_HEALTH_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class GrpcServer:
    """A server with health (Check, Watch, List; `""`, `liveness`, `readiness`, each service name) and reflection.

    Made on the event loop that it serves on. Order of calls: add servicers to `aio`, `start`, `set_ready`, `lame_duck`,
    `drain`.
    """

    def __init__(
        self,
        service_names: Sequence[str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: TlsConfig | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        health_host: str = "0.0.0.0",
        health_port: int | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        """`service_names`: full names such as pagewire.v1.FrontendService. Port 0 takes a free one.

        With a `health_port`, health is served there too, always without TLS. What `interceptors` and handlers raise
        becomes a status.
        """
        self._service_names = tuple(service_names)
        self._host = host
        self._port = port
        self._tls = tls
        self._is_ending = False
        self._is_ready = False
        self._health = HealthServicer()
        self._health_port = None if health_port is None else HealthPort(self._health, health_host, health_port)
        self._aio = grpc.aio.server(
            interceptors=[ErrorInterceptor(", ".join(self._service_names)), *interceptors],
            options=server_options(max_message_bytes),
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._aio)
        reflection.enable_server_reflection((*self._service_names, _HEALTH_NAME, reflection.SERVICE_NAME), self._aio)

    @classmethod
    def for_settings(
        cls,
        service_name: str,
        settings: CommonSettings,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> Self:
        """The server that a process's settings ask for."""
        return cls(
            [service_name],
            host=settings.host,
            port=settings.port,
            tls=settings.tls,
            max_message_bytes=settings.max_message_bytes,
            health_host=settings.health_host,
            health_port=settings.health_port,
            interceptors=interceptors,
        )

    @property
    def aio(self) -> grpc.aio.Server:
        """The server to add servicers to."""
        return self._aio

    @property
    def host(self) -> str:
        return self._host

    @property
    def is_ready(self) -> bool:
        """What `readiness` says. Any thread."""
        return self._is_ready

    @property
    def port(self) -> int:
        """The bound port once started."""
        return self._port

    @property
    def health_port(self) -> int | None:
        """The bound port of plaintext health once started; None without one."""
        return None if self._health_port is None else self._health_port.port

    async def start(self) -> int:
        """Listens and returns the port: alive, not ready. Raises OSError where the address can't be had."""
        address = format_address(self._host, self._port)
        try:
            if self._tls is None:
                port = self._aio.add_insecure_port(address)
            else:
                port = self._aio.add_secure_port(address, self._tls.server_credentials())
        except RuntimeError as error:
            raise OSError(
                f"cannot listen on {address}: the port is taken or the host is not this machine's; "
                "choose others with --host and --port (0 takes a free port)"
            ) from error
        if self._health_port is not None:
            await self._health_port.start()
            log.info("health without TLS on port %d", self._health_port.port)
        await self._aio.start()
        self._port = port
        self._health.set(LIVENESS, True)
        self._set_ready(False)
        return port

    def _set_ready(self, is_ready: bool) -> None:
        self._is_ready = is_ready
        for name in ("", READINESS, *self._service_names):
            self._health.set(name, is_ready)

    async def set_ready(self, is_ready: bool) -> None:
        """Says whether requests can be served: `readiness`, every service name and `""`. Ignored at the end."""
        if not self._is_ending:
            self._set_ready(is_ready)

    async def set_alive(self, is_alive: bool) -> None:
        """Says whether the process is of use at all, or should be restarted: `liveness`."""
        self._health.set(LIVENESS, is_alive)

    async def lame_duck(self, seconds: float) -> None:
        """Says for so long that it is not ready, and goes on serving: who balances load takes time to hear of it.

        Returns at once where it was not ready: nobody calls it then.
        """
        was_ready = self._is_ready
        self._is_ending = True
        self._set_ready(False)
        if seconds > 0 and was_ready:
            log.info("not ready any more; new calls are taken for %g s", seconds)
            await asyncio.sleep(seconds)

    async def drain(self, grace_s: float) -> None:
        """Stops: not ready (still alive), no new calls (UNAVAILABLE), running ones get `grace_s` seconds to end.

        Health without TLS answers to the last: a probe that fails would have the process killed while it drains.
        """
        self._is_ending = True
        self._set_ready(False)
        self._health.close()
        await self._aio.stop(grace_s)
        if self._health_port is not None:
            await self._health_port.stop()


async def wait_for_signal() -> signal.Signals:
    """Waits for SIGINT or SIGTERM. A second one of either ends the process at once, without draining."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[signal.Signals] = loop.create_future()

    def on_signal(which: signal.Signals) -> None:
        if arrived.done():
            os._exit(128 + which)
        arrived.set_result(which)

    for which in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(which, on_signal, which)
    return await arrived
