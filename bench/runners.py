"""Runs a workload through the engine in this process, or through three processes over gRPC."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc
from workload import Workload

from pagewire.runtime.ready import parse_ready
from pagewire.runtime.transport import channel_options
from pagewire.v1 import core_pb2, core_pb2_grpc, frontend_pb2, frontend_pb2_grpc, types_pb2

START_TIMEOUT_S = 300


@dataclass(slots=True)
class Run:
    """One pass over a workload: seconds in all, and per request seconds to the first token and per further token."""

    seconds: float
    num_output_tokens: int
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.seconds


class InprocessRunner:
    """`LLM` in this process."""

    def __init__(self, model: str, dtype: str, kv_cache_memory_bytes: int) -> None:
        from frontend_svc import LLM

        self._llm = LLM(model, dtype=dtype, kv_cache_memory_bytes=kv_cache_memory_bytes)

    def run(self, workload: Workload) -> Run:
        """One pass, with an empty prefix cache."""
        from frontend_svc import SamplingParams

        self._llm.reset_prefix_cache()
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in workload.max_tokens]
        start = time.perf_counter()
        outputs = self._llm.generate(workload.prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return Run(seconds, sum(len(output.outputs[0].token_ids) for output in outputs))

    def close(self) -> None:
        self._llm.close()


class ServedRunner:
    """Worker, core and frontend as three processes on loopback, and one client with a stream per request."""

    def __init__(self, model: str, dtype: str, kv_cache_memory_bytes: int) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        try:
            worker = self._start("worker_svc", f"--kv-cache-memory={kv_cache_memory_bytes}")
            self._core = self._start("core_svc", f"--worker={worker}", f"--model={model}", f"--dtype={dtype}")
            self._frontend = self._start("frontend_svc", f"--core={self._core}")
        except BaseException:
            self.close()
            raise

    def _start(self, module: str, *flags: str) -> str:
        command = [sys.executable, "-m", module, "--host=127.0.0.1", "--port=0", "--log-level=warning", *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._processes.append(process)
        assert process.stdout is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and (line := process.stdout.readline()):
            if (ready := parse_ready(line)) is not None:
                return f"{ready.host}:{ready.port}"
        raise RuntimeError(f"{module} did not become ready")

    def run(self, workload: Workload) -> Run:
        """One pass, with an empty prefix cache."""
        return asyncio.run(self._run(workload))

    async def _run(self, workload: Workload) -> Run:
        async with grpc.aio.insecure_channel(self._core, options=channel_options()) as channel:
            reset = core_pb2.UtilityRequest(reset_prefix_cache=core_pb2.UtilityRequest.ResetPrefixCache())
            await core_pb2_grpc.EngineCoreServiceStub(channel).Utility(reset)
        async with grpc.aio.insecure_channel(self._frontend, options=channel_options()) as channel:
            stub = frontend_pb2_grpc.FrontendServiceStub(channel)
            start = time.perf_counter()
            calls = [self._generate(stub, *pair) for pair in zip(workload.prompts, workload.max_tokens, strict=True)]
            found = await asyncio.gather(*calls)
            run = Run(time.perf_counter() - start, sum(count for count, _, _ in found))
        run.ttft_s = [ttft for _, ttft, _ in found]
        run.tpot_s = [tpot for _, _, tpot in found]
        return run

    async def _generate(
        self, stub: frontend_pb2_grpc.FrontendServiceAsyncStub, prompt: list[int], max_tokens: int
    ) -> tuple[int, float, float]:
        request = frontend_pb2.GenerateRequest(
            token_ids=types_pb2.TokenIds(ids=prompt),
            sampling_params=types_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        )
        start = first = time.perf_counter()
        count = 0
        async for response in stub.Generate(request):
            first = time.perf_counter() if not count else first
            count += sum(len(output.token_ids) for output in response.outputs)
        end = time.perf_counter()
        return count, first - start, (end - first) / max(1, count - 1)

    def close(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
            if process.stdout is not None:
                process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
