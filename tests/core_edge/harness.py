"""A core over a scripted worker, and a frontend that checks what it receives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import numpy as np
import pytest

from core_svc.settings import CoreSettings
from core_svc.startup import CoreProcess
from pagewire.columns import pack_int32, pack_uint64, unpack_int32, unpack_uint64
from pagewire.runtime.lifetime import new_incarnation
from pagewire.runtime.transport import secure_or_insecure_channel
from pagewire.v1 import core_pb2, core_pb2_grpc, types_pb2
from tests.core_edge.worker_server import Script, ScriptedWorker

TIMEOUT_S = 15.0


async def eventually(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Waits until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def engine_request(request_id: int, prompt: Iterable[int] | None = None, max_tokens: int = 5) -> core_pb2.EngineRequest:
    """A greedy request; without a prompt it gets three tokens that are its own."""
    return core_pb2.EngineRequest(
        request_id=request_id,
        prompt_token_ids=pack_int32((1, 2, 3 + request_id % 1000) if prompt is None else prompt),
        sampling_params=types_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, seed=1),
    )


class Core:
    """A running core and a channel to it."""

    def __init__(self, process: CoreProcess, worker: ScriptedWorker, channel: grpc.aio.Channel) -> None:
        self.process = process
        self.worker = worker
        self.script = worker.script
        self.channel = channel
        self.stub = core_pb2_grpc.EngineCoreServiceStub(channel)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.process.port}"

    async def stats(self) -> core_pb2.CoreStats:
        request = core_pb2.UtilityRequest(stats=core_pb2.UtilityRequest.Stats())
        return (await self.stub.Utility(request, timeout=TIMEOUT_S)).stats

    async def assert_empty(self) -> None:
        """Nothing of any request is left: queues, blocks."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                stats = await self.stats()
                if (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0):
                    return
                await asyncio.sleep(0.02)


@asynccontextmanager
async def running_core(worker: ScriptedWorker | None = None, **settings: Any) -> AsyncIterator[Core]:
    """A core that is ready, over `worker`."""
    worker = worker or ScriptedWorker()
    address = await worker.start()
    values = {"port": 0, "worker": address, "heartbeat_interval_ms": 50, "lease_ms": 2000, "worker_silence_s": 2.0}
    process = CoreProcess(CoreSettings(**{**values, **settings}))
    await process.start()
    try:
        await process.connect()
        async with secure_or_insecure_channel(f"127.0.0.1:{process.port}") as channel:
            yield Core(process, worker, channel)
        assert worker.servicer.executor.violations == []
    finally:
        await process.stop(0.0)
        await worker.stop()


class Frontend:
    """One frontend incarnation: what it has of each request; gaps and repeats are errors."""

    def __init__(self, core: Core, incarnation: str | None = None, channel: grpc.aio.Channel | None = None) -> None:
        self.core = core
        self.stub = core.stub if channel is None else core_pb2_grpc.EngineCoreServiceStub(channel)
        self.incarnation = incarnation or new_incarnation()
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, core_pb2.StepOutputs.Finished] = {}
        self.num_messages = 0
        self.num_rows = 0
        self.heartbeats: list[types_pb2.Heartbeat] = []
        self.stats: list[core_pb2.CoreStats] = []
        self.last_sequence = 0
        self.error: grpc.aio.AioRpcError | None = None
        self.unknown: list[int] = []
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None

    async def open(self, *, is_reading: bool = True) -> None:
        """Opens the stream, or opens it again with what is already there."""
        wanted = [request_id for request_id in self.tokens if request_id not in self.finished]
        message = core_pb2.StreamOutputsRequest()
        message.open.frontend_incarnation = self.incarnation
        message.open.request_ids = pack_uint64(np.array(wanted, np.uint64))
        message.open.num_received = pack_int32([len(self.tokens[i]) for i in wanted])
        self._call = self.stub.StreamOutputs()
        await self._call.write(message)
        opened = await asyncio.wait_for(self._call.read(), TIMEOUT_S)
        if opened is grpc.aio.EOF:
            raise AssertionError(f"the stream ended: {await self._call.code()} {await self._call.details()}")
        assert opened.opened.core_incarnation == self.core.process.incarnation
        self.unknown = unpack_uint64(opened.opened.unknown_request_ids).tolist()
        if is_reading:
            self.start_reading()

    def start_reading(self) -> None:
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self.take(message)
        except grpc.aio.AioRpcError as error:
            self.error = error
        # The cancellation of a call that the test broke off.
        except asyncio.CancelledError:
            if not self._call.cancelled():
                raise

    async def read_one(self) -> core_pb2.StreamOutputsResponse:
        message = await asyncio.wait_for(self._call.read(), TIMEOUT_S)
        if message is grpc.aio.EOF:
            raise AssertionError(f"the stream ended: {await self._call.code()} {await self._call.details()}")
        self.take(message)
        return message  # type: ignore[no-any-return]

    def take(self, message: core_pb2.StreamOutputsResponse) -> None:
        if message.WhichOneof("message") == "heartbeat":
            self.heartbeats.append(message.heartbeat)
            return
        outputs = message.outputs
        self.num_messages += 1
        assert outputs.sequence > self.last_sequence
        self.last_sequence = outputs.sequence
        if outputs.HasField("stats"):
            self.stats.append(outputs.stats)
        ids = unpack_uint64(outputs.request_ids).tolist()
        self.num_rows += len(ids)
        offsets, counts = unpack_int32(outputs.offsets).tolist(), unpack_int32(outputs.num_tokens).tolist()
        tokens, start = unpack_int32(outputs.token_ids).tolist(), 0
        for request_id, offset, count in zip(ids, offsets, counts, strict=True):
            mine = self.tokens.setdefault(request_id, [])
            assert count == 0 or offset == len(mine), f"request {request_id}: offset {offset} after {len(mine)} tokens"
            mine.extend(tokens[start : start + count])
            start += count
        for entry in outputs.finished:
            assert ids[entry.row] not in self.finished, "a second end"
            self.finished[ids[entry.row]] = entry

    async def add(self, *requests: core_pb2.EngineRequest) -> core_pb2.AddResponse:
        message = core_pb2.AddRequest(frontend_incarnation=self.incarnation, requests=requests)
        for request in requests:
            # What was generated elsewhere counts, and is not sent again.
            if request.output_token_ids and len(request.output_token_ids) % 4 == 0:
                self.tokens[request.request_id] = unpack_int32(request.output_token_ids).tolist()
        response = await self.core.stub.Add(message, timeout=TIMEOUT_S)
        for request in requests:
            self.tokens.setdefault(request.request_id, [])
        return response  # type: ignore[no-any-return]

    async def abort(self, *request_ids: int, reason: int = types_pb2.ABORT_REASON_CLIENT) -> list[int]:
        message = core_pb2.EngineCoreServiceAbortRequest(
            frontend_incarnation=self.incarnation,
            request_ids=pack_uint64(np.array(request_ids, np.uint64)),
            reason=reason,  # type: ignore[arg-type]
        )
        return list((await self.core.stub.Abort(message, timeout=TIMEOUT_S)).outcomes)

    async def acknowledge(self, sequence: int | None = None) -> None:
        message = core_pb2.StreamOutputsRequest()
        message.acknowledge.sequence = self.last_sequence if sequence is None else sequence
        await self._call.write(message)

    async def ended(self, *request_ids: int) -> None:
        await self.reads(lambda: all(i in self.finished for i in request_ids))

    async def reads(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Waits for something that reading brings about; raises what stopped the reading."""
        reader = self._reader
        assert reader is not None
        await eventually(lambda: condition() or reader.done(), timeout_s)
        if not condition():
            reader.result()
            raise AssertionError(f"the stream ended: {self.error}")

    async def break_stream(self) -> None:
        """The connection is gone: nothing more is read."""
        self._call.cancel()
        if self._reader is not None:
            await asyncio.wait({self._reader})
            if not self._reader.cancelled() and (error := self._reader.exception()) is not None:
                raise error

    async def stream_error(self) -> grpc.aio.AioRpcError:
        await eventually(lambda: self.error is not None)
        assert self.error is not None
        return self.error


def with_core(body: Callable[[Core], Awaitable[None]], script: Script | None = None, **settings: Any) -> None:
    """Runs the body against a core; the core must end cleanly too."""

    async def run() -> None:
        async with running_core(ScriptedWorker(script), **settings) as core:
            await body(core)

    asyncio.run(run())


async def refused(call: Awaitable[Any], code: grpc.StatusCode) -> str:
    """The message of a call that must fail with `code`."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is code, caught.value
    return str(caught.value.details())
