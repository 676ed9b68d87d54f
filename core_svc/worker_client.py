"""The worker over gRPC, as the engine's Executor: handshake, load, tokenizer, cache, plans and commands."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core_svc.execute_client import ExecuteStream, Progress
from core_svc.executor import CacheInfo, CacheSpec, ModelSpec
from core_svc.worker_wire import (
    WorkerInfo,
    cache_info_from_proto,
    initialize_cache_to_proto,
    load_model_to_proto,
    worker_info_from_proto,
)
from pagewire.engine import ModelInfo
from pagewire.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    PagewireError,
    UnavailableError,
)
from pagewire.plan import StepPlan, StepResult
from pagewire.runtime.health import READINESS
from pagewire.runtime.rpc_metrics import RpcClientMetrics
from pagewire.runtime.status import from_rpc_error
from pagewire.runtime.transport import MAX_MESSAGE_BYTES, TlsConfig, sync_channel
from pagewire.types_wire import PROTOCOL_VERSION, TokenizerAssembler, model_info_from_proto, protocol_versions
from pagewire.v1 import worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

Utility = worker_pb2.WorkerServiceUtilityRequest
PROGRESS_LOG_INTERVAL_S = 2.0


@contextmanager
def _errors_of_the_worker() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    except ValueError as error:
        # What gRPC says of a channel that was closed meanwhile, by a shutdown.
        raise UnavailableError(f"the connection to the worker is closed: {error}") from error


class GrpcExecutor:
    """An Executor (see core_svc.executor) for one worker process.

    `handshake` comes first, and again after a loss: it makes a new channel and takes the worker from every other core.
    `on_lost` is called when the Execute stream ends or a command finds no worker, on a thread of its own or the
    caller's, before the step's future fails; it may be called twice for one loss.
    `on_ending`, on a thread of its own: the worker says by grpc.health.v1 that it is not ready any more. It has been
    told to shut down, and goes on for as long as work comes.
    Frozen workers: no result and no heartbeat for `silence_s` while a step runs counts as a loss.
    """

    def __init__(
        self,
        target: str,
        core_incarnation: str,
        *,
        on_lost: Callable[[PagewireError], None] = lambda error: None,
        on_ending: Callable[[], None] = lambda: None,
        tls: TlsConfig | None = None,
        silence_s: float = 4.0,
        command_timeout_s: float = 300.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        metrics: RpcClientMetrics | None = None,
    ) -> None:
        self._target = target
        self._core_incarnation = core_incarnation
        self._on_lost = on_lost
        self._on_ending = on_ending
        self._tls = tls
        self._silence_s = silence_s
        self._command_timeout_s = command_timeout_s
        self._max_message_bytes = max_message_bytes
        self._metrics = metrics
        self._channel: grpc.Channel | None = None
        self._stub: worker_pb2_grpc.WorkerServiceStub | None = None
        self._stream: ExecuteStream | None = None
        self._lock = threading.Lock()
        self._is_shut_down = False
        self._is_established = False
        self.load_timeout_s = command_timeout_s
        """How long load_model may take."""
        self.progress = Progress()

    def handshake(self, timeout_s: float = 5.0) -> WorkerInfo:
        """Introduces this core, which fences every other one. Raises UnavailableError where no worker answers."""
        self._is_established = False
        self._disconnect()
        with self._lock:
            if self._is_shut_down:
                raise UnavailableError("the core shuts down")
            # A new channel has no reconnect backoff of an old failure to wait for.
            self._channel = sync_channel(self._target, self._tls, max_message_bytes=self._max_message_bytes)
            channel = self._channel if self._metrics is None else self._metrics.sync(self._channel)
            self._stub = worker_pb2_grpc.WorkerServiceStub(channel)
        request = worker_pb2.WorkerServiceHandshakeRequest(
            core_incarnation=self._core_incarnation, protocol_versions=protocol_versions()
        )
        with _errors_of_the_worker():
            response = self._connected().Handshake(request, timeout=timeout_s)
        versions = response.protocol_versions
        if not versions.min <= PROTOCOL_VERSION <= versions.max:
            raise FailedPreconditionError(
                f"the worker speaks pagewire.v1 minor versions {versions.min} to {versions.max}, this core "
                f"{PROTOCOL_VERSION}",
                reason="PROTOCOL_VERSION_MISMATCH",
            )
        if response.world_size > 1:
            raise FailedPreconditionError(f"the worker is one of {response.world_size} ranks: not served by this build")
        threading.Thread(target=self._watch_health, args=(self._channel,), name="worker-health", daemon=True).start()
        return worker_info_from_proto(response)

    def _watch_health(self, channel: grpc.Channel) -> None:
        """Runs until the channel is closed, or the worker gone."""
        request = health_pb2.HealthCheckRequest(service=READINESS)
        was_ready = False
        with contextlib.suppress(grpc.RpcError, ValueError):
            for response in health_pb2_grpc.HealthStub(channel).Watch(request):
                is_ready = response.status == health_pb2.HealthCheckResponse.SERVING
                if was_ready and not is_ready and channel is self._channel:
                    self._on_ending()
                was_ready = is_ready

    def load_model(self, spec: ModelSpec) -> ModelInfo:
        """Loads the model and logs the progress. DeadlineExceededError says which stage did not end in time."""
        stage, fraction, last_log_s = "not begun", 0.0, 0.0
        request = load_model_to_proto(spec, self._core_incarnation)
        try:
            with _errors_of_the_worker():
                for response in self._connected().LoadModel(request, timeout=self.load_timeout_s):
                    if response.HasField("model"):
                        return model_info_from_proto(response.model)
                    is_new_stage = response.stage != stage
                    stage, fraction = response.stage, response.fraction
                    if is_new_stage or time.monotonic() - last_log_s > PROGRESS_LOG_INTERVAL_S:
                        last_log_s = time.monotonic()
                        logger.info("the worker loads: %s (%d %%)", stage, round(100 * fraction))
        except DeadlineExceededError as error:
            raise DeadlineExceededError(
                f"the worker did not load the model in time; it was at: {stage} ({round(100 * fraction)} %)"
            ) from error
        raise InternalError("the worker ended LoadModel without a model")

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """The tokenizer's files by name, each checked by its sha256."""
        assembler = TokenizerAssembler()
        request = worker_pb2.WorkerServiceGetTokenizerRequest(core_incarnation=self._core_incarnation)
        with _errors_of_the_worker():
            for response in self._connected().GetTokenizer(request, timeout=self._command_timeout_s):
                assembler.add(response.chunk)
        return assembler.files()

    def initialize_cache(self, spec: CacheSpec, epoch: int) -> CacheInfo:
        """Makes the pool and opens the Execute stream of the epoch."""
        with self._losses_reported():
            return self._initialize_cache(spec, epoch)

    def _initialize_cache(self, spec: CacheSpec, epoch: int) -> CacheInfo:
        self._close_stream()
        stub = self._connected()
        request = initialize_cache_to_proto(spec, epoch, self._core_incarnation)
        with _errors_of_the_worker():
            response = stub.InitializeCache(request, timeout=self._command_timeout_s)
        self.progress.advance()
        stream = ExecuteStream(
            stub,
            self._core_incarnation,
            epoch,
            silence_s=self._silence_s,
            progress=self.progress,
            on_lost=self._on_lost,
        )
        stream.wait_opened(timeout_s=10.0)
        with self._lock:
            self._stream = stream
        self._is_established = True
        return cache_info_from_proto(response)

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Hands over a plan; the future fails with UnavailableError where the worker is gone."""
        stream = self._stream
        if stream is None:
            future: Future[StepResult] = Future()
            future.set_exception(UnavailableError("there is no connection to the worker"))
            return future
        return stream.submit(plan)

    def sleep(self, level: int) -> int:
        """Gives memory back; returns the freed bytes."""
        response = self._utility(Utility(sleep=Utility.Sleep(level=level)))
        return response.sleep.freed_bytes

    def wake_up(self) -> None:
        """Loads the weights again."""
        self._utility(Utility(wake_up=Utility.WakeUp()))

    def profile(self, start: bool) -> str:
        """Starts or stops profiling; returns where the profile is written."""
        return self._utility(Utility(profile=Utility.Profile(start=start))).profile.path

    def shutdown(self) -> None:
        """Lets go of the worker. Idempotent."""
        with self._lock:
            self._is_shut_down = True
        self._disconnect()

    def _utility(self, request: Utility) -> worker_pb2.WorkerServiceUtilityResponse:
        request.core_incarnation = self._core_incarnation
        with self._losses_reported(), _errors_of_the_worker():
            return self._connected().Utility(request, timeout=self._command_timeout_s)

    @contextmanager
    def _losses_reported(self) -> Iterator[None]:
        """Reports a worker that is found gone by a command and not by its stream; not while connecting to it."""
        try:
            yield
        except UnavailableError as error:
            if self._is_established:
                self._on_lost(error)
            raise

    def _connected(self) -> worker_pb2_grpc.WorkerServiceStub:
        stub = self._stub
        if stub is None:
            raise UnavailableError("there is no connection to the worker")
        return stub

    def _close_stream(self) -> None:
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _disconnect(self) -> None:
        self._close_stream()
        with self._lock:
            channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            channel.close()
