"""The core dies, freezes, comes back as another, or only the connection breaks: what callers see, and how soon."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from frontend_support import (
    SEED,
    CoreOptions,
    GrpcCore,
    collect,
    eventually,
    generate_request,
    ids_of,
    run,
    status_of,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core_svc.fake_executor import FakeOptions
from frontend_svc.core_client import GrpcCoreClient
from frontend_svc.engine_client import EngineCoreClient
from frontend_svc.server import SERVICE_NAME, FrontendServer
from frontend_svc.service import TextService
from frontend_svc.tokenizer import Tokenizer
from pagewire.errors import UnavailableError
from pagewire.runtime.lifetime import new_incarnation
from pagewire.runtime.ready import parse_ready
from pagewire.runtime.server import GrpcServer
from pagewire.runtime.status import from_rpc_error
from pagewire.runtime.transport import secure_or_insecure_channel
from pagewire.sampling import SamplingParams
from pagewire.v1 import frontend_pb2_grpc

Files = Mapping[str, bytes]
Stub = frontend_pb2_grpc.FrontendServiceStub
SCRIPT = Path(__file__).parent / "fake_core_process.py"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class CoreProcess:
    """A core in a process of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.process: asyncio.subprocess.Process | None = None
        self.port = 0

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, str(SCRIPT), str(self._directory), str(self.port), stdout=asyncio.subprocess.PIPE
        )
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 60)
        ready = parse_ready(line.decode())
        assert ready is not None, line
        self.port = ready.port

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
        if self.process is not None:
            await self.process.wait()


@contextlib.asynccontextmanager
async def frontend_to(
    target: str,
) -> AsyncIterator[tuple[frontend_pb2_grpc.FrontendServiceStub, TextService, grpc.aio.Channel]]:
    """A frontend in this process for a core elsewhere."""
    server = GrpcServer([SERVICE_NAME])

    async def connect() -> EngineCoreClient:
        return await GrpcCoreClient.connect(target, new_incarnation())

    service = TextService(connect, on_ready=server.set_ready)
    front = FrontendServer(service, server)
    port = await front.start()
    async with secure_or_insecure_channel(f"127.0.0.1:{port}") as channel:
        await asyncio.wait_for(service.wait_ready(), 20)
        yield frontend_pb2_grpc.FrontendServiceStub(channel), service, channel
    await front.stop(0)


async def health(channel: grpc.aio.Channel, name: str = "readiness") -> int:
    request = health_pb2.HealthCheckRequest(service=name)
    return int((await health_pb2_grpc.HealthStub(channel).Check(request)).status)


@pytest.fixture
def tokenizer_dir(tmp_path: Path, smollm2_files: Files) -> Path:
    for name, data in smollm2_files.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


@pytest.mark.system
@pytest.mark.parametrize("which", [signal.SIGKILL, signal.SIGSTOP])
def test_dead_or_frozen_core_ends_every_stream(which: signal.Signals, tokenizer_dir: Path) -> None:
    """All streams, one just begun too, end with UNAVAILABLE within 5 s, readiness goes, and a new core is taken up.

    Case: vllm#39863
    Case: smg#2468
    """

    async def scenario() -> None:
        core = CoreProcess(tokenizer_dir)
        await core.start()
        assert core.process is not None
        try:
            async with frontend_to(f"127.0.0.1:{core.port}") as (stub, service, channel):
                assert await health(channel) == SERVING
                calls = [stub.Generate(generate_request(max_tokens=3000, n=1 + i % 3)) for i in range(6)]
                errors = asyncio.gather(*map(status_of, calls))
                await eventually(lambda: service.session.num_requests == 6)
                await asyncio.sleep(0.5)
                core.process.send_signal(which)
                started = time.monotonic()
                # One that comes now, without a deadline: a frozen core does not even take it.
                late = asyncio.ensure_future(status_of(stub.Generate(generate_request())))
                codes = {
                    error.code() for error in (*await asyncio.wait_for(errors, 10), await asyncio.wait_for(late, 10))
                }
                assert time.monotonic() - started < 5
                assert codes == {grpc.StatusCode.UNAVAILABLE}
                error = await status_of(stub.Generate(generate_request()))
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                found = from_rpc_error(error)
                assert isinstance(found, UnavailableError)
                assert found.retry_after_s is not None
                assert await health(channel) == NOT_SERVING
                assert await health(channel, "liveness") == SERVING
                await core.kill()
                await core.start()
                await asyncio.wait_for(service.wait_ready(), 20)
                assert len(ids_of(await collect(stub.Generate(generate_request())))) == 8
                assert await health(channel) == SERVING
        finally:
            await core.kill()

    run(scenario(), 90)


class Proxy:
    """A TCP relay whose connections can be cut."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self.is_refusing = False

    async def start(self) -> int:
        self.server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self.server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_refusing:
            writer.close()
            return
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers |= {writer, other_writer}
        await asyncio.gather(self._relay(reader, other_writer), self._relay(other_reader, writer))

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


@contextlib.asynccontextmanager
async def broken_line(files: Files, lease_ms: int) -> AsyncIterator[tuple[Stub, TextService, GrpcCore, Proxy]]:
    core = GrpcCore(files, CoreOptions(options=FakeOptions(latency_s=0.01), lease_ms=lease_ms))
    proxy = Proxy(int((await core.start()).rpartition(":")[2]))
    port = await proxy.start()
    try:
        async with frontend_to(f"127.0.0.1:{port}") as (stub, service, _):
            yield stub, service, core, proxy
    finally:
        proxy.cut()
        proxy.server.close()
        await core.stop()


def test_broken_connection_loses_nothing(smollm2_files: Files, smollm2: Tokenizer) -> None:
    """The stream is opened again within the lease, and every token comes once, in order."""

    async def scenario() -> None:
        async with broken_line(smollm2_files, 5000) as (stub, service, core, proxy):
            session = service.session
            texts = [f"Number {i}" for i in range(8)]
            calls = [
                asyncio.ensure_future(collect(stub.Generate(generate_request(text, max_tokens=150, logprobs=0))))
                for text in texts
            ]
            for step in (20, 60, 100):
                await eventually(lambda step=step: core.engine.num_steps > step, 20)  # type: ignore[misc]
                proxy.cut()
            for text, messages in zip(texts, await asyncio.gather(*calls), strict=True):
                expected = core.executor.model.generate(smollm2.encode(text), SamplingParams(seed=SEED), 150)
                assert ids_of(messages) == expected
                positions = [p.candidates[0].token_id for m in messages for o in m.outputs for p in o.logprobs]
                assert positions == expected
            assert service.session is session
            await eventually(lambda: not core.engine.scheduler.requests)

    run(scenario())


def test_connection_broken_beyond_the_lease(smollm2_files: Files) -> None:
    """Streams end with UNAVAILABLE in time; the core aborts what it has; service resumes with the connection."""

    async def scenario() -> None:
        async with broken_line(smollm2_files, 1000) as (stub, service, core, proxy):
            failing = asyncio.ensure_future(status_of(stub.Generate(generate_request(max_tokens=3000))))
            await eventually(lambda: core.engine.num_steps > 5)
            proxy.is_refusing = True
            proxy.cut()
            error = await asyncio.wait_for(failing, 5)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            await eventually(lambda: not core.engine.scheduler.requests)
            proxy.is_refusing = False
            await asyncio.wait_for(service.wait_ready(), 20)
            assert len(ids_of(await collect(stub.Generate(generate_request())))) == 8

    run(scenario())


def test_tokenizer_that_differs_is_refused(smollm2_files: Files) -> None:
    """Files whose sha256 is not the announced one are not used."""

    async def scenario() -> None:
        core = GrpcCore(smollm2_files, CoreOptions())
        assert core.servicer.serving is not None
        core.servicer.serving = replace(
            core.servicer.serving, tokenizer_files={**smollm2_files, "chat_template.jinja": b"other"}
        )
        target = await core.start()
        try:
            with pytest.raises(Exception, match="sha256"):
                await GrpcCoreClient.connect(target, new_incarnation(), timeout_s=5)
        finally:
            await core.stop()

    run(scenario())


def test_connect_gives_up_with_the_reason() -> None:
    async def scenario() -> None:
        with pytest.raises(UnavailableError, match=r"not ready within 0\.5 s"):
            await GrpcCoreClient.connect("127.0.0.1:9", new_incarnation(), timeout_s=0.5)

    run(scenario())
