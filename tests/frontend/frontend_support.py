"""A real engine over the fake executor, reached in process or over gRPC, behind a real frontend server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import grpc
import grpc.aio

from core_svc.config import EngineConfig
from core_svc.engine import EngineCore
from core_svc.execute_client import Progress
from core_svc.executor import CacheSpec, ModelSpec
from core_svc.fake_executor import FakeExecutor, FakeOptions
from core_svc.fake_model import FakeModel
from core_svc.kv_event_log import KvEventLog
from core_svc.output_hub import OutputHub
from core_svc.server import SERVICE_NAME as CORE_SERVICE_NAME
from core_svc.server import EngineCoreServicer, Serving
from frontend_svc.core_client import GrpcCoreClient
from frontend_svc.engine_client import EngineCoreClient
from frontend_svc.inprocess import InprocessClient, start_core
from frontend_svc.server import SERVICE_NAME, FrontendServer
from frontend_svc.service import TextService
from frontend_svc.tokenizer import Tokenizer
from pagewire.engine import ModelInfo
from pagewire.runtime.lifetime import new_incarnation
from pagewire.runtime.server import GrpcServer
from pagewire.runtime.transport import secure_or_insecure_channel
from pagewire.sampling import SamplingParams
from pagewire.types_wire import tokenizer_sha256
from pagewire.v1 import core_pb2_grpc, frontend_pb2_grpc, types_pb2
from pagewire.v1 import frontend_pb2 as pb

T = TypeVar("T")
VOCAB_SIZE = 49152
EOS = 2
SEED = 11


def run(work: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
    """Runs a test's coroutine with a bound."""

    async def bounded() -> T:
        return await asyncio.wait_for(work, timeout_s)

    return asyncio.run(bounded())


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Waits until the condition holds; fails if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        await asyncio.sleep(0.005)


class TextExecutor(FakeExecutor):
    """The fake executor with the real tokenizer's files."""

    def __init__(self, files: Mapping[str, bytes], options: FakeOptions | None, eos_rate: float, **more: Any) -> None:
        model = FakeModel(vocab_size=VOCAB_SIZE, eos_token_id=EOS, eos_rate=eos_rate)
        super().__init__(2, model=model, options=options, epoch=0, **more)
        self._files = files

    def load_model(self, spec: ModelSpec) -> ModelInfo:
        return replace(super().load_model(spec), tokenizer_sha256=tokenizer_sha256(self._files))

    def tokenizer_files(self) -> Mapping[str, bytes]:
        return self._files


@dataclass
class CoreOptions:
    """How the core is made."""

    config: EngineConfig = field(default_factory=EngineConfig)
    num_blocks: int = 2000
    max_model_len: int = 4096
    options: FakeOptions | None = None
    eos_rate: float = 0.0
    heartbeat_interval_ms: int = 200
    lease_ms: int = 5000

    def executor(self, files: Mapping[str, bytes]) -> TextExecutor:
        return TextExecutor(files, self.options, self.eos_rate, max_model_len=self.max_model_len)

    @property
    def cache(self) -> CacheSpec:
        config = self.config
        return CacheSpec(
            block_size=config.block_size,
            num_blocks=self.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )


class GrpcCore:
    """EngineCoreService on loopback over the fake executor, in this process."""

    def __init__(self, files: Mapping[str, bytes], options: CoreOptions) -> None:
        self._options = options
        self.hub = OutputHub(lease_s=options.lease_ms / 1000)
        self.executor = options.executor(files)
        self.core = start_core(self.executor, ModelSpec("fake"), options.cache, options.config, self.hub.publish)
        self.engine = self.core.engine
        self.info = replace(
            self.core.info, heartbeat_interval_ms=options.heartbeat_interval_ms, lease_ms=options.lease_ms
        )
        self.server = GrpcServer([CORE_SERVICE_NAME])
        log = KvEventLog(notify=self.hub.wake_soon)
        self.servicer = EngineCoreServicer(self.info.core_incarnation, self.hub, log)
        self.servicer.serving = Serving(self.engine, self.info, files, Progress())
        self.servicer.unavailable = ""
        core_pb2_grpc.add_EngineCoreServiceServicer_to_server(self.servicer, self.server.aio)
        self._thread = threading.Thread(target=self.engine.run, name="engine", daemon=True)
        self._pulse: asyncio.Task[None] | None = None

    async def start(self, port: int = 0) -> str:
        if port:
            self.server = GrpcServer([CORE_SERVICE_NAME], port=port)
            core_pb2_grpc.add_EngineCoreServiceServicer_to_server(self.servicer, self.server.aio)
        port = await self.server.start()
        self._thread.start()
        self._pulse = asyncio.create_task(self._beat())
        return f"127.0.0.1:{port}"

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._options.heartbeat_interval_ms / 1000)
            self.hub.send_heartbeats()
            self.hub.send_stats(self.engine.num_steps, self.engine.stats())

    async def stop(self) -> None:
        if self._pulse is not None:
            self._pulse.cancel()
        await self.server.drain(0)
        self.engine.shutdown()
        await asyncio.to_thread(self._thread.join, 5)
        self.executor.shutdown()


@dataclass
class Frontend:
    """A running frontend and what is behind it."""

    stub: frontend_pb2_grpc.FrontendServiceStub
    service: TextService
    server: FrontendServer
    engine: EngineCore
    executor: TextExecutor
    channel: grpc.aio.Channel

    def expected_ids(self, prompt: list[int], num_tokens: int, seed: int = SEED) -> list[int]:
        """What the fake model says after a prompt."""
        return self.executor.model.generate(prompt, SamplingParams(seed=seed), num_tokens)

    async def is_idle(self) -> None:
        """Waits until frontend and core hold nothing, and checks that the core kept to its contract."""
        await eventually(lambda: not self.engine.scheduler.requests and not self.engine.has_work())
        await eventually(lambda: len(self.service.session.outputs) == 0 and self.service.num_requests == 0)
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
        # The step that tells the worker may still run.
        await eventually(lambda: not self.executor.used_slots)
        assert self.executor.violations == []


@contextlib.asynccontextmanager
async def frontend(
    kind: str, files: Mapping[str, bytes], options: CoreOptions | None = None, *, max_tokens_behind: int = 4096
) -> AsyncIterator[Frontend]:
    """A frontend over an in-process core ("inprocess") or over a core behind gRPC ("grpc")."""
    options = options or CoreOptions()
    executors: list[TextExecutor] = []
    grpc_core = GrpcCore(files, options) if kind == "grpc" else None
    target = await grpc_core.start() if grpc_core else ""

    def make() -> TextExecutor:
        executors.append(options.executor(files))
        return executors[-1]

    async def connect() -> EngineCoreClient:
        if grpc_core is not None:
            return await GrpcCoreClient.connect(target, new_incarnation(), timeout_s=10)
        return await InprocessClient.start(make, ModelSpec("fake"), options.cache, options.config)

    service = TextService(connect, max_tokens_behind=max_tokens_behind)
    server = FrontendServer(service, GrpcServer([SERVICE_NAME]))
    port = await server.start()
    channel = secure_or_insecure_channel(f"127.0.0.1:{port}")
    try:
        await asyncio.wait_for(service.wait_ready(), 10)
        client = service.session.client
        engine = grpc_core.engine if grpc_core else client.core.engine  # type: ignore[attr-defined]
        executor = grpc_core.executor if grpc_core else executors[0]
        stub = frontend_pb2_grpc.FrontendServiceStub(channel)
        yield Frontend(stub, service, server, engine, executor, channel)
    finally:
        await channel.close()
        await server.stop(0)
        if grpc_core is not None:
            await grpc_core.stop()


def sampling(**values: Any) -> types_pb2.SamplingParams:
    """Parameters with a fixed seed and 8 tokens, unless said otherwise."""
    return types_pb2.SamplingParams(**{"seed": SEED, "max_tokens": 8, **values})


def generate_request(text: str = "Hello there", **values: Any) -> pb.GenerateRequest:
    """A request; `values` that SamplingParams knows go there."""
    names = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    own = {name: values.pop(name) for name in list(values) if name in names}
    if "token_ids" not in values:
        values["text"] = text
    return pb.GenerateRequest(sampling_params=sampling(**own), **values)


async def collect(call: Any) -> list[Any]:
    """All messages of a stream."""
    return [message async for message in call]


async def status_of(call: Any) -> grpc.aio.AioRpcError:
    """The error that ends a call; fails if none does."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")


def text_of(messages: list[Any], index: int = 0) -> str:
    """Text of one completion out of deltas."""
    return "".join(o.text for m in messages for o in m.outputs if o.index == index)


def ids_of(messages: list[Any], index: int = 0) -> list[int]:
    """Token ids of one completion out of deltas."""
    return [i for m in messages for o in m.outputs if o.index == index for i in o.token_ids]


def expected_text(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True)
