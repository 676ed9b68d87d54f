"""A small deployment for `pagewire top`: real frontend and core over the fake executor, on a thread of this process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import grpc

from core_svc.config import EngineConfig
from core_svc.executor import ModelSpec
from core_svc.fake_executor import FakeExecutor, FakeOptions
from core_svc.fake_model import FakeModel
from core_svc.recent_steps import RecentSteps
from frontend_svc.core_client import GrpcCoreClient
from frontend_svc.engine_client import EngineCoreClient
from frontend_svc.server import SERVICE_NAME, FrontendServer
from frontend_svc.service import TextService
from pagewire.client import AsyncClient, SamplingParams
from pagewire.client_types import RequestOptions
from pagewire.engine import ModelInfo
from pagewire.errors import PagewireError
from pagewire.runtime.lifetime import new_incarnation
from pagewire.runtime.process_stats import process_stats
from pagewire.runtime.server import GrpcServer
from pagewire.stats import WorkerStats
from pagewire.stats_wire import fill
from pagewire.types_wire import tokenizer_sha256
from pagewire.v1 import worker_pb2, worker_pb2_grpc
from tests.frontend.frontend_support import CoreOptions, GrpcCore
from tests.frontend.small_tokenizers import sentencepiece_json

T = TypeVar("T")
FILES = {"tokenizer.json": json.dumps(sentencepiece_json()).encode(), "tokenizer_config.json": b"{}"}
VOCAB_SIZE = 273
SECRET = "the prompt that nobody may see"


class SmallExecutor(FakeExecutor):
    """The fake executor with a small tokenizer."""

    def load_model(self, spec: ModelSpec) -> ModelInfo:
        return replace(super().load_model(spec), tokenizer_sha256=tokenizer_sha256(FILES))

    def tokenizer_files(self) -> Mapping[str, bytes]:
        return FILES


@dataclass
class SmallOptions(CoreOptions):
    """A core that takes 20 ms per step."""

    latency_s: float = 0.02

    def executor(self, files: Mapping[str, bytes]) -> Any:
        model = FakeModel(vocab_size=VOCAB_SIZE, eos_token_id=2, eos_rate=0.0)
        options = FakeOptions(latency_s=self.latency_s)
        return SmallExecutor(2, model=model, options=options, epoch=0, max_model_len=self.max_model_len)


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """Says what a worker says of itself; the core of this deployment computes without one."""

    async def Utility(self, request: Any, context: Any) -> Any:
        assert request.WhichOneof("command") == "stats"
        assert not request.core_incarnation
        stats = WorkerStats(7, 3, 2**30, 0, process_stats("worker-life"), "", True, 1, 7, 0, "cpu", "fake")
        response = worker_pb2.WorkerServiceUtilityResponse()
        fill(response.stats, stats)
        return response


class SmallDeployment:
    """Frontend, core and worker on ports of loopback; their loop runs on a thread."""

    def __init__(self, options: CoreOptions | None = None) -> None:
        self._options = options or SmallOptions(EngineConfig(max_num_seqs=6, max_num_batched_tokens=64), num_blocks=200)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="deployment", daemon=True)
        self._tasks: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        self.run(self._start())
        return self

    def __exit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        self.run(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 20) -> T:
        """Runs something on the deployment's loop, and waits."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    async def _start(self) -> None:
        self.worker = GrpcServer(["pagewire.v1.WorkerService"])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(Worker(), self.worker.aio)
        self.worker_target = f"127.0.0.1:{await self.worker.start()}"
        await self.worker.set_ready(True)
        self.core = GrpcCore(FILES, self._options)
        recent = RecentSteps()
        self.core.engine._observers = (recent,)
        assert self.core.servicer.serving is not None
        self.core.servicer.serving = replace(
            self.core.servicer.serving, recent_steps=recent, worker_target=self.worker_target
        )
        self.core_target = await self.core.start()
        await self.core.server.set_ready(True)
        self._server = GrpcServer([SERVICE_NAME])
        self.service = TextService(on_ready=self._server.set_ready)
        self.service.cores.keep({self.core_target: self._connect})
        self.frontend = FrontendServer(self.service, self._server, incarnation=new_incarnation())
        self.frontend_target = f"127.0.0.1:{await self.frontend.start()}"
        await asyncio.wait_for(self.service.wait_ready(), 10)

    async def _connect(self) -> EngineCoreClient:
        return await GrpcCoreClient.connect(self.core_target, new_incarnation(), timeout_s=10)

    async def _stop(self) -> None:
        await asyncio.sleep(0.05)
        await self.frontend.stop(0)
        await self.core.stop()
        await self.worker.drain(0)

    def send(self, name: str, *, num_prompt: int, max_tokens: int, n: int = 1, priority: int = 0) -> None:
        """Begins a request and reads its answer in the background. Without num_prompt the prompt is SECRET."""
        self._tasks.append(
            asyncio.run_coroutine_threadsafe(self._read(name, num_prompt, max_tokens, n, priority), self.loop)
        )

    async def _read(self, name: str, num_prompt: int, max_tokens: int, n: int, priority: int) -> None:
        prompt = SECRET if not num_prompt else [20 + (i * 7 + len(name)) % 200 for i in range(num_prompt)]
        options = RequestOptions(request_id=name, priority=priority)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=n, temperature=1.0)
        async with AsyncClient(self.frontend_target) as client:
            try:
                async for _ in client.generate(prompt, params, options=options):
                    pass
            except (PagewireError, grpc.RpcError):
                # The deployment ends under it.
                return
