"""TLS between processes: who is let in, whom a client believes, and files that are renewed while a server runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from certificates import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.runtime.server import GrpcServer
from pagewire.runtime.settings import CommonSettings, parse_settings
from pagewire.runtime.transport import TlsConfig, secure_or_insecure_channel, sync_channel

SERVICE = "pagewire.v1.FrontendService"
Channel = grpc.aio.Channel


def config(authority: Authority, name: str, *dns_names: str, asks_clients: bool = True) -> TlsConfig:
    cert_file, key_file = authority.issue(name, *dns_names)
    return TlsConfig(str(authority.ca_file), str(cert_file), str(key_file), asks_clients)


@asynccontextmanager
async def serving(tls: TlsConfig) -> AsyncIterator[GrpcServer]:
    server = GrpcServer([SERVICE], tls=tls, health_port=0, health_host="127.0.0.1")
    await server.start()
    yield server
    await server.drain(0)


async def check(channel: Channel) -> None:
    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=5)


async def is_let_in(server: GrpcServer, tls: TlsConfig | None, server_name: str = "") -> bool:
    async with secure_or_insecure_channel(f"127.0.0.1:{server.port}", tls, server_name=server_name) as channel:
        try:
            await check(channel)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False
        return True


def test_both_sides_are_checked(tmp_path: Path) -> None:
    """Only a client with a certificate of our authority gets in, and it believes only servers of that authority."""
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    client = config(ours, "client")
    stranger = config(theirs, "stranger")

    async def main() -> None:
        async with serving(config(ours, "server", "core.example")) as server:
            assert await is_let_in(server, client)
            assert await is_let_in(server, client, server_name="core.example")
            assert not await is_let_in(server, client, server_name="other.example")
            assert not await is_let_in(server, TlsConfig(ca_file=client.ca_file))
            assert not await is_let_in(server, TlsConfig(client.ca_file, stranger.cert_file, stranger.key_file))
            assert not await is_let_in(server, TlsConfig(stranger.ca_file, client.cert_file, client.key_file))
            assert not await is_let_in(server, None)
            # Probes have no certificates.
            async with secure_or_insecure_channel(f"127.0.0.1:{server.health_port}") as channel:
                await check(channel)
            with sync_channel(f"127.0.0.1:{server.port}", client) as blocking:
                request = health_pb2.HealthCheckRequest(service="liveness")
                await asyncio.to_thread(health_pb2_grpc.HealthStub(blocking).Check, request, timeout=5)
        async with serving(config(ours, "open", asks_clients=False)) as server:
            assert await is_let_in(server, TlsConfig(ca_file=client.ca_file))

    asyncio.run(main())


def test_renewed_files_count_for_new_connections(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server that is given certificates of a new authority shows them, and lets in those that it signed; connections
    that are there go on."""
    caplog.set_level(logging.INFO)
    ours, next_one = Authority(tmp_path, "ours"), Authority(tmp_path, "next")
    tls = config(ours, "server")
    client = config(ours, "client")
    next_client = config(next_one, "next-client")

    async def main() -> None:
        async with serving(tls) as server, secure_or_insecure_channel(f"127.0.0.1:{server.port}", client) as old:
            await check(old)
            assert not await is_let_in(server, next_client)
            next_one.issue("server")
            Path(tls.ca_file).write_bytes(next_one.pem)
            assert await is_let_in(server, next_client)
            assert not await is_let_in(server, TlsConfig(str(ours.ca_file), client.cert_file, client.key_file))
            await check(old)

    asyncio.run(main())
    assert caplog.text.count("TLS files read again") == 1


def test_wrong_or_missing_files_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = Authority(tmp_path, "ours")
    tls, client = config(ours, "server"), config(ours, "client")

    async def main() -> None:
        async with serving(tls) as server:
            Path(tls.cert_file).write_text("no certificate")
            assert await is_let_in(server, client)
            Path(tls.cert_file).unlink()
            assert await is_let_in(server, client)
            assert "the old ones stay in use" in caplog.text
            ours.issue("server")
            assert await is_let_in(server, client)

    asyncio.run(main())


def test_a_server_without_a_certificate_is_told_so(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(OSError, match="--tls-cert-file and --tls-key-file"):
            await GrpcServer([SERVICE], tls=TlsConfig(ca_file=str(tmp_path / "ca.pem"))).start()

    asyncio.run(main())


def test_settings() -> None:
    assert parse_settings(CommonSettings, "core", [], environ={}).tls is None
    flags = ["--tls-ca-file=a", "--tls-cert-file=b", "--tls-key-file=c", "--no-tls-client-auth"]
    assert parse_settings(CommonSettings, "core", flags, environ={}).tls == TlsConfig("a", "b", "c", False)
