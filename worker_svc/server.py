"""WorkerService: what a core calls, handed to the compute thread and back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import grpc.aio

from pagewire.errors import (
    AbortedError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    PagewireError,
    UnavailableError,
    UnimplementedError,
    violation,
)
from pagewire.plan import StepResult
from pagewire.runtime.process_stats import process_stats
from pagewire.types_wire import model_info_to_proto, protocol_versions, tokenizer_chunks
from pagewire.v1 import worker_pb2, worker_pb2_grpc
from worker_svc import wire
from worker_svc.compute import ComputeThread
from worker_svc.execute_session import ExecuteSession, StepFailed
from worker_svc.metrics import StepMetrics
from worker_svc.observer import ExecuteObserver
from worker_svc.worker import Worker

logger = logging.getLogger(__name__)

SERVICE_NAME = "pagewire.v1.WorkerService"
HEARTBEAT_INTERVAL_S = 1.0
IDLE_END_S = 2.0
"""A worker that shuts down waits so long for another plan: with work to do, a core sends one after the other."""
DRAIN_POLL_S = 0.05

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """The service of one worker. Its one client is the core that made the newest handshake."""

    def __init__(
        self,
        worker: Worker,
        compute: ComputeThread,
        incarnation: str,
        observers: Sequence[ExecuteObserver] = (),
        metrics: StepMetrics | None = None,
    ) -> None:
        self._worker = worker
        self._compute = compute
        self._incarnation = incarnation
        self._observers = observers
        self._metrics = metrics
        self._core = ""
        self._session: ExecuteSession | None = None
        self._is_ending = False

    async def Handshake(
        self, request: worker_pb2.WorkerServiceHandshakeRequest, context: Context
    ) -> worker_pb2.WorkerServiceHandshakeResponse:
        """Makes this core the one that is served."""
        core = wire.incarnation_from_proto(request.core_incarnation)
        if self._is_ending:
            raise _shutting_down()
        spoken, own = request.protocol_versions, protocol_versions()
        if spoken.max < own.min or own.max < spoken.min:
            raise FailedPreconditionError(
                f"protocol_versions is [{spoken.min}, {spoken.max}]: this worker speaks minor versions "
                f"{own.min} to {own.max} of pagewire.v1",
                reason="PROTOCOL_VERSION_MISMATCH",
            )
        if core != self._core:
            if self._core:
                logger.info("core %s takes over from core %s", core, self._core)
            self._core = core
            self._end_session(self._fenced())
        model = self._worker.model
        return worker_pb2.WorkerServiceHandshakeResponse(
            worker_incarnation=self._incarnation,
            protocol_versions=own,
            rank=0,
            world_size=1,
            device=self._worker.device,
            model=None if model is None else model_info_to_proto(model),
            epoch=self._worker.epoch,
            step=self._worker.step,
        )

    async def LoadModel(
        self, request: worker_pb2.LoadModelRequest, context: Context
    ) -> AsyncIterator[worker_pb2.LoadModelResponse]:
        """Progress while it loads, the model at the end. A load goes on when the core that asked goes away."""
        core = self._require(request.core_incarnation)
        arguments = wire.load_arguments_from_proto(request)
        loop, stages = asyncio.get_running_loop(), asyncio.Queue[tuple[str, float] | None]()

        def on_progress(stage: str, fraction: float) -> None:
            loop.call_soon_threadsafe(stages.put_nowait, (stage, fraction))

        loading = asyncio.ensure_future(
            self._run(core, lambda: self._worker.load_model(**arguments, on_progress=on_progress))
        )
        loading.add_done_callback(lambda done: stages.put_nowait(None))
        while (progress := await stages.get()) is not None:
            yield worker_pb2.LoadModelResponse(stage=progress[0], fraction=progress[1])
        yield wire.loaded_to_proto(await loading)

    async def InitializeCache(
        self, request: worker_pb2.InitializeCacheRequest, context: Context
    ) -> worker_pb2.InitializeCacheResponse:
        """A new pool and a new epoch; the stream of the old one ends."""
        core = self._require(request.core_incarnation)
        arguments = wire.cache_arguments_from_proto(request)
        pool = await self._run(core, lambda: self._worker.initialize_cache(**arguments))
        if self._session is not None and self._session.epoch != request.epoch:
            self._end_session(FailedPreconditionError("a new epoch has started", reason="EPOCH_IN_THE_PAST"))
        return wire.cache_to_proto(*pool)

    async def GetTokenizer(
        self, request: worker_pb2.WorkerServiceGetTokenizerRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WorkerServiceGetTokenizerResponse]:
        """The files in chunks."""
        core = self._require(request.core_incarnation)
        for chunk in tokenizer_chunks(await self._run(core, self._worker.tokenizer_files)):
            yield worker_pb2.WorkerServiceGetTokenizerResponse(chunk=chunk)

    async def Utility(
        self, request: worker_pb2.WorkerServiceUtilityRequest, context: Context
    ) -> worker_pb2.WorkerServiceUtilityResponse:
        """One of the list."""
        if request.WhichOneof("command") == "stats" and not request.core_incarnation:
            return self._stats()
        core, worker, response = self._require(request.core_incarnation), self._worker, wire.Utility
        match request.WhichOneof("command"):
            case "sleep":
                freed = await self._run(core, lambda: worker.sleep(request.sleep.level))
                return response(sleep=response.Sleep(freed_bytes=freed))
            case "wake_up":
                await self._run(core, worker.wake_up)
                return response(wake_up=response.WakeUp())
            case "stats":
                return self._stats()
            case "profile":
                path = await self._run(core, lambda: worker.profile(request.profile.start))
                return response(profile=response.Profile(path=path))
            case None:
                raise InvalidArgumentError([violation("command", "unset", "must be set")])
            case name:
                raise UnimplementedError(f"command {name} is not served by this build")

    def _stats(self) -> worker_pb2.WorkerServiceUtilityResponse:
        """Read from here and not on the compute thread: it must answer while a step runs."""
        worker, process = self._worker, process_stats(self._incarnation)
        stats = replace(
            worker.stats(),
            resident_bytes=process.resident_bytes,
            process=process,
            core_incarnation=self._core,
            is_stream_open=self._session is not None,
            step_age_ms=self._step_age_ms(),
            device=worker.device,
            model="" if worker.model is None else worker.model.model,
        )
        return wire.stats_to_proto(stats)

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.ExecuteRequest], context: Context
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        """The steps. A newer stream takes the place of an older one, which may hang on a broken connection."""
        session = await self._open(await anext(request_iterator, None))
        tasks = [
            asyncio.create_task(self._receive(session, request_iterator)),
            asyncio.create_task(_prompt_heartbeats(session)),
        ]
        try:
            next_step = await self._run(session.core_incarnation, self._worker.begin_stream)
            yield wire.opened_to_proto(self._incarnation, next_step)
            while True:
                item = await session.outgoing.get()
                if item is None:
                    return
                if isinstance(item, PagewireError):
                    raise item
                if self._metrics is not None:
                    self._metrics.count(item)
                if isinstance(item, StepFailed):
                    yield wire.failure_to_proto(item.epoch, item.step, item.error)
                elif isinstance(item, StepResult):
                    yield wire.result_to_proto(item)
                else:
                    yield self._heartbeat()
        finally:
            for task in tasks:
                task.cancel()
            session.end(None)
            if self._session is session:
                self._session = None

    @property
    def has_core(self) -> bool:
        """Whether a core's Execute stream is open. Any thread."""
        return self._session is not None

    async def shut_down(self, grace_s: float, idle_s: float = IDLE_END_S) -> None:
        """Serves the core that holds the worker until it lets go, sends no plan for `idle_s`, or `grace_s` are over.

        A core that drains at the same time needs its worker for that. No core can take the worker from now on. At the
        end the stream ends, so that a core which still holds it learns why.
        """
        self._is_ending = True
        session, started_s = self._session, time.monotonic()
        while session is not None and not session.is_ended:
            now_s = time.monotonic()
            if now_s - started_s > grace_s:
                logger.warning("the core has work here after %g s: it is given up", grace_s)
                break
            if session.num_pending == 0 and now_s - max(started_s, session.idle_since_s) >= idle_s:
                break
            await asyncio.sleep(DRAIN_POLL_S)
        if session is not None:
            session.end(_shutting_down())

    async def _open(self, first: worker_pb2.ExecuteRequest | None) -> ExecuteSession:
        if first is None or first.WhichOneof("message") != "open":
            found = "nothing" if first is None else str(first.WhichOneof("message"))
            raise InvalidArgumentError([violation("message", found, "must be open in the first message")])
        core = self._require(first.open.core_incarnation)
        if first.open.epoch != self._worker.epoch or not first.open.epoch:
            raise FailedPreconditionError(
                f"open.epoch is {first.open.epoch}: the worker's KV pool is of epoch {self._worker.epoch} (0: no pool)",
                reason="EPOCH_IN_THE_PAST",
            )
        self._end_session(AbortedError("a newer Execute stream of the same core took this one's place"))
        self._session = ExecuteSession(core, first.open.epoch, self._worker, self._compute, self._observers)
        return self._session

    async def _receive(
        self, session: ExecuteSession, request_iterator: AsyncIterator[worker_pb2.ExecuteRequest]
    ) -> None:
        try:
            async for request in request_iterator:
                match request.WhichOneof("message"):
                    case "plan":
                        self._submit(session, request.plan)
                    case "grammar_mask":
                        session.put_mask(wire.mask_from_proto(request.grammar_mask))
                    case other:
                        limit = "must be plan or grammar_mask after the first message"
                        raise InvalidArgumentError([violation("message", other or "unset", limit)])
            await session.wait_idle()
            # One turn of the loop, so that the last result is in the queue before the end is.
            await asyncio.sleep(0)
            session.end(None)
        except PagewireError as error:
            session.end(error)
        except (asyncio.CancelledError, grpc.aio.BaseError):
            raise
        except Exception:
            logger.exception("the Execute stream's reader failed")
            session.end(InternalError("internal error in the worker; its log has the details"))

    def _submit(self, session: ExecuteSession, message: worker_pb2.StepPlan) -> None:
        try:
            plan = wire.plan_from_proto(message)
        except PagewireError as error:
            session.submit_failure(message.epoch, message.step, error)
        else:
            session.submit(plan)

    def _heartbeat(self) -> worker_pb2.ExecuteResponse:
        return wire.heartbeat_to_proto(self._step_age_ms(), self._worker.step, self._worker.progress)

    def _step_age_ms(self) -> int:
        started_ns = self._worker.step_started_ns
        return (time.monotonic_ns() - started_ns) // 1_000_000 if started_ns else 0

    async def _run(self, core: str, function: Callable[[], T]) -> T:
        """Runs a call of a core on the compute thread, unless the core is fenced when its turn comes."""

        def run() -> T:
            if core != self._core:
                raise self._fenced()
            return function()

        # Shielded: a caller that goes away must not cancel what already runs.
        return await asyncio.shield(asyncio.wrap_future(self._compute.submit(run)))

    def _require(self, core_incarnation: str) -> str:
        core = wire.incarnation_from_proto(core_incarnation)
        if core != self._core:
            raise self._fenced()
        return core

    def _fenced(self) -> FailedPreconditionError:
        if not self._core:
            return FailedPreconditionError("Handshake comes first", reason="NO_HANDSHAKE")
        return FailedPreconditionError("another core made a newer handshake with this worker", reason="FENCED")

    def _end_session(self, error: PagewireError) -> None:
        if self._session is not None:
            self._session.end(error)
            self._session = None


def _shutting_down() -> UnavailableError:
    return UnavailableError("the worker is shutting down", reason="SHUTTING_DOWN")


async def _prompt_heartbeats(session: ExecuteSession) -> None:
    """Asks for a sign of life every second while plans are pending; by the loop, whatever the computation does."""
    while True:
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)
        session.prompt_heartbeat()


def add_servicer(servicer: WorkerServicer, server: grpc.aio.Server) -> None:
    """Makes a server answer for the servicer."""
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
