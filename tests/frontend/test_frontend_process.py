"""`python -m frontend_svc` as a process: ready line, drain on SIGTERM, exit statuses, idleness."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc
import psutil
import pytest
from frontend_support import CoreOptions, GrpcCore, collect, eventually, generate_request, ids_of, run, status_of
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core_svc.fake_executor import FakeOptions
from frontend_svc.server import SERVICE_NAME
from pagewire.runtime.ready import Ready, parse_ready
from pagewire.runtime.transport import secure_or_insecure_channel
from pagewire.v1 import frontend_pb2_grpc

Files = Mapping[str, bytes]
pytestmark = pytest.mark.system
SERVING = health_pb2.HealthCheckResponse.SERVING
Process = asyncio.subprocess.Process


async def start(*flags: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "frontend_svc", "--port", "0", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@contextlib.asynccontextmanager
async def running(files: Files, *flags: str) -> AsyncIterator[tuple[GrpcCore, Process, Ready, grpc.aio.Channel]]:
    core = GrpcCore(files, CoreOptions(options=FakeOptions(latency_s=0.01), heartbeat_interval_ms=1000))
    target = await core.start()
    # By name, as a headless Service has one.
    process = await start("--core", f"dns:///localhost:{target.rpartition(':')[2]}", *flags)
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        ready = parse_ready(line.decode())
        assert ready is not None, line
        assert ready.service == "frontend"
        async with secure_or_insecure_channel(ready.address) as channel:
            yield core, process, ready, channel
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await core.stop()


def test_drain_on_sigterm(smollm2_files: Files) -> None:
    """A running stream ends in full, a new call is refused, the exit status is 0.

    Case: llm-d-router#1885
    """

    async def scenario() -> None:
        async with running(smollm2_files) as (core, process, _, channel):
            stub = frontend_pb2_grpc.FrontendServiceStub(channel)
            reader = asyncio.ensure_future(collect(stub.Generate(generate_request(max_tokens=60))))
            await eventually(lambda: core.engine.num_steps > 3)
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            error = await status_of(stub.Generate(generate_request(), timeout=5))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert len(ids_of(await reader)) == 60
            assert await asyncio.wait_for(process.wait(), 10) == 0

    run(scenario())


def test_drain_has_an_end(smollm2_files: Files) -> None:
    """What is not done in time ends with UNAVAILABLE, in the core too."""

    async def scenario() -> None:
        async with running(smollm2_files, "--drain-s", "0.3") as (core, process, _, channel):
            stub = frontend_pb2_grpc.FrontendServiceStub(channel)
            failing = asyncio.ensure_future(status_of(stub.Generate(generate_request(max_tokens=4000))))
            await eventually(lambda: core.engine.num_steps > 3)
            process.send_signal(signal.SIGINT)
            assert (await asyncio.wait_for(failing, 5)).code() is grpc.StatusCode.UNAVAILABLE
            assert await asyncio.wait_for(process.wait(), 10) == 0
            await eventually(lambda: not core.engine.scheduler.requests)

    run(scenario())


def test_a_silent_collector_does_not_keep_the_process(smollm2_files: Files) -> None:
    """Lame duck, drain, the last spans and the last numbers end within the margin that is promised."""

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent, pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
            patch.setenv("OTEL_METRICS_EXPORTER", "otlp")
            async with running(smollm2_files, "--drain-s=0.3", "--lame-duck-s=0.2") as (core, process, _, channel):
                stub = frontend_pb2_grpc.FrontendServiceStub(channel)
                failing = asyncio.ensure_future(status_of(stub.Generate(generate_request(max_tokens=4000))))
                await eventually(lambda: core.engine.num_steps > 3)
                process.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(process.wait(), 0.2 + 0.3 + 5) == 0
                assert (await failing).code() is grpc.StatusCode.UNAVAILABLE

    run(scenario())


def test_lame_duck_takes_new_streams_and_a_second_signal_ends_it(smollm2_files: Files) -> None:
    """After SIGTERM new streams are served while health says NOT_SERVING; who signals again waits for nothing.

    Case: llm-d-router#1885
    """

    async def scenario() -> None:
        flags = ("--lame-duck-s", "30", "--health-port", "0", "--health-host", "127.0.0.1")
        async with running(smollm2_files, *flags) as (_, process, _, channel):
            stub, health = frontend_pb2_grpc.FrontendServiceStub(channel), health_pb2_grpc.HealthStub(channel)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(5):
                while (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING:
                    await asyncio.sleep(0.02)
            assert len(ids_of(await collect(stub.Generate(generate_request(max_tokens=20))))) == 20
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 5) == 128 + signal.SIGTERM

    run(scenario())


@pytest.mark.parametrize("text", ["", "tester:short", None])
def test_bad_keys_file_is_explained(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)

    async def scenario() -> None:
        process = await start("--api-keys-file", str(path))
        _, errors = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 2
        assert b"--api-keys-file" in errors and b"Traceback" not in errors

    run(scenario())


def test_killed_frontend_is_forgotten_by_the_core(smollm2_files: Files) -> None:
    """After kill -9 the callers see UNAVAILABLE, and the core frees everything once the lease is over.

    Case: vllm#54947
    """

    async def scenario() -> None:
        async with running(smollm2_files) as (core, process, _, channel):
            stub = frontend_pb2_grpc.FrontendServiceStub(channel)
            failing = asyncio.ensure_future(status_of(stub.Generate(generate_request(max_tokens=4000, n=3))))
            await eventually(lambda: core.engine.stats().num_running == 3)
            process.kill()
            assert (await asyncio.wait_for(failing, 5)).code() is grpc.StatusCode.UNAVAILABLE
            await eventually(lambda: not core.engine.scheduler.requests, 10)

    run(scenario())


def test_idle_frontend_rests(smollm2_files: Files) -> None:
    """Under two percent of a core while nothing happens; health answers.

    Case: vllm#16968
    Case: smg#866
    """

    async def scenario() -> None:
        async with running(smollm2_files) as (_, process, __, channel):
            stub = health_pb2_grpc.HealthStub(channel)
            for name in ("", "readiness", "liveness", SERVICE_NAME):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            watched = psutil.Process(process.pid)
            await asyncio.sleep(1)
            before = sum(watched.cpu_times()[:2])
            await asyncio.sleep(4)
            assert sum(watched.cpu_times()[:2]) - before < 0.02 * 4

    run(scenario())


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--max-tokens-behind", "0"], 2, ["--max-tokens-behind", "0", "at least 1"]),
        (["--nonsense"], 2, ["--nonsense"]),
    ],
)
def test_bad_settings(flags: list[str], status: int, words: list[str]) -> None:
    async def scenario() -> None:
        process = await start(*flags)
        _, errors = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == status
        assert all(word in errors.decode() for word in words)

    run(scenario())


def test_taken_port() -> None:
    async def scenario() -> None:
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            process = await start("--port", str(holder.getsockname()[1]))
            _, errors = await asyncio.wait_for(process.communicate(), 30)
            assert process.returncode == 1
            assert b"cannot listen" in errors
            assert b"Traceback" not in errors and b"never awaited" not in errors

    run(scenario())
