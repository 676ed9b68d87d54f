"""Whatever arrives, the core answers with a status and goes on serving the others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.v1 import core_pb2
from tests.core_edge.harness import Core, Frontend, engine_request, running_core
from tests.core_edge.proto_strategies import messages
from tests.core_edge.worker_server import expected_tokens

SERVICE = core_pb2.DESCRIPTOR.services_by_name["EngineCoreService"]
METHODS = sorted(SERVICE.methods_by_name)
FRONTEND = "the-fuzzer"
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
WRITE_TOO_LATE = "Internal error from Core"
"""How grpc.aio's client words a write to a stream that the server has ended; the server's status is lost then."""
NO_ANSWER = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE}


class RunningCore:
    """A core whose event loop runs on a thread, for tests that are plain functions."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="core-under-fuzz")
        self._thread.start()
        self._context = running_core()
        self.core: Core = self.call(self._context.__aenter__())
        self.num_checks = 0

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def close(self) -> None:
        self.call(self._context.__aexit__(None, None, None))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    def assert_serves(self) -> None:
        """Another frontend gets its tokens, however the core was treated."""

        async def check() -> None:
            frontend = Frontend(self.core)
            await frontend.open()
            self.num_checks += 1
            request = engine_request(self.num_checks)
            await frontend.add(request)
            await frontend.ended(request.request_id)
            assert frontend.tokens[request.request_id] == expected_tokens(request)
            await frontend.break_stream()

        # A fuzzed pause or sleep is obeyed, as it should be.
        for command in ("wake_up", "resume"):
            self.call(self._utility(command))
        self.call(check())

    async def _utility(self, command: str) -> None:
        request = core_pb2.UtilityRequest()
        getattr(request, command).SetInParent()
        await self.core.stub.Utility(request, timeout=10)


@pytest.fixture(scope="module")
def running() -> Iterator[RunningCore]:
    core = RunningCore()
    yield core
    core.close()


async def call_method(core: Core, method: str, payloads: list[bytes]) -> grpc.StatusCode:
    """Sends raw messages; the status, OK where an answer came (a stream's first answer counts)."""
    descriptor = SERVICE.methods_by_name[method]
    path = f"/{SERVICE.full_name}/{method}"
    try:
        if descriptor.client_streaming:
            stream = core.channel.stream_stream(path)(timeout=5)
            for payload in payloads:
                await stream.write(payload)
            await stream.done_writing()
            for _ in payloads:
                await asyncio.wait_for(stream.read(), 1.0)
            stream.cancel()
        elif descriptor.server_streaming:
            answers = core.channel.unary_stream(path)(payloads[0], timeout=0.3)
            await answers.read()
            answers.cancel()
        else:
            await core.channel.unary_unary(path)(payloads[0], timeout=2)
    except grpc.aio.AioRpcError as error:
        if error.details() == WRITE_TOO_LATE:
            return grpc.StatusCode.CANCELLED
        return error.code()
    except (asyncio.InvalidStateError, grpc.aio.UsageError):
        # The stream ended while more was written to it.
        return await stream.code()  # type: ignore[no-any-return]
    except TimeoutError:
        stream.cancel()
    return grpc.StatusCode.OK


def with_fuzzer_open(running: RunningCore, message: Message) -> Message:
    """Half of the messages come from a frontend that is known."""
    if hasattr(message, "frontend_incarnation") and len(message.frontend_incarnation) % 2 == 0:
        message.frontend_incarnation = FRONTEND
    return message


@pytest.mark.parametrize("method", METHODS)
def test_any_message_gets_a_status(running: RunningCore, method: str) -> None:
    """Well-formed protobuf with any content."""
    descriptor = SERVICE.methods_by_name[method]
    frontend = Frontend(running.core, FRONTEND)
    running.call(frontend.open(is_reading=False))

    @FUZZ
    @given(st.lists(messages(descriptor.input_type), min_size=1, max_size=3 if descriptor.client_streaming else 1))
    def check(batch: list[Message]) -> None:
        payloads = [with_fuzzer_open(running, message).SerializeToString() for message in batch]
        code = running.call(call_method(running.core, method, payloads))
        assert code not in NO_ANSWER, code

    check()
    running.assert_serves()
    running.call(frontend.break_stream())


@pytest.mark.parametrize("method", METHODS)
def test_bytes_that_are_no_message_get_a_status(running: RunningCore, method: str) -> None:
    @FUZZ
    @given(st.binary(max_size=60))
    def check(payload: bytes) -> None:
        running.call(call_method(running.core, method, [payload]))

    check()
    running.assert_serves()


@FUZZ
@given(message=messages(core_pb2.DESCRIPTOR.message_types_by_name["EngineRequest"]))
def test_a_request_of_any_content_harms_nobody(running: RunningCore, message: core_pb2.EngineRequest) -> None:
    """Near misses: a good request with some fields replaced."""
    request = engine_request(7_000_000 + message.request_id % 1_000_000)
    request.MergeFrom(message)

    async def add() -> None:
        frontend = Frontend(running.core)
        await frontend.open()
        try:
            await frontend.add(request)
        except grpc.aio.AioRpcError as error:
            assert error.code() not in NO_ANSWER, error
        else:
            await frontend.ended(request.request_id)
        await frontend.break_stream()

    running.call(add())
    running.assert_serves()
