"""What a core does when its worker breaks, freezes, comes back, or belongs to somebody else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core_svc.settings import CoreSettings
from core_svc.startup import CoreProcess
from pagewire.errors import DeadlineExceededError, InternalError, NotFoundError, UnavailableError
from pagewire.runtime.transport import secure_or_insecure_channel
from pagewire.v1 import core_pb2, types_pb2, worker_pb2, worker_pb2_grpc
from tests.core_edge.harness import TIMEOUT_S, Core, Frontend, engine_request, eventually, running_core
from tests.core_edge.worker_server import Script, ScriptedWorker, expected_tokens, model_info

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(core: Core, service: str = "readiness") -> int:
    stub = health_pb2_grpc.HealthStub(core.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status  # type: ignore[no-any-return]


async def becomes(core: Core, status: int, timeout_s: float = TIMEOUT_S) -> None:
    async with asyncio.timeout(timeout_s):
        while await health(core) != status:
            await asyncio.sleep(0.02)


async def assert_ended_unavailable(frontend: Frontend, *request_ids: int) -> None:
    await frontend.ended(*request_ids)
    for request_id in request_ids:
        finished = frontend.finished[request_id]
        assert finished.reason == types_pb2.FINISH_REASON_ERROR
        assert finished.error_code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert "worker" in finished.error_message


async def assert_serves(core: Core, frontend: Frontend, request_id: int) -> None:
    """The core is ready again, for the same frontend and stream."""
    await becomes(core, SERVING)
    await frontend.add(engine_request(request_id))
    await frontend.ended(request_id)
    assert frontend.tokens[request_id] == expected_tokens(
        engine_request(
            request_id,
        )
    )
    await core.assert_empty()


def test_a_broken_stream_ends_requests_and_the_core_reconnects() -> None:
    """Case: smg#2468"""

    async def run() -> None:
        async with running_core() as core:
            frontend = Frontend(core)
            await frontend.open()
            await frontend.add(engine_request(1, max_tokens=50_000), engine_request(2, max_tokens=50_000))
            await frontend.reads(lambda: len(frontend.tokens[1]) > 3)
            core.script.break_stream = True
            await assert_ended_unavailable(frontend, 1, 2)
            await assert_serves(core, frontend, 3)
            assert (core.worker.servicer.epoch, core.script.plans[-1].epoch) == (2, 2)
            assert (await core.stats()).epoch == 2

    asyncio.run(run())


def test_a_stream_that_breaks_while_idle_is_noticed() -> None:
    async def run() -> None:
        async with running_core() as core:
            frontend = Frontend(core)
            await frontend.open()
            address = core.process._settings.worker
            await core.worker.stop()
            await becomes(core, NOT_SERVING)
            assert await health(core, "liveness") == SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await frontend.add(engine_request(1))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            again = ScriptedWorker(port=int(address.rpartition(":")[2]))
            await again.start()
            core.worker = again
            await assert_serves(core, frontend, 2)
            assert again.servicer.num_loads == 1
            await again.stop()

    asyncio.run(run())


def test_a_silent_worker_counts_as_lost_within_the_bound() -> None:
    async def run() -> None:
        async with running_core(worker_silence_s=0.5) as core:
            frontend = Frontend(core)
            await frontend.open()
            core.script.hold.clear()
            await frontend.add(engine_request(1))
            started_s = time.monotonic()
            await assert_ended_unavailable(frontend, 1)
            assert 0.4 < time.monotonic() - started_s < 4.0
            core.script.hold.set()
            await assert_serves(core, frontend, 2)

    asyncio.run(run())


def test_a_long_step_with_heartbeats_is_not_lost() -> None:
    async def run() -> None:
        async with running_core(ScriptedWorker(Script(heartbeat_s=0.1)), worker_silence_s=1.0) as core:
            frontend = Frontend(core)
            await frontend.open()
            core.script.hold.clear()
            await frontend.add(engine_request(1))
            await asyncio.sleep(2.0)
            assert await health(core) == SERVING
            core.script.hold.set()
            await frontend.ended(1)
            assert frontend.tokens[1] == expected_tokens(
                engine_request(
                    1,
                )
            )

    asyncio.run(run())


def test_the_watchdog_withdraws_readiness_and_gives_it_back() -> None:
    """Health follows the loop and the worker's progress, not the process.

    Case: vllm#17972
    Case: vllm#39863
    """

    async def run() -> None:
        worker = ScriptedWorker(Script(heartbeat_s=0.05))
        async with running_core(worker, step_limit_s=0.4) as core:
            frontend = Frontend(core)
            await frontend.open()
            core.script.hold.clear()
            await frontend.add(engine_request(1))
            await asyncio.sleep(1.0)
            assert await health(core) == SERVING, "a long step that gets on"
            core.script.is_progressing = False
            await becomes(core, NOT_SERVING)
            assert await health(core, "liveness") == SERVING
            core.script.is_progressing = True
            await becomes(core, SERVING)
            core.script.hold.set()
            await frontend.ended(1)

    asyncio.run(run())


def test_a_step_that_fails_in_band_ends_its_requests_with_the_reason() -> None:
    async def run() -> None:
        async with running_core() as core:
            frontend = Frontend(core)
            await frontend.open()
            core.script.step_error = InternalError("the logits are no numbers")
            await frontend.add(engine_request(1))
            await frontend.ended(1)
            assert frontend.finished[1].error_code == grpc.StatusCode.INTERNAL.value[0]
            assert "no numbers" in frontend.finished[1].error_message
            await assert_serves(core, frontend, 2)
            assert core.script.plans[-1].epoch == 1, "the worker was not lost"

    asyncio.run(run())


def test_a_worker_that_refuses_the_step_is_taken_anew() -> None:
    async def run() -> None:
        async with running_core() as core:
            frontend = Frontend(core)
            await frontend.open()
            core.worker.servicer.next_step = 7
            await frontend.add(engine_request(1))
            await assert_ended_unavailable(frontend, 1)
            await assert_serves(core, frontend, 2)

    asyncio.run(run())


def test_a_core_that_lost_its_worker_to_another_core_ends() -> None:
    async def run() -> None:
        async with running_core() as core:
            frontend = Frontend(core)
            await frontend.open()
            async with secure_or_insecure_channel(core.process._settings.worker) as channel:
                await worker_pb2_grpc.WorkerServiceStub(channel).Handshake(
                    worker_pb2.WorkerServiceHandshakeRequest(core_incarnation="another")
                )
            await frontend.add(engine_request(1))
            await assert_ended_unavailable(frontend, 1)
            await eventually(core.process.failed.done)
            assert "another core" in str(core.process.failed.exception())
            assert core.worker.servicer.core == "another", "it must not be taken back"

    asyncio.run(run())


def test_a_worker_that_comes_back_with_another_model_ends_the_core() -> None:
    async def run() -> None:
        async with running_core() as core:
            frontend = Frontend(core)
            await frontend.open()
            other = model_info()
            core.script.model = type(other)(**{**{n: getattr(other, n) for n in other.__slots__}, "weights_id": "w2"})
            core.script.break_stream = True
            await frontend.add(engine_request(1))
            await assert_ended_unavailable(frontend, 1)
            await eventually(core.process.failed.done)
            assert "another model" in str(core.process.failed.exception())

    asyncio.run(run())


@asynccontextmanager
async def starting_core(address: str, **settings: object) -> AsyncIterator[CoreProcess]:
    process = CoreProcess(CoreSettings(port=0, worker=address, **settings))  # type: ignore[arg-type]
    await process.start()
    try:
        yield process
    finally:
        await process.stop(0.0)


def test_start_up_has_a_deadline_with_the_reason() -> None:
    """Case: vllm#17676"""

    async def run() -> None:
        async with starting_core("127.0.0.1:1", startup_timeout_s=0.5) as process:
            with pytest.raises(UnavailableError, match=r"longer than 0.5 s .*127\.0\.0\.1:1.*refused"):
                await process.connect()
        worker = ScriptedWorker(Script(load_s=30))
        address = await worker.start()
        async with starting_core(address, startup_timeout_s=0.7) as process:
            with pytest.raises((UnavailableError, DeadlineExceededError), match="reading weights"):
                await process.connect()
        await worker.stop()

    asyncio.run(run())


def test_what_waiting_cannot_mend_ends_start_up_at_once() -> None:
    async def run() -> None:
        worker = ScriptedWorker(Script(load_error=NotFoundError("no model of this name", reason="MODEL_NOT_FOUND")))
        address = await worker.start()
        async with starting_core(address, startup_timeout_s=60.0) as process:
            with pytest.raises(NotFoundError, match="no model of this name"):
                await asyncio.wait_for(process.connect(), 5)
        await worker.stop()

    asyncio.run(run())


def test_while_loading_it_is_alive_not_ready_and_says_so() -> None:
    """Case: kserve#5062"""

    async def run() -> None:
        worker = ScriptedWorker(Script(load_s=0.6))
        address = await worker.start()
        async with starting_core(address) as process:
            connecting = asyncio.create_task(process.connect())
            async with secure_or_insecure_channel(f"127.0.0.1:{process.port}") as channel:
                core = Core(process, worker, channel)
                assert await health(core, "liveness") == SERVING
                assert await health(core) == NOT_SERVING
                request = core_pb2.HandshakeRequest(
                    frontend_incarnation="f", protocol_versions=types_pb2.ProtocolVersions(min=1, max=1)
                )
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await core.stub.Handshake(request)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                details = dict(caught.value.trailing_metadata() or ())
                assert b"RetryInfo" in details["grpc-status-details-bin"]
                await connecting
                assert await health(core) == SERVING
                assert (await core.stub.Handshake(request)).core_incarnation == process.incarnation
        await worker.stop()

    asyncio.run(run())


class WorkerProcess:
    """The scripted worker as a process, to be killed and frozen."""

    def __init__(self, step_s: float = 0.0) -> None:
        script = Path(__file__).with_name("worker_server.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(step_s)], stdout=subprocess.PIPE, text=True, env=os.environ
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_end_within_five_seconds_of_a_dead_or_frozen_worker_process(how: signal.Signals) -> None:
    async def run() -> None:
        worker = WorkerProcess(step_s=0.01)
        try:
            process = CoreProcess(CoreSettings(port=0, worker=worker.address))
            await process.start()
            await process.connect()
            async with secure_or_insecure_channel(f"127.0.0.1:{process.port}") as channel:
                core = Core(process, ScriptedWorker(), channel)
                frontend = Frontend(core)
                await frontend.open()
                await frontend.add(*(engine_request(i, max_tokens=50_000) for i in (1, 2, 3)))
                await frontend.reads(lambda: len(frontend.tokens[3]) > 3)
                worker.process.send_signal(how)
                started_s = time.monotonic()
                await assert_ended_unavailable(frontend, 1, 2, 3)
                assert time.monotonic() - started_s < 5.0
                await becomes(core, NOT_SERVING)
                if how is signal.SIGSTOP:
                    worker.process.send_signal(signal.SIGCONT)
                    await becomes(core, SERVING)
                    await frontend.add(engine_request(4))
                    await frontend.ended(4)
                    assert frontend.tokens[4] == expected_tokens(
                        engine_request(
                            4,
                        )
                    )
            await process.stop(0.0)
        finally:
            worker.end()

    asyncio.run(run())
