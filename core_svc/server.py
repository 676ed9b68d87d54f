"""EngineCoreService: what frontends call, translated to the engine and back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc.aio

from core_svc import wire
from core_svc.detailed_stats import DetailedStats
from core_svc.engine import EngineCore
from core_svc.execute_client import Progress
from core_svc.kv_event_log import KvEventLog
from core_svc.output_hub import OutputHub, OutputStream
from core_svc.recent_steps import RecentSteps
from core_svc.watchdog import step_age_ms
from pagewire.engine import AbortReason, CommandResult, CoreStats, EngineInfo, GetStats
from pagewire.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError, violation
from pagewire.types_wire import PROTOCOL_VERSION, protocol_versions, tokenizer_chunks
from pagewire.v1 import core_pb2, core_pb2_grpc

logger = logging.getLogger(__name__)

SERVICE_NAME = "pagewire.v1.EngineCoreService"
RETRY_AFTER_S = 1.0
MAX_REQUESTS_PER_ADD = 1024

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Serving:
    """What the servicer needs of a core that has its worker."""

    engine: EngineCore
    info: EngineInfo
    tokenizer_files: Mapping[str, bytes]
    progress: Progress
    recent_steps: RecentSteps | None = None
    """The engine's, for live views."""
    worker_target: str = ""


async def _result(future: Future[T]) -> T:
    """Awaits an engine's future. A cancelled call must not cancel it: the engine will set it all the same."""
    inner = asyncio.wrap_future(future)
    inner.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(inner)


class EngineCoreServicer(core_pb2_grpc.EngineCoreServiceServicer):
    """The service. `serving` is None until the model is loaded; `unavailable` says why work is refused, if it is."""

    def __init__(self, core_incarnation: str, hub: OutputHub, kv_log: KvEventLog) -> None:
        self._core_incarnation = core_incarnation
        self._hub = hub
        self._kv_log = kv_log
        self._kv_appended = asyncio.Event()
        hub.add_wake_listener(self._wake_kv_readers)
        hub.on_dropped = self._on_dropped
        self._serving: Serving | None = None
        self._stats: DetailedStats | None = None
        self.unavailable: str = "the core is loading its model"

    @property
    def serving(self) -> Serving | None:
        """What is served; None until the model is loaded."""
        return self._serving

    @serving.setter
    def serving(self, serving: Serving) -> None:
        self._serving = serving
        self._stats = DetailedStats(serving.engine, serving.info, serving.recent_steps, serving.worker_target)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service."""
        core_pb2_grpc.add_EngineCoreServiceServicer_to_server(self, server)

    async def Handshake(self, request: core_pb2.HandshakeRequest, context: Context) -> core_pb2.HandshakeResponse:
        """Protocol first, so that a peer of another version learns that at once."""
        wire.incarnation_from_proto(request.frontend_incarnation, "frontend_incarnation")
        spoken = request.protocol_versions
        if not spoken.min <= PROTOCOL_VERSION <= spoken.max:
            raise FailedPreconditionError(
                f"protocol_versions is [{spoken.min}, {spoken.max}]: this core speaks minor version "
                f"{PROTOCOL_VERSION} of pagewire.v1",
                reason="PROTOCOL_VERSION_MISMATCH",
            )
        return wire.engine_info_to_proto(self._require_serving().info, protocol_versions())

    async def Add(self, request: core_pb2.AddRequest, context: Context) -> core_pb2.AddResponse:
        """All or none; a repeated one changes nothing, and succeeds even where new ones would be refused."""
        incarnation = wire.incarnation_from_proto(request.frontend_incarnation, "frontend_incarnation")
        if request.requests and self._hub.knows_all(incarnation, (r.request_id for r in request.requests)):
            return core_pb2.AddResponse(core_incarnation=self._core_incarnation)
        serving = self._require_serving()
        buffer = self._hub.require_open(incarnation)
        if not 0 < len(request.requests) <= MAX_REQUESTS_PER_ADD:
            limit = f"must have 1 to {MAX_REQUESTS_PER_ADD} entries"
            raise InvalidArgumentError([violation("requests", f"{len(request.requests)} entries", limit)])
        requests = wire.requests_from_proto(request)
        # Before the engine has them: it may publish their end before add returns.
        new_ids = buffer.register(r.request_id for r in requests)
        try:
            serving.engine.add(incarnation, requests)
        except BaseException:
            buffer.unregister(new_ids)
            raise
        return core_pb2.AddResponse(core_incarnation=self._core_incarnation)

    async def Abort(
        self, request: core_pb2.EngineCoreServiceAbortRequest, context: Context
    ) -> core_pb2.EngineCoreServiceAbortResponse:
        """One outcome per id."""
        engine = self._require_engine()
        incarnation = wire.incarnation_from_proto(request.frontend_incarnation, "frontend_incarnation")
        request_ids, reason = wire.abort_from_proto(request)
        outcomes = await _result(engine.abort(incarnation, request_ids, reason))
        return wire.abort_outcomes_to_proto(outcomes)

    async def Utility(self, request: core_pb2.UtilityRequest, context: Context) -> core_pb2.UtilityResponse:
        """One of the list."""
        command, engine = wire.command_from_proto(request), self._require_engine()
        result: CommandResult
        if isinstance(command, GetStats) and command.detail is not None and self._stats is not None:
            result = await self._stats.answer(command.detail, self.unavailable)
        else:
            result = await _result(engine.utility(command))
        if isinstance(result, CoreStats):
            result = replace(result, num_frontends=self._hub.num_open)
        return wire.command_result_to_proto(command, result)

    async def GetTokenizer(
        self, request: core_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[core_pb2.GetTokenizerResponse]:
        """The files that the worker exported."""
        for chunk in tokenizer_chunks(self._require_serving().tokenizer_files):
            yield wire.tokenizer_chunk_to_proto(chunk)

    async def StreamKvEvents(
        self, request: core_pb2.StreamKvEventsRequest, context: Context
    ) -> AsyncIterator[core_pb2.StreamKvEventsResponse]:
        """From a sequence number on, for ever. The reader's place is all that is kept for it."""
        next_sequence = request.start_sequence
        while True:
            appended = self._kv_appended
            batches = self._kv_log.read(next_sequence)
            for batch in batches:
                yield wire.kv_events_to_proto(batch, self._core_incarnation)
                next_sequence = batch.sequence + 1
            if not batches:
                await appended.wait()

    async def StreamOutputs(  # type: ignore[override]
        self, request_iterator: AsyncIterator[core_pb2.StreamOutputsRequest], context: Context
    ) -> None:
        """The one stream of a frontend. Half-closing it says only that no more acknowledgements come.

        Written with `context.write` and not as a generator, because it also ends for reasons that are no output.
        """
        self._require_engine()
        first = await anext(request_iterator, None)
        if first is None:
            raise InvalidArgumentError([violation("message", "nothing", "must be open in the first message")])
        incarnation, num_received = wire.open_from_proto(first)
        engine = self._require_engine()
        stream, unknown, unwanted = self._hub.open(incarnation, num_received)
        tasks: list[asyncio.Task[None]] = []
        try:
            if unwanted:
                logger.info("frontend %s came back without %d requests: aborted", incarnation, len(unwanted))
                engine.abort(incarnation, unwanted, AbortReason.CLIENT)
            await context.write(wire.opened_to_proto(self._core_incarnation, unknown))
            for work in (self._send(stream, context), self._receive(stream, request_iterator)):
                task = asyncio.create_task(work)
                task.add_done_callback(lambda done: _end_with(stream, done))
                tasks.append(task)
            await stream.ended
        finally:
            for task in tasks:
                task.cancel()
            self._hub.close(stream)

    async def _send(self, stream: OutputStream, context: Context) -> None:
        while True:
            await stream.wake.wait()
            stream.wake.clear()
            if stream.is_heartbeat_due:
                stream.is_heartbeat_due = False
                await context.write(self._heartbeat())
            # The buffer is the frontend's: what a stream took after another one has its place would be lost.
            while not stream.ended.done() and (outputs := stream.session.buffer.take()) is not None:
                await context.write(wire.outputs_to_proto(outputs))

    async def _receive(
        self, stream: OutputStream, request_iterator: AsyncIterator[core_pb2.StreamOutputsRequest]
    ) -> None:
        async for message in request_iterator:
            sequence, finished_ids = wire.acknowledge_from_proto(message)
            if stream.ended.done():
                return
            stream.session.buffer.acknowledge(sequence, finished_ids)

    def _heartbeat(self) -> core_pb2.StreamOutputsResponse:
        serving = self.serving
        if serving is None:
            return wire.heartbeat_to_proto(0, 0, 0)
        engine = serving.engine
        age_ms = step_age_ms(time.monotonic_ns(), engine.step_started_ns)
        return wire.heartbeat_to_proto(age_ms, engine.num_steps, serving.progress.value)

    def _require_serving(self) -> Serving:
        """What new work needs: a loaded model, a worker, no drain."""
        if self.serving is None or self.unavailable:
            raise UnavailableError(self.unavailable or "the core is loading", retry_after_s=RETRY_AFTER_S)
        return self.serving

    def _require_engine(self) -> EngineCore:
        """What the handling of present work needs: an engine, draining or not."""
        if self.serving is None:
            raise UnavailableError(self.unavailable, retry_after_s=RETRY_AFTER_S)
        return self.serving.engine

    def _wake_kv_readers(self) -> None:
        self._kv_appended.set()
        self._kv_appended = asyncio.Event()

    def _on_dropped(self, incarnation: str, reason: AbortReason) -> None:
        if self.serving is not None:
            self.serving.engine.drop_frontend(incarnation, reason)


def _end_with(stream: OutputStream, task: asyncio.Task[None]) -> None:
    """A sender or receiver that failed ends the stream; one that reached the end of acknowledgements does not."""
    if not task.cancelled() and (error := task.exception()) is not None:
        stream.end(error)
