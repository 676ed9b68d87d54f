"""`python -m core_svc` as a process: ready line, draining, failed start-up, quiet idling."""

from __future__ import annotations

import asyncio
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import psutil
import pytest

from pagewire.errors import UnavailableError
from pagewire.runtime.ready import Ready, parse_ready
from pagewire.runtime.transport import secure_or_insecure_channel
from pagewire.v1 import core_pb2, types_pb2
from tests.core_edge.harness import Core, Frontend, engine_request, eventually
from tests.core_edge.worker_server import Script, ScriptedWorker, expected_tokens


class CoreCommand:
    """A core process, its output read as it comes."""

    def __init__(self, *arguments: str, program: Sequence[str] = ("-m", "core_svc")) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *program, "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors: list[str] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        assert self.process.stdout is not None and self.process.stderr is not None
        self._threads = [
            threading.Thread(target=lambda: [self._lines.put(line) for line in self.process.stdout or ()]),
            threading.Thread(target=lambda: self.errors.extend(self.process.stderr or ())),
        ]
        for thread in self._threads:
            thread.start()

    def ready(self, timeout_s: float = 20.0) -> Ready:
        try:
            ready = parse_ready(self._lines.get(timeout=timeout_s))
        except queue.Empty:
            raise AssertionError(f"not ready: {self.errors}") from None
        assert ready is not None
        return ready

    def wait(self, timeout_s: float = 20.0) -> int:
        status = self.process.wait(timeout_s)
        for thread in self._threads:
            thread.join(5)
        return status

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        assert self.process.stdout is not None and self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()


class _Process:
    """What the harness needs of a core in another process."""

    def __init__(self, ready: Ready) -> None:
        self.incarnation = ready.incarnation
        self.port = ready.port


@asynccontextmanager
async def core_command(
    *arguments: str, script: Script | None = None, program: Sequence[str] = ("-m", "core_svc")
) -> AsyncIterator[tuple[CoreCommand, Core]]:
    """A ready core process over a worker in this one."""
    worker = ScriptedWorker(script)
    address = await worker.start()
    command = CoreCommand("--worker", address, *arguments, program=program)
    try:
        ready = await asyncio.to_thread(command.ready)
        async with secure_or_insecure_channel(ready.address) as channel:
            yield command, Core(_Process(ready), worker, channel)  # type: ignore[arg-type]
        assert worker.servicer.executor.violations == []
    finally:
        await asyncio.to_thread(command.end)
        await worker.stop()


def test_sigterm_lets_running_requests_finish_and_exits_with_zero() -> None:
    """Case: llm-d-router#1885"""

    async def run() -> None:
        async with core_command("--drain-s", "20", script=Script(step_s=0.01)) as (command, core):
            frontend = Frontend(core)
            await frontend.open()
            request = engine_request(1, max_tokens=100)
            await frontend.add(request)
            await frontend.reads(lambda: len(frontend.tokens[1]) > 3)
            command.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await frontend.add(engine_request(2))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await frontend.ended(1)
            assert frontend.tokens[1] == expected_tokens(request)
            assert await asyncio.to_thread(command.wait) == 0
            assert (await frontend.stream_error()).code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


def test_what_the_drain_does_not_wait_for_is_aborted_and_delivered() -> None:
    async def run() -> None:
        async with core_command("--drain-s", "0.3", script=Script(step_s=0.01)) as (command, core):
            frontend = Frontend(core)
            await frontend.open()
            await frontend.add(engine_request(1, max_tokens=60_000))
            await frontend.reads(lambda: len(frontend.tokens[1]) > 3)
            command.process.send_signal(signal.SIGTERM)
            await frontend.ended(1)
            assert frontend.finished[1].reason == types_pb2.FINISH_REASON_ABORT
            assert frontend.finished[1].abort_reason == types_pb2.ABORT_REASON_SHUTDOWN
            assert await asyncio.to_thread(command.wait) == 0

    asyncio.run(run())


def test_a_wedged_worker_does_not_hold_up_the_shutdown() -> None:
    """Case: vllm#48966"""

    async def run() -> None:
        async with core_command("--drain-s", "0.2", script=Script(heartbeat_s=0.1)) as (command, core):
            frontend = Frontend(core)
            await frontend.open()
            core.script.hold.clear()
            await frontend.add(engine_request(1))
            await asyncio.sleep(0.3)
            started_s = time.monotonic()
            command.process.send_signal(signal.SIGTERM)
            await frontend.ended(1)
            assert frontend.finished[1].error_code == grpc.StatusCode.UNAVAILABLE.value[0]
            assert await asyncio.to_thread(command.wait) == 0
            assert time.monotonic() - started_s < 5

    asyncio.run(run())


def test_a_core_waits_for_its_worker() -> None:
    async def run() -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = CoreCommand("--worker", f"127.0.0.1:{port}")
        try:
            await asyncio.sleep(1.5)
            assert command.process.poll() is None
            worker = ScriptedWorker(port=port)
            await worker.start()
            assert (await asyncio.to_thread(command.ready)).service == "core"
            command.process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(command.wait) == 0
            await worker.stop()
        finally:
            await asyncio.to_thread(command.end)

    asyncio.run(run())


def test_a_failed_start_up_says_why_on_one_line() -> None:
    command = CoreCommand("--worker", "127.0.0.1:1", "--startup-timeout-s", "0.5")
    try:
        assert command.wait() == 1
        last = command.errors[-1]
        assert "127.0.0.1:1" in last and "--startup-timeout-s" in last and "refused" in last
    finally:
        command.end()


def test_a_load_that_fails_again_and_again_says_why_once() -> None:
    error = UnavailableError("the hub can't be reached", reason="MODEL_FETCH_FAILED")

    async def run() -> None:
        worker = ScriptedWorker(Script(load_error=error))
        command = CoreCommand("--worker", await worker.start(), "--startup-timeout-s", "4")
        try:
            assert await asyncio.to_thread(command.wait) == 1
            assert worker.servicer.num_loads > 2
            for said in ("the hub can't be reached; trying again", "incarnation", "the worker loads"):
                assert sum(said in line for line in command.errors) == 1, command.errors
            assert "the hub can't be reached" in command.errors[-1]
        finally:
            await asyncio.to_thread(command.end)
            await worker.stop()

    asyncio.run(run())


def test_sigterm_while_waiting_for_the_worker_ends_at_once() -> None:
    command = CoreCommand("--worker", "127.0.0.1:1")
    try:
        deadline_s = time.monotonic() + 15
        while not any("trying again" in line for line in command.errors):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        command.process.send_signal(signal.SIGTERM)
        assert command.wait(8) == 0
    finally:
        command.end()


def test_a_taken_port_is_a_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = CoreCommand("--port", str(taken.getsockname()[1]))
        try:
            assert command.wait() == 1
            assert "--port" in command.errors[-1]
        finally:
            command.end()


def test_bad_settings_are_refused_by_name() -> None:
    command = CoreCommand("--policy", "lottery")
    try:
        assert command.wait() == 2
        assert "--policy" in "".join(command.errors) and "lottery" in "".join(command.errors)
    finally:
        command.end()


def test_a_lost_engine_ends_the_process_with_an_error() -> None:
    """Case: vllm#48966"""

    async def run() -> None:
        async with core_command() as (command, core):
            worker_stub = core.worker.servicer
            worker_stub.core = "another"
            frontend = Frontend(core)
            await frontend.open()
            await frontend.add(engine_request(1))
            await frontend.ended(1)
            assert await asyncio.to_thread(command.wait) == 1
            assert "another core" in command.errors[-1] or any("another core" in line for line in command.errors)

    asyncio.run(run())


FAULTY = """
import sys
from core_svc.__main__ import main
from core_svc.scheduler import Scheduler
schedule = Scheduler.schedule
def faulty(self, **arguments):
    if self.num_steps == 5:
        raise ZeroDivisionError("a fault of ours")
    return schedule(self, **arguments)
Scheduler.schedule = faulty
sys.exit(main())
"""


def test_a_fault_in_the_loop_ends_streams_calls_and_process() -> None:
    """Case: vllm#48966"""

    async def run() -> None:
        async with core_command(program=("-c", FAULTY)) as (command, core):
            frontend = Frontend(core)
            await frontend.open()
            pause = core_pb2.UtilityRequest.Pause(mode=core_pb2.PAUSE_MODE_WAIT)
            await frontend.add(engine_request(1, max_tokens=50))
            waiting = core.stub.Utility(core_pb2.UtilityRequest(pause=pause), timeout=15)
            error = await frontend.stream_error()
            assert error.code() is grpc.StatusCode.UNAVAILABLE and "a fault of ours" in str(error.details())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await waiting
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert await asyncio.to_thread(command.wait, 5.0) == 1
            assert "ZeroDivisionError: a fault of ours" in "".join(command.errors)

    asyncio.run(run())


def test_an_idle_core_is_quiet() -> None:
    """Under 2 % of a core with a frontend connected, and the first token after idling is not delayed.

    Case: vllm#16968
    """

    async def run() -> None:
        async with core_command() as (command, core):
            frontend = Frontend(core)
            await frontend.open()
            await frontend.add(engine_request(1))
            await frontend.ended(1)
            await eventually(lambda: len(frontend.stats) > 0)
            process = psutil.Process(command.process.pid)
            before, started_s = process.cpu_times(), time.monotonic()
            await asyncio.sleep(3.0)
            after, elapsed_s = process.cpu_times(), time.monotonic() - started_s
            used_s = after.user + after.system - before.user - before.system
            assert used_s / elapsed_s < 0.02, f"{100 * used_s / elapsed_s:.1f} % of a core"
            asked_s = time.monotonic()
            await frontend.add(engine_request(2))
            await frontend.reads(lambda: len(frontend.tokens[2]) > 0)
            assert time.monotonic() - asked_s < 0.5

    asyncio.run(run())
