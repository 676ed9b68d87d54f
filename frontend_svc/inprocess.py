"""The three services joined in one process, for `LLM` and for breakpoints.

The one place where the frontend meets core and worker in code. They are loaded when they are used, and only through
the interfaces that the gRPC clients implement: `EngineCoreClient` here, `Executor` in the core.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pagewire.engine import (
    AbortOutcome,
    AbortReason,
    Command,
    CommandResult,
    EngineInfo,
    EngineRequest,
    ModelInfo,
    StepOutputs,
)
from pagewire.errors import UnavailableError
from pagewire.plan import StepPlan, StepResult
from pagewire.runtime.lifetime import new_incarnation

if TYPE_CHECKING:
    from core_svc.config import EngineConfig
    from core_svc.engine import EngineCore
    from core_svc.executor import CacheInfo, CacheSpec, Executor, ModelSpec
    from worker_svc.worker import Worker

log = logging.getLogger(__name__)

FIRST_EPOCH = 1
JOIN_TIMEOUT_S = 10.0
MAX_NUM_OFFLINE_REQUESTS = 2**20
T = TypeVar("T")
Publish = Callable[[str, StepOutputs], None]


class WorkerExecutor:
    """An Executor that calls a worker directly, all of it on one thread of its own: the engine plans meanwhile."""

    def __init__(self, worker: Worker, *, on_progress: Callable[[str, float], None] | None = None) -> None:
        from worker_svc.compute import ComputeThread

        self._worker = worker
        self._on_progress = on_progress
        self._compute = ComputeThread()

    def _run(self, call: Callable[[], T]) -> T:
        return self._compute.submit(call).result()

    def load_model(self, spec: ModelSpec) -> ModelInfo:
        return self._run(
            lambda: self._worker.load_model(
                model=spec.model,
                revision=spec.revision,
                dtype=spec.dtype,
                quantization=spec.quantization,
                max_model_len=spec.max_model_len,
                force_generic=spec.force_generic,
                load_format=spec.load_format,
                on_progress=self._on_progress,
            )
        )

    def tokenizer_files(self) -> Mapping[str, bytes]:
        return self._run(self._worker.tokenizer_files)

    def initialize_cache(self, spec: CacheSpec, epoch: int) -> CacheInfo:
        from core_svc.executor import CacheInfo

        num_blocks, bytes_per_block, kv_cache_dtype = self._run(
            lambda: self._worker.initialize_cache(
                epoch=epoch,
                block_size=spec.block_size,
                num_blocks=spec.num_blocks,
                memory_bytes=spec.memory_bytes,
                kv_cache_dtype=spec.kv_cache_dtype,
                max_num_seqs=spec.max_num_seqs,
                max_num_batched_tokens=spec.max_num_batched_tokens,
            )
        )
        return CacheInfo(num_blocks, bytes_per_block, kv_cache_dtype)

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        # A result wakes the engine up, which takes Python: it leaves when the next step's forward pass has begun.
        deliver = self._compute.deliver
        return self._compute.submit(lambda: self._worker.start(plan, on_prepared=deliver), delivers=True)

    def sleep(self, level: int) -> int:
        return self._run(lambda: self._worker.sleep(level))

    def wake_up(self) -> None:
        self._run(self._worker.wake_up)

    def profile(self, start: bool) -> str:
        return self._run(lambda: self._worker.profile(start))

    def shutdown(self) -> None:
        """Ends the thread; the worker goes with this object."""
        self._compute.close(JOIN_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class OfflineOptions:
    """What `LLM` takes; its docstring says what each means."""

    model: str
    dtype: str
    revision: str
    quantization: str
    device: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    block_size: int
    num_kv_blocks: int
    kv_cache_memory_bytes: int
    kv_cache_dtype: str
    enable_prefix_caching: bool
    policy: str
    async_scheduling: bool
    force_generic: bool
    load_format: str
    log_requests: bool


@dataclass(slots=True)
class InprocessCore:
    """A core on this process's own threads."""

    engine: EngineCore
    executor: Executor
    info: EngineInfo
    tokenizer_files: Mapping[str, bytes]


def make_executor(
    device: str = "cpu", kv_cache_memory_bytes: int = 0, on_progress: Callable[[str, float], None] | None = None
) -> WorkerExecutor:
    """An executor over a worker of this process. Loads torch."""
    from worker_svc.openmp import bound_spinning

    bound_spinning()
    from worker_svc.worker import Worker

    return WorkerExecutor(Worker(device=device, kv_cache_memory_bytes=kv_cache_memory_bytes), on_progress=on_progress)


def start_core(
    executor: Executor, model: ModelSpec, cache: CacheSpec, config: EngineConfig, publish: Publish
) -> InprocessCore:
    """Loads the model, makes the KV pool and the engine over it.

    Raises what the worker raises: NotFoundError for a model that is not there, InvalidArgumentError for one that
    cannot be served, ResourceExhaustedError where memory does not suffice.
    """
    from core_svc.engine import EngineCore

    model_info = executor.load_model(model)
    tokenizer_files = executor.tokenizer_files()
    cache_info = executor.initialize_cache(cache, FIRST_EPOCH)
    engine = EngineCore(executor, model_info, cache_info, config, publish, epoch=FIRST_EPOCH)
    features = [name for name, is_on in (("prefix_caching", config.enable_prefix_caching),) if is_on]
    if config.policy == "priority":
        features.append("priority")
    info = EngineInfo(
        core_incarnation=new_incarnation(),
        model=engine.model,
        block_size=config.block_size,
        num_kv_blocks=cache_info.num_blocks - 1,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_requests=config.max_num_requests,
        features=tuple(features),
    )
    return InprocessCore(engine, executor, info, tokenizer_files)


def start_offline_core(options: OfflineOptions, executor: Executor | None, publish: Publish) -> InprocessCore:
    """The core behind `LLM`, over a worker of this process unless an executor is given."""
    from core_svc.config import EngineConfig
    from core_svc.executor import CacheSpec, ModelSpec

    config = EngineConfig(
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        policy=options.policy,
        enable_prefix_caching=options.enable_prefix_caching,
        max_num_requests=MAX_NUM_OFFLINE_REQUESTS,
        async_scheduling=options.async_scheduling,
        log_requests=options.log_requests,
    )
    model = ModelSpec(
        options.model,
        options.revision,
        options.dtype,
        options.quantization,
        options.max_model_len,
        options.force_generic,
        options.load_format,
    )
    cache = CacheSpec(
        block_size=options.block_size,
        # The null block comes on top of what requests can use.
        num_blocks=options.num_kv_blocks + 1 if options.num_kv_blocks else 0,
        memory_bytes=options.kv_cache_memory_bytes,
        kv_cache_dtype=options.kv_cache_dtype,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
    executor = executor or make_executor(options.device, options.kv_cache_memory_bytes)
    return start_core(executor, model, cache, config, publish)


class InprocessClient:
    """An EngineCoreClient whose core runs on a thread of this process. Made by `start`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._incarnation = new_incarnation()
        self._core: InprocessCore | None = None
        self._thread: threading.Thread | None = None
        self._outputs: deque[StepOutputs] = deque()
        self._has_outputs = asyncio.Event()
        self._error: UnavailableError | None = None

    @classmethod
    async def start(
        cls, make: Callable[[], Executor], model: ModelSpec, cache: CacheSpec, config: EngineConfig
    ) -> InprocessClient:
        """Starts the engine's thread; model and pool are made on it, since all computing belongs to one thread."""
        client = cls()
        started: asyncio.Future[InprocessCore] = client._loop.create_future()
        client._thread = threading.Thread(
            target=client._run, args=(make, model, cache, config, started), name="engine", daemon=True
        )
        client._thread.start()
        client._core = await started
        return client

    def _run(
        self,
        make: Callable[[], Executor],
        model: ModelSpec,
        cache: CacheSpec,
        config: EngineConfig,
        started: asyncio.Future[InprocessCore],
    ) -> None:
        try:
            core = start_core(make(), model, cache, config, self._publish)
        except BaseException as error:
            self._soon(started.set_exception, error)
            return
        self._soon(started.set_result, core)
        try:
            core.engine.run()
            self._soon(self._end, UnavailableError("the core has shut down"))
        except BaseException as error:
            log.exception("the engine's loop died")
            self._soon(self._end, UnavailableError(f"the core died: {error}"))

    def _soon(self, call: Callable[..., Any], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            log.debug("after the end of the event loop: %s", args)

    def _publish(self, frontend_incarnation: str, outputs: StepOutputs) -> None:
        self._outputs.append(outputs)
        self._soon(self._has_outputs.set)

    def _end(self, error: UnavailableError) -> None:
        self._error = self._error or error
        self._has_outputs.set()

    @property
    def core(self) -> InprocessCore:
        assert self._core is not None
        return self._core

    @property
    def info(self) -> EngineInfo:
        return self.core.info

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        return self.core.tokenizer_files

    async def add(self, requests: Sequence[EngineRequest]) -> None:
        if self._error is not None:
            raise self._error
        self.core.engine.add(self._incarnation, requests)

    async def abort(self, request_ids: Sequence[int], reason: AbortReason) -> list[AbortOutcome]:
        return await asyncio.wrap_future(self.core.engine.abort(self._incarnation, request_ids, reason))

    async def utility(self, command: Command) -> CommandResult:
        return await asyncio.wrap_future(self.core.engine.utility(command))

    async def outputs(self) -> AsyncIterator[StepOutputs]:
        while True:
            await self._has_outputs.wait()
            self._has_outputs.clear()
            while self._outputs:
                yield self._outputs.popleft()
                await asyncio.sleep(0)  # a busy core must not starve the callers
            if self._error is not None:
                raise self._error

    async def close(self) -> None:
        self._end(UnavailableError("the client is closed"))
        if self._core is None or self._thread is None:
            return
        self._core.engine.drop_frontend(self._incarnation, AbortReason.SHUTDOWN)
        self._core.engine.shutdown()
        await self._loop.run_in_executor(None, self._thread.join, JOIN_TIMEOUT_S)
        self._core.executor.shutdown()
