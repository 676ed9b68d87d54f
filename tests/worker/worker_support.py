"""A real WorkerService to talk to: in a thread of this process or in a process of its own, and a plain client."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from core_svc.worker_wire import failure_from_proto, plan_to_proto, result_from_proto
from pagewire.columns import pack_int32
from pagewire.plan import GrammarMask, StepPlan, StepResult
from pagewire.runtime.ready import Ready, parse_ready
from pagewire.runtime.server import GrpcServer
from pagewire.runtime.transport import channel_options
from pagewire.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from tests.worker.mini_core import MiniCore
from worker_svc.compute import ComputeThread
from worker_svc.server import SERVICE_NAME, WorkerServicer
from worker_svc.worker import Worker

ROOT = Path(__file__).parents[2]
TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
ANSWER_S = 20.0
PROMPT = [5, 17, 3, 88, 41, 9]


def write_tiny_model(folder: Path) -> Path:
    """A directory that load_format dummy turns into a small Llama."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    return folder


class ServerThread:
    """A WorkerService on an event loop in a thread; `worker` is reachable for inspection."""

    def __init__(self) -> None:
        self.worker = Worker(num_threads=1)
        self.compute = ComputeThread()
        self.address = ""
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(20)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = GrpcServer([SERVICE_NAME])
        self.servicer = WorkerServicer(self.worker, self.compute, "worker-incarnation")
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.servicer, server.aio)
        self.address = f"127.0.0.1:{await server.start()}"
        await server.set_ready(True)
        self._started.set()
        await self._stop.wait()
        await self.servicer.shut_down(1.0, idle_s=0.0)
        await server.drain(1.0)

    def close(self) -> None:
        assert self._loop is not None and self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()
        assert self.compute.close(5.0)


class Stream:
    """An Execute stream. `submit` sends, `result` waits for the next result and skips heartbeats."""

    def __init__(self, stub: Any, core: str, epoch: int) -> None:
        self._requests: queue.SimpleQueue[worker_pb2.ExecuteRequest | None] = queue.SimpleQueue()
        self.heartbeats: list[types_pb2.Heartbeat] = []
        self.send(worker_pb2.ExecuteRequest(open=worker_pb2.ExecuteRequest.Open(core_incarnation=core, epoch=epoch)))
        self.call = stub.Execute(iter(self._requests.get, None), timeout=120)

    def opened(self) -> worker_pb2.ExecuteResponse.Opened:
        response = next(self.call)
        assert response.WhichOneof("message") == "opened"
        return response.opened

    def send(self, request: worker_pb2.ExecuteRequest) -> None:
        self._requests.put(request)

    def submit(self, plan: StepPlan) -> None:
        self.send(worker_pb2.ExecuteRequest(plan=plan_to_proto(plan)))

    def send_mask(self, mask: GrammarMask) -> None:
        message = worker_pb2.GrammarMask(
            epoch=mask.epoch,
            step=mask.step,
            slots=pack_int32(mask.slots),
            num_mask_rows=pack_int32(mask.num_mask_rows),
            mask=pack_int32(mask.mask),
        )
        self.send(worker_pb2.ExecuteRequest(grammar_mask=message))

    def message(self) -> worker_pb2.StepResult:
        while True:
            response = next(self.call)
            if response.WhichOneof("message") != "heartbeat":
                return response.result
            self.heartbeats.append(response.heartbeat)

    def result(self) -> StepResult:
        message = self.message()
        if (error := failure_from_proto(message)) is not None:
            raise error
        return result_from_proto(message)

    def execute(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self.result()

    def half_close(self) -> None:
        self._requests.put(None)

    def close(self) -> None:
        self._requests.put(None)
        self.call.cancel()


class Client:
    """A core's calls."""

    def __init__(self, address: str, core: str = "core-1") -> None:
        self.core = core
        self.channel = grpc.insecure_channel(address, options=channel_options())
        self.stub = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.streams: list[Stream] = []

    def handshake(self, low: int = 1, high: int = 1) -> worker_pb2.WorkerServiceHandshakeResponse:
        versions = types_pb2.ProtocolVersions(min=low, max=high)
        request = worker_pb2.WorkerServiceHandshakeRequest(core_incarnation=self.core, protocol_versions=versions)
        return self.stub.Handshake(request, timeout=ANSWER_S)

    def load(self, model: str, **fields: Any) -> list[worker_pb2.LoadModelResponse]:
        request = worker_pb2.LoadModelRequest(core_incarnation=self.core, model=model, **fields)
        return list(self.stub.LoadModel(request, timeout=240))

    def initialize_cache(self, epoch: int = 1, **fields: Any) -> worker_pb2.InitializeCacheResponse:
        values = {"block_size": 4, "num_blocks": 100, "max_num_seqs": 64, "max_num_batched_tokens": 512} | fields
        request = worker_pb2.InitializeCacheRequest(core_incarnation=self.core, epoch=epoch, **values)
        return self.stub.InitializeCache(request, timeout=ANSWER_S)

    def utility(self, **command: Any) -> worker_pb2.WorkerServiceUtilityResponse:
        request = worker_pb2.WorkerServiceUtilityRequest(core_incarnation=self.core, **command)
        return self.stub.Utility(request, timeout=120)

    def tokenizer(self) -> list[types_pb2.TokenizerChunk]:
        request = worker_pb2.WorkerServiceGetTokenizerRequest(core_incarnation=self.core)
        return [response.chunk for response in self.stub.GetTokenizer(request, timeout=ANSWER_S)]

    def stream(self, epoch: int = 1) -> Stream:
        stream = Stream(self.stub, self.core, epoch)
        self.streams.append(stream)
        return stream

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        self.channel.close()


@contextmanager
def worker_process(
    *flags: str, wait_s: float = 180.0, env: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], Ready]]:
    """`python -m worker_svc` on a free port, once it is ready; killed at the end if it still runs."""
    command = [sys.executable, "-m", "worker_svc", "--port", "0", *flags]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    )
    killer = threading.Timer(wait_s, process.kill)
    killer.start()
    try:
        assert process.stdout is not None
        ready = next((found for line in process.stdout if (found := parse_ready(line))), None)
        killer.cancel()
        assert ready is not None, f"the worker ended with {process.wait()} before it was ready"
        yield process, ready
    finally:
        killer.cancel()
        if process.poll() is None:
            process.kill()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


def core_on(stream, epoch=1):
    stream.opened()
    return MiniCore(stream.execute, num_blocks=100, block_size=4, epoch=epoch)


def fails(code, said=""):
    """Expects an RPC to fail with the code and words."""

    class Expectation:
        def __enter__(self):
            return self

        def __exit__(self, kind, error, traceback):
            assert isinstance(error, grpc.RpcError), f"expected {code}, got {error!r}"
            assert error.code() == code and said in error.details(), f"{error.code()}: {error.details()}"
            return True

    return Expectation()
