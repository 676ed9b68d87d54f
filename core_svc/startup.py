"""The life of a core process: listen, connect to the worker, serve, reconnect, drain."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import TypeVar

from core_svc.config import EngineConfig
from core_svc.engine import EngineCore
from core_svc.kv_event_log import KvEventLog
from core_svc.output_hub import OutputHub
from core_svc.process_metrics import CoreMetrics
from core_svc.recent_steps import RecentSteps
from core_svc.server import SERVICE_NAME, EngineCoreServicer, Serving
from core_svc.settings import CoreSettings
from core_svc.trace_observer import TraceObserver
from core_svc.watchdog import StepWatchdog
from core_svc.worker_client import GrpcExecutor
from core_svc.worker_link import Connection, WorkerLink, explain
from pagewire.engine import EngineInfo
from pagewire.errors import FailedPreconditionError, PagewireError, UnavailableError
from pagewire.runtime.lifetime import new_incarnation
from pagewire.runtime.logs import set_incarnation
from pagewire.runtime.server import GrpcServer
from pagewire.runtime.tracing import start_tracing, stop_telemetry

logger = logging.getLogger(__name__)

FLUSH_S = 5.0
"""How long frontends get to read the last outputs of a core that stops."""
STEP_GRACE_S = 1.0
"""How long a step may take to end once the drain is over."""
STATS_INTERVAL_S = 1.0
T = TypeVar("T")


class CoreProcess:
    """A core: its server on this event loop, its engine on a thread. Order of calls: start, connect, run, stop."""

    def __init__(self, settings: CoreSettings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.incarnation = new_incarnation()
        self._tracer = start_tracing("core", self.incarnation)
        set_incarnation(self.incarnation)
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Gets the error that no reconnect can mend."""
        self._metrics = CoreMetrics(
            settings,
            self.incarnation,
            is_ready=lambda: self._server.is_ready,
            num_frontends=lambda: self._hub.num_open,
        )
        self._server = GrpcServer.for_settings(SERVICE_NAME, settings, self._metrics.interceptors)
        self._hub = OutputHub(lease_s=settings.lease_ms / 1000, max_buffer_bytes=settings.output_buffer_bytes)
        self._kv_log = KvEventLog(notify=self._hub.wake_soon)
        self._servicer = EngineCoreServicer(self.incarnation, self._hub, self._kv_log)
        self._servicer.add_to(self._server.aio)
        self._executor = GrpcExecutor(
            settings.worker,
            self.incarnation,
            on_lost=lambda error: self._soon(self._on_worker_lost, error),
            on_ending=lambda: self._soon(self._on_worker_ending, self._num_losses),
            tls=settings.tls,
            silence_s=settings.worker_silence_s,
            max_message_bytes=settings.max_message_bytes,
            metrics=self._metrics.client,
        )
        self._link = WorkerLink(self._executor, settings.worker, settings.model_spec(), settings.cache_spec())
        self._recent_steps = RecentSteps()
        self._watchdog = StepWatchdog(settings.step_limit_s)
        self._connection: Connection | None = None
        self._engine: EngineCore | None = None
        self._engine_thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ending = False
        self._is_stopping = False
        self._is_stalled = False
        self._num_losses = 0
        self._reconnect: asyncio.Task[None] | None = None

    @property
    def host(self) -> str:
        return self._server.host

    @property
    def port(self) -> int:
        return self._server.port

    async def start(self) -> None:
        """Listens: alive, not ready."""
        self._metrics.start()
        await self._server.start()

    async def connect(self) -> None:
        """Waits for the worker, loads the model, starts the engine and becomes ready."""
        connection = await self._connect_to_worker(0, self._settings.startup_timeout_s)
        config = self._settings.engine_config()
        tracing = self._trace_observer()
        engine = EngineCore(
            self._executor,
            connection.model,
            connection.cache,
            config,
            self._hub.publish,
            on_kv_events=self._kv_log.append,
            epoch=connection.epoch,
            observers=[self._recent_steps, *self._metrics.observers, *([tracing] if tracing is not None else [])],
        )
        self._metrics.watch(engine)
        if tracing is not None:
            tracing.watch(engine.scheduler)
        self._connection, self._engine = connection, engine
        self._set_serving(config)
        self._engine_thread = threading.Thread(target=self._run_engine, args=(engine,), name="engine", daemon=True)
        self._engine_thread.start()
        self._spawn(self._pulse())
        self._become_available()

    async def lame_duck(self) -> None:
        """Not ready, but still taking requests: frontends and their balancers get time to hear of it."""
        self._is_ending = True
        await self._server.lame_duck(self._settings.lame_duck_s)

    def _trace_observer(self) -> TraceObserver | None:
        if self._tracer is None:
            return None
        return TraceObserver(self._tracer, self._settings.trace_step_interval)

    async def stop(self, drain_s: float) -> None:
        """Refuses new requests, lets running ones end for `drain_s`, aborts the rest, delivers, and lets go."""
        self._is_stopping = True
        failure = self.failed.exception() if self.failed.done() else None
        why = "the core is shutting down" if failure is None else f"the core ends: {explain(failure)}"
        self._servicer.unavailable = why
        await self._server.set_ready(False)
        self._link.stop()
        engine, thread = self._engine, self._engine_thread
        if engine is not None and thread is not None:
            await self._in_thread(lambda: engine.shutdown(drain_s))
            await self._in_thread(lambda: thread.join(drain_s + STEP_GRACE_S))
            if thread.is_alive():
                engine.fail(UnavailableError("the core is shutting down, and a step does not end"))
                await self._in_thread(lambda: thread.join(STEP_GRACE_S))
            deadline_s = time.monotonic() + FLUSH_S
            while self._hub.has_unsent and time.monotonic() < deadline_s:
                await asyncio.sleep(0.01)
        for task in self._tasks:
            task.cancel()
        self._hub.end_all(UnavailableError(why))
        await self._server.drain(1.0)
        await self._in_thread(self._executor.shutdown)
        await stop_telemetry(self._tracer, self._metrics.close)

    def _set_serving(self, config: EngineConfig) -> None:
        assert self._connection is not None and self._engine is not None
        settings, connection = self._settings, self._connection
        features = [
            name
            for name, is_on in (
                ("prefix_caching", config.enable_prefix_caching),
                ("priority", config.policy == "priority"),
            )
            if is_on
        ]
        info = EngineInfo(
            core_incarnation=self.incarnation,
            model=self._engine.model,
            block_size=config.block_size,
            num_kv_blocks=connection.cache.num_blocks - 1,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_requests=config.max_num_requests,
            features=tuple(features),
            lease_ms=settings.lease_ms,
            heartbeat_interval_ms=settings.heartbeat_interval_ms,
        )
        self._servicer.serving = Serving(
            self._engine,
            info,
            connection.tokenizer_files,
            self._executor.progress,
            self._recent_steps,
            settings.worker,
        )

    def _run_engine(self, engine: EngineCore) -> None:
        try:
            engine.run()
        except BaseException as error:
            # A core whose loop is dead must not look alive.
            logger.exception("the engine's loop died")
            self._soon(self._fail, error)

    def _on_worker_lost(self, error: PagewireError) -> None:
        self._num_losses += 1
        self._metrics.worker.lost()
        if self._is_stopping or self._engine is None:
            return
        logger.error("the worker is lost: %s", error.message)
        self._servicer.unavailable = f"the worker is lost: {error.message}"
        self._engine.fail(UnavailableError(self._servicer.unavailable, retry_after_s=1.0))
        if is_fenced(error):
            self._fail(error)
        elif self._reconnect is None:
            self._reconnect = self._spawn(self._reconnect_worker())
        self._update_readiness()

    def _on_worker_ending(self, num_losses: int) -> None:
        """The worker is to shut down and this core is not: what runs can end well, if nothing new comes."""

        async def refuse_new() -> None:
            # As long as the lame duck of our own: where all get their signal at once, ours may come a little later.
            await asyncio.sleep(self._settings.lame_duck_s)
            if num_losses == self._num_losses and not self._is_ending and not self._is_stopping:
                self._servicer.unavailable = "the worker is shutting down"
                self._update_readiness()

        if self._engine is not None:
            logger.info("the worker shuts down: it gets no new requests after %g s", self._settings.lame_duck_s)
            self._spawn(refuse_new())

    async def _connect_to_worker(self, after_epoch: int, timeout_s: float | None) -> Connection:
        while True:
            num_losses = self._num_losses
            connection = await self._in_thread(
                lambda epoch=after_epoch: self._link.connect(after_epoch=epoch, timeout_s=timeout_s)  # type: ignore[misc]
            )
            # A loss between the opening of the stream and here was reported to nobody who acts on it.
            if num_losses == self._num_losses:
                self._metrics.worker.connected(connection.worker_incarnation)
                return connection
            after_epoch = connection.epoch

    async def _reconnect_worker(self) -> None:
        assert self._engine is not None and self._connection is not None
        engine, old = self._engine, self._connection
        after_epoch = max(old.epoch, engine.stats().epoch)
        connection = await self._connect_to_worker(after_epoch, None)
        if _identity(connection) != _identity(old):
            self._fail(FailedPreconditionError("the worker came back with another model: the core has to start anew"))
            return
        self._connection = connection
        self._reconnect = None
        engine.resume_with(connection.cache, connection.epoch)
        self._set_serving(self._settings.engine_config())
        logger.info("the worker is back under epoch %d", connection.epoch)
        self._become_available()

    def _become_available(self) -> None:
        if not self._is_stopping:
            self._servicer.unavailable = ""
            self._update_readiness()

    def _update_readiness(self) -> None:
        self._spawn(self._server.set_ready(not self._servicer.unavailable and not self._is_stalled))

    async def _pulse(self) -> None:
        """Heartbeats, stats and the watchdog, on one timer."""
        assert self._engine is not None
        engine, interval_s = self._engine, self._settings.heartbeat_interval_ms / 1000
        last_stats_s = 0.0
        while True:
            await asyncio.sleep(interval_s)
            self._hub.send_heartbeats()
            if time.monotonic() - last_stats_s >= STATS_INTERVAL_S - interval_s / 2 and self._hub.num_open:
                last_stats_s = time.monotonic()
                self._hub.send_stats(engine.num_steps, engine.stats())
            is_stalled = self._watchdog.is_stalled(
                time.monotonic_ns(), engine.step_started_ns, self._executor.progress.changed_ns
            )
            if is_stalled != self._is_stalled:
                self._is_stalled = is_stalled
                logger.error("step %d is %s", engine.num_steps + 1, "stalled: not ready" if is_stalled else "going on")
                self._update_readiness()

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    def _soon(self, call: Callable[[T], None], argument: T) -> None:
        try:
            self._loop.call_soon_threadsafe(call, argument)
        except RuntimeError:
            logger.debug("after the end of the event loop: %s", argument)

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._is_stopping:
            self._fail(error)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """Runs a blocking call on a daemon thread: one that hangs must not keep the process from ending."""
        result: asyncio.Future[T] = self._loop.create_future()

        def finish(set_result: Callable[[], None]) -> None:
            if not result.done():
                set_result()

        def run() -> None:
            try:
                value = call()
            except BaseException as error:
                failure = error
                self._soon(finish, lambda: result.set_exception(failure))
            else:
                self._soon(finish, lambda: result.set_result(value))

        threading.Thread(target=run, name="blocking-call", daemon=True).start()
        return await result


def is_fenced(error: PagewireError) -> bool:
    """Whether another core has taken the worker: taking it back would go on for ever."""
    return isinstance(error, FailedPreconditionError) and error.reason == "FENCED"


def _identity(connection: Connection) -> tuple[str, str, str]:
    return connection.model.weights_id, connection.model.tokenizer_sha256, connection.model.dtype


__all__ = ["CoreProcess", "explain", "is_fenced"]
