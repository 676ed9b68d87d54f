"""Streaming clients in a closed loop: so many at once, each takes the next request when its own has ended.

The same loop drives gRPC (`FrontendService.Generate`) and server-sent events (`/v1/completions`). Both read raw
messages with as little work as possible, because client and server share the machine.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc.aio

from bench.workloads import Workload
from pagewire.runtime.transport import channel_options
from pagewire.v1 import core_pb2, core_pb2_grpc, frontend_pb2, frontend_pb2_grpc, types_pb2

Stream = Callable[[list[int], int], AsyncIterator[int]]
"""Prompt and number of tokens to the number of tokens of each message, as the messages come."""


@dataclass(slots=True)
class Load:
    """What the clients of one pass saw, in seconds; gaps are between messages of a stream after the first."""

    seconds: float = 0.0
    num_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


async def closed_loop(stream: Stream, workload: Workload, num_clients: int) -> Load:
    """Runs the workload's requests in their order. Raises RuntimeError where an answer has another length."""
    waiting = iter(list(zip(workload.prompts, workload.max_tokens, strict=True)))
    load = Load()

    async def client() -> None:
        for prompt, max_tokens in waiting:
            await _request(stream, prompt, max_tokens, load)

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(min(num_clients, len(workload.prompts)))))
    load.seconds = time.perf_counter() - started
    return load


async def _request(stream: Stream, prompt: list[int], max_tokens: int, load: Load) -> None:
    before = time.perf_counter()
    count, is_first = 0, True
    async for num_tokens in stream(prompt, max_tokens):
        if not num_tokens:
            continue
        now = time.perf_counter()
        (load.ttft_s if is_first else load.gaps_s).append(now - before)
        before, is_first = now, False
        count += num_tokens
    if count != max_tokens:
        raise RuntimeError(f"a stream had {count} tokens instead of {max_tokens}")
    load.num_tokens += count


async def pagewire_load(frontend: str, core: str, workload: Workload, num_clients: int) -> Load:
    """One pass over gRPC, with an empty prefix cache."""
    async with grpc.aio.insecure_channel(core, options=channel_options()) as channel:
        reset = core_pb2.UtilityRequest(reset_prefix_cache=core_pb2.UtilityRequest.ResetPrefixCache())
        await core_pb2_grpc.EngineCoreServiceStub(channel).Utility(reset)
    async with grpc.aio.insecure_channel(frontend, options=channel_options()) as channel:
        stub = frontend_pb2_grpc.FrontendServiceStub(channel)

        async def stream(prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
            request = frontend_pb2.GenerateRequest(
                token_ids=types_pb2.TokenIds(ids=prompt),
                sampling_params=types_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
            )
            async for response in stub.Generate(request):
                yield sum(len(output.token_ids) for output in response.outputs)

        return await closed_loop(stream, workload, num_clients)


async def openai_load(host: str, port: int, workload: Workload, num_clients: int, *, reset: bool = True) -> Load:
    """One pass over HTTP with server-sent events, with an empty prefix cache where the server can empty it."""

    async def stream(prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        # The ids are asked for because a message may hold several tokens; they are counted by their commas.
        async for line in post(host, port, "/v1/completions", {**body, "return_token_ids": True}):
            if line.startswith(b"data: {"):
                yield count_tokens(line)

    if reset:
        async for _ in post(host, port, "/reset_prefix_cache", None):
            pass
    return await closed_loop(stream, workload, num_clients)


def count_tokens(line: bytes) -> int:
    """Tokens in the message `data: {... "token_ids":[1,2] ...}`, without parsing all of it."""
    _, found, rest = line.partition(b'"token_ids":[')
    inside = rest.partition(b"]")[0].strip()
    return inside.count(b",") + 1 if found and inside else 0


async def post(host: str, port: int, path: str, body: object) -> AsyncIterator[bytes]:
    """Lines of the answer's body. Raises RuntimeError for another status than 200."""
    reader, writer = await asyncio.open_connection(host, port, limit=2**20)
    try:
        data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        await writer.drain()
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{path}: {status.decode().strip()} {(await reader.read(2000)).decode()[-300:]}")
        async for line in reader:
            yield line
    finally:
        writer.close()
